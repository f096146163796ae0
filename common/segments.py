"""Sums, means and whitening of per-token numbers: within sequences, and over the tokens of all ranks."""

import torch
from torch import Tensor

from common.parallel.ranks import all_sum


def segment_sum(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] -> [S]: sums within sequences, in a fixed order (an atomic `index_add` would not repeat on a GPU)."""
    return torch.segment_reduce(x, "sum", lengths=cu_seqlens.diff().long(), initial=0, unsafe=True)


def segment_mean(x: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] -> [S]: means within sequences over the tokens with mask; 0 for a sequence that has none."""
    count = segment_sum(mask.to(x.dtype), cu_seqlens)
    return segment_sum(torch.where(mask, x, 0), cu_seqlens) / count.clamp(min=1)


def expand(x: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[S] -> [T]: each sequence's number on all of its tokens."""
    return x.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)


def moments(x: Tensor) -> tuple[float, float, float]:
    """Count, mean and sum of squared deviations of a float64 [N], over all ranks."""
    count, total = all_sum([len(x), x.sum()]).tolist()
    mean = total / max(count, 1)
    return count, mean, all_sum([(x - mean).square().sum()]).item()


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over every token with mask on every rank (unbiased variance); 0 elsewhere."""
    count, mean, squares = moments(x[mask].double())
    scale = (squares / max(count - 1, 1) + 1e-8) ** -0.5
    return torch.where(mask, (x.double() - mean) * scale, 0).to(x.dtype)
