"""A CUDA device that is not there: the code for GPUs runs, unchanged, on a machine that has none.

Tensors on "cuda" are FakeTensors, which have shapes, dtypes and a device. Behind their storages lies memory of the
host, on which the CPU runs every operation too, after the fake one has accepted it. So the numbers are real ones: a run
on this device is the same run as on the CPU. What the CPU has no kernel for (FlashAttention, products of 16-bit
operands with a float32 result) is written down here in float64 or float32; collectives act as if all ranks held the
same. For models that no host could run, `only_shapes` leaves out the numbers of floating-point tensors (memory.py).

What this proves: every tensor is on the device that its operation needs, dtypes and shapes fit, no kernel is asked for
something that it refuses (`CONTRACTS`), nothing that was never written is used, no stream and no copy comes before what
it needs (streams.py), and the host waits for the device only where `Device.reads` says. What it cannot prove: speed,
fragments of memory, streams inside collectives.

It reaches into torch: it puts a device guard and a hooks object where a CUDA build has its own. So it works with one
version of torch (`WHY_NOT` says why not here), only in a process of its own that imports it first, and only in tests.
"""

import contextlib
import ctypes
import functools
import itertools
import mmap
import platform
import re
import sys
import threading
import types
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.utils._pytree as pytree
from torch import distributed as dist
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn import attention as switch
from torch.nn.attention import _fa3, _fa4
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from tests.cuda.allocator import Allocator, Block
from tests.cuda.streams import Order, Race, Use, Uses

ROOT = Path(__file__).resolve().parent.parent.parent
WRAPPERS = tuple(str(Path(torch.__file__).parent / name) for name in ("_dynamo", "_compile.py"))   # of every dispatch
aten = torch.ops.aten
WRITE_INTO_ZEROS = (aten.index_put.default, aten.scatter.src, aten.scatter_add.default)


def _why_not() -> str:
    """The reason why this machine cannot have the device; empty if it can."""
    if torch.__version__ != "2.13.0+cpu":
        return f"the stand-in for CUDA reaches into torch 2.13.0+cpu, this is {torch.__version__}"
    if platform.machine() != "x86_64":
        return f"the stand-in for CUDA has machine code for x86-64, this is {platform.machine()}"
    return ""


WHY_NOT = _why_not()


# --------------------------------------------------------------------------- what a CUDA build of torch has

def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))


def _register_device_guard() -> None:
    """Autograd asks c10's registry for a guard of the CUDA device, and a CPU build has none.

    torch lets Python register one for the device type PrivateUse1: its pointer is moved to CUDA's slot."""
    cuda, private_use_1, num_device_types = 1, 20, 22

    class Guard(torch._C._acc.DeviceGuard):
        def type_(self):
            return torch._C._autograd.DeviceType.CUDA

    _register_device_guard.kept = Guard()
    torch._C._acc.register_python_privateuseone_device_guard(_register_device_guard.kept)
    symbol = "_ZN3c104impl26device_guard_impl_registryE"
    registry = (ctypes.c_void_p * num_device_types).in_dll(_library("libc10.so"), symbol)
    assert registry[private_use_1] is not None
    registry[cuda], registry[private_use_1] = registry[private_use_1], None


def _register_kernels() -> None:
    """Where CUDA has a kernel of its own and the CPU build thinks it has none, torch would take an operation apart."""
    _register_kernels.kept = library = torch.library.Library("aten", "IMPL")
    for name in ("silu_backward", "mish_backward"):
        library.impl(name, _nothing, "CUDA")


def _build_hooks() -> None:
    """The autograd engine asks ATen's CUDA hooks whether there is a CUDA, and those of a CPU build say no.

    The hooks object gets a copy of its table of virtual functions in which `isBuilt` returns true and
    `hasPrimaryContext` false. Positions in the table are counted from torch's own headers."""
    headers = Path(torch.__file__).parent / "include/ATen/detail"
    names = ["destructor", "deleting destructor"]
    for file in ("AcceleratorHooksInterface.h", "CUDAHooksInterface.h"):
        names += re.findall(r"^  virtual [^~;{(]*?(\w+)\(", (headers / file).read_text(), flags=re.MULTILINE)
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code[0:6] = b"\xb8\x01\x00\x00\x00\xc3"                             # mov eax, 1; ret
    code[16:22] = b"\xb8\x00\x00\x00\x00\xc3"                           # mov eax, 0; ret
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    get_hooks = _library("libtorch_cpu.so")["_ZN2at6detail12getCUDAHooksEv"]
    get_hooks.restype = ctypes.c_void_p
    table_of_hooks = ctypes.c_void_p.from_address(get_hooks())
    header = 2                                                          # offset to top, type information
    size = header + len(names)
    table = (ctypes.c_void_p * size)(*(ctypes.c_void_p * size).from_address(table_of_hooks.value - 8 * header))
    is_built = header + names.index("isBuilt")
    assert b"\x31\xc0\xc3" in ctypes.string_at(table[is_built], 8)      # xor eax, eax; ret: it is the right one
    table[is_built] = address
    table[header + names.index("hasPrimaryContext")] = address + 16
    _build_hooks.kept = code, table
    table_of_hooks.value = ctypes.addressof(table) + 8 * header


