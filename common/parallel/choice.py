"""Choose tokens by their score, over the micro-batches of all ranks."""

import numpy as np
import torch
from torch import Tensor

from common.batch import Batch
from common.parallel.ranks import all_gather_objects, all_sum, seed_of


def choose_largest(
    microbatches: list[Batch], scores: list[Tensor], candidates: list[Tensor], seed: int, fraction: float,
) -> list[Tensor]:
    """Choose the max(1, fraction * tokens) candidates with the largest score over all ranks: [T] bools each.

    Equal scores are ordered by random numbers of (seed, response, position), so neither micro-batches, nor their order,
    nor ranks change the choice. `scores` are float64 [T] and `candidates` bool [T], one of each a micro-batch."""
    count = max(1, int(fraction * all_sum([sum(b.mask.sum() for b in microbatches)]).item()))
    keys = [_random_numbers(seed, b) for b in microbatches]
    rows = [torch.stack([-s.cpu(), k], dim=1)[c.cpu()] for s, k, c in zip(scores, keys, candidates)]
    rows = torch.cat(rows).numpy()                                                      # [n, 2]
    first = rows[np.lexsort(rows.T[::-1])][:count]                                      # rising by (-score, key)
    first = np.concatenate(all_gather_objects(first))                                   # at most `count` rows a rank
    chosen = torch.from_numpy(first[np.lexsort(first.T[::-1])][:count, 1])
    return [c & torch.isin(k, chosen).to(c.device) for c, k in zip(candidates, keys)]


def _random_numbers(seed: int, batch: Batch) -> Tensor:
    """A number below 1 for each token, from a generator for each response: [T] float64, no two of them equal."""
    seeds = [seed_of(seed, number) for number in batch.number.tolist()]
    numbers = [np.random.default_rng(s).random(length) for s, length in zip(seeds, batch.lengths.tolist())]
    return torch.from_numpy(np.concatenate(numbers))
