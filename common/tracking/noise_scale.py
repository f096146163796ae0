"""The gradient noise scale (McCandlish et al. 2018, arXiv 1812.06162): how many prompts give a gradient whose noise is
as large as its signal.

A mini-batch of b prompts has the gradient g = G + noise, with E|g|^2 = |G|^2 + tr(Sigma) / b. AdamW's first moment m
is a mean of earlier gradients, whose noise is independent of that of g, so E<g, m> = |G|^2 as long as G changes slowly
over 1 / (1 - beta_1) optimizer steps: where it turns faster the noise scale is too large. So one mini-batch a step is
enough, and no gradient is kept or computed for it.

    B_noise = tr(Sigma) / |G|^2 = b (E|g|^2 - E<g, m>) / E<g, m>                   (section 2.2 and appendix A.1)
"""

from typing import Any

import torch

from common.model.sharding import product_with_moment

DECAY = 0.98
"""Of both means, an optimizer step."""
AT_LEAST = 20
"""Optimizer steps before it is reported."""


class NoiseScale:
    """`observe` each optimizer step of one model. All ranks have the same numbers, which a checkpoint keeps."""

    def __init__(self, state: dict[str, Any], decay: float = DECAY):
        self.decay = decay
        self.product: float | None = None  # of the clipped gradient and the first moment, in this step
        self.state = {"steps": 0, "norm_sq": 0.0, "product": 0.0, "weight": 0.0} | state
        # weight: the share of gradients in AdamW's first moment, whose first value is 0 and whose gradients are clipped

    def watch(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """Follow the training of `model`, a PackedModel. Look before each step of `optimizer`: at other times its
        moments may be offloaded."""
        model.noise_scale = self
        parameters = [*model.parameters()]

        def before_step(*_: Any) -> None:
            self.product = product_with_moment(parameters, optimizer)

        optimizer.register_step_pre_hook(before_step)

    def observe(self, norm: float, beta: float, max_norm: float) -> None:
        """After a step. `norm`: of its gradient before clipping at `max_norm` (0: none); `beta`: AdamW's first."""
        if self.product is None:
            return
        state = self.state
        kept = min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
        if state["weight"] > 0:
            state["steps"] += 1
            state["norm_sq"] = self.decay * state["norm_sq"] + norm**2
            state["product"] = self.decay * state["product"] + self.product / kept / state["weight"]
        state["weight"] = beta * state["weight"] + (1 - beta) * kept

    def metrics(self, per_update: float) -> dict[str, float]:
        """B_noise in prompts, for mini-batches of `per_update` prompts, and noise over signal of one. Empty: too few
        steps yet, or no signal is seen."""
        if self.state["steps"] < AT_LEAST or self.state["product"] <= 0:
            return {}
        ratio = max(self.state["norm_sq"] / self.state["product"] - 1, 0.0)
        return {"signal/noise_scale": per_update * ratio, "signal/noise_to_signal": ratio}
