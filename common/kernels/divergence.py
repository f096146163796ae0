"""A divergence between the whole distributions of two models, of a few tokens at a time."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from common.kernels.logp import Head, accumulate_dtype, matmul, slices

CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}      # of the logits; about eight tensors as large exist


def linear_divergence(student: tuple[Tensor, Head], teacher: tuple[Tensor, Head],
                      divergence: Callable[[Tensor, Tensor], Tensor], temperature: float = 1.0,
                      same_words: bool = True) -> Tensor:
    """divergence(log p, log q) of each token, p the student's softmax(logits / temperature) and q the teacher's:
    float32 [N], float64 where the inputs are, with the gradient by the student's hidden states and head.

    `student`, `teacher`: hidden states [N, H], H of their own, and the head. `divergence` maps log-probs [n, V] of both
    to [n], and autograd differentiates it. It sees n of the N tokens at a time, in forward and again in backward. V is
    the student's vocabulary: what the teacher's head has beyond it is padding, and is left out. Without `same_words`
    the teacher's vocabulary is another one, of any size, and `divergence` gets all of it.
    """
    hidden, head = student
    other_hidden, other = teacher
    other_weight = other.weight
    if same_words:
        other_weight = other_weight[: len(head.weight)]

    def of_products(ours: Tensor, theirs: Tensor) -> Tensor:
        return divergence(_log_softmax(ours, head, temperature), _log_softmax(theirs, other, temperature))

    return _LinearDivergence.apply(hidden, head.weight, other_hidden, other_weight, of_products)


def _log_softmax(product: Tensor, head: Head, temperature: float) -> Tensor:
    """As `_logits`, with a gradient."""
    if head.softcap:
        return (torch.tanh(product * (head.logit_scale / head.softcap)) * (head.softcap / temperature)).log_softmax(1)
    return (product * (head.logit_scale / temperature)).log_softmax(1)


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, other_hidden, other_weight, of_products):
        ctx.save_for_backward(hidden, weight, other_hidden, other_weight)
        ctx.of_products = of_products
        value = hidden.new_empty(len(hidden), dtype=accumulate_dtype(hidden))
        for rows, *_, products in _chunks(hidden, weight, other_hidden, other_weight):
            value[rows] = of_products(*products)
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        hidden, weight, *_ = ctx.saved_tensors
        grad_hidden, grad_weight = (torch.zeros_like(x, dtype=accumulate_dtype(hidden)) for x in (hidden, weight))
        for rows, mm, head, (ours, theirs) in _chunks(*ctx.saved_tensors):
            with torch.enable_grad():
                value = ctx.of_products(ours.requires_grad_(), theirs)
            g = mm.operand(torch.autograd.grad(value, ours, grad[rows])[0])
            mm.add(grad_hidden[rows], g, head)
            if ctx.needs_input_grad[1]:
                mm.add(grad_weight, g.T, mm.operand(hidden[rows]))
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype), None, None, None


def _chunks(hidden: Tensor, weight: Tensor, other_hidden: Tensor, other_weight: Tensor) -> Iterator[tuple]:
    """Some rows at a time, and the products of their hidden states with both heads, [n, V] each."""
    with matmul(hidden, weight) as mm:
        head, other_head = mm.operand(weight), mm.operand(other_weight)
        size = 4 * max(len(weight), len(other_weight))
        for rows in slices(len(hidden), max(1, CHUNK_BYTES[hidden.device.type] // size)):
            ours, theirs = mm.operand(hidden[rows]), mm.operand(other_hidden[rows])
            yield rows, mm, head, (mm(ours, head.T), mm(theirs, other_head.T))
