"""Changes to vLLM's CPU build: packed weights follow a sync, and a job is independent of others on the machine.
Written for vLLM 0.32, whose internals it names."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from torch import nn


def before_packing(read: Callable[[nn.Module], None]) -> AbstractContextManager:
    """Call `read(layer)` right before vLLM packs a linear layer's weights: afterwards they can no longer be read."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    pack = UnquantizedLinearMethod.process_weights_after_loading

    def read_and_pack(self: Any, layer: nn.Module) -> None:
        read(layer)
        pack(self, layer)

    return mock.patch.object(UnquantizedLinearMethod, "process_weights_after_loading", read_and_pack)


def pack_rest(model: nn.Module) -> None:
    """Pack what a reload of vLLM 0.32 does not, although its CPU kernels read packed copies: a tied output head, which
    has no tensor of its own in the reload, and the experts of a mixture, which are packed at the first load only."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
        elif isinstance(getattr(module, "quant_method", None), UnquantizedFusedMoEMethod):
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)


def no_shared_memory() -> AbstractContextManager:
    """vLLM names the shared memory of a group after its ranks alone, so that a second job on the machine, or what a
    killed job left behind, stops the start. Without it, tensor-parallel ranks use the process group."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    return mock.patch.object(CpuCommunicator, "_all_group_ranks_share_shm_group_name", return_value=False)
