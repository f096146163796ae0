"""LoRA (Hu et al. 2021, arXiv 2106.09685): the model stays frozen, and its linear layers learn a product of two small
matrices each.

A layer computes with W' = W + scale B A, rounded to W's own dtype. The sampling engine gets this W' from the same
function, so trainer and engine hold the same numbers. The reference is the same model with its adapters off.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from common.flags.model import LoRAConfig
from common.source.stored import is_adapter

ROUTERS = {"gate", "router", "shared_expert_gate"}
"""Linear layers inside blocks that choose experts: they belong neither to attention nor to an MLP."""


class _Adapted(torch.autograd.Function):
    """x W'^T. The gradients of A and B are computed without the gradient of W; the backward pass computes W' again."""

    @staticmethod
    def forward(ctx, x, weight, bias, a, b, scale):
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return F.linear(x, merge(weight, a, b, scale), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight, a, b = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ merge(weight, a, b, ctx.scale)
        rows = grad.flatten(0, -2)                                                      # [T, out]
        inputs = x.flatten(0, -2)                                                       # [T, in]
        grad_a = ctx.scale * ((rows @ b).T @ inputs)                                    # [rank, in]
        grad_b = ctx.scale * (rows.T @ (inputs @ a.T))                                  # [out, rank]
        return grad_x, None, None, grad_a, grad_b, None


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W' [out, in] in the dtype of `weight`; the sum is computed in float32 (float64 for float64)."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=scale).to(weight.dtype)


class LoRALinear(nn.Linear):
    """A linear layer with a frozen weight and an adapter. It is created without memory, like the model."""

    are_on = True  # all adapters, but while the reference scores

    def __init__(self, linear: nn.Linear, rank: int, scale: float, dtype: torch.dtype = torch.float32):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, "meta", linear.weight.dtype)
        self.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.empty(rank, linear.in_features, device="meta", dtype=dtype))
        self.lora_B = nn.Parameter(torch.empty(linear.out_features, rank, device="meta", dtype=dtype))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        if not self.are_on:
            return F.linear(x, self.weight, self.bias)
        return _Adapted.apply(x, self.weight, self.bias, self.lora_A, self.lora_B, self.scale)


def add_adapters(model: PreTrainedModel, config: LoRAConfig, dtype: torch.dtype = torch.float32) -> None:
    """Freeze a model on the meta device and give its linear layers adapters. Raises ValueError for a wrong target."""
    linears = []                                                        # (block, name in it, layer)
    for block in model.get_decoder().modules():
        if type(block).__name__ in model._no_split_modules:
            for name, module in block.named_modules():
                if type(module) is nn.Linear:
                    linears.append((block, name, module))
    possible = {name.rpartition(".")[2] for _, name, _ in linears} - ROUTERS
    for target in config.targets:
        if target not in possible:
            raise ValueError(
                f"--lora.targets {target} must be a linear layer of attention or of an MLP, here one of "
                f"{' '.join(sorted(possible))}: an embedding and the output head are no matrix product of a "
                f"layer's input, and the experts of a mixture are one tensor, not a linear layer each"
            )
    model.requires_grad_(False)
    for block, name, linear in linears:
        if name.rpartition(".")[2] in (config.targets or possible):
            block.set_submodule(name, LoRALinear(linear, config.rank, config.alpha / config.rank, dtype))


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
            values[name] = (2 * uniform - 1) * parameter.shape[1] ** -0.5
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
