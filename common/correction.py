"""Engine and trainer disagree a little on every probability; old data disagree more. Measure it, and correct for it.

`rollout_logp` is what the engine reported while sampling, `old_logp` what the trainer computes for the same weights.
"""

import torch
from torch import Tensor

from common.packing import Batch
from common.tracking import Meter


def truncated_weights(old_logp: Tensor, rollout_logp: Tensor, threshold: float) -> Tensor:
    """Truncated importance sampling per token (TIS): min(p_old / p_rollout, threshold), detached. [T], [T] -> [T]."""
    return (old_logp - rollout_logp).detach().clamp(-20, 20).exp().clamp(max=threshold)


def measure(meter: Meter, batch: Batch, old_logp: Tensor, threshold: float) -> None:
    """Adds `training/rollout_probs_diff_*` (|p_old - p_rollout|) and `rollout_corr/*` of one micro-batch."""
    old, rollout = old_logp.detach()[batch.mask], batch.rollout_logp[batch.mask]
    diff = (old.exp() - rollout.exp()).abs()
    ratio = truncated_weights(old, rollout, torch.inf)
    log_ratio = (old - rollout).clamp(-20, 20)
    meter.mean("training/rollout_probs_diff_mean", diff)
    meter.max("training/rollout_probs_diff_max", diff)
    meter.mean("rollout_corr/kl", -log_ratio)                           # k1 of KL(rollout || old)
    meter.mean("rollout_corr/k3_kl", ratio - 1 - log_ratio)
    meter.mean("rollout_corr/rollout_is_mean", ratio.clamp(max=threshold))
    meter.max("rollout_corr/rollout_is_max", ratio)
    meter.mean("rollout_corr/rollout_is_ratio_fraction_high", (ratio > threshold).double())