class Event:
    """Says what was asked of a stream before it was recorded."""

    def __init__(self, *_, **__):
        self.clock = {}

    def record(self, stream=None):
        self.clock = ORDER.now((stream or _current_stream()).stream_id)
        return self

    def wait(self, stream=None):
        ORDER.wait((stream or _current_stream()).stream_id, self.clock)

    def query(self) -> bool:
        return True

    def synchronize(self):
        ORDER.host_waits(self.clock)

    def elapsed_time(self, other) -> float:
        return 1.0


class Stream:
    """A stream is a number. Everything happens when it is called; ORDER says whether it could."""

    numbers = itertools.count(1)
    current = threading.local()
    of_main: "Stream"

    def __init__(self, device=None, priority=0, **_):
        self.stream_id, self.priority, self.device = next(Stream.numbers), priority, torch.device("cuda", 0)

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def record_event(self, event=None) -> Event:
        return (event or Event()).record(self)

    def synchronize(self):
        ORDER.host_waits(ORDER.now(self.stream_id))

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False


ORDER = Order()
DEFAULT_STREAM = Stream.of_main = Stream()
"""A thread starts with the default stream. A kernel of a backward pass runs in the stream of its forward pass, which
here is the one that the main thread has set."""


def _current_stream(device=None) -> Stream:
    is_autograds = threading.get_ident() not in threading._active       # `current_thread()` would make an object of it
    return getattr(Stream.current, "stream", None) or (Stream.of_main if is_autograds else DEFAULT_STREAM)


def _set_stream(stream: Stream) -> None:
    Stream.current.stream = stream
    if threading.current_thread() is threading.main_thread():
        Stream.of_main = stream


@contextlib.contextmanager
def _on_stream(stream):
    before = getattr(Stream.current, "stream", None)                    # None: autograd's follows the main thread's
    Stream.current.stream = stream or before
    try:
        yield
    finally:
        Stream.current.stream = before


# --------------------------------------------------------------------------- contracts: what kernels refuse

class KernelRefuses(RuntimeError):
    """A call that the real kernel refuses and the fake one accepts."""


def _check_varlen_attention(device: "Device", func, args: tuple) -> None:
    """FlashAttention-2's checks (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_varlen_fwd)."""
    if func is not torch.ops.torch_attn._varlen_attn.default:
        return
    query, key, value, *cu_seqlens = args[:5]
    newer = switch.current_flash_attention_impl()
    error = None
    if newer == "FA4":                                                  # torch's own checks of what it hands over
        error = _fa4._fa4_forward_support_error(query, key, value, 0.0, False, None, None, cu_seqlens[0])
    if newer == "FA3":
        error = _fa3._fa3_forward_support_error(query, key, value, 0.0, False, None, None, cu_seqlens[0], *[None] * 3)
    if error:
        raise KernelRefuses(f"{newer}: {error}")
    if device.capability < (8, 0):
        raise KernelRefuses("FlashAttention only supports Ampere GPUs or newer")
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise KernelRefuses(f"FlashAttention only support fp16 and bf16 data type, not {query.dtype}")
    if not query.dtype == key.dtype == value.dtype:
        raise KernelRefuses(f"query, key and value must have the same dtype: {query.dtype}, {key.dtype}, {value.dtype}")
    if any(x.stride(-1) != 1 for x in (query, key, value)):
        raise KernelRefuses("Input tensor must have contiguous last dimension")
    if query.shape[-1] > 256 or query.shape[-1] % 8:
        raise KernelRefuses(f"head_dim {query.shape[-1]} must be a multiple of 8 and at most 256")
    if query.shape[1] % key.shape[1]:
        raise KernelRefuses(f"{query.shape[1]} query heads must be a multiple of the {key.shape[1]} key heads")
    for offsets in cu_seqlens:
        if offsets.dtype != torch.int32 or not offsets.is_contiguous() or offsets.device.type != "cuda":
            raise KernelRefuses(f"cu_seqlens must be contiguous int32 on CUDA, not {offsets.dtype} on {offsets.device}")


