"""Sums and means: within sequences, within groups of responses, and over the tokens of all ranks."""

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


def has_any(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] -> [S] bool: sequences that have a token with mask."""
    return segment_sum(mask.double(), cu_seqlens) > 0


def segment_cumsum(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] -> [T]: within each sequence the sum up to each token, itself included."""
    total = x.cumsum(0)                                     # of all sequences; what came before each is taken off
    return total - expand((total - x)[cu_seqlens[:-1].long()], cu_seqlens, len(x))


def expand(x: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[S] -> [T]: each sequence's number on all of its tokens."""
    return x.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)


def moments(x: Tensor) -> tuple[float, float, float]:
    """Count, mean and sum of squared deviations of a float64 [N], over all ranks."""
    # two passes: the mean of squares minus the square of the mean would cancel where the spread is small
    count, total = all_sum([len(x), x.sum()]).tolist()
    mean = total / max(count, 1)
    return count, mean, all_sum([(x - mean).square().sum()]).item()


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over every token with mask on every rank (unbiased variance); 0 elsewhere."""
    count, mean, squares = moments(x[mask].double())
    scale = (squares / max(count - 1, 1) + 1e-8) ** -0.5    # 1e-8 is verl's: all values equal give 0, not NaN
    return torch.where(mask, (x.double() - mean) * scale, 0).to(x.dtype)


def group_sum(x: Tensor, group: Tensor) -> Tensor:
    """[S] -> [S]: for each response the sum over its group; ignores NaN."""
    # on the CPU, so in a fixed order
    return x.new_zeros(_num_groups(group)).index_add(0, group, x.nan_to_num())[group]


def group_count(x: Tensor, group: Tensor) -> Tensor:
    """[S] -> [S]: for each response the number of values in its group that are not NaN."""
    return group_sum((~x.isnan()).to(x.dtype), group)


def group_mean(x: Tensor, group: Tensor, weights: Tensor | float = 1.0) -> Tensor:
    """[S] -> [S]: for each response the weighted mean over its group; ignores NaN, and is NaN for a group that has no
    values. Of equal values it is that value: the sum of three 0.1 is not 0.3, so the mean of what is left is added."""
    weights = weights * (~x.isnan()).to(x.dtype)
    mean = group_sum(weights * x, group) / group_sum(weights, group)
    return mean + group_sum(weights * (x - mean), group) / group_sum(weights, group)


def group_std(x: Tensor, group: Tensor) -> Tensor:
    """[S] -> [S]: for each response the unbiased standard deviation of its group; ignores NaN; 0 for a group of one."""
    squares = group_sum((x - group_mean(x, group)).square(), group)
    return (squares / (group_count(x, group) - 1).clamp(min=1)).sqrt()


def group_max(x: Tensor, group: Tensor) -> Tensor:
    """[S] -> [S]: for each response the largest value of its group."""
    return x.new_full((_num_groups(group),), -torch.inf).scatter_reduce(0, group, x, "amax")[group]


def group_log_mean_exp(x: Tensor, group: Tensor) -> Tensor:
    """[S] -> [S]: for each response log(mean(exp(x))) over its group, also where exp(x) would be infinite or 0."""
    top = group_max(x, group)                               # so that no exponential is above 1
    return top + group_mean((x - top).exp(), group).log()


def group_win_rate(x: Tensor, group: Tensor) -> Tensor:
    """[S] -> [S]: for each response the share of its group's values, its own included, that are below it; equal ones
    count half. Ignores NaN, and is NaN for one."""
    is_mate = (group[:, None] == group) & ~x.isnan()                                                    # [S, S]
    wins = ((x[:, None] > x).to(x.dtype) + (x[:, None] >= x).to(x.dtype)) / 2
    return torch.where(x.isnan(), torch.nan, (wins * is_mate).sum(1) / is_mate.sum(1))


def best_and_worst(rewards: Tensor, group: Tensor) -> Tensor:
    """Numbers of chosen, rejected, chosen, ... [2 P]: from each group with two different rewards. NaN: no reward."""
    pairs = []
    for members in group.argsort(stable=True).split(group.bincount().tolist()):
        scored = members[rewards[members].isfinite()]
        if len(rewards[scored].unique()) > 1:
            pairs.append((scored[rewards[scored].argmax()], scored[rewards[scored].argmin()]))
    return torch.tensor(pairs, dtype=torch.int64).flatten()


def group_lead(x: Tensor, group: Tensor) -> Tensor:
    """[S] -> [S]: each group's largest value gets its lead over the second largest; all others get 0 (ties, too)."""
    x = x.nan_to_num(nan=-torch.inf)
    is_best = x == group_max(x, group)
    lead = x - group_max(x.where(~is_best, -torch.inf), group)
    is_alone = group_sum(is_best.to(x.dtype), group) == 1
    return lead.where(is_best & lead.isfinite() & is_alone, 0)


def is_constant(x: Tensor, group: Tensor) -> Tensor:
    """[S] -> [S] bool: True if all values of the response's group are equal. Ignores NaN."""
    return group_sum((x - group_mean(x, group)).abs(), group) == 0


def _num_groups(group: Tensor) -> int:
    if not len(group):
        return 0
    return int(group.max()) + 1
