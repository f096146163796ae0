"""The tokens that the losses clip_cov and kl_cov of grpo_variants.py select (Cui et al. 2025, arXiv 2505.22617).

Both look at the covariance of a token's advantage with its log-prob, where the means are those of the mini-batch on all
ranks. So micro-batches, their order and the number of ranks do not change which tokens are selected.
"""

import numpy as np
import torch
from torch import Tensor

from common.batch import Batch
from common.model.policy import Policy
from common.parallel.ranks import all_gather_objects, all_sum, seed_of
from common.segments import moments
from variants.losses import Tokens, ppo
from variants.settings import LossSettings

SELECTED = ("clip_cov", "kl_cov")


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
    low = settings.numbers["cov_low"]
    high = settings.numbers["cov_high"]
    candidates = []
    for b, logp, cov in zip(microbatches, logps, covariances(microbatches, logps)):
        _, stats = ppo(Tokens(logp, b.old_logp, b.advantage, b.mask, b.cu_seqlens), **settings.bounds)
        candidates.append(b.mask & (cov > low) & (cov < high) & (stats["actor/pg_clipfrac"] == 0))
    equal = [torch.zeros_like(logp, dtype=torch.float64) for logp in logps]
    return choose_largest(microbatches, equal, candidates, seed, settings.numbers["fraction"])


def select_kl_cov(microbatches: list, logps: list[Tensor], seed: int, settings: LossSettings) -> list[Tensor]:
    """Selects the share of all tokens with the largest cov; `seed` orders equal values: [T] bools."""
    masks = [b.mask for b in microbatches]
    fraction = settings.numbers["fraction"]
    return choose_largest(microbatches, covariances(microbatches, logps), masks, seed, fraction)


def covariances(microbatches: list, logps: list[Tensor]) -> list[Tensor]:
    """(A - mean A) (logp - mean logp) per token, the means over the mini-batch on all ranks: [T] float64 each."""
    sampled_advantages = []                                                             # [N] each
    sampled_logps = []                                                                  # [N] each
    for b, logp in zip(microbatches, logps):
        sampled_advantages.append(b.advantage[b.mask])
        sampled_logps.append(logp.detach()[b.mask])
    _, mean_advantage, _ = moments(torch.cat(sampled_advantages).double())
    _, mean_logp, _ = moments(torch.cat(sampled_logps).double())
    found = []
    for b, logp in zip(microbatches, logps):
        found.append((b.advantage.double() - mean_advantage) * (logp.detach().double() - mean_logp))
    return found


def choose_largest(
    microbatches: list[Batch], scores: list[Tensor], candidates: list[Tensor], seed: int, fraction: float,
) -> list[Tensor]:
    """Choose the max(1, fraction * tokens) candidates with the largest score over all ranks: [T] bools each.

    Equal scores are ordered by random numbers of (seed, response, position), so neither micro-batches, nor their order,
    nor ranks change the choice. `scores` are float64 [T] and `candidates` bool [T], one of each a micro-batch."""
    num_tokens = 0
    keys = []                                                                           # [T] each
    rows_of_microbatches = []                                                           # [candidates, 2] each
    for b, score, is_candidate in zip(microbatches, scores, candidates):
        num_tokens += int(b.mask.sum())
        key = _random_numbers(seed, b)
        keys.append(key)
        rows_of_microbatches.append(torch.stack([-score.cpu(), key], dim=1)[is_candidate.cpu()])
    count = max(1, int(fraction * all_sum([num_tokens]).item()))
    rows = torch.cat(rows_of_microbatches).numpy()                                      # [n, 2]
    first = rows[np.lexsort(rows.T[::-1])][:count]                                      # rising by (-score, key)
    first = np.concatenate(all_gather_objects(first))                                   # at most `count` rows a rank
    chosen = torch.from_numpy(first[np.lexsort(first.T[::-1])][:count, 1])
    return [c & torch.isin(k, chosen).to(c.device) for c, k in zip(candidates, keys)]


def _random_numbers(seed: int, batch: Batch) -> Tensor:
    """A number below 1 for each token, from one generator for each response: [T] float64, no two equal."""
    numbers = []
    for number, length in zip(batch.number.tolist(), batch.sequence_lengths.tolist()):
        generator = np.random.default_rng(seed_of(seed, number))
        numbers.append(generator.random(length))
    return torch.from_numpy(np.concatenate(numbers))