def _check_matrix_products(device: "Device", func, args: tuple) -> None:
    """cuBLAS multiplies operands of one dtype, and sums 16-bit products into float32 only where it is asked to."""
    products = (aten.mm.default, aten.bmm.default, aten.mm.dtype, aten.bmm.dtype)
    if func in products and args[0].dtype != args[1].dtype:
        raise KernelRefuses(f"{func}: expected the same dtype, got {args[0].dtype} and {args[1].dtype}")
    if func in (aten.addmm.default, aten.addmm_.default) and not args[0].dtype == args[1].dtype == args[2].dtype:
        raise KernelRefuses(f"{func}: expected the same dtype, got {[x.dtype for x in args[:3]]}")
    if func in (aten.mm.dtype, aten.bmm.dtype):
        from_16_bits = args[0].dtype in (torch.float16, torch.bfloat16) and args[2] == torch.float32
        if args[2] != args[0].dtype and not from_16_bits:
            raise KernelRefuses(f"{func}: out_dtype {args[2]} of {args[0].dtype} operands")
    if func is aten.addmm.dtype_out and not (args[1].dtype == args[2].dtype and args[0].dtype == args[3]):
        raise KernelRefuses(f"{func}: operands of one dtype, and a sum of out_dtype {args[3]}, not {args[0].dtype}")


def _check_fp8(device: "Device", func, args: tuple) -> None:
    """Tensor cores multiply 8-bit numbers from Ada and Hopper on (aten/src/ATen/native/cuda/ScaledBlas.cpp)."""
    if func is aten._scaled_mm.default and device.capability < (8, 9):
        raise KernelRefuses("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9")


def _check_nccl(device: "Device", func, args: tuple) -> None:
    """NCCL moves tensors of CUDA devices only; the backend "cpu:gloo,cuda:nccl" sends the others to gloo."""
    name = func._schema.name
    if name.startswith("c10d::"):
        kinds = {x.device.type for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)}
        if len(kinds) > 1:
            raise KernelRefuses(f"{name}: tensors on {sorted(kinds)} in one collective")


def _check_generator(func, first, generator) -> None:
    """A kernel draws with a generator of its own device (aten/src/ATen/core/Generator.h, check_generator)."""
    if isinstance(first, FakeTensor) and getattr(generator, "made_for", "cuda") != "cuda":
        raise KernelRefuses(f"{func}: Expected a 'cuda' device type for generator but found 'cpu'")


CONTRACTS = (_check_varlen_attention, _check_matrix_products, _check_fp8, _check_nccl)


# --------------------------------------------------------------------------- kernels that the CPU does not have

def _visible(num_queries: int, num_keys: int, window: list[int]) -> torch.Tensor:
    """[queries, keys] bool: the last query sees the last key, -1 is no limit (FlashAttention's documentation)."""
    place = torch.arange(num_queries)[:, None] + num_keys - num_queries
    keys = torch.arange(num_keys)
    before, after = window
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if before >= 0:
        visible &= keys >= place - before
    return visible & (keys <= place + after) if after >= 0 else visible


def _attention_of_each(query, key, value, offsets_q, offsets_k, scale, window):
    """(rows of queries, rows of keys, weights [heads, queries, keys], key, value with a head for each of the query's)
    of each packed sequence, in float64."""
    repeats = query.shape[1] // key.shape[1]
    query, key, value = (x.double().transpose(0, 1) for x in (query, key, value))       # [heads, T, D]
    key, value = key.repeat_interleave(repeats, 0), value.repeat_interleave(repeats, 0)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    bounds = zip(itertools.pairwise(offsets_q.tolist()), itertools.pairwise(offsets_k.tolist()))
    for rows, columns in ((slice(*queries), slice(*keys)) for queries, keys in bounds):
        q, k, v = query[:, rows], key[:, columns], value[:, columns]
        hidden = ~_visible(q.shape[1], k.shape[1], window)
        weights = (scale * q @ k.transpose(1, 2)).masked_fill(hidden, -torch.inf).softmax(-1)
        yield rows, columns, weights, q * scale, k * scale, v


def _varlen_forward(query, key, value, offsets_q, offsets_k, max_q, max_k, causal=False, scale=None, window=(-1, -1),
                    *_):
    newer = switch.current_flash_attention_impl()
    if newer:                                                           # what torch's switch calls is the real code
        forward = {"FA4": _fa4._fa4_run_forward, "FA3": _fa3._fa3_run_forward}[newer]
        out, sums = forward(query, key, value, offsets_q, offsets_k, max_q, max_k, scale, causal, *window, None)
        return out, sums, torch.zeros(2, dtype=torch.uint64)
    out = torch.zeros_like(query)
    for rows, _, weights, _, _, v in _attention_of_each(query, key, value, offsets_q, offsets_k, scale, window):
        assert rows.stop - rows.start <= max_q and v.shape[1] <= max_k
        out[rows] = (weights @ v).transpose(0, 1).to(out.dtype)
    return out, torch.zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)


