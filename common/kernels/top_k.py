"""Log-probs of a few words of each token, and of all others together, without the logits [N, V] of all tokens."""

from collections.abc import Iterator

import torch
from torch import Tensor

from common.kernels.divergence import CHUNK_BYTES, _log_softmax
from common.kernels.logp import Head, accumulate_dtype, matmul, slices

ABSENT = -100.0
"""The log-prob of a word that is none: its probability is 0 in float32, and it is finite."""


def of_words(logp: Tensor, words: Tensor, with_rest: bool) -> Tensor:
    """The log-probs [n, k] of these different words, of all words' [n, V]; `with_rest`: and last that of all others as
    one class, [n, k + 1]. k must be below V then."""
    chosen = logp.gather(1, words)
    if not with_rest:
        return chosen
    rest = logp.scatter(1, words, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([chosen, rest], dim=1)


def linear_top_k(hidden: Tensor, head: Head, words: Tensor, temperature: float = 1.0) -> Tensor:
    """Of hidden states [N, H] and different words [N, k] (-1: none): the log-probs of these words, and last that of
    the rest, log of the sum of p over all other words, [N, k + 1]. p = softmax(logits / temperature).

    Float32, float64 where the inputs are, with the gradient by the hidden states and the head. The rest is summed over
    its own words: 1 minus the others would lose it in rounding. ABSENT where a word is -1. k must be below V."""
    assert words.shape[1] < len(head.weight), "without a word for the rest, its log-prob is -inf"
    return _LinearTopK.apply(hidden, head.weight, words, head, temperature)


class _LinearTopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, words, head, temperature):
        ctx.save_for_backward(hidden, weight, words)
        ctx.settings = head._replace(weight=None), temperature
        found = hidden.new_empty(len(words), words.shape[1] + 1, dtype=accumulate_dtype(hidden))
        for rows, _, _, product in _chunks(hidden, weight):
            found[rows] = _of_words(product, words[rows], *ctx.settings)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        hidden, weight, words = ctx.saved_tensors
        grad_hidden, grad_weight = (torch.zeros_like(x, dtype=accumulate_dtype(hidden)) for x in (hidden, weight))
        for rows, mm, operand, product in _chunks(hidden, weight):
            with torch.enable_grad():
                found = _of_words(product.requires_grad_(), words[rows], *ctx.settings)
            g = mm.operand(torch.autograd.grad(found, product, grad[rows])[0])
            mm.add(grad_hidden[rows], g, operand)
            if ctx.needs_input_grad[1]:
                mm.add(grad_weight, g.T, mm.operand(hidden[rows]))
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype), None, None, None


def _of_words(product: Tensor, words: Tensor, head: Head, temperature: float) -> Tensor:
    """Products [n, V] with the head, words [n, k] -> [n, k + 1]."""
    logp = _log_softmax(product, head, temperature)
    is_word = words >= 0
    num_words = logp.shape[1]
    columns = words.long().where(is_word, num_words)                # a further column takes those that are none
    is_named = torch.zeros(len(words), num_words + 1, dtype=torch.bool, device=words.device)
    is_named = is_named.scatter(1, columns, True)[:, :num_words]
    named = logp.gather(1, columns.clamp(max=num_words - 1)).where(is_word, ABSENT)
    rest = logp.masked_fill(is_named, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([named, rest], dim=1)


def _chunks(hidden: Tensor, weight: Tensor) -> Iterator[tuple]:
    """Some rows at a time, and the product [n, V] of their hidden states with the head."""
    with matmul(hidden, weight) as mm:
        operand = mm.operand(weight)
        for rows in slices(len(hidden), max(1, CHUNK_BYTES[hidden.device.type] // 4 // len(weight))):
            yield rows, mm, operand, mm(mm.operand(hidden[rows]), operand.T)
