"""Is my change better, or was it luck? Continues a run twice from one checkpoint, as it was and changed, and compares.

    python -m tools.twin runs/a --at 40 --script mine.py                     # mine.py instead of the run's script
    python -m tools.twin runs/a --at 40 --steps 20 --seeds 3 --optim.lr 2e-5     # other flags go to the changed side
    python -m tools.twin runs/a --at 0 --script mine.py --print              # the commands, for two jobs, and no more

Both sides have the same prompts, and the same random numbers for the same responses, so what differs at first is the
change alone. They run one after the other, in folders of their own; what has finished is not run again, so the same
command compares two jobs that ran the commands of --print. At the end the responses of the last validation are compared
in pairs, and so are the seeds: see `report`.
"""

import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow.parquet as pq
import tyro

from common.checkpoint.files import complete_checkpoints
from common.checkpoint.own import FINISHED
from common.flags.secrets import redacted
from tools.compare import read_start
from tools.evaluation import bootstrap_interval, paired_test
from tools.flags import ROOT, exit_with_error
from tools.report import draw, write_page
from tools.runs import read_metrics
from tools.seeds import difference, half_width
from tools.terminal import visible

SIDES = ("original", "changed")
NOT_OF_THE_MODEL = ("timing_", "perf/", "rollout/tokens_per_s", "sync/probe_")
"""How the names of metrics begin that differ between two runs of the same script; the last is of a start alone."""
MANY = 1_000_000
HIDDEN = "***"
Flags = dict[str, list[str]]


@dataclass
class Args:
    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run: its newest start says the script, flags and ranks."""
    at: int
    """Step of the checkpoint that both sides continue; 0: both start anew."""
    script: str = ""
    """The changed script; default: the run's own."""
    steps: int = 0
    """Steps after --at. 0: up to the run's --total-steps. A schedule of the learning rate ends with the last step, so
    another number changes it on both sides."""
    seeds: int = 1
    """Pairs. Each further one has the next --seed on both sides."""
    out: str = ""
    """Folder of the twins; default: RUN_twins."""
    launch: str = ""
    """What starts a script; default: Python or `torchrun --standalone` with the run's number of ranks."""
    print_: Annotated[bool, tyro.conf.arg(name="print")] = False
    """Print the commands and run nothing."""


# --------------------------------------------------------------------------- the commands

def flags_in(arguments: Sequence[str]) -> Flags:
    """["--a", "1", "2", "--b=3", "--c.no-d"] -> {"--a": ["1", "2"], "--b": ["3"], "--c.no-d": []}; of a flag that is
    given twice the last."""
    found: Flags = {}
    values: list[str] | None = None                                     # of the flag before
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            values = [value] if equals else []
            found.pop(name.replace("_", "-"), None)
            found[name.replace("_", "-")] = values
        elif values is None:
            raise ValueError(f"{argument} is no flag, and follows none")
        else:
            values.append(argument)
    return found


def merged(flags: Flags, changes: Flags) -> list[str]:
    """The arguments with these changes. `--a.no-b` and `--a.b` are the same flag."""
    def base(name: str) -> str:
        head, dot, last = name.removeprefix("--").rpartition(".")
        return head + dot + last.removeprefix("no-")

    changed = {base(name) for name in changes}
    kept = {name: values for name, values in flags.items() if base(name) not in changed}
    return [word for name, values in (kept | changes).items() for word in (name, *values)]