def _varlen_backward(grad_out, query, key, value, out, sums, offsets_q, offsets_k, max_q, max_k, causal, _, scale=None,
                     window=(-1, -1)):
    given = grad_out, query, key, value, out, sums, offsets_q, offsets_k
    newer = switch.current_flash_attention_impl()
    if newer == "FA4":
        return _fa4._fa4_run_backward(*given, scale, causal, *window)
    if newer == "FA3":
        return _fa3._fa3_run_backward(*given, max_q, max_k, scale, causal, *window)
    grads = [torch.zeros(x.shape, dtype=torch.float64) for x in (query, key, value)]
    shared = key.shape[1], query.shape[1] // key.shape[1], -1, key.shape[-1]
    for rows, columns, weights, q, k, v in _attention_of_each(query, key, value, offsets_q, offsets_k, scale, window):
        up = grad_out[rows].double().transpose(0, 1)                    # [heads, queries, D]
        slope = up @ v.transpose(1, 2)
        slope = weights * (slope - (weights * slope).sum(-1, keepdim=True))
        grads[0][rows] += (slope @ k).transpose(0, 1)
        grads[1][columns] += (slope.transpose(1, 2) @ q).view(shared).sum(1).transpose(0, 1)
        grads[2][columns] += (weights.transpose(1, 2) @ up).view(shared).sum(1).transpose(0, 1)
    return tuple(grad.to(x.dtype) for grad, x in zip(grads, (query, key, value)))


def _mm_into(a, b, dtype):
    return (a.to(dtype) @ b.to(dtype)).to(dtype)


