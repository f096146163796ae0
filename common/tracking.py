"""What a run reports: a meter that averages over all ranks, timers, and the places the numbers go to."""

import dataclasses
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch import Tensor

from common.dist import World, all_max, all_sum


@dataclass
class LogConfig:
    to: tuple[Literal["console", "jsonl", "wandb"], ...] = ("console", "jsonl")
    """Where metrics go. wandb needs its package; without an account set WANDB_MODE=offline."""
    wandb_project: str = "rl"
    """Weights & Biases project."""


class Meter:
    """Sums, counts and maxima of one step, reduced over all ranks together.

    Every rank must add the same names in a step (a dummy micro-batch adds zeros). Values stay on their device until
    `reduce`.
    """

    def __init__(self):
        self.sums: dict[str, Any] = defaultdict(float)
        self.counts: dict[str, Any] = defaultdict(float)
        self.maxima: dict[str, Any] = {}

    def mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Mean over all values, of every rank, where `mask` is True."""
        values = values.detach() if mask is None else values.detach()[mask]
        self.sums[name] = self.sums[name] + values.double().sum()
        self.counts[name] += values.numel()

    def total(self, name: str, value: Tensor | float, per: float = 1.0) -> None:
        """Sum over all ranks, divided by `per`."""
        self.sums[name] = self.sums[name] + (value.detach() if isinstance(value, Tensor) else value) / per

    def max(self, name: str, values: Tensor) -> None:
        top = values.detach().double().max() if values.numel() else torch.tensor(-torch.inf, dtype=torch.float64)
        self.maxima[name] = torch.maximum(self.maxima[name], top) if name in self.maxima else top

    def reduce(self) -> dict[str, float]:
        """The step's numbers, the same on every rank. A mean over nothing is absent."""
        names, tops = sorted(self.sums), sorted(self.maxima)
        flat = [float(self.sums[n]) for n in names] + [float(self.counts.get(n, 0)) for n in names]
        totals = all_sum(flat) if flat else torch.zeros(0)
        metrics = {}
        for name, value, count in zip(names, totals[: len(names)].tolist(), totals[len(names) :].tolist()):
            if name not in self.counts:
                metrics[name] = value
            elif count:
                metrics[name] = value / count
        if tops:
            metrics |= dict(zip(tops, all_max([float(self.maxima[n]) for n in tops]).tolist()))
        return metrics


class Timer:
    """Seconds by phase, of this rank: `with timer("gen"): ...`. `on_phase` hears every phase's name as it begins."""

    def __init__(self, on_phase: Callable[[str], None] = lambda name: None):
        self.on_phase = on_phase
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.on_phase(phase)
        start = time.perf_counter()
        with torch.profiler.record_function(phase):
            yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] += time.perf_counter() - start
        self.on_phase(f"after {phase}")

    def metrics(self) -> dict[str, float]:
        total = time.perf_counter() - self.start
        return {f"timing_s/{phase}": s for phase, s in self.seconds.items()} | {"timing_s/step": total}


def spread(name: str, values: Tensor) -> dict[str, float]:
    """name/mean, name/max, name/min of numbers that every rank has. [N]"""
    values = values.double()
    return {f"{name}/{kind}": float(getattr(values, kind)()) for kind in ("mean", "max", "min")}


def memory(world: World) -> dict[str, float]:
    """Peak memory of the worst rank, in GiB."""
    peak = _peak_rss_gb()
    metrics = {"perf/cpu_memory_used_gb": psutil.Process().memory_info().rss / 2**30, "perf/cpu_memory_peak_gb": peak}
    if world.device.type == "cuda":
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 2**30
    return dict(zip(metrics, all_max(list(metrics.values())).tolist()))


def _peak_rss_gb() -> float:
    status = Path("/proc/self/status")
    if not status.exists():
        return psutil.Process().memory_info().rss / 2**30
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**20


