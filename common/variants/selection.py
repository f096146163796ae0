"""Tokens that a loss selects over a whole mini-batch before it is computed: clip-cov and kl-cov (Cui et al. 2025)."""

import torch
from torch import Tensor

from common.model.policy import Policy
from common.parallel.exchange import choose_largest
from common.parallel.ranks import seed_of
from common.segments import moments
from common.variants.losses import LossSettings, Tokens, ppo

SELECTED = ("clip_cov", "kl_cov")                       # losses that need a selection


def select(settings: LossSettings, microbatches: list, policy: Policy, temperature: float, *seed: int) -> None:
    """Write `microbatch.extra["selected"]`, if the loss needs it, from the log-probs of the current policy."""
    if settings.name not in SELECTED:
        return
    logps = [policy.score(microbatch, temperature) for microbatch in microbatches]
    function = {"clip_cov": select_clip_cov, "kl_cov": select_kl_cov}[settings.name]
    for microbatch, selected in zip(microbatches, function(microbatches, logps, seed_of(*seed), settings)):
        microbatch.extra["selected"] = selected


def select_clip_cov(microbatches: list, logps: list[Tensor], seed: int, settings: LossSettings) -> list[Tensor]:
    """A random share of all tokens, among those with cov_low < cov < cov_high that ppo has not clipped: [T] bools."""
    low, high, candidates = settings.numbers["cov_low"], settings.numbers["cov_high"], []
    for b, logp, cov in zip(microbatches, logps, covariances(microbatches, logps)):
        _, stats = ppo(Tokens(logp, b.old_logp, b.advantage, b.mask, b.cu_seqlens), **settings.bounds)
        candidates.append(b.mask & (cov > low) & (cov < high) & (stats["actor/pg_clipfrac"] == 0))
    equal = [torch.zeros_like(logp, dtype=torch.float64) for logp in logps]
    return choose_largest(microbatches, equal, candidates, seed, settings.numbers["fraction"])


def select_kl_cov(microbatches: list, logps: list[Tensor], seed: int, settings: LossSettings) -> list[Tensor]:
    """Selects the share of all tokens with the largest cov; `seed` orders equal values: [T] bools."""
    masks, fraction = [b.mask for b in microbatches], settings.numbers["fraction"]
    return choose_largest(microbatches, covariances(microbatches, logps), masks, seed, fraction)


def covariances(microbatches: list, logps: list[Tensor]) -> list[Tensor]:
    """(A - mean A) (logp - mean logp) per token, the means over the mini-batch on all ranks: [T] float64 each."""
    _, advantage, _ = moments(torch.cat([b.advantage[b.mask] for b in microbatches]).double())
    _, logp, _ = moments(torch.cat([x.detach()[b.mask] for b, x in zip(microbatches, logps)]).double())
    return [(b.advantage.double() - advantage) * (x.detach().double() - logp) for b, x in zip(microbatches, logps)]
