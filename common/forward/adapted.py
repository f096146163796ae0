"""Layers with LoRA's adapters: a linear layer, and the experts of a mixture, of which each matrix has an adapter of its
own.

transformers keeps the experts of a layer in one tensor [experts, out, in], in some families [experts, in, out]. They
can have adapters if their class is made by transformers' `use_experts_implementation`, because its attributes say what
happens between the two products.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALIGNED = 8
"""Rows of a multiple of 8 numbers, 16 bytes in bfloat16, are what torch's grouped product takes."""
PART = 2**26
"""Numbers of experts that are float32 at a time while they are merged: 256 MiB."""


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float, is_transposed: bool = False) -> Tensor:
    """W' = W + scale B A in the dtype of `weight`; the sum is computed in float32 (float64 for float64). W [out, in], A
    [rank, in], B [out, rank]; of experts [experts, ...] each, of W the transpose if `is_transposed`."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    if weight.ndim == 2:
        return torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=scale).to(weight.dtype)
    if is_transposed:                                                   # (B A)^T = A^T B^T
        a, b = b.mT, a.mT
    merged = torch.empty_like(weight)
    num_experts = max(PART // weight[0].numel(), 1)
    for part, *factors in zip(*(x.split(num_experts) for x in (merged, weight, b, a))):
        part.copy_(torch.baddbmm(*(x.to(wide) for x in factors), alpha=scale))
    return merged


class _AdaptedLinear(torch.autograd.Function):
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
        return _AdaptedLinear.apply(x, self.weight, self.bias, self.lora_A, self.lora_B, self.scale)


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows [N, in], ordered by expert, each times the matrix of its expert, [experts, in, out] -> [N, out]. `ends`
    [experts]: where the rows of each expert end."""
    if x.dtype == torch.float64:                                        # torch's product does not know it
        return torch.ops.transformers.grouped_mm_fallback(x, weight, ends)
    return F.grouped_mm(x, weight, offs=ends)


class Experts(NamedTuple):
    """What a product with W' needs to know beside its tensors."""

    scale: float
    is_transposed: bool
    ends: Tensor


class _AdaptedProduct(torch.autograd.Function):
    """`grouped` with W'. W' is computed again in the backward pass: those of all layers, which are not sharded, would
    be another copy of the model on each rank."""

    @staticmethod
    def forward(ctx, x, weight, a, b, experts):
        ctx.save_for_backward(x, weight, a, b)
        ctx.experts = experts
        scale, is_transposed, ends = experts
        merged = merge(weight, a, b, scale, is_transposed)
        return grouped(x, merged if is_transposed else merged.mT, ends)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight, a, b = ctx.saved_tensors
        scale, is_transposed, ends = ctx.experts
        grad = grad.contiguous()
        grad_x = None
        if ctx.needs_input_grad[0]:
            merged = merge(weight, a, b, scale, is_transposed)
            grad_x = grouped(grad, merged.mT if is_transposed else merged, ends)
        padding = -a.shape[1] % ALIGNED
        with torch.enable_grad():
            a = a.detach().requires_grad_()
            b = b.detach().requires_grad_()
            low = grouped(x, F.pad(a, (0, 0, 0, padding)).mT, ends)                     # [N, rank]
            product = scale * grouped(low, F.pad(b, (0, padding)).mT, ends)             # [N, out]
            grad_a, grad_b = torch.autograd.grad(product, (a, b), grad)
        return grad_x, None, grad_a, grad_b, None


class AdaptedExperts(nn.Module):
    """What `adapt` makes of a layer's experts: a frozen module of transformers with an adapter for each of its tensors,
    NAME_lora_A [experts, rank, in] and NAME_lora_B [experts, out, rank]."""

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Hidden states [t, H], and of each the experts [t, k] that the router chose and their weights [t, k] ->
        [t, H]. The operations are those of transformers' `grouped_mm`, in its order, so that both round alike."""
        if not LoRALinear.are_on:
            return super().forward(hidden, chosen, weights)
        expert, order = chosen.flatten().sort()                                         # [t * k] both
        numbers = torch.arange(self.num_experts, device=expert.device)
        ends = torch.searchsorted(expert, numbers, right=True, out_int32=True)          # [experts]
        rows = hidden[order // chosen.shape[1]]                                         # [t * k, H]
        first, second = names_of(self)
        experts = Experts(self.scale, self.is_transposed, ends)
        inner = self._product(first, rows, experts, expert)
        if self.has_gate:
            inner = self._apply_gate(inner)
        else:
            inner = self.act_fn(inner)
        out = self._product(second, inner, experts, expert) * weights.flatten()[order, None]
        return out[order.argsort()].view(*chosen.shape, -1).sum(1).to(hidden.dtype)

    def _product(self, name: str, rows: Tensor, experts: Experts, expert: Tensor) -> Tensor:
        """`expert` [N]: that of each row."""
        weight = getattr(self, name)
        a = getattr(self, f"{name}_lora_A")
        b = getattr(self, f"{name}_lora_B")
        out = _AdaptedProduct.apply(rows.to(weight.dtype), weight, a, b, experts)
        if self.has_bias:
            out = out + getattr(self, f"{name}_bias")[expert]
        return out


def names_of(experts: nn.Module) -> tuple[str, str]:
    """The names of the tensors of the first and of the second product."""
    return ("gate_up_proj" if experts.has_gate else "up_proj"), "down_proj"


def are_experts(module: nn.Module) -> bool:
    """Whether these are a layer's experts that can have adapters."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed")


ROUTERS = ("Router", "TopKGating", "MoEV1Gate")
"""How the names of classes end that choose experts in transformers. Kimi's ForgetGate, for example, chooses none."""


def is_router(module: nn.Module) -> bool:
    """Whether this module chooses experts."""
    return type(module).__name__.endswith(ROUTERS)


def adapt(experts: nn.Module, rank: int, scale: float, dtype: torch.dtype) -> None:
    """Give frozen experts adapters, without memory, like the model."""
    for name in names_of(experts):
        count, outputs, inputs = getattr(experts, name).shape
        if experts.is_transposed:
            inputs, outputs = outputs, inputs
        a = torch.empty(count, rank, inputs, device="meta", dtype=dtype)
        b = torch.empty(count, outputs, rank, device="meta", dtype=dtype)
        experts.register_parameter(f"{name}_lora_A", nn.Parameter(a))
        experts.register_parameter(f"{name}_lora_B", nn.Parameter(b))
    experts.scale = scale
    kind = type(experts)
    experts.__class__ = type(f"Adapted{kind.__name__}", (AdaptedExperts, kind), {})
