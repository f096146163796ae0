"""What changed between two runs: the code first, then the flags, then the curves.

    python -m tools.compare runs/a runs/b
"""

import difflib
import json
import sys
from pathlib import Path
from typing import Any

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


def read_start(run: Path) -> dict[str, Any]:
    """What the newest start of a run was: start.json, with the script's text as "script" and the diff as "diff". A file
    that is not there is an empty text."""
    numbers = [int(file.parent.name[6:]) for file in run.glob("start_*/start.json") if file.parent.name[6:].isdecimal()]
    if not numbers:
        raise ValueError(f"{run} holds no start_N/start.json: it must be a run folder (--run-dir)")
    folder = run / f"start_{max(numbers)}"
    try:
        known = {"flags": {}, "versions": {}, "commit": "", "ranks": 0}
        start = known | json.loads((folder / "start.json").read_text())
        texts = [file.read_text(errors="replace") for file in sorted(folder.glob("*.py"))]
        diff = folder / "changes.diff"
        return start | {"script": texts[0] if texts else "",
                        "diff": diff.read_text(errors="replace") if diff.is_file() else ""}
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder}/start.json is damaged: {error}") from None


def read_metrics(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl"
    return read_rows(path) if path.is_file() else []


def compare_code(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """A unified diff of the scripts and of what each working tree had changed, and the commits and versions."""
    lines = []
    for name in ("script", "diff"):
        old, new = a[name].splitlines(), b[name].splitlines()
        lines += difflib.unified_diff(old, new, f"a: {name}", f"b: {name}", n=1, lineterm="")
    for name in ("commit", "ranks"):
        if a[name] != b[name]:
            lines.append(f"{name}: {a[name]} -> {b[name]}")
    lines += [f"version of {line}" for line in compare_flags(a["versions"], b["versions"])]
    return lines


def compare_flags(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> list[str]:
    """`--name: a -> b` for each flag that differs; nested ones as --optim.lr."""
    lines = []
    for name in sorted(a.keys() | b.keys()):
        old, new = a.get(name), b.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += compare_flags(old, new, f"{prefix}{name}.")
        elif old != new and prefix + name not in ALWAYS_DIFFERENT:
            lines.append(f"{prefix}{name}: {old} -> {new}")
    return lines


def compare_curves(a: list[dict[str, float]], b: list[dict[str, float]]) -> list[str]:
    """Validation results before and after, and the mean of the last steps of what people look at."""
    names = sorted({name for row in a + b for name in row if name.startswith("val-core/")})
    lines = [f"{name:48} {_ends(a, name):>20} {_ends(b, name):>20}" for name in names]
    for name in SHOWN:
        lines.append(f"{name:48} {_mean_of_last(a, name):>20} {_mean_of_last(b, name):>20}")
    return lines


def _ends(rows: list[dict[str, float]], name: str) -> str:
    values = [row[name] for row in rows if name in row]
    return f"{values[0]:.3f} -> {values[-1]:.3f}" if values else "-"


def _mean_of_last(rows: list[dict[str, float]], name: str) -> str:
    values = [row[name] for row in rows if name in row][-LAST:]
    return f"{sum(values) / len(values):.4g}" if values else "-"


def main(a: Path, b: Path) -> None:
    start_a, start_b = read_start(a), read_start(b)
    metrics_a, metrics_b = read_metrics(a), read_metrics(b)
    sections = {
        "code": compare_code(start_a, start_b),
        "flags": compare_flags(start_a["flags"], start_b["flags"]),
        f"curves: validation before -> after, else the mean of the last {LAST} steps": [
            f"{'':48} {a.name[-20:]:>20} {b.name[-20:]:>20}", *compare_curves(metrics_a, metrics_b),
        ],
    }
    for title, lines in sections.items():
        print(f"== {title}", *(map(visible, lines) if lines else ["the same"]), "", sep="\n")


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        sys.exit(0)
    if len(sys.argv) != 3:
        sys.exit("error: name two run folders: python -m tools.compare runs/a runs/b")
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except ValueError as error:
        exit_with_error(error)
