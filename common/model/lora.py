"""LoRA (Hu et al. 2021, arXiv 2106.09685): the model stays frozen, and its linear layers, and the experts of a mixture
if asked for, learn a product of two small matrices each.

A layer computes with W' = W + scale B A, rounded to W's own dtype. The sampling engine gets this W' from the same
function, so trainer and engine hold the same numbers. The reference is the same model with its adapters off.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from common.flags.model import LoRAConfig
from common.forward.adapted import AdaptedExperts, LoRALinear, adapt, are_experts, is_router, names_of
from common.forward.adapted import merge as merge
from common.forward.blocks import blocks_of
from common.source.stored import is_adapter

ROUTER_NAMES = {"gate", "router", "shared_expert_gate"}
"""Linear layers inside blocks that choose experts: they belong neither to attention nor to an MLP."""
EXPERTS = "experts"
"""The name of all experts in --lora.targets."""
ALL_LINEAR = "all-linear"
"""The name of all linear layers there, which are the default."""


class Adapter(NamedTuple):
    """The adapter of one tensor of a model; see `merge`."""

    a: nn.Parameter
    b: nn.Parameter
    scale: float
    is_transposed: bool = False


def add_adapters(model: PreTrainedModel, config: LoRAConfig, dtype: torch.dtype = torch.float32) -> bool:
    """Freeze a model on the meta device and give its linear layers adapters, and its experts, if --lora.targets name
    them. Returns whether there are experts that have none. Raises ValueError for a wrong target."""
    linears = []                                                        # (block, name in it, layer)
    mixtures = []
    for block in blocks_of(model.get_decoder(), model):
        in_routers: set[nn.Module] = set()
        for name, module in block.named_modules():
            if is_router(module):
                in_routers.update(module.modules())
            if type(module) is nn.Linear and module not in in_routers:
                linears.append((block, name, module))
            elif are_experts(module):
                mixtures.append(module)
    by_default = {name.rpartition(".")[2] for _, name, _ in linears} - ROUTER_NAMES
    possible = {ALL_LINEAR, *by_default}
    if mixtures:
        possible.add(EXPERTS)
    for target in config.targets:
        if target not in possible:
            raise ValueError(
                f"--lora.targets {target} must be a linear layer of attention or of an MLP, here one of "
                f"{' '.join(sorted(possible))}: an embedding and the output head are no matrix product of a "
                f"layer's input, and `experts` are all of a mixture, if transformers builds them by its "
                f"use_experts_implementation"
            )
    model.requires_grad_(False)
    scale = config.alpha / config.rank
    targets = set(config.targets or [ALL_LINEAR])
    if ALL_LINEAR in targets:
        targets |= by_default
    if not by_default and EXPERTS not in targets:
        raise ValueError(f"--lora.rank {config.rank}: a {model.config.model_type} has no linear layers in its blocks "
                         f"(GPT-2 and its kin have Conv1D instead), so nothing would be trained: set it to 0")
    for block, name, linear in linears:
        if name.rpartition(".")[2] in targets:
            block.set_submodule(name, LoRALinear(linear, config.rank, scale, dtype))
    if EXPERTS not in targets:
        return bool(mixtures)
    for experts in mixtures:
        adapt(experts, config.rank, scale, dtype)
    return False


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """The name of each weight that has an adapter -> the adapter."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LoRALinear):
            found[f"{name}.weight"] = Adapter(layer.lora_A, layer.lora_B, layer.scale)
        elif isinstance(layer, AdaptedExperts):
            for own_name in names_of(layer):
                a, b = map(layer.get_parameter, matrices_of(own_name))
                found[f"{name}.{own_name}"] = Adapter(a, b, layer.scale, layer.is_transposed)
    return found


def matrices_of(weight: str) -> tuple[str, str]:
    """The names of A and B of the adapter of this weight: LAYER.weight, or EXPERTS.NAME."""
    stem = weight.removesuffix("weight")
    if stem == weight:
        stem = f"{weight}_"
    return f"{stem}lora_A", f"{stem}lora_B"


def transposed_experts(model: nn.Module) -> set[str]:
    """The names of experts' tensors [experts, in, out]."""
    found = set()
    for name, layer in model.named_modules():
        if are_experts(layer) and layer.is_transposed:
            found |= {f"{name}.{own_name}" for own_name in names_of(layer)}
    return found


def new_adapters(model: nn.Module) -> dict[str, Tensor]:
    """Initial values of adapters: A as in `nn.Linear` and peft, B zero, so that W' is W. The seed is torch's own."""
    generator = torch.Generator().manual_seed(torch.initial_seed())
    values = {}
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            continue
        if name.endswith("lora_B"):
            values[name] = torch.zeros(parameter.shape)
        else:
            uniform = torch.rand(parameter.shape, generator=generator)                  # in [0, 1)
            values[name] = (2 * uniform - 1) * parameter.shape[-1] ** -0.5
    return values


class Reference:
    """A policy as it was before training: its adapters are off while it scores. It has no weights of its own."""

    def __init__(self, policy: nn.Module):
        self.policy = policy

    def score(self, batch: Any, temperature: float) -> Tensor:
        LoRALinear.are_on = False
        logp = self.policy.score(replace(batch, routing=None), temperature)     # its own experts
        LoRALinear.are_on = True
        return logp
