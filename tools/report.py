"""Look at runs: a page that needs neither server nor network, with curves, rollouts, and a second run to compare with.

    python -m tools.report runs/quickstart                                   # writes runs/quickstart/report.html
    python -m tools.report runs/a --compare runs/b
    python -m tools.report runs/a runs/b --out curves.png                    # a picture of any number of runs
"""

import base64
import hashlib
import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow.parquet as pq
import tyro

from common.checkpoint.secrets import redacted
from common.tracking.health import HealthCheck

PAGE = Path(__file__).parent / "page"


@dataclass
class Args:
    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Run folders: one for a page, any number for a picture (drawn over each other)."""
    compare: str = ""
    """A second run for the page: flags that differ, curves over each other."""
    out: str = ""
    """File to write: .html is the page, .png the picture; default: report.html in the run's folder."""
    max_mb: float = 50.0
    """Most MB of rollouts in the page; beyond it every second recorded step is left out, until the rest fits."""


def read_metrics(run: str) -> list[dict[str, float]]:
    """One dict per logged step, in order. Raises ValueError if `run` has no metrics."""
    path = Path(run) / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give the folder of a run (--run-dir) that logged to jsonl")
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not rows:
        raise ValueError(f"{path} is empty: the run has not finished a step")
    return rows


def series(rows: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of a metric, where it was logged."""
    found = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in found], [value for _, value in found]


def draw(runs: list[str], out: Path) -> None:
    """Four panels with all runs in them: reward, validation, policy, and the seconds of the first run's phases."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    (reward, validation), (policy, seconds) = axes
    all_rows = {run: read_metrics(run) for run in runs}
    for run, rows in all_rows.items():
        label = Path(run).name if len(runs) > 1 else None
        (line,) = reward.plot(*series(rows, "critic/rewards/mean"), label=label)
        colour = line.get_color()
        for name in sorted({key for row in rows for key in row if key.startswith("val-core/")}):
            style = "--" if name.endswith("greedy") else ":" if "/acc/best@" in name else "-"
            text = name.removeprefix("val-core/") if run == runs[0] else None    # the colours are the first panel's
            validation.plot(*series(rows, name), style, marker="o", color=colour, label=text)
        policy.plot(*series(rows, "actor/entropy"), color=colour, label="entropy (nats)" if run == runs[0] else None)
        policy.plot(
            *series(rows, "training/rollout_probs_diff_mean"), ":", color=colour,
            label="mean |p_engine - p_trainer|" if run == runs[0] else None,
        )
    first = [row for row in all_rows[runs[0]] if "timing_s/step" in row]
    phases = sorted({key for row in first for key in row if key.startswith("timing_s/") and key != "timing_s/step"})
    if first:
        steps, values = [row["step"] for row in first], [[row.get(key, 0.0) for row in first] for key in phases]
        seconds.stackplot(steps, values, labels=[key.removeprefix("timing_s/") for key in phases])
    for axis, title in ((reward, "training reward, mean of the step's responses"), (validation, "validation accuracy"),
                        (policy, "policy"), (seconds, f"seconds of a step by phase ({Path(runs[0]).name})")):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    validation.set_ylim(0, 1)
    policy.set_yscale("log")
    figure.savefig(out, dpi=110)
    plt.close(figure)


def write_page(run: str, compare: str, out: Path, max_mb: float) -> None:
    """One self-contained file. All text of the runs is in a JSON block, whose `<` are escaped, and reaches the page as
    text; of scripts the browser runs only the one whose hash the page names."""
    data = page_data([run, compare] if compare else [run], max_mb)
    script = f"{(PAGE / 'uplot/uPlot.iife.min.js').read_text()}\n{(PAGE / 'page.js').read_text()}"
    parts = {
        "title": Path(run).resolve().name.replace("&", "&amp;").replace("<", "&lt;"),
        "style": f"{(PAGE / 'uplot/uPlot.min.css').read_text()}\n{(PAGE / 'page.css').read_text()}",
        "script": script,
        "hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "data": json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    template = (PAGE / "page.html").read_text()
    # one pass over the template: what is filled in may itself have {{...}}
    out.write_text(re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], template))


