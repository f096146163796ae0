"""Pictures of runs: `python -m common.view RUN [RUN ...] [--out curves.png]` draws what their metrics.jsonl hold."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass
class Args:
    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Run folders; several are drawn over each other."""
    out: str = ""
    """PNG file; default: curves.png in the first run's folder."""


def read_metrics(run: str) -> list[dict[str, float]]:
    """One dict per logged step, in order. Raises ValueError if `run` has no metrics."""
    path = Path(run) / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give the folder of a run (--run-dir) that logged to jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if not rows:
        raise ValueError(f"{path} is empty: the run has not finished a step")
    return rows


def series(rows: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of a metric, where it was logged."""
    found = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in found], [value for _, value in found]


def draw(runs: list[str], out: Path) -> None:
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
            style = "--" if name.endswith("greedy") else "-"
            text = name.removeprefix("val-core/") + (f" ({Path(run).name})" if len(runs) > 1 else "")
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
    reward.set_ylim(bottom=0)
    validation.set_ylim(0, 1)
    policy.set_yscale("log")
    figure.savefig(out, dpi=110)
    plt.close(figure)


def main(args: Args) -> None:
    if not args.runs:
        raise ValueError("give at least one run folder")
    out = Path(args.out or Path(args.runs[0]) / "curves.png")
    draw(list(args.runs), out)
    print(f"curves {out}")


if __name__ == "__main__":
    from common.tracking import fail

    try:
        main(tyro.cli(Args, description=__doc__))
    except ValueError as error:
        fail(error)
