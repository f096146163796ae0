"""A task whose answers have log-normal lengths: `python -m tests.bench.long_tail OUT` writes parquet files in verl's
columns. A list of numbers is to be repeated; the score is the share of the numbers that are right.

    grpo.py --train-data OUT/train.parquet --val-data OUT/test.parquet --reward.function tests/bench/long_tail.py
"""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

# of the number of numbers in a list, which is log-normal
MEDIAN = 6
SIGMA = 1.0
LONGEST = 48


def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float:
    wanted, found = ground_truth.split(), solution_str.split()
    return sum(a == b for a, b in zip(wanted, found)) / max(len(wanted), len(found))


def make_rows(num_rows: int, rng: np.random.Generator) -> list[dict]:
    rows = []
    for number in range(num_rows):
        length = int(np.clip(rng.lognormal(np.log(MEDIAN), SIGMA), 1, LONGEST))
        example, numbers = rng.integers(1, 9, 5), rng.integers(1, 9, length)
        prompt = [
            {"role": "user", "content": f"Repeat: {' '.join(map(str, example))}"},
            {"role": "assistant", "content": " ".join(map(str, example))},
            {"role": "user", "content": f"Repeat: {' '.join(map(str, numbers))}"},
        ]
        truth = " ".join(map(str, numbers))
        rows.append({"data_source": "long_tail", "prompt": prompt, "ability": "math",
                     "reward_model": {"style": "rule", "ground_truth": truth}, "extra_info": {"index": number}})
    return rows


def main(out: str) -> None:
    rng = np.random.default_rng(0)
    Path(out).mkdir(parents=True, exist_ok=True)
    for name, num_rows in (("train", 2000), ("test", 96)):
        pq.write_table(pa.Table.from_pylist(make_rows(num_rows, rng)), f"{out}/{name}.parquet")


if __name__ == "__main__":
    main(sys.argv[1])
