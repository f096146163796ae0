"""The meter: sums and counts over all ranks."""

from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from common.parallel.ranks import World, all_max, all_sum
from common.tracking.timer import Timer


class Meter:
    """Sums, counts, squares and extremes of one step, reduced over all ranks together.

    Every rank must add the same names in a step (a dummy micro-batch adds zeros). Values stay on their device until
    `reduce`.
    """

    def __init__(self):
        self.sums: dict[str, Any] = defaultdict(float)
        self.counts: dict[str, Any] = defaultdict(float)
        self.squares: dict[str, Any] = defaultdict(float)
        self.maxima: dict[str, Any] = {}
        self.negated: set[str] = set()                                  # minima, kept as maxima of -x
        self.formulas: dict[str, tuple[Callable[..., float], tuple[str, ...]]] = {}

    def mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Mean over all values, of every rank, where `mask` is True."""
        values = values.detach() if mask is None else values.detach()[mask]
        self.sums[name] = self.sums[name] + values.double().sum()
        self.counts[name] += values.numel()

    def std(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Unbiased standard deviation of all values, of every rank, where `mask` is True."""
        self.mean(name, values, mask)
        values = values.detach() if mask is None else values.detach()[mask]
        self.squares[name] = self.squares[name] + values.double().square().sum()

    def total(self, name: str, value: Tensor | float, per: float = 1.0) -> None:
        """Sum over all ranks, divided by `per`."""
        self.sums[name] = self.sums[name] + (value.detach() if isinstance(value, Tensor) else value) / per

    def max(self, name: str, values: Tensor) -> None:
        top = values.detach().double().max() if values.numel() else torch.tensor(-torch.inf, dtype=torch.float64)
        self.maxima[name] = torch.maximum(self.maxima[name], top) if name in self.maxima else top

    def min(self, name: str, values: Tensor) -> None:
        self.negated.add(name)
        self.max(name, -values)

    def spread(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """name/mean, name/max, name/min over all values, of every rank, where `mask` is True."""
        values = values if mask is None else values[mask]
        self.mean(f"{name}/mean", values)
        self.max(f"{name}/max", values)
        self.min(f"{name}/min", values)

    def derive(self, name: str, formula: Callable[..., float], *inputs: str) -> None:
        """`formula` of other metrics of this meter, once they are global. Inputs named `_...` are not reported."""
        self.formulas[name] = formula, inputs

    def reduce(self) -> dict[str, float]:
        """The step's numbers, the same on every rank: one sum and one maximum over the ranks. What has no value (a mean
        or a maximum over nothing, the deviation of one value) is absent."""
        names, tops = sorted(self.sums), sorted(self.maxima)
        added = (self.sums, self.counts, self.squares)
        columns = [float(numbers.get(name, 0.0)) for numbers in added for name in names]
        sums, counts, squares = all_sum(columns).view(3, -1).tolist()
        metrics = {}
        for name, total, count, square in zip(names, sums, counts, squares):
            if name in self.squares and count > 1:
                metrics[name] = (max(square - total**2 / count, 0.0) / (count - 1)) ** 0.5
            elif name not in self.counts:
                metrics[name] = total
            elif name not in self.squares and count:
                metrics[name] = total / count
        for name, top in zip(tops, all_max([float(self.maxima[name]) for name in tops]).tolist()):
            if top != -torch.inf:
                metrics[name] = -top if name in self.negated else top
        for name, (formula, inputs) in self.formulas.items():
            if metrics.keys() >= set(inputs):
                metrics[name] = formula(*(metrics[n] for n in inputs))
        return {name: value for name, value in metrics.items() if not name.startswith("_")}


def spread(name: str, values: Tensor) -> dict[str, float]:
    """name/mean, name/max, name/min of numbers that every rank has. [N]; nothing of none."""
    values = values.double()
    return {f"{name}/{kind}": float(getattr(values, kind)()) for kind in ("mean", "max", "min") if len(values)}


def step_metrics(meter: Meter, timer: Timer, world: World, results: Any, minibatches: list[list], *,
                 max_prompt_length: int, max_response_length: int, update_flops: float, peak_flops: float,
                 ) -> dict[str, float]:
    """What every script logs of a step, under verl's names; the only place where the step's meter is reduced.

    `results` has `prompt_lengths`, `response_lengths` (tokens) and `truncated`: [S], the same on every rank.
    `minibatches`: this rank's micro-batches. `update_flops`: of all ranks (packing.train_flops); `peak_flops`: what one
    rank's chip can do (profiling.peak_flops).
    """
    prompt_lengths, response_lengths = results.prompt_lengths, results.response_lengths
    lengths = (prompt_lengths + response_lengths).double()                                      # [S]
    here = torch.tensor([float(sum(len(microbatch.tokens) for microbatch in chain(*minibatches)))])
    meter.max("global_seqlen/balanced_max", here)
    meter.min("global_seqlen/balanced_min", here)
    for name, value in _memory(world).items():
        meter.max(name, torch.tensor(value))
    metrics = meter.reduce() | timer.metrics()
    for name, values, limit in (("prompt_length", prompt_lengths, max_prompt_length),
                                ("response_length", response_lengths, max_response_length)):
        metrics |= spread(name, values) | {f"{name}/clip_ratio": float((values >= limit).double().mean())}
    as_dealt = [float(part.sum()) for part in np.array_split(lengths.numpy(), world.size)]      # tokens by rank
    metrics |= {
        "global_seqlen/min": min(as_dealt), "global_seqlen/max": max(as_dealt),
        "global_seqlen/minmax_diff": max(as_dealt) - min(as_dealt), "global_seqlen/mean": sum(as_dealt) / world.size,
    }
    num_tokens, num_sampled, seconds = float(lengths.sum()), float(response_lengths.sum()), timer.seconds
    metrics |= {f"timing_per_token_ms/{phase}": 1000 * s / (num_sampled if phase == "gen" else num_tokens)
                for phase, s in seconds.items() if phase in PER_TOKEN_PHASES}
    metrics |= {
        "rollout/truncated_frac": float(results.truncated.double().mean()),
        "rollout/tokens_per_s": num_sampled / seconds["gen"],
        "perf/total_num_tokens": int(num_tokens),
        "perf/time_per_step": metrics["timing_s/step"],
        "perf/throughput": num_tokens / metrics["timing_s/step"] / world.size,
    }
    if "update_actor" in seconds:
        achieved = update_flops / seconds["update_actor"] / world.size
        metrics |= {"perf/update_tflops": achieved / 1e12, "perf/mfu/actor": achieved / peak_flops}
    return metrics

PER_TOKEN_PHASES = ("gen", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")


def memory(world: World) -> dict[str, float]:
    """Peak memory of the worst rank, in GiB."""
    metrics = _memory(world)
    return dict(zip(metrics, all_max(list(metrics.values())).tolist()))


def _memory(world: World) -> dict[str, float]:
    metrics = {"perf/cpu_memory_used_gb": psutil.Process().memory_info().rss / 2**30,
               "perf/cpu_memory_peak_gb": _peak_rss_gb()}
    if world.device.type == "cuda":
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 2**30
    return metrics


def _peak_rss_gb() -> float:
    status = Path("/proc/self/status")
    if not status.exists():
        return psutil.Process().memory_info().rss / 2**30
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**20
