"""Weights on their way into the engine: checksums of what is sent and held, and loads at the speed of copies.

vLLM's loaders know which part of which tensor goes where (fused q, k, v and gate, up; shards of a tensor-parallel rank;
padded vocabularies; names), and spend most of a sync finding it out again. So the first load runs them and is recorded,
and later ones repeat its copies. A recording is used only if copies explain the whole model, every weight and nothing
else; its first use is compared in full, and every use in the usual sample.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten

ROW = 2048
"""Elements that a checksum adds in 32 bits."""


class Region(NamedTuple):
    """Elements of a tensor, by its first one."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


class Copy(NamedTuple):
    name: str  # of the tensor that was sent
    source: Region
    target: Region


@dataclass
class Written:
    """What a load wrote into one storage."""

    copies: dict[Region, Copy] = field(default_factory=dict)  # by target: some loaders write a region twice
    zeroed: bool = False
    otherwise: bool = False  # by anything but copies of what was sent

    def explains(self, numel: int) -> bool:
        count = self.numel
        return not self.otherwise and (count == numel or (0 < count < numel and self.zeroed))

    @property
    def numel(self) -> int:
        return sum(math.prod(region.size) for region in self.copies)


@dataclass
class Weight:
    """One parameter of the engine and the copies that fill it."""

    module: nn.Module
    name: str
    written: Written
    shape: torch.Size
    dtype: torch.dtype
    packed: bool  # its module's kernels read a packed form: filled beside the engine, packed, dropped