def page_data(runs: list[str], max_mb: float) -> dict[str, Any]:
    """What page.js draws. Curves are aligned by step: they have one value for each step of any run, and null at the
    steps that their own run has not."""
    tables = [read_metrics(run) for run in runs]
    steps = sorted({row["step"] for rows in tables for row in rows})
    shown = [{
        "name": Path(run).resolve().name,
        "flags": read_flags(Path(run) / "config.json"),
        "metrics": aligned(rows, steps),
    } for run, rows in zip(runs, tables)]
    prompts, rollouts, left_out = read_rollouts(Path(runs[0]), max_mb)
    _, rewards = series(tables[0], "critic/rewards/mean")
    change = f", mean reward {rewards[0]:.3f} at first, {rewards[-1]:.3f} at last" if rewards else ""
    health = HealthCheck(every=20)
    return {
        "runs": shown, "steps": steps, "prompts": prompts, "rollouts": rollouts, "left_out": left_out,
        "warnings": [line for row in tables[0] for line in health.look(row["step"], row)],
        "summary": f"{shown[0]['flags'].get('--model', 'unknown model')} · {tables[0][-1]['step']} steps{change}",
    }


def aligned(rows: list[dict[str, float]], steps: list[int]) -> dict[str, list[float | None]]:
    """Each metric's values at `steps`."""
    by_step = {row["step"]: row for row in rows}
    names = sorted({name for row in rows for name in row} - {"step"})
    return {name: [finite(by_step.get(step, {}).get(name)) for step in steps] for name in names}


def finite(x: float | None) -> float | None:
    """`x`, or None, which JSON has, for what it has not: nan and the infinities."""
    return x if x is not None and math.isfinite(x) else None


def read_flags(file: Path) -> dict[str, str]:
    return flat_flags(redacted(json.loads(file.read_text()))) if file.exists() else {}


def flat_flags(flags: dict[str, Any], prefix: str = "--") -> dict[str, str]:
    """Nested flags as they are typed: {"optim": {"max_lr": 1}} -> {"--optim.max-lr": "1"}."""
    found = {}
    for key, value in flags.items():
        name = prefix + key.replace("_", "-")
        if isinstance(value, dict):
            found |= flat_flags(value, f"{name}.")
        else:
            found[name] = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return found


def read_rollouts(run: Path, max_mb: float) -> tuple[list[str], list[dict[str, Any]], str]:
    """Prompts; responses, each with the number of its prompt; and a note on the steps that were left out. The files
    are written by common/tracking/rollouts.py."""
    files = sorted((run / "rollouts").glob("step_*.parquet"))
    kept = [(len(json.dumps(rows)), rows) for rows in map(rollouts_of, files)]
    while len(kept) > 1 and sum(size for size, _ in kept) > max_mb * 1e6:
        kept = kept[::-2][::-1]  # every second one, counted from the last, which stays
    prompts: dict[str, int] = {}
    for _, rows in kept:
        for row in rows:
            row["prompt"] = prompts.setdefault(row["prompt"], len(prompts))
    left_out = ""
    if len(kept) < len(files):
        left_out = f"; {len(files) - len(kept)} of {len(files)} recorded steps left out (--max-mb)"
    return list(prompts), [row for _, rows in kept for row in rows], left_out


def rollouts_of(file: Path) -> list[dict[str, Any]]:
    """A file's responses as the page wants them, numbers with four decimals."""
    rows = pq.read_table(file).to_pylist()
    for row in rows:
        for name, value in row.items():
            if isinstance(value, float):
                row[name] = finite(round(value, 4))
            elif isinstance(value, list) and value and isinstance(value[0], float):
                row[name] = [finite(x) for x in np.round(value, 4).tolist()]
        row["id"] = f"{row['step']}-{row['index']}"
        row["texts"] = row.pop("token_texts")
        row["reward_parts"] = {key: finite(part) if isinstance(part, float) else part
                               for key, part in json.loads(row["reward_parts"]).items()}
    return rows


def main(args: Args) -> None:
    if not args.runs:
        raise ValueError("give at least one run folder")
    out = Path(args.out or Path(args.runs[0]) / "report.html")
    if out.suffix == ".png" and not args.compare:
        draw(list(args.runs), out)
    elif out.suffix == ".html" and len(args.runs) == 1:
        write_page(args.runs[0], args.compare, out, args.max_mb)
    else:
        raise ValueError(f"--out {out} with {len(args.runs)} run(s): a page (.html) shows one run, and with --compare "
                         f"RUN2 a second; a picture (.png) shows any number, without --compare")
    print(f"{'curves' if out.suffix == '.png' else 'report'} {out}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
