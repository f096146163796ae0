"""What the scorers' numbers are where no function scores, and which metrics they give."""

import math
from typing import Any

import torch

from common.metrics import Meter
from common.parallel.ranks import all_names
from common.rollout import Sample
from rewards.runtime.replies import MAX_NAMES
from rewards.runtime.scores import Scores


def scores_without_functions(samples: list[Sample]) -> Scores:
    """What stands in for the reward functions where a reward model scores alone: 0, to which its score is
    added. An episode that failed has no score, whatever the reward model would say of it."""
    scores = []
    extras: list[dict[str, Any]] = []
    for sample in samples:
        score = 0.0
        if sample.response.end_reason in ("timeout", "error"):
            score = math.nan
        scores.append(score)
        extras.append({})
    return Scores(
        scores=scores,
        extras=extras,
        failures=[None] * len(samples),
    )


def measure_rewards(meter: Meter, samples: list[Sample], scores: Scores) -> None:
    """Add to `meter` the shares of failures (a judge's broken forms are errors, too), and the means of the numbers in
    the reward dicts. All ranks call it."""
    is_timeout = []
    is_error = []
    is_form = []
    for kind in scores.failures:
        is_form.append(kind == "form")
        is_timeout.append(kind == "timeout")
        is_error.append(kind not in (None, "timeout"))
    meter.mean("reward/timeout_frac", torch.tensor(is_timeout))
    meter.mean("reward/error_frac", torch.tensor(is_error))
    meter.mean("reward/form_frac", torch.tensor(is_form))
    numbers: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.extras.items():
            if isinstance(value, float):
                numbers.setdefault(name, []).append(value)
    for name in all_names({*numbers})[:MAX_NAMES]:
        values = numbers.get(name, [])                              # other ranks may have some
        meter.mean(f"reward/{name}", torch.tensor(values, dtype=torch.float64))
