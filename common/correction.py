"""The engine's distribution is not quite the trainer's, and old data is further off: measure it, and correct for it.

roll is `rollout_logp`, which the engine reported while it sampled; old is `old_logp`, or the current policy's log-prob
where a step has one update. l = old - roll [T]; l, and its sum over a response, are clamped to [-20, 20] before exp.
Differences are measured over all sampled tokens; then come rejections (arXiv 2512.23075), then importance weights over
the tokens that remain. Nothing depends on how a mini-batch was cut. Presets and metrics have verl's names and meanings.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from common.batch import Batch
from common.flags.correction import CorrectionConfig
from common.flags.correction import resolve_correction as resolve_correction
from common.metrics import Meter
from common.parallel.ranks import all_sum
from common.segments import expand, has_any, segment_cumsum, segment_mean, segment_sum


def reject_and_weight(minibatches: Sequence[Iterable[Batch]], rewards: Tensor, config: CorrectionConfig,
                      meter: Meter) -> Tensor:
    """Does once a step what must happen before advantages and denominators: takes rejected tokens out of `mask`, writes
    `rollout_weight` where `old_logp` is known, and with --correction.bypass makes `old_logp` the engine's.
    Returns the rewards [S], NaN for responses that shall leave their group's statistics, the same on every rank."""
    # an episode may have several sequences, on several ranks: it has left its group when none of them has tokens
    counts = torch.zeros(2, len(rewards), dtype=torch.float64)                # its sequences that are lost, that remain
    for batch in chain(*minibatches):
        if batch.old_logp is not None:
            measure(meter, batch, batch.old_logp)
        index = batch.index.clamp(min=0)                                      # a dummy loses nothing, and has no tokens
        counts = counts.to(index.device).index_add(1, index, _reject(batch, config, meter).double())
        if config.bypass:
            batch.old_logp = batch.rollout_logp
    for microbatches in map(list, minibatches):
        if not config.bypass and microbatches[0].old_logp is not None:
            _write_weights(microbatches, config, meter)
    num_lost, num_remaining = all_sum(counts)                                                               # [S], [S]
    if not config.rejected_leave_group:
        return rewards
    return torch.where((num_lost > 0) & (num_remaining == 0), torch.nan, rewards)


def _reject(batch: Batch, config: CorrectionConfig, meter: Meter) -> Tensor:
    """Takes rejected tokens out of `batch.mask`. Returns bool [2, S]: the sequences that lost all tokens, and those
    that have some left."""
    mask = batch.mask                                                                                       # [T]
    had_tokens = has_any(mask, batch.cu_seqlens)                                                            # [S]
    if config.reject:
        log_ratio = _log_ratio(batch, batch.old_logp)                                                       # [T]
        bounds = zip(config.reject_below, config.reject_above)
        for kind, over, (below, above) in zip(config.reject, config.reject_over, bounds):
            estimate = _over_response(_estimate(kind, log_ratio), over, batch, mask)                        # [T]
            batch.mask = batch.mask & (estimate >= below) & (estimate <= above)
    meter.mean("rollout_corr/rollout_rs_masked_fraction", ~batch.mask, mask)
    remains = has_any(batch.mask, batch.cu_seqlens)                                                         # [S]
    lost = had_tokens & ~remains                                                                            # [S]
    meter.mean("rollout_corr/rejected_frac", lost, had_tokens)
    return torch.stack([lost, remains])


def importance_weights(batch: Batch, logp: Tensor, config: CorrectionConfig, meter: Meter) -> Tensor:
    """Returns what token losses are multiplied by, detached: [T] float32, 1 without --correction.weights. Returns the
    weights that `reject_and_weight` wrote; without an old-policy forward, it computes (and measures) them from the
    current `logp`."""
    if batch.rollout_weight is not None:
        return batch.rollout_weight
    if not config.needs_old_logp():                                           # else `reject_and_weight` has measured
        measure(meter, batch, logp.detach())
    return _weights(batch, logp.detach(), config, meter)[0].float()


def measure(meter: Meter, batch: Batch, logp: Tensor) -> None:
    """Adds how far the trainer's `logp` [T] is from `rollout_logp` in one micro-batch: `training/rollout_probs_diff_*`,
    and `rollout_corr/*` as means over tokens (kl, k3_kl, chi2_token) or over responses. ppl is exp(-mean log-prob)."""
    mask = batch.measured                                                                                   # [T]
    has_tokens = has_any(mask, batch.cu_seqlens)                                                            # [S]
    log_ratio = _log_ratio(batch, logp)                                                                     # [T]
    for name, values in {
        "kl": -log_ratio,                                                     # of KL(rollout || old), as k3
        "k3_kl": _estimate("k3", log_ratio),
        "chi2_token": torch.expm1(2 * log_ratio.clamp(-20, 20)),              # E[w^2] - 1
    }.items():
        meter.mean(f"rollout_corr/{name}", values, mask)
    sums = segment_sum(log_ratio, batch.cu_seqlens)                                                         # [S]
    trainer_log_ppl = -segment_mean(logp.double(), mask, batch.cu_seqlens)
    rollout_log_ppl = -segment_mean(batch.rollout_logp.double(), mask, batch.cu_seqlens)
    log_ppl_diff = trainer_log_ppl - rollout_log_ppl
    for name, values in {
        "chi2_seq": torch.expm1(2 * sums.clamp(-20, 20)),
        "training_ppl": trainer_log_ppl.exp(),
        "rollout_ppl": rollout_log_ppl.exp(),
        "log_ppl_diff": log_ppl_diff,
        "log_ppl_abs_diff": log_ppl_diff.abs(),
        "ppl_ratio": log_ppl_diff.exp(),
    }.items():
        meter.mean(f"rollout_corr/{name}", values, has_tokens)
    diff = (logp.double().exp() - batch.rollout_logp.double().exp()).abs()
    name = "training/rollout_probs_diff"
    meter.mean(f"{name}_mean", diff, mask)
    is_fresh = mask if batch.fresh is None else mask & batch.fresh[batch.sequence_ids]
    meter.mean(f"_{name}_fresh", diff, is_fresh)                              # for `Engine.check_sampled`
    meter.max(f"{name}_max", diff, mask)
    meter.mean(f"_{name}_square", diff.square(), mask)
    meter.total(f"_{name}_count", mask.sum())
    meter.derive(f"{name}_std", _std, f"{name}_mean", f"_{name}_square", f"_{name}_count")


