"""What vLLM's CPU build needs from us: packed weights that follow a sync, a cache that gives memory back, segments of
its own. Written for vLLM 0.32, whose internals it names."""

import contextlib
import ctypes
import mmap
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn


@contextlib.contextmanager
def before_packing(see: Callable[[nn.Module], None]) -> Iterator[None]:
    """`see(layer)` at the last moment at which a linear layer's weights can be read: before vLLM packs them."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    pack = UnquantizedLinearMethod.process_weights_after_loading

    def see_and_pack(self, layer: nn.Module) -> None:
        see(layer)
        pack(self, layer)

    UnquantizedLinearMethod.process_weights_after_loading = see_and_pack
    try:
        yield
    finally:
        UnquantizedLinearMethod.process_weights_after_loading = pack


def pack(layer: nn.Module) -> None:
    """A linear layer's weights, just written, into the form that the CPU kernels read; the originals are dropped."""
    layer.quant_method.process_weights_after_loading(layer)


def pack_rest(model: nn.Module) -> None:
    """What a reload of vLLM 0.32 leaves unpacked though its CPU kernels read packed copies. A tied output head has no
    tensor of its own in the reload and keeps the old copy; the experts of a mixture are packed at the first load only.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            pack(module)
        elif isinstance(getattr(module, "quant_method", None), UnquantizedFusedMoEMethod):
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)


def give_back_cache(worker: Any) -> None:
    """On CPUs: the kernel takes the cache's pages and gives zeros when they are touched again."""
    libc = ctypes.CDLL(None, use_errno=True)
    for tensor in worker.model_runner.kv_caches:
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0 and libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise on vLLM's key-value cache")


@contextlib.contextmanager
def own_segment_name() -> Iterator[None]:
    """On CPUs vLLM names the shared memory of a group after its ranks alone, so a second job on the machine, or what a
    killed one left behind, stops the start: put a name into it that the job's ranks share and no other job has."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    name = [uuid.uuid4().hex[:12]]
    dist.broadcast_object_list(name, src=0)
    make_group_name = _CPUSHMDistributed.make_group_name

    def with_name(communicator: Any) -> str:
        return f"{name[0]}-{communicator.unique_name}-{'-'.join(map(str, communicator.ranks))}-cpushm"

    _CPUSHMDistributed.make_group_name = staticmethod(with_name)
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
