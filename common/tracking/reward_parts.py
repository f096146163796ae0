"""Which parts of the score the policy's gradient comes from, for --log.signal-rewards.

The gradient of the policy's term is linear in the advantages. Where these are A = s (R - mean_g R), with a factor s of
each group, and the score is a sum R = sum R_k, the advantage of a part is A_k = s (R_k - mean_g R_k), and sum A_k = A.
So the part's gradient is that of the whole with each response's share multiplied by A_k / A.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from common.parallel.exchange import gather_numbers
from common.parallel.ranks import all_max
from common.rollout import Rollout, sum_per_response
from common.segments import group_mean, group_sum

REST = "rest"
"""What the named parts leave of the score."""
TOLERANCE = 1e-3
"""Of the largest advantage: they are float32, and some have a small constant in their denominator."""


def shares_of_parts(rollout: Rollout, parts: Sequence[str]) -> dict[str, Tensor]:
    """Part -> A_k / A of each response [S], 0 where A is 0; the same on every rank. All ranks call it, after
    `rollout.batch.advantage` is written.

    `parts`: names of numbers that the reward function returned, or NAME=FACTOR. Raises ValueError if a scored response
    has no such number, and for advantages that are not of the form above."""
    values = part_values(rollout, parts)
    score = rollout.scores.nan_to_num()
    rest = score - torch.stack([*values.values()]).sum(0)
    if rest.abs().max() > 1e-9 * score.abs().max():
        values[REST] = rest
    centred = centre(score, rollout)
    check_form(centred, rollout)
    shares = {}
    for name, numbers in values.items():
        shares[name] = torch.where(centred == 0, 0.0, centre(numbers, rollout) / centred)
    return shares


def part_values(rollout: Rollout, parts: Sequence[str]) -> dict[str, Tensor]:
    """[S] each, 0 without a score."""
    factors = {}
    for part in parts:
        name, _, factor = part.partition("=")
        factors[name] = float(factor or 1)
    rows = []
    for sample in rollout.samples:
        numbers = []
        for name in factors:
            value = sample.extras.get(name)
            if not math.isfinite(sample.score):
                value = 0.0
            if not isinstance(value, float):
                raise ValueError(f"--log.signal-rewards {name}: row {sample.row} of --train-data: the reward function "
                                 f"returned {name} = {value!r}, must be a number; it returned "
                                 f"{', '.join(sorted(sample.extras)) or 'its score alone'}")
            numbers.append(value)
        rows.append(numbers)
    index = torch.tensor([sample.index for sample in rollout.samples], dtype=torch.int64)
    table = gather_numbers(torch.tensor(rows, dtype=torch.float64).view(-1, len(factors)), index)   # [S, parts]
    return {name: factor * column for (name, factor), column in zip(factors.items(), table.unbind(1))}


def centre(values: Tensor, rollout: Rollout) -> Tensor:
    """[S] -> [S] less the mean of its group's scored responses; 0 for those without a score."""
    scored = torch.where(rollout.has_score, values, torch.nan)
    return (scored - group_mean(scored, rollout.group)).nan_to_num()


def check_form(centred: Tensor, rollout: Rollout) -> None:
    """Raise ValueError, on all ranks, unless advantages are `centred` [S] times a factor of the group."""
    batch = rollout.batch
    error = math.inf
    if batch.advantage is not None:
        counts = sum_per_response(batch, batch.mask.double(), len(rollout)).clamp(min=1)
        mean = sum_per_response(batch, batch.advantage.double() * batch.mask, len(rollout)) / counts    # [S]
        squares = group_sum(centred.square(), rollout.group)
        factor = torch.where(squares > 0, group_sum(mean * centred, rollout.group) / squares, 0.0)
        apart = (batch.advantage - rollout.to_tokens(factor * centred)).abs() * batch.mask
        largest, size = all_max([apart.max(), (batch.advantage * batch.mask).abs().max()]).tolist()
        error = largest / size if size else 0.0
        if (factor < 0).any():
            error = math.inf
    if error > TOLERANCE:
        raise ValueError("--log.signal-rewards: this script's advantages are not the scores less their group's mean, "
                         "times one factor for each group, before run.to_minibatches, so the parts of a score have no "
                         "share of their own in them: leave the flag out")
