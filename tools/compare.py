"""What differs between runs or settings: the code first, then the flags, then the curves.

    python -m tools.compare runs/a runs/b
    python -m tools.compare runs/*                                         # seeds of the same setting are put together
    python -m tools.compare --a runs/a_seed1 runs/a_seed2 runs/a_seed3 --b runs/b_seed1 runs/b_seed2 runs/b_seed3

Of several runs, such as those of several seeds, the numbers are their mean, the half width of its 95% interval
(Student's t), and their lowest and highest. Two settings with several runs each also have their difference with its
interval (Welch's).
"""

import difflib
import json
import string
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import tyro

from common.checkpoint.files import read_regular
from tools.flags import exit_with_error
from tools.runs import read_rows
from tools.seeds import difference, half_width
from tools.terminal import visible

ALWAYS_DIFFERENT = {"run_dir"}
OF_ONE_RUN = {"run_dir", "seed"}
LETTERS = string.ascii_lowercase
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
    """Two run folders, or more: runs that differ only in the seed are put together."""
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


def compare_code(starts: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    """`starts`: of each side, its runs' starts. A unified diff of the first runs' scripts and of what their working
    trees had changed, of each side against the first; the commits and versions of all."""
    lines = []
    for name in ("script", "diff"):
        for letter, side in zip(LETTERS[1:], starts[1:]):
            old, new = starts[0][0][name].splitlines(), side[0][name].splitlines()
            lines += difflib.unified_diff(old, new, f"a: {name}", f"{letter}: {name}", n=1, lineterm="")
        lines += [f"{letter}: not all of its runs have the same {name}; the first one's is compared"
                  for letter, side in zip(LETTERS, starts) if any(one[name] != side[0][name] for one in side)]
    known = [[{name: start[name] for name in ("commit", "ranks")} for start in side] for side in starts]
    lines += compare_flags(known)
    versions = compare_flags([[start["versions"] for start in side] for side in starts])
    return lines + [f"version of {line}" for line in versions]


def compare_flags(sides: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    """`name: a -> b` for each flag whose values differ between the sides; nested ones as optim.lr. Of several runs all
    their values are named."""
    flags = [[flat(one) for one in side] for side in sides]
    lines = []
    for name in sorted({name for side in flags for one in side for name in one} - ALWAYS_DIFFERENT):
        values = [list(dict.fromkeys(str(one.get(name)) for one in side)) for side in flags]
        if any(sorted(found) != sorted(values[0]) for found in values):
            lines.append(f"{name}: {' -> '.join(' | '.join(found) for found in values)}")
    return lines


def flat(flags: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim": {"lr": 1}} -> {"optim.lr": 1}."""
    found = {}
    for name, value in flags.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def compare_curves(sides: Sequence[Sequence[Rows]]) -> list[tuple[str, ...]]:
    """Lines of a table: the last step, validation results before and after, and the mean of the last steps of what
    people look at."""
    names = sorted({name for rows in chain(*sides) for row in rows for name in row if name.startswith("val-core/")})
    lines = [("steps", *map(_last_steps, sides))]
    for name in (*names, *SHOWN):
        is_validation = name in names
        found = [[values for rows in side if (values := [row[name] for row in rows if name in row])] for side in sides]
        ends = [[values[-1] if is_validation else _mean(values[-LAST:]) for values in side] for side in found]
        cells = []
        for side, last in zip(found, ends):
            text = _with_interval(last, ".3f" if is_validation else ".4g") if last else "-"
            cells.append(f"{_mean([values[0] for values in side]):.3f} -> {text}" if is_validation and last else text)
        if len(sides) == 2 and min(map(len, ends)) > 1:
            middle, half = difference(ends[0], ends[1])
            cells.append(f"{middle:+.3g} ± {half:.2g}")
        lines.append((name, *cells))
    return lines


def _last_steps(side: Sequence[Rows]) -> str:
    """The last step of a side's runs: ends of runs of other lengths are no comparison."""
    last = sorted({int(rows[-1]["step"]) if rows else 0 for rows in side})
    return f"{last[0]}" if len(last) == 1 else f"{last[0]} to {last[-1]}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _with_interval(values: Sequence[float], form: str) -> str:
    """The mean; of several also the half width of its interval, the lowest and the highest."""
    text = f"{_mean(values):{form}}"
    return text if len(values) == 1 else (
        f"{text} ± {half_width(values):.2g} ({min(values):{form}} to {max(values):{form}})")


def table(lines: Sequence[Sequence[str]]) -> list[str]:
    """Cells in columns, the first one's to the left; a line may have fewer than others."""
    width = [max(len(line[i]) for line in lines if i < len(line)) for i in range(max(map(len, lines)))]
    return [f"{line[0]:{width[0]}}" + "".join(f"  {cell:>{wide}}" for cell, wide in zip(line[1:], width[1:]))
            for line in lines]


def main(sides: Sequence[Sequence[Path]]) -> None:
    starts = [[read_start(run) for run in side] for side in sides]
    metrics = [[read_metrics(run) for run in side] for side in sides]
    names = [side[0].name[-20:] if len(side) == 1 else f"{len(side)} runs" for side in sides]
    has_letters = len(sides) > 2 or any(len(side) > 1 for side in sides)
    if has_letters:
        for letter, side in zip(LETTERS, sides):
            print(visible(f"{letter}: {' '.join(map(str, side))}"))
        print()
        names = [f"{letter}: {name}" for letter, name in zip(LETTERS, names)]
    if len(sides) == 2 and min(map(len, sides)) > 1:
        names.append("b - a")
    sections = {
        "code": compare_code(starts),
        "flags": compare_flags([[start["flags"] for start in side] for side in starts]),
        f"curves: validation before -> after, else the mean of the last {LAST} steps":
            table([("", *names), *compare_curves(metrics)]),
    }
    for title, lines in sections.items():
        print(f"== {title}", *(map(visible, lines) if lines else ["the same"]), "", sep="\n")


def sides_of(args: Args) -> list[Sequence[Path]]:
    """The runs of each side. Of three or more runs, those with the same script and flags, but for the seed, are one."""
    folders = [Path(run).resolve() for run in (*args.runs, *args.a, *args.b)]
    for run in folders:
        if folders.count(run) > 1:
            raise ValueError(f"{run} is named twice, and would count as two runs")
    has_sides = bool(args.a and args.b) and not args.runs
    if has_sides:
        return [args.a, args.b]
    if len(args.runs) < 2 or args.a or args.b:
        raise ValueError("name two or more run folders, python -m tools.compare runs/a runs/b, or those of two sides, "
                         "--a runs/a1 runs/a2 --b runs/b1 runs/b2")
    if len(args.runs) == 2:
        return [[run] for run in args.runs]
    settings: dict[tuple, list[Path]] = {}
    for run in args.runs:
        start = read_start(run)
        flags = {name: str(value) for name, value in flat(start["flags"]).items() if name not in OF_ONE_RUN}
        settings.setdefault((start["script"], *sorted(flags.items())), []).append(run)
    if len(settings) > len(LETTERS):
        raise ValueError(f"the runs have {len(settings)} settings; {len(LETTERS)} can be compared")
    return [*settings.values()]


if __name__ == "__main__":
    try:
        main(sides_of(tyro.cli(Args, description=__doc__)))
    except ValueError as error:
        exit_with_error(error)
