"""What a run prints."""

import json
import re
from collections.abc import Sequence
from pathlib import Path


def batch_line(sizes: Sequence[int], max_tokens: int, longest: int, ranks: int) -> str:
    """The batch units of a run in words. `sizes`: prompts and samples a step, mini-batches, epochs. `longest`: the most
    tokens that a prompt and its response may have."""
    prompts, samples, minibatches, epochs = sizes
    responses = prompts * samples
    number = -(-responses // (minibatches * ranks * max(1, max_tokens // longest)))
    return (f"{prompts:,} prompts x {samples:,} samples = {responses:,} responses a step, {minibatches} mini-batch(es) "
            f"of {responses // minibatches:,}, {epochs} epoch(s), micro-batches of up to {max_tokens:,} tokens on each "
            f"of {ranks} rank(s), about {number} at the longest lengths")


def step_line(step: int, total_steps: int, metrics: dict[str, float]) -> str:
    """One step in one line: its reward or loss; its seconds, those of the two longest phases and the rest; the
    seconds of samplers that work at the same time; and the time left at this pace. A save counts in the step after it,
    because a step is logged before it is saved."""
    shown = [
        ("reward", "critic/rewards/mean", ".3f"), ("length", "response_length/mean", ".0f"),
        ("loss", "train/loss", ".3f"), ("accuracy", "preference/accuracy", ".3f"),
        ("entropy", "actor/entropy", ".2f"), ("kl", "actor/ppo_kl", ".1e"), ("clip", "actor/pg_clipfrac", ".3f"),
        ("grad", "actor/grad_norm", ".2g"),
    ]
    numbers = [
        f"{label} {metrics[name]:{form}}" for label, name, form in shown
        if name in metrics and (metrics[name] or label not in ("kl", "clip"))   # with one update per rollout both are 0
    ]
    # names with a further slash, timing_s/agent_loop/..., are parts of a phase
    phases = {name.partition("/")[2]: s for name, s in metrics.items() if re.fullmatch(r"timing_s/\w+", name)}
    step_s = phases.pop("step")
    meanwhile = f", samplers {phases.pop('gen'):.4g}" if "wait" in phases else ""
    longest = sorted(phases.items(), key=lambda phase: phase[1], reverse=True)[:2]
    rest = step_s - sum(s for _, s in longest)
    seconds = " ".join(f"{phase} {s:.4g}" for phase, s in [*longest, ("rest", rest)]) + meanwhile
    not_every_step = phases.get("testing", 0.0) + phases.get("save_checkpoint", 0.0)
    left = f"{(total_steps - step) * (step_s - not_every_step) / 60:.0f} min left"
    width = len(str(total_steps))
    line = f"step {step:>{width}}/{total_steps}  {'  '.join(numbers)} | {step_s:.4g} s: {seconds} | {left}"
    return f"{line}\n{val_line(f'after step {step}', metrics)}" if any(k.startswith("val-") for k in metrics) else line


def val_line(when: str, metrics: dict[str, float]) -> str:
    """The validation results in one line."""
    results = [f"{k.removeprefix('val-core/')} {v:.3f}" for k, v in metrics.items() if k.startswith("val-core/")]
    return f"validation {when}:  " + "  ".join(results)


def summary(run_dir: Path) -> str:
    """The last lines of a finished run: validation before and after, seconds, memory, and where everything is."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    validated = sorted({name for row in rows for name in row if name.startswith("val-core/")})
    lines = ["validation, before -> after"] if validated else []
    for name in validated:
        values = [row[name] for row in rows if name in row]
        lines.append(f"  {name.removeprefix('val-core/')}  {values[0]:.3f} -> {values[-1]:.3f}")
    steps = [row for row in rows if "timing_s/step" in row]
    seconds = sum(row["timing_s/step"] for row in steps)
    peaks = [row.get("perf/max_memory_reserved_gb", row["perf/cpu_memory_peak_gb"]) for row in steps]   # of GPU, CPU
    lines.append(f"{len(steps)} steps in {seconds:.0f} s, peak memory of a rank {max(peaks, default=0.0):.1f} GiB")
    lines.append(f"run folder {run_dir.resolve().as_uri()}, report: python -m tools.report {run_dir}")
    return "\n".join(lines)
