"""The weights of vLLM's model: which of them a sync fills, and what it then holds."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from common.sync.checksums import Checksum, held_checksums

LATENT = "MLAAttention"
"""vLLM's class of multi-head latent attention. Its own parameters are computed of the weights beside it."""


class EngineWeights:
    """Of one worker."""

    def __init__(self, model: nn.Module, vllm_config: Any, dtype: torch.dtype, on_cpu: bool):
        self.model = model
        self.vllm_config = vllm_config
        self.dtype = dtype
        self.on_cpu = on_cpu
        # the layers that vLLM quantises itself, e.g. with --rollout.extra '{"quantization": "fp8_per_tensor"}'
        methods = {layer: getattr(layer, "quant_method", None) for layer in model.modules()}
        self.quantized = [layer for layer, method in methods.items() if getattr(method, "uses_meta_device", False)]

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load all weights, for `complete` to pack them. Returns names of those into which nothing went; a few models
        do not tell."""
        if self.on_cpu:
            unpack_on_cpu(self.model)
        with quantize_on_load(self.quantized, self.vllm_config):
            names = loadable(self.model)
            loaded = self.model.load_weights(tensors)
        compute_weights(self.model, self.dtype)
        if loaded is None:
            return set()
        return not_loaded(names, loaded)

    def complete(self, sent: dict[str, Checksum]) -> dict[str, Checksum]:
        """The checksums of what is held of the tensors in `sent`; then the weights are packed for CPUs."""
        held = held_checksums(self.model, sent, self.dtype)
        if self.on_cpu:
            pack_on_cpu(self.model)
        return held


def loadable(model: nn.Module) -> list[list[str]]:
    """The names of each weight of vLLM's model that a sync must fill, those by which modules share it too."""
    names: dict[int, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if type(module).__name__ == LATENT:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            names.setdefault(id(parameter), []).append(_plain(f"{prefix}.{name}"))
    return [*names.values()]


def not_loaded(names: Iterable[list[str]], loaded: Iterable[str]) -> set[str]:
    """Of each weight that was not filled the first name."""
    filled = {_plain(name) for name in loaded}
    return {own[0] for own in names if filled.isdisjoint(own)}


def _plain(name: str) -> str:
    """vLLM 0.26 tells experts' names without the module that holds them."""
    return name.replace(".routed_experts", "").removeprefix(".")


@contextlib.contextmanager
def quantize_on_load(layers: list[nn.Module], vllm_config: Any) -> Iterator[None]:
    """While weights are loaded: these layers, which hold theirs quantised, take them as the trainer sends them, and
    quantise them anew once they are complete. Without it, a load would write into the quantised weights."""
    if not layers:
        yield
        return
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    with set_current_vllm_config(vllm_config):
        for layer in layers:
            initialize_layerwise_reload(layer)
        yield
        for layer in layers:
            finalize_layerwise_reload(layer, vllm_config.model_config)


def compute_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """After a sync: what multi-head latent attention computes of its weights for decoding."""
    for module in model.modules():
        if type(module).__name__ == LATENT:
            module.process_weights_after_loading(dtype)


def unpack_on_cpu(model: nn.Module) -> None:
    """Before a sync on CPUs: give convolutions, which are packed in the place of their weights, their own shape."""
    for module in model.modules():
        if "_cpu_unpacked_conv_weight" in vars(module):
            module.weight.data = module._cpu_unpacked_conv_weight[:, None].clone()


def pack_on_cpu(model: nn.Module) -> None:
    """After a sync on CPUs: pack the weights of linear layers and convolutions, of the output head and of a mixture's
    experts again."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        if "cpu_linear" in vars(module) or "_cpu_unpacked_conv_weight" in vars(module):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
        elif isinstance(getattr(module, "quant_method", None), UnquantizedFusedMoEMethod):
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