class Tracker:
    """Rank 0 writes; the others are silent. `run_dir/metrics.jsonl` has one line a step, `config.json` the flags."""

    def __init__(self, config: LogConfig, run_dir: str, args: Any, world: World, state: dict[str, Any]):
        """`state`: what `state_dict` returned when the run is resumed, else {}. Lines of steps that the checkpoint has
        not seen are dropped, so no step appears twice."""
        self.on = set(config.to) if world.is_main else set()
        self.run_dir, self.wandb, self.wandb_id = Path(run_dir), None, state.get("wandb_id")
        if not world.is_main:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        flags = dataclasses.asdict(args)
        (self.run_dir / "config.json").write_text(json.dumps(flags, indent=2, default=str) + "\n")
        self.jsonl = self.run_dir / "metrics.jsonl"
        kept = []
        if state and self.jsonl.exists():
            whole, _, _ = self.jsonl.read_text().rpartition("\n")            # a kill may have cut the last line
            kept = [x for x in whole.splitlines() if json.loads(x)["step"] <= state["step"]]
        if "jsonl" in self.on:
            temporary = self.jsonl.with_suffix(".partial")                   # a kill must not cost the old lines
            temporary.write_text("".join(line + "\n" for line in kept))
            temporary.rename(self.jsonl)
        if "wandb" in self.on:
            import wandb

            self.wandb = wandb.init(
                project=config.wandb_project, name=self.run_dir.name, dir=str(self.run_dir), config=flags,
                id=self.wandb_id, resume="allow",
            )
            self.wandb_id = self.wandb.id

    def log(self, step: int, metrics: dict[str, float], line: str) -> None:
        """`line` is what the console shows of it."""
        if "console" in self.on:
            print(line, flush=True)
        if "jsonl" in self.on:
            with self.jsonl.open("a") as file:
                file.write(json.dumps({"step": step, **metrics}) + "\n")
        if self.wandb is not None:
            self.wandb.log(metrics, step=step)

    def state_dict(self, step: int) -> dict[str, Any]:
        return {"step": step, "wandb_id": self.wandb_id}

    def close(self) -> None:
        if self.wandb is not None:
            self.wandb.finish()


def step_line(step: int, total_steps: int, metrics: dict[str, float]) -> str:
    """One step in one line: what is learned, then seconds by phase."""
    shown = [("reward", "critic/rewards/mean", ".3f"), ("length", "response_length/mean", ".1f"),
             ("entropy", "actor/entropy", ".3f"), ("kl", "actor/ppo_kl", ".1e"), ("clip", "actor/pg_clipfrac", ".3f"),
             ("grad", "actor/grad_norm", ".2f"), ("lr", "actor/lr", ".1e"),
             ("engine-diff", "training/rollout_probs_diff_mean", ".4f")]
    numbers = "  ".join(f"{label} {metrics[key]:{form}}" for label, key, form in shown if key in metrics)
    phases = [(k.removeprefix("timing_s/"), v) for k, v in metrics.items() if k.startswith("timing_s/")]
    seconds = " ".join(f"{phase} {s:.1f}" for phase, s in phases if phase != "step" and s >= 0.05)
    width = len(str(total_steps))
    line = f"step {step:>{width}}/{total_steps}  {numbers}  |  {metrics['timing_s/step']:.1f} s: {seconds}"
    return f"{line}\n{val_line(f'after step {step}', metrics)}" if any(k.startswith("val-") for k in metrics) else line


def val_line(when: str, metrics: dict[str, float]) -> str:
    """The validation results in one line."""
    results = [f"{k.removeprefix('val-core/')} {v:.3f}" for k, v in metrics.items() if k.startswith("val-core/")]
    return f"validation {when}:  " + "  ".join(results)


def say(world: World, text: str) -> None:
    """Rank 0 prints a line."""
    if world.is_main:
        print(text, flush=True)


def fail(error: ValueError) -> None:
    """A mistake in flags or files, found by our own checks: the message alone and exit code 2. Others: re-raised."""
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    if not Path(trace.tb_frame.f_code.co_filename).is_relative_to(Path(__file__).parent.parent) or \
            ".venv" in trace.tb_frame.f_code.co_filename:
        raise error
    rank = f"[rank {os.environ['RANK']}] " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    print(f"{rank}error: {error}", file=sys.stderr, flush=True)
    sys.exit(2)
