"""What a run reports: a meter that averages over all ranks, timers, and the places the numbers go to."""

import dataclasses
import importlib.util
import json
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch
from torch import Tensor

from common.anomalies import Watch
from common.dist import World, all_max, all_sum
from common.profiling import Profiler, is_out_of_memory, memory_note, snapshot


@dataclass
class LogConfig:
    to: tuple[Literal["console", "jsonl", "wandb", "tensorboard"], ...] = ("console", "jsonl")
    """Where metrics go. wandb and tensorboard need their packages; without an account set WANDB_MODE=offline."""
    wandb_project: str = "rl"
    """Weights & Biases project."""
    rollouts_every: int = 5
    """Steps between files of responses, RUN_DIR/rollouts/step_000005.parquet; the first step has one too. 0: none."""
    rollouts_max: int = 64
    """Most responses in such a file: the step's first groups, whole ones, at least one."""
    profile_steps: tuple[int, ...] = ()
    """Steps, counted from 1, that every rank traces with torch's profiler into RUN_DIR/profiles."""
    warn_every: int = 20
    """Steps before the same warning about the run's health is repeated. 0: no warnings."""

    def __post_init__(self):
        if min(self.rollouts_every, self.warn_every) < 0 or min((self.rollouts_max, *self.profile_steps)) < 1:
            raise ValueError(f"--log.rollouts-every {self.rollouts_every} and --log.warn-every {self.warn_every} must "
                             f"be at least 0, --log.rollouts-max {self.rollouts_max} and --log.profile-steps "
                             f"{self.profile_steps} at least 1")
        for package in {"wandb", "tensorboard"} & set(self.to):
            if importlib.util.find_spec(package) is None:
                raise ValueError(f"--log.to {package} needs the package {package}: pip install {package}, or leave it "
                                 f"out of --log.to")
        if "wandb" in self.to and os.environ.get("WANDB_MODE") not in ("offline", "disabled"):
            import wandb

            if not wandb.login(prompt=False):
                raise ValueError("--log.to wandb finds no account: set WANDB_API_KEY, or WANDB_MODE=offline")


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


class Timer:
    """Seconds by phase, of this rank: `with timer("gen"): ...`. `on_phase` hears each phase's name at its start. Out of
    memory: the error says the phase and the flags to turn, and on a GPU a snapshot is left in `run_dir/profiles`."""

    def __init__(self, run_dir: Path | None = None, on_phase: Callable[[str], None] = lambda name: None):
        self.run_dir, self.on_phase, self.start = run_dir, on_phase, time.perf_counter()
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.on_phase(phase)
        start = time.perf_counter()
        try:
            with torch.profiler.record_function(phase):
                yield
        except RuntimeError as error:                                   # torch.OutOfMemoryError is one
            if is_out_of_memory(error):
                error.add_note(memory_note(phase))
                if self.run_dir is not None and torch.cuda.is_available():
                    snapshot(self.run_dir / f"profiles/out_of_memory_rank{os.environ['RANK']}.pickle")
            raise
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] += time.perf_counter() - start
        self.on_phase(f"after {phase}")

    def metrics(self) -> dict[str, float]:
        total = time.perf_counter() - self.start
        return {f"timing_s/{phase}": s for phase, s in self.seconds.items()} | {"timing_s/step": total}


def spread(name: str, values: Tensor) -> dict[str, float]:
    """name/mean, name/max, name/min of numbers that every rank has. [N]; nothing of none."""
    values = values.double()
    return {f"{name}/{kind}": float(getattr(values, kind)()) for kind in ("mean", "max", "min") if len(values)}


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


