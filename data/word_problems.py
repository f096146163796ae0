"""One-step word problems, the quickstart's task: python data/word_problems.py --out data/word_problems

Four templates of addition, subtraction and multiplication with small numbers. The prompt is a chat whose earlier turns
show one solved example (`7 + 5 = 12` / `#### 12`): without it a 135M model almost never finds the format, and GRPO has
no signal. Writes train.parquet and test.parquet in verl's columns; no test problem is in train. The same seed gives the
same bytes.
"""

import argparse
import os
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

NAMES = ["Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack", "Kate", "Leo", "Maria",
         "Noah", "Olivia", "Paul", "Rosa", "Sam", "Tina", "Victor"]
THINGS = ["apples", "marbles", "stickers", "books", "coins", "pencils", "cards", "shells", "cookies", "flowers",
          "balloons", "stamps"]
TEMPLATES = {
    "+": "{n} has {a} {th}. {m} gives {n} {b} more {th}. How many {th} does {n} have now?",
    "-": "{n} has {a} {th}. {n} gives {b} {th} to {m}. How many {th} does {n} have left?",
    "*": "{n} buys {a} boxes of {th}. Each box has {b} {th}. How many {th} does {n} have?",
    "and": "{n} has {a} {th} and {m} has {b} {th}. How many {th} do they have together?",
}
SCHEMA = pa.schema([
    ("data_source", pa.string()),
    ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
    ("ability", pa.string()),
    ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
    ("extra_info", pa.struct([("split", pa.string()), ("index", pa.int64())])),
])


def make_problem(rng: random.Random) -> tuple[str, str, int]:
    """(question, solution whose last line is the answer after ####, answer)."""
    kind = rng.choice(list(TEMPLATES))
    n, m = rng.sample(NAMES, 2)
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    if kind == "-":
        a += b  # 4 to 18, and something is left
    elif kind == "*":
        a, b = rng.randint(2, 5), rng.randint(2, 5)
    operator = "+" if kind == "and" else kind
    answer = {"+": a + b, "-": a - b, "*": a * b}[operator]
    question = TEMPLATES[kind].format(n=n, m=m, a=a, b=b, th=rng.choice(THINGS))
    return question, f"{a} {operator} {b} = {answer}\n#### {answer}", answer


def make_rows(num_train: int, num_test: int, seed: int) -> dict[str, list[dict]]:
    """Rows of both splits. All questions are different, so the splits are disjoint; a solved example is never the
    question of any row of either split."""
    rng = random.Random(seed)
    problems: dict[str, tuple[str, int]] = {}
    while len(problems) < num_train + num_test:
        question, solution, answer = make_problem(rng)
        problems.setdefault(question, (solution, answer))
    rows: dict[str, list[dict]] = {"test": [], "train": []}
    for position, (question, (_, answer)) in enumerate(problems.items()):
        split = "test" if position < num_test else "train"
        example, solution, _ = make_problem(rng)
        while example in problems:
            example, solution, _ = make_problem(rng)
        rows[split].append({
            "data_source": "word_problems",
            "prompt": [{"role": "user", "content": example}, {"role": "assistant", "content": solution},
                       {"role": "user", "content": question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(answer)},
            "extra_info": {"split": split, "index": len(rows[split])},
        })
    return rows


def write(rows: list[dict], path: Path) -> None:
    """Write in one rename, so that a file that exists is whole; leave a file alone that already has these rows."""
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    temporary = path.with_name(f".{path.name}.tmp")
    pq.write_table(table, temporary)
    if path.exists() and path.read_bytes() == temporary.read_bytes():
        temporary.unlink()
        print(f"data: {path} is complete, {len(rows)} problems")
        return
    os.replace(temporary, path)
    print(f"data: {path} written, {len(rows)} problems")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("data/word_problems"))
    parser.add_argument("--num-train", type=int, default=2048)
    parser.add_argument("--num-test", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.num_train < 1 or args.num_test < 1 or args.num_train + args.num_test > 20_000:
        sys.exit(f"error: --num-train {args.num_train} and --num-test {args.num_test} must be at least 1 and together "
                 f"at most 20000")
    args.out.mkdir(parents=True, exist_ok=True)
    for split, rows in make_rows(args.num_train, args.num_test, args.seed).items():
        write(rows, args.out / f"{split}.parquet")


if __name__ == "__main__":
    main()
