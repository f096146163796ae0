"""Tokens that a loss chooses over a whole mini-batch: clip-cov and kl-cov."""

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common.losses import LossSettings, ppo
from common.parallel.ranks import all_sum
from common.parallel.seeds import seed_of
from common.segments import moments


def select_clip_cov(microbatches: list, logps: list[Tensor], seed: int, clip_low: float, clip_high: float, *,
                    fraction=2e-4, cov_low=1.0, cov_high=5.0) -> list[Tensor]:
    """Of the tokens with cov_low < cov < cov_high that ppo has not clipped, a random `fraction` of all: [T] bools."""
    candidates = []
    for b, logp, cov in zip(microbatches, logps, covariances(microbatches, logps)):
        _, stats = ppo(logp, b.old_logp, b.advantage, b.mask, b.cu_seqlens, clip_low, clip_high)
        candidates.append(b.mask & (cov > cov_low) & (cov < cov_high) & (stats["actor/pg_clipfrac"] == 0))
    return _select(microbatches, [torch.zeros_like(x, dtype=torch.float64) for x in logps], candidates, seed, fraction)


def select_kl_cov(microbatches: list, logps: list[Tensor], seed: int, *, fraction=2e-4) -> list[Tensor]:
    """The `fraction` of all tokens that has the largest cov, `seed` deciding among equals: [T] bools."""
    return _select(microbatches, covariances(microbatches, logps), [b.mask for b in microbatches], seed, fraction)

SELECTED = ("clip_cov", "kl_cov")                       # losses that choose tokens over a whole mini-batch first


def select(name: str, microbatches: list, score: Callable, settings: LossSettings,
           *seed: int) -> list[dict[str, Tensor]]:
    """Per micro-batch what the loss takes besides the usual: its chosen tokens, or nothing. `score(microbatch)` gives
    the current log-probs and is called only if they are needed: on all ranks or on none."""
    if name not in SELECTED:
        return [{}] * len(microbatches)
    bounds = (settings.clip_low, settings.clip_high) if name == "clip_cov" else ()
    choose = {"clip_cov": select_clip_cov, "kl_cov": select_kl_cov}[name]
    return [{"selected": x} for x in choose(microbatches, [score(b) for b in microbatches], seed_of(*seed), *bounds)]


def covariances(microbatches: list, logps: list[Tensor]) -> list[Tensor]:
    """(A - mean A) (logp - mean logp) per token, the means over the mini-batch on all ranks: [T] float64 each."""
    _, advantage, _ = moments(torch.cat([b.advantage[b.mask] for b in microbatches]).double())
    _, logp, _ = moments(torch.cat([x.detach()[b.mask] for b, x in zip(microbatches, logps)]).double())
    return [(b.advantage.double() - advantage) * (x.detach().double() - logp) for b, x in zip(microbatches, logps)]


def _select(microbatches, scores, candidates, seed, fraction) -> list[Tensor]:
    """The max(1, fraction * tokens) candidates with the largest score over all ranks, equals ordered by a hash of
    (seed, response, position): neither micro-batches, nor their order, nor ranks can change the choice."""
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
    score, key = -first[-1, 0], first[-1, 1]                                            # of the last one chosen
    return [c & ((s > score) | ((s == score) & (k <= key))) for c, s, k in zip(candidates, scores, keys)]


def _token_hash(seed: int, batch) -> Tensor:
    """52 bits a token (exact in float64) of splitmix64 over seed, response index and position: [T] float64."""
    x = np.full(len(batch.mask), seed, dtype=np.uint64)
    for part in (batch.index[batch.sequence_ids], batch.position_ids):
        x = (x ^ part.cpu().numpy().astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        x ^= x >> np.uint64(31)
    return torch.from_numpy((x >> np.uint64(12)).astype(np.float64)).to(batch.mask.device)