class Tracker:
    """Rank 0 writes; the others are silent. `run_dir/metrics.jsonl` has one line a step, `config.json` the flags."""

    def __init__(self, config: LogConfig, run_dir: str, args: Any, world: World, state: dict[str, Any]):
        """`state`: what `state_dict` returned when the run is resumed, else {}. What was written about steps that the
        checkpoint has not seen is dropped, so no step appears twice."""
        self.on = set(config.to) if world.is_main else set()
        self.run_dir, self.wandb, self.wandb_id, self.board = Path(run_dir), None, state.get("wandb_id"), None
        self.profiler = Profiler(self.run_dir / "profiles", config.profile_steps, world.rank)
        self.watch = Watch(config.warn_every)
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
        for file in sorted((self.run_dir / "rollouts").glob("step_*.parquet")):
            if int(file.stem.removeprefix("step_")) > state.get("step", -1):
                file.unlink()
        if "wandb" in self.on:
            import wandb

            self.wandb = wandb.init(
                project=config.wandb_project, name=self.run_dir.name, dir=str(self.run_dir), config=flags,
                id=self.wandb_id, resume="allow",
            )
            self.wandb_id = self.wandb.id
        if "tensorboard" in self.on:
            from torch.utils.tensorboard import SummaryWriter

            folder = self.run_dir / "tensorboard"
            if not state:
                shutil.rmtree(folder, ignore_errors=True)
            self.board = SummaryWriter(str(folder), purge_step=state["step"] + 1 if state else None)

    def begin(self, step: int) -> None:
        """Every rank calls it as `step` begins, counted from 1: profiles start here, `log` ends them."""
        self.profiler.start(step)

    def log(self, step: int, metrics: dict[str, float], line: str) -> None:
        """`line` is what the console shows of it. Every rank calls it."""
        trace = self.profiler.stop(step)
        if "console" in self.on:
            print(line, *self.watch.look(step, metrics), *([f"profile {trace}"] if trace else []), sep="\n", flush=True)
        if "jsonl" in self.on:
            with self.jsonl.open("a") as file:
                file.write(json.dumps({"step": step, **metrics}) + "\n")
        if self.wandb is not None:
            self.wandb.log(metrics, step=step)
        if self.board is not None:
            for name, value in metrics.items():
                self.board.add_scalar(name, value, step)
            self.board.flush()

    @contextmanager
    def progress(self, phase: str, total: int) -> Iterator[Callable[[], None]]:
        """`with tracker.progress("rollout", 64) as advance:`, and `advance()` whenever one of them is done: a bar on a
        terminal, elsewhere a line every 30 s."""
        if "console" not in self.on:
            yield lambda: None
        elif sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            with Progress(*columns, transient=True, refresh_per_second=4) as bar:
                yield partial(bar.advance, bar.add_task(phase, total=total))
        else:
            yield PlainProgress(phase, total).advance

    def state_dict(self, step: int) -> dict[str, Any]:
        return {"step": step, "wandb_id": self.wandb_id}

    def close(self) -> None:
        if self.wandb is not None:
            self.wandb.finish()
        if self.board is not None:
            self.board.close()


class PlainProgress:
    """Prints `rollout 40/64, 62 s` when 30 s have passed since the start or the last such line."""

    def __init__(self, phase: str, total: int, every_s: float = 30.0):
        self.phase, self.total, self.every_s, self.done = phase, total, every_s, 0
        self.start = self.said = time.monotonic()

    def advance(self) -> None:
        self.done += 1
        now = time.monotonic()
        if now - self.said >= self.every_s:
            self.said = now
            print(f"  {self.phase} {self.done}/{self.total}, {now - self.start:.0f} s", flush=True)


def batch_line(
    prompts: int, samples: int, minibatches: int, epochs: int, max_tokens: int, longest: int, ranks: int,
) -> str:
    """The batch units of a run in words. `longest`: tokens of the longest prompt and response that may come."""
    responses = prompts * samples
    number = -(-responses // (minibatches * ranks * max(1, max_tokens // longest)))
    return (f"{prompts:,} prompts x {samples:,} samples = {responses:,} responses a step, {minibatches} mini-batch(es) "
            f"of {responses // minibatches:,}, {epochs} epoch(s), micro-batches of up to {max_tokens:,} tokens on each "
            f"of {ranks} rank(s), about {number} at the longest lengths")


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