def commands(args: Args, extra: Sequence[str]) -> dict[Path, list[str]]:
    """The folder of each run -> its command; pairs one after the other, the original first. Raises ValueError if the
    run cannot be continued so."""
    start = read_start(args.run)
    original = flags_in(start["command"][1:])
    hidden = [name for name, values in original.items() if any(HIDDEN in value for value in values)]
    if hidden:
        raise ValueError(f"{args.run} was started with a secret in {' '.join(hidden)}, which is not on disk: give it "
                         f"to runs in a variable of the environment")
    total = start["flags"].get("total_steps")
    if start["flags"].get("total_epochs"):                              # it decided, and has no number of steps
        total = None
    steps = args.steps or (total - args.at if isinstance(total, int) else 0)
    if steps < 1:
        length = f"--total-steps {total}"
        if start["flags"].get("total_epochs"):
            length = f"--total-epochs {start['flags']['total_epochs']:g}"
        raise ValueError(f"--steps {args.steps}: {args.run} has {length}, so say how many follow --at {args.at}")
    checkpoint = checkpoint_of(args.run, args.at)
    script = script_of(args, start)
    launch = shlex.split(args.launch) or launch_of(int(start["ranks"]))
    seed = int(start["flags"].get("seed", 0))
    found = {}
    for number in range(args.seeds):
        for side in SIDES:
            folder = Path(args.out or f"{args.run}_twins") / f"{side}_{number + 1}"
            common = {
                "--run-dir": [str(folder)], "--total-steps": [str(args.at + steps)],
                "--total-epochs": ["0"], "--seed": [str(seed + number)],
                "--log.rollouts-every": [str(MANY)], "--log.rollouts-max": [str(MANY)],  # all of each validation
                "--save.resume": ["auto"], "--save.allow-changes": [], "--save.hf": ["never"],
            }
            has_begun = folder.is_dir() and bool(complete_checkpoints(folder))
            if checkpoint is not None and not has_begun:
                common["--save.resume"] = [str(checkpoint)]
            is_changed = side == SIDES[1]
            changes = flags_in(extra) if is_changed else {}
            own = [name for name in changes if name in common]
            if own:
                raise ValueError(f"{own[0]} is the same on both sides, and set by this tool: leave it out")
            file = args.script if is_changed and args.script else script
            arguments = merged(original, common | changes)
            check_same(folder, file, arguments)
            found[folder] = [*launch, file, *arguments]
    return found


def checkpoint_of(run: Path, at: int) -> Path | None:
    if at == 0:
        return None
    steps = [*complete_checkpoints(run)]
    for folder in steps:
        if int(folder.name.removeprefix("step_")) == at:
            return folder.resolve()
    names = ", ".join(str(int(folder.name.removeprefix("step_"))) for folder in steps)
    raise ValueError(f"--at {at}: {run} has checkpoints of the steps {names or '(none)'}, and 0 starts anew "
                     f"(--save.every and --save.keep say which are kept)")


def check_same(folder: Path, script: str, arguments: Sequence[str]) -> None:
    """Raises ValueError for a folder that another command began: its numbers would be taken for this one's."""
    if not any(folder.glob("start_*/start.json")):
        return
    start = read_start(folder)
    now, before = flags_in(arguments), flags_in(start["command"][1:])
    # what the first start of a twin continued is itself, from its first checkpoint on
    names = [name for name in sorted({*now, *before} - {"--save.resume"}) if now.get(name) != before.get(name)]
    if redacted(Path(script).read_text()) != start["script"]:
        names.insert(0, f"the text of {script}")
    if names:
        raise ValueError(f"{folder} was begun with another {names[0]}: give another --out, or move it away")


def script_of(args: Args, start: dict[str, Any]) -> str:
    """The run's script: the file of this name here, which must have the text that the run started with, else the copy
    of it in the run folder, which imports what is here."""
    name = Path(start["command"][0]).name
    if start["script"] and (ROOT / name).is_file() and (ROOT / name).read_text() == start["script"]:
        return str(ROOT / name)
    copies = sorted(args.run.glob(f"start_*/{name}"), key=lambda file: int(file.parent.name.removeprefix("start_")))
    if not copies:
        raise ValueError(f"{args.run} has no copy of its script {name}")
    return str(copies[-1].resolve())


def launch_of(ranks: int) -> list[str]:
    if ranks == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


# --------------------------------------------------------------------------- the comparison

