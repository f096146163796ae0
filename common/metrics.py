"""The meter: means, sums and extremes of a step, over all ranks. The timer: the seconds of its phases."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.parallel.ranks import all_gather_objects, combine

OUT_OF_MEMORY = """ran out of memory in phase {}. If the engine was awake, lower --rollout.gpu-memory-utilization (on
CPUs --rollout.kv-cache-gb); else lower --max-tokens-per-gpu or set --policy.gradient-checkpointing True"""


class Meter:
    """Sums, counts and extremes of one step, reduced over all ranks together.

    A rank may add names that others do not, of the data sources of its responses for example. Values stay on their
    device until `reduce`.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Any] = defaultdict(float)
        self.counts: dict[str, Any] = defaultdict(float)
        self.maxima: dict[str, Any] = {}
        self.negated: set[str] = set()                                  # minima, kept as maxima of -x
        self.formulas: dict[str, tuple[Callable[..., float], tuple[str, ...]]] = {}

    def mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Adds the mean over all values, of every rank, where `mask` is True."""
        # sum and count, not the mean: micro-batches and ranks have different numbers of tokens
        self.sums[name] = self.sums[name] + _where(mask, values, 0.0).sum()
        self.counts[name] = self.counts[name] + (values.numel() if mask is None else mask.sum())

    def total(self, name: str, value: Tensor | float, per: float = 1.0) -> None:
        """Sum over all ranks, divided by `per`."""
        if isinstance(value, Tensor):
            value = value.detach()
        self.sums[name] = self.sums[name] + value / per

    def max(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        values = _where(mask, values, -torch.inf)
        top = torch.tensor(-torch.inf, dtype=torch.float64)
        if values.numel():
            top = values.max()
        if name in self.maxima:
            top = torch.maximum(self.maxima[name], top)
        self.maxima[name] = top

    def min(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        self.negated.add(name)
        self.max(name, -values, mask)

    def spread(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """name/mean, name/max, name/min over all values, of every rank, where `mask` is True."""
        self.mean(f"{name}/mean", values, mask)
        self.max(f"{name}/max", values, mask)
        self.min(f"{name}/min", values, mask)

    def derive(self, name: str, formula: Callable[..., float], *inputs: str) -> None:
        """Adds `formula` of this meter's global metrics. Inputs named `_...` are not reported."""
        self.formulas[name] = formula, inputs

    def reduce(self) -> dict[str, float]:
        """The step's numbers, the same on every rank. Metrics with no values are left out."""
        # names travel with their numbers: two ranks may have as many names, and not the same
        ours = as_floats(self.sums), as_floats(self.counts), as_floats(self.maxima), self.negated
        of_sums, of_counts, of_maxima, of_negated = zip(*all_gather_objects(ours))
        counts = combine(of_counts, np.sum)
        negated = set().union(*of_negated)
        metrics = {}
        for name, total in combine(of_sums, np.sum).items():
            if name not in counts:                                      # a total
                metrics[name] = total
            elif counts[name]:
                metrics[name] = total / counts[name]
        for name, top in combine(of_maxima, np.max).items():
            if top != -np.inf:
                metrics[name] = -top if name in negated else top
        for name, (formula, inputs) in self.formulas.items():
            if metrics.keys() >= set(inputs):
                metrics[name] = formula(*(metrics[n] for n in inputs))
        return {name: value for name, value in metrics.items() if not name.startswith("_")}


def as_floats(numbers: dict[str, Any]) -> dict[str, float]:
    return {name: float(x) for name, x in numbers.items()}


def _where(mask: Tensor | None, values: Tensor, other: float) -> Tensor:
    """Float64 values, `other` where `mask` is False. `values[mask]` would make the host wait for a GPU."""
    values = values.detach().double()
    return values if mask is None else torch.where(mask, values, other)


def spread(name: str, values: Tensor) -> dict[str, float]:
    """name/mean, name/max, name/min of numbers [N] that every rank has, ignoring NaN; {} if there are none."""
    values = values[~values.isnan()].double()
    if not len(values):
        return {}
    return {f"{name}/mean": float(values.mean()), f"{name}/max": float(values.max()),
            f"{name}/min": float(values.min())}


class Timer:
    """Seconds by phase, of this rank: `with timer("gen"): ...`. `on_phase` hears each phase's name at its start. Out of
    a GPU's memory: the error says the phase and the flags to turn."""

    def __init__(self, on_phase: Callable[[str], None] = lambda name: None):
        self.on_phase = on_phase
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.on_phase(phase)
        start = time.perf_counter()
        try:
            with torch.profiler.record_function(phase):
                yield
        except RuntimeError as error:                                   # CPUs have no class of their own for it
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                error.add_note(OUT_OF_MEMORY.format(phase))
            raise
        if torch.cuda.is_available():
            torch.cuda.synchronize()                                    # kernels of this phase may still run
        self.seconds[phase] += time.perf_counter() - start
        self.on_phase(f"after {phase}")

    def metrics(self) -> dict[str, float]:
        return {f"timing_s/{phase}": s for phase, s in self.seconds.items()}
