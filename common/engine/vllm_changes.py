"""What is changed in vLLM 0.32 at its start: on CPUs, classes of transformers, routers in float32."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel


@contextlib.contextmanager
def start_on_cpu() -> Iterator[None]:
    """While vLLM starts on CPUs: patches of vLLM 0.32.

    It packs the weights of linear layers for its kernels and would remove the originals. They stay beside the packed
    copies, so that a sync can write and read them. It names the shared memory of tensor-parallel ranks by rank number
    alone, so a second job on the machine, or leftovers of a killed job, make the start fail. Without that memory the
    ranks use the process group.

    One patch stays: vLLM counts how many tokens are more probable than the sampled one. Nothing here reads that, and
    torch would compile the kernel for it first, which takes 10 s and a C++ compiler."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers import utils

    mock.patch("vllm.v1.sample.sampler.batched_count_greater_than", lambda logp, _: torch.zeros(len(logp))).start()
    pack_layer = utils.dispatch_cpu_unquantized_gemm
    keep_weights = mock.patch.object(
        utils, "dispatch_cpu_unquantized_gemm", lambda layer, remove_weight: pack_layer(layer, remove_weight=False)
    )
    with keep_weights, mock.patch.object(CpuCommunicator, "_all_group_ranks_share_shm_group_name", return_value=False):
        yield


@contextlib.contextmanager
def kept_classes() -> Iterator[None]:
    """While vLLM starts. Of a family that it has no model of its own for it runs transformers' model, and changes that
    model's class, of which the trainer's model is, too. At the end the class is as it was, and vLLM's models are of a
    class of their own, which is derived from it."""
    from vllm.compilation import decorators

    decorate = decorators._support_torch_compile
    before: dict[type, tuple[tuple[type, ...], dict[str, Any]]] = {}

    def decorate_and_note(cls: type, *args: Any, **kwargs: Any) -> type:
        if issubclass(cls, PreTrainedModel):
            before.setdefault(cls, (cls.__bases__, dict(vars(cls))))
        return decorate(cls, *args, **kwargs)

    with mock.patch.object(decorators, "_support_torch_compile", decorate_and_note):
        yield
    for cls, (bases, attributes) in before.items():
        added = {name: value for name, value in vars(cls).items() if attributes.get(name) is not value}
        more_bases = [base for base in cls.__bases__ if base not in bases]
        models = [made for made in gc.get_objects() if type(made) is cls and "vllm_config" in vars(made)]
        for name in added:
            if name in attributes:
                setattr(cls, name, attributes[name])
            else:
                delattr(cls, name)
        cls.__bases__ = bases
        own = type(cls.__name__, (cls, *more_bases), added)
        for made in models:
            made.__class__ = own


def use_float32_routers() -> None:
    """--policy.router-float32, before vLLM starts, for all routers of this process: their weights stay in the dtype in
    which they are sent, the product is computed in float32."""
    try:
        from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    except ImportError as error:
        raise ValueError(f"--policy.router-float32: this vLLM has other routers than 0.32 ({error})") from None

    def forward(self, x):
        bias = None if self.bias is None else self.bias.float()
        logits = F.linear(x.float(), self.weight.float(), bias)
        return (logits, None) if self.return_bias else logits

    mock.patch.object(GateLinear, "forward", forward).start()


def check_routers(model: nn.Module, num_layers: int) -> None:
    """Raise ValueError if vLLM's model has layers with experts whose routers are not computed in float32."""
    found = [module for module in model.modules() if type(module).__name__ == "GateLinear"]
    if len(found) != num_layers or not found:
        raise ValueError(f"--policy.router-float32: vLLM's {type(model).__name__} has {num_layers} layers with experts "
                         f"and {len(found)} routers that are known, leave it out")
