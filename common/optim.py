"""The learning rate of a step, and an optimizer step over the shards that skips broken gradients. AdamW is
in common/model/optimizers.py, and its flags are in common/flags/model.py."""

import math

import torch

from common.flags.model import OptimConfig
from common.model.policy import PackedModel
from common.model.sharding import check_all_reduced, clip_gradients


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """The rate of `step` (from 0): a function of the step alone, so a resumed run needs no schedule state."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)     # below 1 in the last step
    shape = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    return config.lr * (config.min_lr_frac + (1.0 - config.min_lr_frac) * shape[config.schedule])


def _check_rate(model: PackedModel, optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Raises ValueError for a learning rate that a script, or its scheduler, has set: this module sets another."""
    for group in optimizer.param_groups:
        if model.rate not in (None, group["lr"]):
            raise ValueError(f"this script has set the learning rate {group['lr']:g}, and optimizer_step sets {lr:g}, "
                             f"by its `config` and the step: give it replace(args.optim, lr=RATE, warmup_steps=0, "
                             f"schedule=\"constant\") with the RATE of this step, without a scheduler")


def optimizer_step(model: PackedModel, optimizer: torch.optim.Optimizer, lr: float, config: OptimConfig) -> float:
    """Clip, step, zero the gradients. Returns the global gradient norm before clipping.

    A norm that is not finite changes nothing: the caller counts the skipped step. Too many in a row: RuntimeError, as
    for gradients that copies of the model have not summed. A gradient on a canary: ValueError.
    """
    check_all_reduced(model)
    _check_rate(model, optimizer, lr)
    norm = clip_gradients(model.parameters(), config.max_grad_norm)
    if not norm.isfinite():
        model.check_canaries()
    if norm.isfinite():  # the norm is that of all shards, so all ranks step or none does
        for group in optimizer.param_groups:
            group["lr"] = lr
        model.rate = lr
        optimizer.step()
        if model.noise_scale is not None:
            model.noise_scale.observe(float(norm), config.betas[0], config.max_grad_norm)
        model.version += 1  # the engine's weights are old now: its next `wake` loads these
    model.skipped_in_a_row = 0 if norm.isfinite() else model.skipped_in_a_row + 1
    if model.skipped_in_a_row >= config.max_skipped_steps:
        raise RuntimeError(f"the gradient norm was not finite {model.skipped_in_a_row} times in a row (--optim."
                           f"max-skipped-steps): lower --optim.lr, look at actor/ppo_kl and "
                           f"training/rollout_probs_diff_max of the steps before")
    optimizer.zero_grad(set_to_none=True)  # also after a skipped step: its gradients must not reach the next one
    model.canary_gradients.clear()
    return float(norm)
