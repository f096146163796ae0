"""A table of runs: sampled accuracy at each validation, and steps and seconds of training until it is a target: the
accuracy of a model that evaluate.py sampled, or one standard error less. Between two validations the accuracy is a
straight line; `-`: not reached. `python -m tests.bench.steps_to runs/teacher_accuracy runs/distill/*`

The target is that of the problems that the runs validate. Their standard error is therefore that of sampling alone:
sqrt(mean over problems of p (1 - p) / samples), p the evaluated model's accuracy of a problem, and as many samples as a
validation has.
"""

import json
import sys
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from common.rollouts.validation import spread_rows
from tools.runs import read_metrics


def sampled_accuracy(row: dict[str, float]) -> float | None:
    """Mean of the sampled responses in a line of metrics, None without a validation."""
    found = [value for key, value in row.items() if key.startswith("val-core/") and "/acc/mean@" in key]
    return found[0] if found else None


def target_of(evaluation: str, flags: dict) -> tuple[float, float]:
    """Accuracy of the evaluated model on the problems that a run with these flags validates, and the standard error of
    a validation of it."""
    problems = spread_rows(sum(pq.read_metadata(file).num_rows for file in flags["val_data"]), flags["eval_prompts"])
    table = pq.read_table(Path(evaluation) / "rollouts", columns=["row", "greedy", "acc"])
    accs = np.array([[found["acc"] for found in table.to_pylist() if found["row"] == row and not found["greedy"]]
                     for row in problems])                                                      # [P, N]
    mean, samples = accs.mean(axis=1), accs.shape[1]
    spread = (mean * (1 - mean)).mean() * samples / (samples - 1)                               # unbiased
    return accs.mean(), (spread / (len(problems) * flags["eval_n"])) ** 0.5


def crossing(points: list[tuple[float, float, float]], target: float) -> tuple[float, float] | None:
    """Step and seconds where (step, seconds, accuracy) first reach the target."""
    for (step, seconds, before), (next_step, next_seconds, after) in pairwise(points):
        if before < target <= after:
            share = (target - before) / (after - before)
            return step + share * (next_step - step), seconds + share * (next_seconds - seconds)
    return None


def main(evaluation: str, runs: list[str]) -> None:
    target, error = target_of(evaluation, json.loads((Path(runs[0]) / "config.json").read_text()))
    print(f"target {target:.3f}, or one standard error less: {target - error:.3f}\n")
    print("| run | sampled accuracy: step, seconds | to the target | to one standard error less |")
    print("| --- | --- | --- | --- |")
    for run in runs:
        rows = read_metrics(run)
        seconds = accumulate(row.get("timing_s/step", 0.0) - row.get("timing_s/testing", 0.0) for row in rows)
        points = [(row["step"], spent, sampled_accuracy(row)) for row, spent in zip(rows, seconds)
                  if sampled_accuracy(row) is not None]
        cells = ["; ".join(f"{accuracy:.3f}: {step:.0f}, {spent:.0f} s" for step, spent, accuracy in points)]
        for goal in (target, target - error):
            reached = crossing(points, goal)
            cells.append("-" if reached is None else f"{reached[0]:.1f} steps, {reached[1]:.0f} s")
        print(f"| {run} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
