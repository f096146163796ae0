"""AdamW over the shards: its flags, the learning rate of a step, and an optimizer step that skips broken gradients."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from common.model.policy import PackedModel
from common.model.sharding import clip_gradients


@dataclass
class OptimConfig:
    kind: Literal["adamw", "adamw-bf16", "adamw-8bit"] = "adamw"
    """adamw: weights, gradients and moments are float32, 16 bytes a weight. adamw-bf16: bfloat16, rounded
    stochastically, 8 bytes. adamw-8bit: the same with moments in 8 bits, 6 bytes."""
    lr: float = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up, down to `min_lr_frac` of the peak at the last step."""
    warmup_steps: int = 0
    """Steps of linear warm-up from lr / warmup_steps."""
    min_lr_frac: float = 0.0
    """Learning rate at the last step as a share of the peak (linear and cosine)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm at this value. 0: no clipping."""
    max_skipped_steps: int = 3
    """Stop after this many optimizer steps in a row whose gradient norm is not finite (each is skipped and counted)."""

    def __post_init__(self):
        rules = {
            "lr": (0 < self.lr < math.inf, "must be positive"),
            "warmup_steps": (self.warmup_steps >= 0, "must be at least 0"),
            "min_lr_frac": (0 <= self.min_lr_frac <= 1, "must be in [0, 1]"),
            "betas": (all(0 <= beta < 1 for beta in self.betas), "must be in [0, 1), both"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "must be at least 0"),
            "max_grad_norm": (self.max_grad_norm >= 0, "must be at least 0 (0: no clipping)"),
            "max_skipped_steps": (self.max_skipped_steps >= 1, "must be at least 1"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"--optim.{name.replace('_', '-')} {vars(self)[name]} {rule}")


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """The rate of `step` (from 0): a function of the step alone, so a resumed run needs no schedule state."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps)
    shape = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    floor = 1.0 if config.schedule == "constant" else config.min_lr_frac
    return config.lr * (floor + (1.0 - floor) * shape[config.schedule])


def optimizer_step(model: PackedModel, optimizer: torch.optim.Optimizer, lr: float, config: OptimConfig) -> float:
    """Clip, step, zero the gradients. Returns the global gradient norm before clipping.

    A norm that is not finite changes nothing: the caller counts the skipped step. Too many in a row: RuntimeError.
    """
    norm = clip_gradients(model.parameters(), config.max_grad_norm)
    if norm.isfinite():
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        model.version += 1
    model.skipped_in_a_row = 0 if norm.isfinite() else model.skipped_in_a_row + 1
    if model.skipped_in_a_row >= config.max_skipped_steps:
        raise RuntimeError(
            f"the gradient norm was not finite {model.skipped_in_a_row} times in a row (--optim.max-skipped-steps): "
            f"lower --optim.lr, look at actor/ppo_kl and training/rollout_probs_diff_max of the steps before"
        )
    optimizer.zero_grad(set_to_none=True)
    return float(norm)
