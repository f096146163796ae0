"""What changed between two runs, or two sets of runs: the code first, then the flags, then the curves.

    python -m tools.compare runs/a runs/b
    python -m tools.compare --a runs/a_seed1 runs/a_seed2 runs/a_seed3 --b runs/b_seed1 runs/b_seed2 runs/b_seed3

Of several runs, such as those of several seeds, the numbers are their mean and, in brackets, their lowest and highest.
"""

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from common.checkpoint.files import read_regular
from tools.flags import exit_with_error
from tools.runs import read_rows
from tools.terminal import visible

ALWAYS_DIFFERENT = {"run_dir"}
SHOWN = (
    "critic/rewards/mean", "response_length/mean", "actor/entropy", "actor/grad_norm", "actor/ppo_kl",
    "training/rollout_probs_diff_mean", "timing_s/step",
)
LAST = 5
"""Steps over which a curve's end is averaged."""
Rows = list[dict[str, float]]


@dataclass
class Args:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Two run folders."""
    a: tuple[Path, ...] = ()
    """Instead: the runs of one side, for example all seeds of a setting."""
    b: tuple[Path, ...] = ()
    """The runs of the other side."""


def read_start(run: Path) -> dict[str, Any]:
    """What the newest start of a run was: start.json, with the script's text as "script" and the diff as "diff". A file
    that is not there is an empty text."""
    numbers = [int(file.parent.name[6:]) for file in run.glob("start_*/start.json") if file.parent.name[6:].isdecimal()]
    if not numbers:
        raise ValueError(f"{run} holds no start_N/start.json: it must be a run folder (--run-dir)")
    folder = run / f"start_{max(numbers)}"
    try:
        known = {"flags": {}, "versions": {}, "commit": "", "ranks": 0}
        start = known | json.loads(read_regular(folder / "start.json"))
        texts = [read_regular(file).decode(errors="replace") for file in sorted(folder.glob("*.py"))]
        diff = folder / "changes.diff"
        return start | {"script": texts[0] if texts else "",
                        "diff": read_regular(diff).decode(errors="replace") if diff.exists() else ""}
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder}/start.json is damaged: {error}") from None


def read_metrics(run: Path) -> Rows:
    path = run / "metrics.jsonl"
    return read_rows(path) if path.is_file() else []


def compare_code(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]) -> list[str]:
    """A unified diff of the first runs' scripts and of what their working trees had changed; the commits and versions
    of all."""
    lines = []
    for name in ("script", "diff"):
        old, new = a[0][name].splitlines(), b[0][name].splitlines()
        lines += difflib.unified_diff(old, new, f"a: {name}", f"b: {name}", n=1, lineterm="")
        lines += [f"{side}: not all of its runs have the same {name}; the first one's is compared"
                  for side, starts in {"a": a, "b": b}.items() if any(one[name] != starts[0][name] for one in starts)]
    known = [[{name: start[name] for name in ("commit", "ranks")} for start in side] for side in (a, b)]
    lines += compare_flags(*known)
    versions = compare_flags([start["versions"] for start in a], [start["versions"] for start in b])
    return lines + [f"version of {line}" for line in versions]


def compare_flags(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]) -> list[str]:
    """`name: a -> b` for each flag whose values differ between the sides; nested ones as optim.lr. Of several runs all
    their values are named."""
    sides = [[flat(flags) for flags in side] for side in (a, b)]
    lines = []
    for name in sorted({name for side in sides for flags in side for name in flags} - ALWAYS_DIFFERENT):
        old, new = (list(dict.fromkeys(str(flags.get(name)) for flags in side)) for side in sides)
        if sorted(old) != sorted(new):
            lines.append(f"{name}: {' | '.join(old)} -> {' | '.join(new)}")
    return lines


def flat(flags: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim": {"lr": 1}} -> {"optim.lr": 1}."""
    found = {}
    for name, value in flags.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def compare_curves(a: Sequence[Rows], b: Sequence[Rows]) -> list[str]:
    """Validation results before and after, and the mean of the last steps of what people look at."""
    names = sorted({name for rows in (*a, *b) for row in rows for name in row if name.startswith("val-core/")})
    wide = 20 if len(a) == len(b) == 1 else 36
    lines = [f"{name:48} {_ends(a, name):>{wide}} {_ends(b, name):>{wide}}" for name in names]
    for name in SHOWN:
        lines.append(f"{name:48} {_mean_of_last(a, name):>{wide}} {_mean_of_last(b, name):>{wide}}")
    return lines


def _ends(runs: Sequence[Rows], name: str) -> str:
    values = [found for rows in runs if (found := [row[name] for row in rows if name in row])]
    if not values:
        return "-"
    return f"{_mean([one[0] for one in values]):.3f} -> {_with_range([one[-1] for one in values], '.3f')}"


def _mean_of_last(runs: Sequence[Rows], name: str) -> str:
    values = [_mean(found) for rows in runs if (found := [row[name] for row in rows if name in row][-LAST:])]
    return _with_range(values, ".4g") if values else "-"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _with_range(values: Sequence[float], form: str) -> str:
    """The mean; of several also the lowest and the highest."""
    text = f"{_mean(values):{form}}"
    return text if len(values) == 1 else f"{text} ({min(values):{form}} to {max(values):{form}})"


def main(a: Sequence[Path], b: Sequence[Path]) -> None:
    starts = [[read_start(run) for run in side] for side in (a, b)]
    metrics = [[read_metrics(run) for run in side] for side in (a, b)]
    one, other = (side[0].name[-20:] if len(side) == 1 else f"{len(side)} runs" for side in (a, b))
    wide = 20 if len(a) == len(b) == 1 else 36
    sections = {
        "code": compare_code(*starts),
        "flags": compare_flags(*([start["flags"] for start in side] for side in starts)),
        f"curves: validation before -> after, else the mean of the last {LAST} steps": [
            f"{'':48} {one:>{wide}} {other:>{wide}}", *compare_curves(*metrics),
        ],
    }
    for title, lines in sections.items():
        print(f"== {title}", *(map(visible, lines) if lines else ["the same"]), "", sep="\n")


def sides(args: Args) -> tuple[Sequence[Path], Sequence[Path]]:
    """The runs of either side."""
    has_two_runs = len(args.runs) == 2 and not args.a and not args.b
    has_sides = bool(args.a and args.b) and not args.runs
    if not has_two_runs and not has_sides:
        raise ValueError("name two run folders, python -m tools.compare runs/a runs/b, or those of two sides, --a "
                         "runs/a1 runs/a2 --b runs/b1 runs/b2")
    return (args.runs[:1], args.runs[1:]) if args.runs else (args.a, args.b)


if __name__ == "__main__":
    try:
        main(*sides(tyro.cli(Args, description=__doc__)))
    except ValueError as error:
        exit_with_error(error)
