"""How well the policy does on each row of the training data, and what follows for which rows are sampled.

As in prime-rl's DifficultyPools (github.com/PrimeIntellect-ai/prime-rl, pull request 3261) every row belongs to a pool,
of which its latest mean score decides, and a pool has a weight. Here the mean decays over the visits to a row, and
rows are passed over in the order of an epoch (`PromptSampler`), so that none is drawn twice in an epoch.
"""

import math
import zlib
from base64 import b64decode, b64encode
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from common.flags.data import DataConfig
from common.rollout import Rollout

DECAY = 0.5
"""What a new mean leaves of the rate before it."""
POOLS = ("unseen", "too_hard", "learning", "too_easy")
"""A row's pool is a number in this order."""


def update_rates(rates: Tensor, rollout: Rollout) -> None:
    """Take the scores of a rollout into `rates`, float32 [N], NaN where a row has none yet. Group by group a row's rate
    becomes DECAY of what it was and 1 - DECAY of the mean of the group's scores; the first mean is taken whole. Lost
    scores (NaN) are left out. `rollout` has the same scores on all ranks, and so do the rates."""
    for group in rollout.group.unique().tolist():
        is_in_group = rollout.group == group                                                    # [S]
        row = int(rollout.row[is_in_group][0])
        scores = rollout.scores[is_in_group]
        known = scores[~scores.isnan()].tolist()
        if not known:
            continue
        mean = fmean(known)                             # rounded once: the same on CPUs that add in another order
        before = float(rates[row])
        rates[row] = mean if math.isnan(before) else DECAY * before + (1 - DECAY) * mean


def pool_of_rows(rates: Tensor, config: DataConfig) -> Tensor:
    """The pool of each row, int64 [N], as a number of POOLS."""
    pools = torch.full_like(rates, POOLS.index("learning"), dtype=torch.int64)
    pools[rates <= config.pool_hard] = POOLS.index("too_hard")
    pools[rates >= config.pool_easy] = POOLS.index("too_easy")
    pools[rates.isnan()] = POOLS.index("unseen")
    return pools


def pool_weights(rates: Tensor, config: DataConfig) -> Tensor:
    """The weight of each row for --data.pool learning, float32 [N]: 1 for those that are learnt from or not yet seen,
    --data.pool-rest for the others."""
    of_pool = torch.tensor([1.0, config.pool_rest, 1.0, config.pool_rest])
    return of_pool[pool_of_rows(rates, config)]


def pool_metrics(rates: Tensor, config: DataConfig, num_passed_over: int) -> dict[str, float]:
    """The share of all rows in each pool, and how many rows were passed over to find those of a step."""
    counts = pool_of_rows(rates, config).bincount(minlength=len(POOLS))
    metrics = {"curriculum/passed_over": float(num_passed_over)}
    for name, count in zip(POOLS, counts.tolist()):
        metrics[f"curriculum/{name}_frac"] = count / len(rates)
    return metrics


def to_text(numbers: np.ndarray | Tensor) -> str:
    """Numbers of rows, float32 [N], for a checkpoint: text of a fraction of a megabyte for most data, which is compared
    between ranks as the rest of `run.script_state` is."""
    return b64encode(zlib.compress(np.asarray(numbers, dtype="<f4").tobytes(), 1)).decode()


def from_text(text: str) -> np.ndarray:
    """What `to_text` was given."""
    return np.frombuffer(zlib.decompress(b64decode(text)), "<f4").copy()
