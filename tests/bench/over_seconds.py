"""What variants of a run learned over steps and over seconds, means over their seeds: a table, and a picture.
`python -m tests.bench.over_seconds tests/evidence/long_tail.png OUT/*/*.seed*`: runs FOLDER/NAME.seed1,
FOLDER/NAME.seed2 ... are the variant FOLDER NAME."""

import statistics
import sys
from itertools import groupby
from pathlib import Path

import numpy as np

from tools.runs import read_metrics


def curve(run: str) -> tuple[list[int], list[float], list[float]]:
    """Of each validation: the step, the seconds of training before it, and the sampled result."""
    seconds, found = 0.0, []
    for row in read_metrics(run):
        if "timing_s/step" in row:
            seconds += row["timing_s/step"] - row.get("timing_s/testing", 0.0)
        for name in row:
            if name.startswith("val-core/") and "/acc/mean@" in name:
                found.append((row["step"], seconds, row[name]))
    steps, seconds, results = zip(*found)
    return list(steps), list(seconds), list(results)


def variant(run: str) -> str:
    path = Path(run)
    return f"{path.parent.name} {path.name.rpartition('.seed')[0]}"


def main(picture: str, runs: list[str]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (over_steps, over_seconds) = plt.subplots(1, 2, figsize=(11, 4), sharey=True, constrained_layout=True)
    base: dict[str, float] = {}                             # seconds of the first variant, by seed
    print("| variant | validations after steps | sampled, mean and standard deviation | seconds of training | over the "
          "first, each seed |\n| --- | --- | --- | --- | --- |")
    for name, of_variant in groupby(runs, variant):
        of_variant = list(of_variant)
        curves = [curve(run) for run in of_variant]
        steps = curves[0][0]
        assert all(each[0] == steps for each in curves), f"the seeds of {name} were not validated after the same steps"
        seconds, results = (np.array([each[i] for each in curves]) for i in (1, 2))
        seeds = [Path(run).suffix for run in of_variant]
        base = base or dict(zip(seeds, seconds[:, -1]))
        ratios = " ".join(f"{end / base[seed]:.2f}" for seed, end in zip(seeds, seconds[:, -1]))
        spread = [statistics.stdev(column) if len(column) > 1 else 0.0 for column in results.T]
        results_text = ", ".join(f"{mean:.2f} ± {sd:.2f}" for mean, sd in zip(results.mean(0), spread))
        seconds_text = ", ".join(f"{mean:.0f}" for mean in seconds.mean(0))
        print(f"| {name} | {', '.join(map(str, steps))} | {results_text} | {seconds_text} | {ratios} |")
        for axis, x in ((over_steps, np.array(steps)), (over_seconds, seconds.mean(0))):
            axis.errorbar(x, results.mean(0), spread, marker="o", capsize=2, label=name)
    for axis, label in ((over_steps, "step"), (over_seconds, "seconds of training, validations left out")):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    over_steps.set_ylabel("sampled validation result")
    over_seconds.legend(fontsize=8)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
