"""Tokens that a loss selects over a whole mini-batch before it is computed: clip-cov and kl-cov (Cui et al. 2025)."""

from collections.abc import Callable

import torch
from torch import Tensor

from common.losses import LossSettings, ppo
from common.parallel.choice import choose_largest
from common.parallel.ranks import seed_of
from common.segments import moments

SELECTED = ("clip_cov", "kl_cov")                       # losses that need a selection


def select(name: str, microbatches: list, score: Callable, settings: LossSettings,
           *seed: int) -> list[dict[str, Tensor]]:
    """For each micro-batch the further arguments of the loss: its selected tokens, or none.

    `score(microbatch)` gives the current log-probs and is called only if they are needed: on all ranks or on none."""
    if name not in SELECTED:
        return [{}] * len(microbatches)
    logps = [score(microbatch) for microbatch in microbatches]
    if name == "clip_cov":
        selected = select_clip_cov(microbatches, logps, seed_of(*seed), settings.clip_low, settings.clip_high)
    else:
        selected = select_kl_cov(microbatches, logps, seed_of(*seed))
    return [{"selected": tokens} for tokens in selected]


def select_clip_cov(microbatches: list, logps: list[Tensor], seed: int, clip_low: float, clip_high: float, *,
                    fraction=2e-4, cov_low=1.0, cov_high=5.0) -> list[Tensor]:
    """Of the tokens with cov_low < cov < cov_high that ppo has not clipped, a random `fraction` of all: [T] bools."""
    candidates = []
    for b, logp, cov in zip(microbatches, logps, covariances(microbatches, logps)):
        _, stats = ppo(logp, b.old_logp, b.advantage, b.mask, b.cu_seqlens, clip_low, clip_high)
        candidates.append(b.mask & (cov > cov_low) & (cov < cov_high) & (stats["actor/pg_clipfrac"] == 0))
    equal = [torch.zeros_like(logp, dtype=torch.float64) for logp in logps]
    return choose_largest(microbatches, equal, candidates, seed, fraction)


def select_kl_cov(microbatches: list, logps: list[Tensor], seed: int, *, fraction=2e-4) -> list[Tensor]:
    """The `fraction` of all tokens that has the largest cov, `seed` deciding among equals: [T] bools."""
    masks = [b.mask for b in microbatches]
    return choose_largest(microbatches, covariances(microbatches, logps), masks, seed, fraction)


def covariances(microbatches: list, logps: list[Tensor]) -> list[Tensor]:
    """(A - mean A) (logp - mean logp) per token, the means over the mini-batch on all ranks: [T] float64 each."""
    _, advantage, _ = moments(torch.cat([b.advantage[b.mask] for b in microbatches]).double())
    _, logp, _ = moments(torch.cat([x.detach()[b.mask] for b, x in zip(microbatches, logps)]).double())
    return [(b.advantage.double() - advantage) * (x.detach().double() - logp) for b, x in zip(microbatches, logps)]
