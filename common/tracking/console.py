"""What a run prints."""

import os
import sys
import time
import traceback
from pathlib import Path

from common.parallel.ranks import World


class PlainProgress:
    """Prints `rollout 40/64, 62 s` when 30 s have passed since the start or the last such line."""

    def __init__(self, phase: str, total: int):
        self.phase, self.total, self.done = phase, total, 0
        self.start = self.last_line = time.monotonic()

    def advance(self) -> None:
        self.done += 1
        now = time.monotonic()
        if now - self.last_line >= 30:
            self.last_line = now
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


def print_on_main(world: World, text: str) -> None:
    """Rank 0 prints a line."""
    if world.is_main:
        print(text, flush=True)


def exit_with_error(error: ValueError) -> None:
    """A mistake in flags or files, found by our own checks: the message alone and exit code 2. Others: re-raised."""
    file = Path(traceback.extract_tb(error.__traceback__)[-1].filename)     # where it was raised
    if not file.is_relative_to(Path(__file__).parent.parent.parent) or ".venv" in file.parts:
        raise error
    rank = f"[rank {os.environ['RANK']}] " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    print(f"{rank}error: {error}", file=sys.stderr, flush=True)
    sys.exit(2)
