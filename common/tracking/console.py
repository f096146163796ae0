"""What a run prints."""

import copy
import dataclasses
import errno
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from common.checkpoint.secrets import flags_of

ROOT = Path(__file__).parent.parent.parent


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
    only_if_it_moves = ("kl", "clip")  # with one update per rollout both are 0
    numbers = [
        f"{label} {metrics[name]:{form}}" for label, name, form in shown
        if name in metrics and (metrics[name] or label not in only_if_it_moves)
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


def run_script(main: Callable[[Any], None], flags: type, description: str) -> None:
    """Read `flags`, a dataclass, from the command line and call `main`. A mistake in flags or files, or a full disk, is
    one line and exit code 2."""
    try:
        main(read_flags(flags, description))
    except (ValueError, OSError) as error:
        exit_with_error(error)


def read_flags(flags: type, description: str) -> Any:
    """`flags`, a dataclass, from the command line. --help shows the script's own flags, --help-all also the nested
    dataclasses' flags."""
    arguments = ["--help" if argument == "--help-all" else argument for argument in sys.argv[1:]]
    if {"-h", "--help"} & set(sys.argv):
        flags = without_nested(flags)
        description += "\n\n--help-all also shows the flags of policy, optim, rollout, data, reward, save, log ..."
    refuse_others_flags(flags, arguments, sys.argv[0])
    args = tyro.cli(flags, description=description, args=arguments)
    refuse_nan(args)
    return args


def refuse_others_flags(flags: type, arguments: list[str], script: str) -> None:
    """Raise ValueError for a flag that only other scripts of this project have, and name them, the most similar first.
    What is unknown to all is left to tyro, as are --help and the flags of nested dataclasses."""
    own = {field.name.rstrip("_") for field in dataclasses.fields(flags)}
    declared = {file.name: declared_flags(file) for file in sorted(ROOT.glob("*.py"))}
    nearest = sorted(declared, key=lambda file: -len(declared[file] & own))
    given = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    for flag in [] if {"-h", "--help"} & set(arguments) else given:
        name = flag.removeprefix("--").replace("-", "_")
        names = {name, name.removeprefix("no_")}
        having = [file for file in nearest if names & declared[file]]
        if having and not names & own:
            raise ValueError(f"{Path(script).name} has no flag {flag}; it is one of {', '.join(having)}")


def refuse_nan(args: Any) -> None:
    """Raise ValueError for a flag that is NaN. It is neither above nor below any bound, so that it passes most checks,
    turns off the limits that are flags, and makes every loss NaN."""
    for flag, value in flags_of(args).items():
        if any(x != x for x in (value if isinstance(value, list) else [value])):  # only NaN differs from itself
            raise ValueError(f"{flag} {value} must be a number")


def declared_flags(file: Path) -> set[str]:
    """The fields that the class Args of a script has itself. The script is not imported: one that is being edited may
    be no valid Python. A line of a docstring is no field, because it assigns nothing."""
    body = "".join(re.findall(r"^class Args\b.*\n((?: .*\n|\n)*)", file.read_text(), re.MULTILINE))
    return set(re.findall(r"^    (\w+?)_?: .* = ", body, re.MULTILINE))


def without_nested(flags: type) -> type:
    """The dataclass, with its nested dataclasses left out of its help."""
    nested = [copy.copy(field) for field in dataclasses.fields(flags) if dataclasses.is_dataclass(field.type)]
    hidden = [(field.name, Annotated[field.type, tyro.conf.Suppress], field) for field in nested]
    return dataclasses.make_dataclass(flags.__name__, hidden, bases=(flags,))


def exit_with_error(error: Exception) -> None:
    """A mistake in flags or files that our own checks found, or a full disk: its message and exit code 2. Others are
    re-raised."""
    file = Path(traceback.extract_tb(error.__traceback__)[-1].filename)     # where it was raised
    is_ours = isinstance(error, ValueError) and file.is_relative_to(ROOT) and ".venv" not in file.parts
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if not is_ours and not is_full:
        raise error
    rank = f"[rank {os.environ.get('RANK', 0)}] " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    text = f"{rank}error: {'the disk is full: ' if is_full else ''}{error}"
    # the message may quote downloaded data, whose control sequences a terminal would obey
    print("".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text), file=sys.stderr, flush=True)
    sys.exit(2)