def _all_gather(output, shard, *_):
    output.view(-1, *shard.shape).copy_(shard.expand(len(output.view(-1)) // shard.numel(), *shard.shape))


def _reduce_scatter(output, whole, *_):
    output.copy_(whole.flatten().split(output.numel())[dist.get_rank()].view(output.shape))


def _all_to_all(output, message, group, sizes_out, sizes_in, *_):
    group = dist.ProcessGroup.unbox(group)
    to_me = message.split(sizes_in or len(message) // group.size())[group.rank()]       # what it sends itself, all send
    output.copy_(torch.cat([to_me] * group.size()))


def _nothing(*_):
    pass


OPERATIONS = {
    "c10d::_allgather_base_": "gather", "c10d::_reduce_scatter_base_": "reduce-scatter", "c10d::allreduce_": "sum",
    "c10d::broadcast_": "broadcast", "c10d::alltoall_base_": "exchange", "_c10d_functional::all_reduce": "sum",
    "_c10d_functional::all_gather_into_tensor": "gather", "_c10d_functional::reduce_scatter_tensor": "reduce-scatter",
    "_c10d_functional::all_to_all_single": "exchange",
}


def _group_size(x) -> int:
    """Of an argument of a collective that says which ranks take part; 0 for others."""
    if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()):
        return dist.ProcessGroup.unbox(x).size()
    is_name = isinstance(x, str) and x in dist.distributed_c10d._world.pg_names.values()
    return dist.distributed_c10d._resolve_process_group(x).size() if is_name else 0


def _kernels() -> dict:
    """Operation -> its numbers. In collectives all ranks hold what this rank holds; sums are averages."""
    c10d, functional, attention = torch.ops.c10d, torch.ops._c10d_functional, torch.ops.torch_attn
    return {
        attention._varlen_attn.default: _varlen_forward,
        attention._varlen_attn_backward.default: _varlen_backward,
        aten.mm.dtype: _mm_into,
        aten.addmm.dtype_out: lambda x, a, b, dtype, out: out.addmm_(a.to(dtype), b.to(dtype)),
        aten.histc.default: lambda x, *args, **kwargs: aten.histc(x.double(), *args, **kwargs).to(x.dtype),
        aten._fused_sdp_choice.default: lambda *_, **__: 0,             # the one of plain products and softmax
        c10d._allgather_base_.default: _all_gather,
        c10d._reduce_scatter_base_.default: _reduce_scatter,
        c10d.alltoall_base_.default: _all_to_all,
        c10d.allreduce_.default: _nothing,
        c10d.broadcast_.default: _nothing,
        functional.all_reduce.default: lambda x, *_: x.clone(),
        functional.wait_tensor.default: lambda x: x,
        functional.all_gather_into_tensor.default: lambda x, size, *_: torch.cat([x] * size),
    }


# --------------------------------------------------------------------------- the device

@dataclass(eq=False)
class Held:
    """What lies behind a storage of the device."""

    storage: weakref.ref
    block: Block | None
    numbers: torch.UntypedStorage | None
    """In memory of the host. None: nobody knows them."""
    uses: Uses
    """Which streams have read and written it."""


class Device(TorchDispatchMode):
    """Enter it around the code under test."""

    def __init__(self, capability: tuple[int, int], total_gb: float):
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.functions = _Functions(self)
        self.capability = capability
        self.total = int(total_gb * 2**30)
        self.allocator = Allocator()
        self.next_block: Block | None = None
        """What the next new storage gets."""
        self.only_shapes = False
        """Floating-point tensors have no numbers, and nothing is computed. Where the host asks for one, it gets 0.
        Whole numbers and masks are kept, because sizes follow from them."""
        self.reads: Counter[str] = Counter()
        """How often the host waited for the device, by `file:function`."""
        self.moved: Counter[str] = Counter()
        """Bytes that went through collectives, by operation and ranks of the group: the larger of what goes in and what
        comes out."""
        self.num_operations = 0
        self.heard: Callable = lambda func, args, out: None
        """Is told of every operation that ran on the device."""
        self.kernels = _kernels()
        self.memory: dict[int, Held] = {}                               # by the address of a storage
        self.pinned: dict[int, weakref.ref] = {}                        # the same of storages of the host

    def __enter__(self):
        self.functions.__enter__()
        torch._C._set_only_lift_cpu_tensors(True)                       # torch.tensor(..., device="cuda") starts there
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(False)
        self.functions.__exit__(*error)

    def in_this_thread(self, function, *args):
        """What `function(*args)` returns, in another thread than the one that entered."""
        with self.functions, _pushed(self):
            return function(*args)

    def hold(self, storage: torch.UntypedStorage, is_known: bool = True) -> Held:
        """What lies behind a storage of the device, made when it is seen first. New memory is NaN, so that nobody gets
        0 from what was never written."""
        key = storage._cdata
        held = self.memory.get(key)
        if held is not None and held.storage() is storage:
            return held

        def freed(_):
            self.allocator.give_back(held.block)
            ORDER.free(held.uses)
            if self.memory.get(key) is held:
                del self.memory[key]

        numbers = None
        if is_known:
            numbers = torch.full([storage.nbytes()], 255, dtype=torch.uint8).untyped_storage()
        block, self.next_block = self.next_block, None
        block = block or self.allocator.take(storage.nbytes(), _current_stream().stream_id)
        uses = ORDER.allocate(_current_stream().stream_id)
        held = self.memory[key] = Held(weakref.ref(storage, freed), block, numbers, uses)
        return held

    def pass_on(self, func, args: tuple, out) -> None:
        """Give the block of an operand to the result, where autograd without a mode would have computed in place.

        Its engine adds gradients up in place, and some formulas write into zeros that they have just made; where there
        is a mode, both make a new tensor (`isTensorSubclassLike` in torch/csrc/autograd). The references that count
        here are those of a tensor that nothing but the engine has."""
        first = args[0]
        is_sum = func is aten.add.Tensor and isinstance(first, FakeTensor) and isinstance(args[1], FakeTensor)
        if not (is_sum or func in WRITE_INTO_ZEROS) or not _is_called_by_the_engine():
            return
        storage = first.untyped_storage()
        is_shared = first._use_count() > 4 or torch._C._storage_Use_Count(storage._cdata) > 2
        if is_sum and (is_shared or not is_non_overlapping_and_dense_or_false(first)):
            return
        old, new = self.hold(storage), out.untyped_storage()
        if new.nbytes() == storage.nbytes() and new._cdata not in self.memory:
            self.next_block, old.block = old.block, None

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """FSDP2 and `Offload` empty storages and fill them again."""
        held = self.hold(storage)
        self.allocator.give_back(held.block)
        held.block = self.allocator.take(size, _current_stream().stream_id)
        ORDER.free(held.uses)
        held.uses = ORDER.allocate(_current_stream().stream_id)
        if held.numbers is not None:
            held.numbers.resize_(0)                                     # what was in it is lost
            held.numbers.resize_(size)
            torch.empty(0, dtype=torch.uint8).set_(held.numbers).fill_(255)

    def count_bytes(self, func, args: tuple) -> None:
        size = next(filter(None, map(_group_size, args)))
        whole = max(x.nbytes for x in pytree.tree_leaves(args) if isinstance(x, FakeTensor))
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            whole *= size                                               # the result is no argument
        self.moved[f"{OPERATIONS[func._schema.name]} over {size}"] += whole

    def is_known(self, x) -> bool:
        """Whether the numbers of a tensor or a storage are known."""
        if isinstance(x, FakeTensor):
            return self.hold(x.untyped_storage(), is_known=not self.only_shapes).numbers is not None
        held = self.memory.get(x._cdata) if isinstance(x, torch.UntypedStorage) else None
        return held is None or held.numbers is not None

    def numbers(self, x):
        """A tensor of the device -> its memory as a tensor of the CPU, 0 where its numbers are not known; anything else
        as it is."""
        if isinstance(x, FakeTensor):
            if not self.is_known(x):
                return torch.zeros((), dtype=x.dtype).expand(x.shape)   # takes no memory
            place = x.storage_offset(), x.shape, x.stride()
            return torch.empty(0, dtype=x.dtype).set_(self.hold(x.untyped_storage()).numbers, *place)
        if isinstance(x, torch.UntypedStorage) and x._cdata in self.memory:
            return self.hold(x).numbers
        return torch.device("cpu") if isinstance(x, torch.device) else x

    def read(self, tensor: FakeTensor) -> torch.Tensor:
        """What the host gets when it reads a tensor of the device: it waits for the stream."""
        self.reads[_place()] += 1
        self.copy_of("a read by the host", tensor)
        _current_stream().synchronize()
        return self.numbers(tensor)

    def keep(self, tensor: FakeTensor, stream: Stream) -> None:
        """`record_stream`: the memory is not taken again before this stream is done with it."""
        self.hold(tensor.untyped_storage(), is_known=not self.only_shapes).uses.kept_for.add(stream.stream_id)

    def copy_of(self, what: str, tensor: FakeTensor) -> Use:
        """A copy of a tensor is put into the stream."""
        uses = self.hold(tensor.untyped_storage(), is_known=not self.only_shapes).uses
        return ORDER.launch(_current_stream().stream_id, what, [uses])

    def to_host(self, tensor: FakeTensor, host: torch.Tensor) -> torch.Tensor:
        """A copy into pinned memory that the host does not wait for."""
        ORDER.arrive(self.copy_of("a copy to the host", tensor), host, self.numbers(tensor).to(host.dtype))
        return host

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        found = self.pinned.get(storage._cdata)
        return found is not None and found() is storage

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self.pinned[storage._cdata] = weakref.ref(storage)
        return tensor

    def check_arrived(self, func, flat: list) -> None:
        """The host does not read what a copy to it may still write."""
        if ORDER.copies and _starts_a_kernel(func):
            read = {x.untyped_storage()._cdata for x in flat if isinstance(x, torch.Tensor)}
            if any(copy.is_arriving and copy.host.untyped_storage()._cdata in read for copy in ORDER.copies):
                raise Race(f"the host uses memory in {func} before a copy from the device has arrived there")

    def follow(self, func, args: tuple, kwargs: dict, out) -> None:
        """An operation of the device comes after those that it needs."""
        if not _starts_a_kernel(func):
            return
        written = _written(func, args, kwargs)
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)]
        made = [x for x in pytree.tree_leaves(out) if isinstance(x, FakeTensor)]
        of_given, of_made, of_written = ({x.untyped_storage()._cdata for x in xs} for xs in (given, made, written))
        of_written |= of_made - of_given
        touched = of_given - of_written, of_written
        reads, writes = ([self.memory[key].uses for key in keys if key in self.memory] for keys in touched)
        use = ORDER.launch(_current_stream().stream_id, str(func), reads, writes)
        is_async = func is aten.copy_.default and len(args) > 2 and args[2]
        if is_async and not isinstance(args[1], FakeTensor) and self.is_pinned(args[1]):
            ORDER.depart(use, args[1])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(kind.__name__ in ("DTensor", "AsyncCollectiveTensor") for kind in types):
            return NotImplemented                                       # they unpack themselves and call again
        flat = pytree.tree_leaves((args, kwargs))
        fakes = [x for x in flat if isinstance(x, FakeTensor)]
        is_nested = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if is_nested or any(x.fake_mode is not self.fake for x in fakes):
            return func(*args, **kwargs)                                # DTensor's own search for shapes
        pinned = kwargs.pop("pin_memory", None)
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if func is aten.is_pinned.default:
            return not fakes and self.is_pinned(args[0])
        if not fakes and not any(isinstance(x, torch.device) and x.type == "cuda" for x in flat):
            self.check_arrived(func, flat)
            out = func(*args, **kwargs)                                 # on the CPU
            return self.pin(out) if pinned else out
        assert not pinned, f"{func}: only memory of the host can be pinned"
        self.num_operations += 1
        for check in CONTRACTS:
            check(self, func, args)
        if func._schema.name in OPERATIONS:
            self.count_bytes(func, args)
        if func is aten._local_scalar_dense.default:
            return self.read(args[0]).item()
        to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
        if func is aten._to_copy.default and to_host:
            kept = {name: x for name, x in kwargs.items() if name in ("dtype", "memory_format")}
            if not self.is_known(args[0]):
                return torch.zeros((), dtype=kept.get("dtype") or args[0].dtype).expand(args[0].shape)
            if kwargs.get("non_blocking"):                              # torch makes it in pinned memory
                return self.to_host(args[0], self.pin(torch.empty_like(self.numbers(args[0]), **kept)))
            return func(self.read(args[0]), **kept)
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            if not self.is_known(args[1]):
                return args[0]
            if len(args) > 2 and args[2] and self.is_pinned(args[0]):   # into other memory the host waits anyway
                return self.to_host(args[1], args[0])
            return func(args[0], self.read(args[1]), *args[2:])
        is_masked = func is aten.index.Tensor and any(x is not None and x.dtype == torch.bool for x in args[1])
        if func is aten.nonzero.default or is_masked:
            self.reads[_place()] += 1                                   # the size of the result is read
        if to_host:                                                     # empty_like(x, device="cpu"): real memory
            return func(*pytree.tree_map(self.numbers, args), **kwargs)
        out = self._run(func, args, kwargs)
        self.follow(func, args, kwargs, out)
        self.heard(func, args, out)
        return out

    def _run(self, func, args: tuple, kwargs: dict):
        """Shapes, dtypes and devices first, because they may be refused; then the numbers."""
        is_sized_by_numbers = False
        self.fake.cache_enabled = "Storage" not in func._overloadname   # it would keep the storage
        try:
            with self.fake:
                out = func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            is_sized_by_numbers = True
        else:
            self.pass_on(func, args, out)
        if self.only_shapes and not is_sized_by_numbers and not self._keep_whole_numbers(func, args, kwargs, out):
            return out
        kernel = self.kernels.get(func, func)
        known = kernel(*pytree.tree_map(self.numbers, args), **pytree.tree_map(self.numbers, kwargs))
        if is_sized_by_numbers:
            with self.fake:
                out = pytree.tree_map_only(
                    torch.Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device="cuda"), known
                )
        if not isinstance(known, torch.Tensor | list | tuple):
            return out if known is None else known                      # a collective's work, or a plain number
        for mine, result in zip(pytree.tree_leaves(out), pytree.tree_leaves(known)):
            if isinstance(mine, FakeTensor):
                is_new = mine.untyped_storage()._cdata not in self.memory
                is_kept = not (self.only_shapes and result.is_floating_point())
                held = self.hold(mine.untyped_storage(), is_known=is_kept)
                if is_new and held.numbers is not None and "empty" not in func._schema.name:
                    self.numbers(mine).copy_(result)
        return out

    def _keep_whole_numbers(self, func, args: tuple, kwargs: dict, out) -> bool:
        """With `only_shapes`: whether this operation gives whole numbers, of numbers that are known. If not, its
        results get their memory here."""
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, FakeTensor | torch.UntypedStorage)]
        written = [
            x for argument, x in zip(func._schema.arguments, args)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if func is torch.ops.c10d.alltoall_base_.default:               # its schema does not say so
            written = [args[0]]
        results = [x for x in pytree.tree_leaves((out, written)) if isinstance(x, FakeTensor)]
        if all(map(self.is_known, inputs)) and any(not x.is_floating_point() for x in results):
            return True
        for x in results:
            held = self.hold(x.untyped_storage(), is_known=False)
            if written:
                held.numbers = None
        return False


NO_KERNEL = ("empty", "new_empty", "lift", "resize", "set_", "record_stream", "is_pinned", "wait_tensor", "alias",
             "_unsafe_view", "detach")


@functools.cache
def _starts_a_kernel(func) -> bool:
    """Views and allocations do not."""
    is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.arguments)
    return not is_view and not func._schema.name.partition("::")[2].startswith(NO_KERNEL)


