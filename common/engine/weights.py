"""The weights of vLLM's model: which of them a sync fills, and what it then holds."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from common.engine.sync import Checksum, held_checksums
from common.engine.vllm_changes import LATENT, compute_weights, pack_on_cpu, quantize_on_load, unpack_on_cpu


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