def first_difference(a: Path, b: Path) -> str:
    """The first step at which the metrics of two runs differ, and those that differ by most, relative to their size.
    Seconds, tokens a second and memory are left out."""
    rows_of_b = {row["step"]: row for row in read_metrics(str(b))}
    for row in read_metrics(str(a)):
        other = rows_of_b.get(row["step"])
        if other is None:
            continue
        apart = {}
        for name in sorted({*row, *other} - {"step"}):
            if name.startswith(NOT_OF_THE_MODEL) or "seconds" in name:
                continue
            one, two = row.get(name, math.nan), other.get(name, math.nan)
            is_same = one == two or (math.isnan(one) and math.isnan(two))
            if not is_same:
                size = max(abs(one), abs(two))
                apart[name] = (abs(one - two) / size if math.isfinite(size) else math.inf, one, two)
        if apart:
            most = sorted(apart.items(), key=lambda item: -item[1][0])[:3]
            shown = "; ".join(f"{name} {one:.6g} and {two:.6g}" for name, (_, one, two) in most)
            return f"step {int(row['step'])}: {len(apart)} metrics, most {shown}"
    return ""


def scores_of(run: Path) -> tuple[int, list[dict[str, Any]]]:
    """The step of the last validation that was recorded, and its responses. 0 and [] if there is none."""
    files = sorted((run / "rollouts").glob("val_*.parquet"))
    if not files:
        return 0, []
    rows = pq.read_table(files[-1], columns=["index", "group", "prompt", "score"]).to_pylist()
    return int(files[-1].stem.removeprefix("val_")), sorted(rows, key=lambda row: row["index"])


def by_prompt(a: Path, b: Path) -> np.ndarray:
    """Mean scores of the prompts of the last validation [2, P], those whose score is missing on either side left out.
    Raises ValueError if the sides validated on other prompts."""
    (step_a, rows_a), (step_b, rows_b) = scores_of(a), scores_of(b)
    prompts = [[(row["index"], row["prompt"]) for row in rows] for rows in (rows_a, rows_b)]
    if step_a != step_b or prompts[0] != prompts[1]:
        raise ValueError(f"the last validations of {a} (step {step_a}, {len(rows_a)} responses) and {b} (step "
                         f"{step_b}, {len(rows_b)}) are not of the same prompts: leave the flags of validation as they "
                         f"are")
    groups: dict[int, list[tuple[float, float]]] = {}
    for one, two in zip(rows_a, rows_b):
        scores = [math.nan if row["score"] is None else float(row["score"]) for row in (one, two)]
        if not any(map(math.isnan, scores)):
            groups.setdefault(one["group"], []).append((scores[0], scores[1]))
    return np.array([np.mean(pairs, axis=0) for pairs in groups.values()]).reshape(-1, 2).T


def report(pairs: Sequence[tuple[Path, Path]]) -> dict[str, Any]:
    """Of each pair: its mean scores; their difference with a bootstrap interval over prompts, paired and as if the
    sides had had other prompts; the p-value of the paired test (tools/evaluation.py). Over several seeds: the
    mean difference with Student's interval of the pairs, Welch's of the same runs unpaired, and the number of runs
    of a side that would give the paired interval without pairs: seeds x (var a + var b) / var(b - a)."""
    found: dict[str, Any] = {"pairs": []}
    means = []
    for a, b in pairs:
        scores = by_prompt(a, b)
        entry: dict[str, Any] = {"original": str(a), "changed": str(b), "num_prompts": scores.shape[1],
                                 "first_difference": first_difference(a, b)}
        if scores.shape[1]:
            apart = scores[1] - scores[0]
            interval = bootstrap_interval(apart[:, None])
            p_value, test = paired_test(apart)
            entry |= {"mean_original": scores[0].mean(), "mean_changed": scores[1].mean(), "difference": apart.mean(),
                      "p_value": p_value, "test": test}
            if interval is not None:
                entry |= {"low": interval[0, 0], "high": interval[1, 0],
                          "unpaired_half": 1.96 * math.sqrt(scores.var(axis=1, ddof=1).sum() / scores.shape[1])}
            means.append((scores[0].mean(), scores[1].mean()))
        found["pairs"].append(entry)
    if len(means) > 1:
        a_means, b_means = np.array(means).T
        apart = b_means - a_means
        variance = apart.var(ddof=1)
        together = a_means.var(ddof=1) + b_means.var(ddof=1)
        found["seeds"] = {
            "number": len(means), "difference": apart.mean(), "paired_half": half_width(apart.tolist()),
            "unpaired_half": difference(a_means.tolist(), b_means.tolist())[1],
            "runs_for_the_same": len(means) * together / variance if variance else None,
        }
    return found