def _written(func, args: tuple, kwargs: dict) -> list[FakeTensor]:
    """The arguments that an operation writes. Schemas of collectives do not say which: the first one."""
    if func._schema.name.startswith("c10d::"):
        found = args[:1]
    else:
        values = kwargs | {argument.name: x for argument, x in zip(func._schema.arguments, args)}
        found = [values.get(argument.name) for argument in func._schema.arguments
                 if argument.alias_info is not None and argument.alias_info.is_write]
    return [x for x in pytree.tree_leaves(found) if isinstance(x, FakeTensor)]


@contextlib.contextmanager
def _pushed(device: Device):
    _push_mode(device)
    try:
        yield
    finally:
        _pop_mode()


def _is_called_by_the_engine() -> bool:
    """Whether no Python code stands between this operation and autograd's engine, which has a thread of its own."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((__file__, *WRAPPERS)):
        frame = frame.f_back
    return frame is None


def _place() -> str:
    """`file:function` of the innermost frame that is the project's own code."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(str(ROOT)) and not path.startswith((str(ROOT / "tests"), str(ROOT / ".venv"))):
            return f"{path.removeprefix(f'{ROOT}/')}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "tests"


class _Functions(TorchFunctionMode):
    """Calls that a FakeTensor does not survive as far as the dispatcher."""

    def __init__(self, device: Device):
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        first = args[0] if args else None
        _check_generator(func, first, (kwargs or {}).get("generator"))  # the dispatcher makes another object of it
        if func in (torch.as_tensor, torch.tensor) and isinstance(first, list | tuple):
            items = [self.device.read(x).item() if isinstance(x, FakeTensor) else x for x in first]
            return func(items, *args[1:], **(kwargs or {}))
        is_asked = func in (torch.isfinite, torch.Tensor.isfinite) and isinstance(first, FakeTensor)
        if is_asked and self.device.only_shapes:                        # a loss that is not finite ends the step
            return torch.ones(first.shape, dtype=torch.bool, device="cuda")
        if func is torch.Tensor.numpy and isinstance(first, FakeTensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
                            "host memory first.")
        return func(*args, **(kwargs or {}))


