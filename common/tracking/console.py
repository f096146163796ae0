"""What a run prints."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PretrainedConfig

from common.flags.model import ModelConfig
from common.forward.attention import choose_attention, kernel_in_use
from common.model.loading import uses_liger


def batch_line(sizes: Sequence[int], max_tokens: int, longest: int, ranks: int) -> str:
    """The batch units of a run in words. `sizes`: prompts and samples a step, mini-batches, epochs. `longest`: the most
    tokens that a prompt and its response may have."""
    prompts, samples, minibatches, epochs = sizes
    responses = prompts * samples
    responses_of_microbatch = max(1, max_tokens // longest)
    number = math.ceil(responses / (minibatches * ranks * responses_of_microbatch))
    return (f"{prompts:,} prompts x {samples:,} samples = {responses:,} responses a step, {minibatches} mini-batch(es) "
            f"of {responses // minibatches:,}, {epochs} epoch(s), micro-batches of up to {max_tokens:,} tokens on each "
            f"of {ranks} rank(s), about {number} at the longest lengths")


def kernels_line(config: ModelConfig, hf_config: PretrainedConfig, device: torch.device) -> str:
    """Where the models run, and with which kernels."""
    where = device.type
    is_bfloat16_on_cpu = where == "cpu" and config.compute_dtype == "bfloat16"
    if is_bfloat16_on_cpu and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        where = "cpu, which emulates it (--policy.compute-dtype float32 is several times as fast)"
    attention = choose_attention(device, hf_config, config)
    if attention == "packed_varlen":
        attention += f" ({kernel_in_use()})"
    liger = "off"
    if uses_liger(device, hf_config, config):
        liger = "on"
    return f"{config.compute_dtype} on {where}, attention {attention}, Liger's kernels {liger}"


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
    numbers = []
    for label, name, form in shown:
        if name not in metrics:
            continue
        if label in ("kl", "clip") and not metrics[name]:               # with one update per rollout both are 0
            continue
        numbers.append(f"{label} {metrics[name]:{form}}")
    phases = {}
    for name, seconds in metrics.items():
        # names with a further slash, timing_s/agent_loop/..., are parts of a phase
        if re.fullmatch(r"timing_s/\w+", name):
            phases[name.removeprefix("timing_s/")] = seconds
    step_s = phases.pop("step")
    meanwhile = ""
    if "wait" in phases:
        meanwhile = f", samplers {phases.pop('gen'):.4g}"
    longest = sorted(phases.items(), key=lambda phase: phase[1], reverse=True)[:2]
    parts = ""
    longest_s = 0.0
    for phase, seconds in longest:
        parts += f"{phase} {seconds:.4g} "
        longest_s += seconds
    parts += f"rest {step_s - longest_s:.4g}"
    not_every_step = phases.get("testing", 0.0) + phases.get("save_checkpoint", 0.0)
    left = f"{(total_steps - step) * (step_s - not_every_step) / 60:.0f} min left"
    width = len(str(total_steps))
    line = f"step {step:>{width}}/{total_steps}  {'  '.join(numbers)} | {step_s:.4g} s: {parts}{meanwhile} | {left}"
    if any(name.startswith("val-") for name in metrics):
        line += "\n" + val_line(f"after step {step}", metrics)
    return line


def val_line(when: str, metrics: dict[str, float]) -> str:
    """The validation results in one line."""
    results = []
    for name, value in metrics.items():
        if name.startswith("val-core/"):
            results.append(f"{name.removeprefix('val-core/')} {value:.3f}")
    return f"validation {when}:  " + "  ".join(results)


def summary(run_dir: Path) -> str:
    """The last lines of a finished run: validation before and after, seconds, memory, and where everything is."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    validated: dict[str, list[float]] = {}                           # metric -> its values, the first one first
    for row in rows:
        for name, value in row.items():
            if name.startswith("val-core/"):
                validated.setdefault(name, []).append(value)
    lines = ["validation, before -> after"] if validated else []
    for name, values in sorted(validated.items()):
        lines.append(f"  {name.removeprefix('val-core/')}  {values[0]:.3f} -> {values[-1]:.3f}")
    num_steps = 0
    seconds = 0.0
    peak_gb = 0.0                                                       # of the GPU, without one of the host
    for row in rows:
        if "timing_s/step" in row:
            num_steps += 1
            seconds += row["timing_s/step"]
            peak_gb = max(peak_gb, row.get("perf/max_memory_reserved_gb", row["perf/cpu_memory_peak_gb"]))
    lines.append(f"{num_steps} steps in {seconds:.0f} s, peak memory of a rank {peak_gb:.1f} GiB")
    lines.append(f"run folder {run_dir.resolve().as_uri()}, report: python -m tools.report {run_dir}")
    return "\n".join(lines)