def described(found: dict[str, Any]) -> list[str]:
    lines = []
    for number, pair in enumerate(found["pairs"], start=1):
        lines.append(f"pair {number}: {pair['original']} and {pair['changed']}")
        lines.append(f"  first difference  {pair['first_difference'] or 'none: all metrics are equal'}")
        if not pair["num_prompts"]:
            lines.append("  no responses of a validation: the run samples none (--val-data)")
            continue
        lines.append(f"  validation        {pair['mean_original']:.4f} -> {pair['mean_changed']:.4f}, mean score of "
                     f"{pair['num_prompts']} prompts")
        if "low" in pair:
            lines.append(f"  difference        {pair['difference']:+.4f} [{pair['low']:+.4f}, {pair['high']:+.4f}], "
                         f"p = {pair['p_value']:.3g} ({pair['test']})")
            lines.append(f"  unpaired          {pair['difference']:+.4f} ± {pair['unpaired_half']:.4f}: the same "
                         f"scores, as if each side had prompts of its own")
    if seeds := found.get("seeds"):
        lines.append(f"over {seeds['number']} seeds: {seeds['difference']:+.4f} ± {seeds['paired_half']:.4f} in "
                     f"pairs, ± {seeds['unpaired_half']:.4f} unpaired")
        if seeds["runs_for_the_same"] is not None:
            lines.append(f"  {seeds['runs_for_the_same']:.1f} runs of each side would give the paired interval without "
                         f"pairs")
    else:
        lines.append("one seed: the intervals are over prompts. Whether another seed agrees, --seeds 3 says")
    return lines


def main(args: Args, extra: Sequence[str]) -> None:
    if args.seeds < 1 or args.at < 0 or args.steps < 0:
        raise ValueError(f"--seeds {args.seeds} must be at least 1, --at {args.at} and --steps {args.steps} at least 0")
    if args.script and not Path(args.script).is_file():
        raise ValueError(f"--script {args.script} is no file")
    if not args.script and not extra:
        raise ValueError("nothing is changed: give --script mine.py, or flags of the changed side")
    runs = commands(args, extra)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(":")}
    for folder, command in runs.items():
        if args.print_:
            print(f"PYTHONPATH={shlex.quote(str(ROOT))} {shlex.join(command)}")
            continue
        if (folder / FINISHED).exists():
            print(f"{folder} is finished", flush=True)
            continue
        print(visible(f"{folder}: {shlex.join(command)}"), flush=True)
        done = subprocess.run(command, env=environment)
        if done.returncode:
            raise ValueError(f"{folder} ended with exit code {done.returncode}, as it says above; the same command "
                             f"goes on from there")
    if args.print_:
        return
    folders = [*runs]
    pairs = list(zip(folders[0::2], folders[1::2]))
    out = folders[0].parent
    found = report(pairs)
    (out / "twin.json").write_text(json.dumps(found, indent=2) + "\n")
    draw([*map(str, folders)], out / "curves.png")
    write_page([*map(str, folders)], out / "report.html", 50.0)
    print(*map(visible, described(found)), f"curves {out / 'curves.png'}, report {out / 'report.html'}", sep="\n")


if __name__ == "__main__":
    try:
        main(*tyro.cli(Args, description=__doc__, return_unknown_args=True))
    except ValueError as error:
        exit_with_error(error)