# --------------------------------------------------------------------------- putting it in place

def fake_process_groups() -> None:
    """From here on a process group has this process alone, as whatever rank it says it is, and its collectives return
    at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group, new_group = dist.init_process_group, dist.new_group

    def init_fake_group(backend=None, *, store=None, rank=-1, world_size=-1, timeout=None, **_):
        init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    def new_fake_group(ranks=None, timeout=None, backend=None, **others):
        return new_group(ranks, **others)

    dist.init_process_group, dist.new_group = init_fake_group, new_fake_group
    dist.rendezvous = lambda *_, **__: iter([(FakeStore(), 0, 1)])


def _keep_ties(apply: Callable) -> Callable:
    """A weight that moves to a GPU stays the same object, and so that of all its modules. A FakeTensor is another one,
    for each module that has it."""
    def apply_and_tie(module, fn, recurse=True):
        places = defaultdict(list)
        for owner in module.modules():
            for name, weight in owner._parameters.items():
                places[weight].append((owner, name))
        apply(module, fn, recurse)
        for (first, name), *others in places.values():
            for owner, other in others:
                owner._parameters[other] = first._parameters[name]
        return module

    return apply_and_tie


def install(
    name: str = "NVIDIA H100 80GB HBM3", capability: tuple[int, int] = (9, 0), total_gb: float = 79.1,
    num_gpus: int = 8,
) -> Device:
    """Give this process a CUDA device, for good, and let `init_process_group` make a group whose collectives do
    nothing. Call it before anything asks whether there is a GPU; then run the code under test in `with device:`."""
    if WHY_NOT:
        raise RuntimeError(WHY_NOT)
    _register_device_guard()
    _build_hooks()
    _register_kernels()
    FakeTensorMode.avoid_device_init = property(lambda self: True)
    FakeTensor.tolist = lambda tensor: device.read(tensor).tolist()
    FakeTensor.record_stream = lambda tensor, stream: device.keep(tensor, stream)
    from torch.distributed._tools import fake_collectives  # noqa: F401  shapes of c10d's operations
    from torch.nn.attention import varlen  # noqa: F401  makes its operators known

    device = Device(capability, total_gb)
    properties = types.SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], total_memory=device.total, multi_processor_count=132,
    )

    def synchronize(_=None):
        device.reads[_place()] += 1
        ORDER.host_waits()

    new_generator = torch.Generator.__new__

    def make_generator(kind, device="cpu"):
        generator = new_generator(kind)                                 # of the CPU, which draws the numbers
        generator.made_for = torch.device(device).type
        return generator

    def reset_peak(_=None):
        device.allocator.reset_peaks()

    stand_ins = {
        "Stream": Stream, "Event": Event, "current_stream": _current_stream, "stream": _on_stream,
        "set_stream": _set_stream,
        "default_stream": lambda _=None: DEFAULT_STREAM, "is_available": lambda: True, "is_initialized": lambda: True,
        "_lazy_init": lambda: None, "device_count": lambda: num_gpus, "current_device": lambda: 0,
        "set_device": lambda _: None, "synchronize": synchronize,
        "empty_cache": lambda: device.allocator.empty_cache(),
        "mem_get_info": lambda _=None: (device.total - device.allocator.reserved, device.total),
        "get_device_capability": lambda _=None: capability, "get_device_name": lambda _=None: name,
        "get_device_properties": lambda _=None: properties, 
        "memory_allocated": lambda _=None: device.allocator.allocated,
        "max_memory_allocated": lambda _=None: device.allocator.peak_allocated,
        "memory_reserved": lambda _=None: device.allocator.reserved,
        "max_memory_reserved": lambda _=None: device.allocator.peak_reserved, "reset_peak_memory_stats": reset_peak,
        "manual_seed": lambda _: None, "manual_seed_all": lambda _: None, "is_bf16_supported": lambda *_, **__: True,
        "get_rng_state": lambda _=None: torch.zeros(16, dtype=torch.uint8), "set_rng_state": lambda *_: None,
    }
    for attribute, stand_in in stand_ins.items():
        setattr(torch.cuda, attribute, stand_in)
    torch.compile = lambda function, **_: function                      # the kernels are those of the CPU
    torch.Generator = type("Generator", (torch.Generator,), {"__new__": make_generator})
    torch.accelerator.synchronize = synchronize
    torch.accelerator.current_stream = _current_stream
    resize, device_of = torch.UntypedStorage.resize_, torch.UntypedStorage.device

    def resize_(storage, size):
        if storage._cdata in device.memory:
            device.resize(storage, size)
        return resize(storage, size)

    torch.UntypedStorage.resize_ = resize_
    torch.nn.Module._apply = _keep_ties(torch.nn.Module._apply)
    torch.UntypedStorage.device = property(
        lambda storage: torch.device("cuda", 0) if storage._cdata in device.memory else device_of.__get__(storage)
    )
    fake_process_groups()
    return device
