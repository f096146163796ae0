"""What runs learned that have no reward of their own, first and last of each number:
`python -m tests.bench.lessons_table runs/learn/sft1 runs/learn/dpo runs/learn/distilled`"""

import sys

from tools.runs import read_metrics

NAMES = ("train/loss", "val/loss", "val-core/preference/accuracy", "val-core/preference/margin", "preference/accuracy",
         "preference/pairs", "actor/kl_loss", "reward/model", "reward/acc")


def main(runs: list[str]) -> None:
    print("\n| run | number | first | last |\n| --- | --- | --- | --- |")
    for run in runs:
        rows = read_metrics(run)
        names = [name for name in NAMES if any(name in row for row in rows)]
        for name in names:
            values = [row[name] for row in rows if name in row]
            print(f"| {run} | `{name}` | {values[0]:.3f} | {values[-1]:.3f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
