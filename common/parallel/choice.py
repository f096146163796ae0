"""Choose tokens by their score, over the micro-batches of all ranks."""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common.batch import Batch
from common.parallel.ranks import all_sum


def choose_largest(
    microbatches: list[Batch], scores: list[Tensor], candidates: list[Tensor], seed: int, fraction: float,
) -> list[Tensor]:
    """Choose the max(1, fraction * tokens) candidates with the largest score over all ranks: [T] bools each.

    Equal scores are ordered by a hash of (seed, response, position), so neither micro-batches, nor their order, nor
    ranks change the choice. `scores` are float64 [T] and `candidates` bool [T], one of each a micro-batch."""
    count = max(1, int(fraction * all_sum([sum(b.mask.sum() for b in microbatches)]).item()))
    keys = [_token_hash(seed, b) for b in microbatches]
    rows = torch.cat([torch.stack([-s, k], dim=1)[c] for s, k, c in zip(scores, keys, candidates)]).cpu()   # [n, 2]
    first = rows.numpy()[np.lexsort(rows.numpy().T[::-1])][:count]                      # rising by (-score, key)
    if dist.is_initialized():
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, first)                                            # at most `count` rows a rank
        first = np.concatenate(parts)
        first = first[np.lexsort(first.T[::-1])][:count]
    if len(first) == 0:
        return [torch.zeros_like(c) for c in candidates]
    score, key = -first[-1, 0], first[-1, 1]                                            # of the last one that is chosen
    return [c & ((s > score) | ((s == score) & (k <= key))) for c, s, k in zip(candidates, scores, keys)]


def _token_hash(seed: int, batch: Batch) -> Tensor:
    """52 bits a token (exact in float64) of splitmix64 over seed, response index and position: [T] float64."""
    x = np.full(len(batch.mask), seed, dtype=np.uint64)
    for part in (batch.index[batch.sequence_ids], batch.position_ids):
        x = (x ^ part.cpu().numpy().astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        x ^= x >> np.uint64(31)
    return torch.from_numpy((x >> np.uint64(12)).astype(np.float64)).to(batch.mask.device)