class Recorder(TorchDispatchMode):
    """Watches a load: `sending` wraps what is sent, `before_packing` is called for each layer about to be packed."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[int, list[tuple[int, int, str]]] = defaultdict(list)  # storage -> start, end, name
        self.written: dict[int, Written] = defaultdict(Written)
        self.alive: dict[int, StorageWeakRef] = {}  # while there is one, a number is not used again
        self.weights: list[Weight] = []

    def sending(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if tensor.is_contiguous():
                start = tensor.storage_offset()
                self.sent[self.number(tensor)].append((start, start + tensor.numel(), name))
            yield name, tensor

    def number(self, tensor: Tensor) -> int:
        reference = StorageWeakRef(tensor.untyped_storage())
        return self.alive.setdefault(reference.cdata, reference).cdata

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is ATEN.copy_.default:
            self.copied(args[0], args[1])
        elif func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args):
                if argument.alias_info is not None and argument.alias_info.is_write and value.numel():
                    written = self.written[self.number(value)]
                    if func is ATEN.zero_.default or (func is ATEN.fill_.Scalar and args[1] == 0):
                        written.zeroed = True
                    else:
                        written.otherwise = True
        return result

    def copied(self, target: Tensor, source: Tensor) -> None:
        if target.is_meta or target.numel() == 0:
            return
        number, of = self.number(target), self.number(source)
        region = Region(target.storage_offset(), tuple(target.shape), target.stride())
        if number == of and region == Region(source.storage_offset(), tuple(source.shape), source.stride()):
            return  # onto itself
        for start, end, name in self.sent.get(of, ()):
            offset = source.storage_offset()
            if start <= offset < end and source.shape == target.shape:
                there = Region(offset - start, tuple(source.shape), source.stride())
                self.written[number].copies[region] = Copy(name, there, region)
                return
        if of in self.written and is_whole(source) and is_whole(target):
            self.written[number] = self.written[of]  # from where vLLM put it first
        else:
            self.written[number].otherwise = True

    def before_packing(self, layer: nn.Module) -> None:
        for name, parameter in layer.named_parameters(recurse=False):
            if self.number(parameter) in self.written:  # vLLM writes some after the packing, straight into the engine
                self.weights.append(self.weight(layer, name, parameter, packed=True))

    def weight(self, module: nn.Module, name: str, parameter: Tensor, packed: bool) -> Weight:
        # taken out: what a packing does to it is not of the load
        written = self.written.pop(self.number(parameter), Written()) if is_whole(parameter) else Written()
        return Weight(module, name, written, parameter.shape, parameter.dtype, packed)

    def finish(self, model: nn.Module) -> "Recording | str":
        """The recording, or why there is none. Raises RuntimeError if the load left a weight as it was."""
        packed, seen = {(id(weight.module), weight.name) for weight in self.weights}, set()
        for module in model.modules():
            if type(module).__name__.startswith("MLA"):
                return f"{type(module).__name__} keeps products of its weights"
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.numel() and (id(module), name) not in packed and parameter not in seen:    # tied: once
                    seen.add(parameter)
                    self.weights.append(self.weight(module, name, parameter, packed=False))
        untouched = [f"{type(w.module).__name__}.{w.name}" for w in self.weights if w.written == Written()]
        if untouched:
            raise RuntimeError(
                f"weight sync: nothing that the trainer sends goes into {len(untouched)} weights of the engine's "
                f"{type(model).__name__} ({', '.join(sorted(untouched)[:3])}): transformers' model has other weights"
            )
        for weight in self.weights:
            if not weight.written.explains(math.prod(weight.shape)):
                return f"{type(weight.module).__name__}.{weight.name} is not filled by copies alone"
        return Recording(self.weights)


class Recording:
    """Copies by the name of what is sent."""

    def __init__(self, weights: list[Weight]):
        self.weights = weights
        self.is_proven = False  # a load by it was compared in full
        self.steps: dict[str, list[tuple[Weight, Copy]]] = defaultdict(list)
        self.parts: dict[nn.Module, int] = defaultdict(int)  # packed module -> copies that fill it
        self.packed: dict[nn.Module, list[Weight]] = defaultdict(list)
        for weight in weights:
            for copy in weight.written.copies.values():
                self.steps[copy.name].append((weight, copy))
                self.parts[weight.module] += weight.packed
            if weight.packed:
                self.packed[weight.module].append(weight)

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]], pack: Callable[[nn.Module], None]) -> None:
        """As vLLM's loaders do, with `pack` for each packed layer as it is complete. Tensors arrive contiguous.

        Raises RuntimeError if some weight did not arrive.
        """
        missing = dict(self.parts)
        names = set(self.steps)
        for weight in self.weights:
            if weight.written.zeroed and not weight.packed:
                getattr(weight.module, weight.name).zero_()
        for name, tensor in tensors:
            names.discard(name)
            for weight, copy in self.steps.get(name, ()):
                module = weight.module
                if weight.packed and missing[module] == self.parts[module]:
                    self.make_room(module)
                copy.target.of(getattr(module, weight.name)).copy_(copy.source.of(tensor))
                if weight.packed:
                    missing[module] -= 1
                    if not missing[module]:
                        pack(module)
        if names:
            raise RuntimeError(f"weight sync: the trainer did not send {sorted(names)}")

    def make_room(self, module: nn.Module) -> None:
        for weight in self.packed[module]:
            make = torch.zeros if weight.written.zeroed else torch.empty
            getattr(module, weight.name).data = make(weight.shape, dtype=weight.dtype)


def checksum(tensor: Tensor) -> int:
    """Sum of the elements, each read as its bytes, signed: exact; adds up over the parts of a tensor in any order."""
    size = tensor.element_size()
    data = tensor.detach().contiguous().view(-1).view(torch.int8).view(-1, size)
    rows = len(data) // ROW
    whole, rest = data[: rows * ROW].view(rows, ROW * size), data[rows * ROW :]
    if tensor.device.type == "cpu":  # as a product of matrices: torch widens before it adds, 9 times slower
        sums = torch._int_mm(whole, torch.eye(size, dtype=torch.int8).repeat(ROW, 1)).sum(0, dtype=torch.int64)
    else:
        sums = whole.sum(0, dtype=torch.int64).view(ROW, size).sum(0)
    sums += rest.sum(0, dtype=torch.int64)
    return sum(x << 8 * i for i, x in enumerate(sums.tolist()))


def compare_checksums(
    model: nn.Module, sent: dict[str, int], packed: dict[str, int], dtype: torch.dtype
) -> dict[str, tuple[int, int]]:
    """Checksums of what was sent and of what the engine's tensors hold, summed over its tensor-parallel ranks.

    Where vLLM fuses tensors (q, k, v; gate, up), the sum over the parts must agree. `packed`: taken before packing.
    Left out: quantised tensors, and keys and values where heads are repeated over ranks.
    """
    from vllm.distributed import get_tp_group

    fused = {part: whole for whole, parts in model.packed_modules_mapping.items() for part in parts}
    want: dict[str, int] = {}
    for name, value in sent.items():
        path = [fused.get(part, part) for part in name.split(".")]
        want[".".join(path)] = want.get(".".join(path), 0) + value
    held, ranks = dict(packed), get_tp_group().world_size
    for name in {*want, *packed}:
        path, _, of = name.rpartition(".")
        with contextlib.suppress(AttributeError):  # the engine has no such module
            module = model.get_submodule(path)
            parameter = getattr(module, of, None)
            if name not in packed and parameter is not None and parameter.dtype == dtype and parameter.numel():
                held[name] = checksum(parameter)
            if getattr(module, "num_kv_head_replicas", 1) > 1:
                held.pop(name, None)
    names = sorted(held)
    total = torch.tensor([held[name] for name in names], dtype=torch.int64)
    dist.all_reduce(total, group=get_tp_group().cpu_group)
    # whole copies on every rank (norms, some biases) add up to `ranks` times the sum
    return {n: (want[n], want[n] if have == ranks * want[n] else have) for n, have in zip(names, total.tolist())}


def is_whole(tensor: Tensor) -> bool:
    """All of its storage, in order."""
    return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