def _log_ratio(batch: Batch, logp: Tensor) -> Tensor:
    """Returns l [T] float64, not clamped; 0, a ratio of 1, outside the mask."""
    return torch.where(batch.mask, logp.double() - batch.rollout_logp.double(), 0)


def _estimate(kind: str, log_ratio: Tensor) -> Tensor:
    """Estimates KL(rollout || old) from samples of rollout, per token, as losses.kl_estimate with d = -l."""
    clamped = log_ratio.clamp(-20, 20)
    if kind == "k1":
        return -clamped
    if kind == "k2":
        return clamped.square() / 2
    return torch.expm1(clamped) - clamped


def _over_response(x: Tensor, over: str, batch: Batch, mask: Tensor) -> Tensor:
    """[T] -> [T]: on every token the sum, mean or maximum of x over its response's tokens with mask; token: x."""
    if over == "token":
        return x
    if over == "max":
        lowest = torch.full_like(batch.cu_seqlens[1:], -torch.inf, dtype=torch.float64)
        x = lowest.scatter_reduce(0, batch.sequence_ids, torch.where(mask, x, -torch.inf), "amax")          # [S]
    elif over == "mean":
        x = segment_mean(x, mask, batch.cu_seqlens)
    else:
        x = segment_sum(torch.where(mask, x, 0), batch.cu_seqlens)
    return expand(x, batch.cu_seqlens, len(mask))


def _weights(batch: Batch, logp: Tensor, config: CorrectionConfig, meter: Meter) -> tuple[Tensor, Tensor]:
    """Returns the truncated weights [T] float64, and a mask [T] of the weights that enter the statistics: every token,
    or one token per response for sequence weights.

    Adds rollout_is_*: fractions out of bounds are of weights before truncation, one a token or a response; mean, std
    and eff_sample_size (Kish's, over the number of tokens) are of tokens' weights after it; max and min are so for
    token weights, and of weights before it for those of responses."""
    mask = batch.mask
    over = {"sequence": "sum", "geometric": "mean"}.get(config.weights, "token")
    log_weight = _over_response(_log_ratio(batch, logp), over, batch, mask)
    counted = mask if over == "token" else mask & (segment_cumsum(mask.long(), batch.cu_seqlens) == 1)
    raw = log_weight.clamp(-20, 20).exp()
    weight = raw.clamp(config.lower, config.upper)
    if config.outside == "zero":
        weight = torch.where(weight == raw, raw, 0)
    name = "rollout_corr/rollout_is"
    low = config.lower if config.outside == "zero" and config.lower else 1 / config.upper
    extremes = weight if over == "token" else raw
    meter.mean(f"{name}_mean", weight, mask)
    meter.mean(f"_{name}_square", weight.square(), mask)
    meter.max(f"{name}_max", extremes, mask)
    meter.min(f"{name}_min", extremes, mask)
    meter.derive(f"{name}_std", _std, f"{name}_mean", f"_{name}_square")
    share = lambda mean, square: mean**2 / square if square else 0.0                                # noqa: E731
    meter.derive(f"{name}_eff_sample_size", share, f"{name}_mean", f"_{name}_square")
    meter.mean(f"{name}_ratio_fraction_high", raw > config.upper, counted)
    meter.mean(f"{name}_ratio_fraction_low", raw < low, counted)
    return torch.ones_like(weight) if config.weights == "none" else weight, counted


def _write_weights(microbatches: list[Batch], config: CorrectionConfig, meter: Meter) -> None:
    """Writes `rollout_weight` of a mini-batch; with --correction.batch-normalise its mean over all ranks is 1."""
    found = [_weights(batch, batch.old_logp, config, meter) for batch in microbatches]
    scale = 1.0
    if config.batch_normalise:
        kept = torch.cat([weight[counted] for weight, counted in found])
        total, count = all_sum([kept.sum(), len(kept)]).tolist()
        scale = count / total if total else 1.0
    for batch, (weight, _) in zip(microbatches, found):
        batch.rollout_weight = (weight * scale).float()


def _std(mean: float, square: float, count: float = math.inf) -> float:
    """The standard deviation from mean and mean square; the unbiased one if `count` is given (0 for a single value)."""
    return (max(square - mean**2, 0.0) / (1 - 1 / max(count, 2))) ** 0.5
