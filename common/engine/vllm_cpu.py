"""Changes to vLLM's CPU build: packed weights follow a sync, and a job is independent of others on the machine.
Written for vLLM 0.32, whose internals it names."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import nn


@contextmanager
def changed_start() -> Iterator[None]:
    """While vLLM starts.

    It packs the weights of linear layers for its kernels and would remove them. They stay beside the packed copies, so
    that a sync can write and read them.
    It names the shared memory of tensor-parallel ranks after their numbers alone, so that a second job on the machine,
    or what a killed job left behind, stops the start. Without that memory they use the process group."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers import utils

    pack_layer = utils.dispatch_cpu_unquantized_gemm
    keep_weights = mock.patch.object(
        utils, "dispatch_cpu_unquantized_gemm", lambda layer, remove_weight: pack_layer(layer, remove_weight=False)
    )
    with keep_weights, mock.patch.object(CpuCommunicator, "_all_group_ranks_share_shm_group_name", return_value=False):
        yield


def pack(model: nn.Module) -> None:
    """After a sync: pack the weights of linear layers, of the output head and of a mixture's experts again."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        if "cpu_linear" in vars(module):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
        elif isinstance(getattr(module, "quant_method", None), UnquantizedFusedMoEMethod):
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
