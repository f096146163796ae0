"""One-step word problems, the quickstart's task: python data/word_problems.py --out data/word_problems

Four templates of addition, subtraction and multiplication with small numbers. The prompt is a chat whose earlier turns
show one solved example (`7 + 5 = 12` / `#### 12`): without it a 135M model almost never finds the format, and GRPO has
no signal. Writes train.parquet and test.parquet in verl's columns; no test problem is in train. The same seed gives the
same bytes. --solved also writes solved/train.parquet and solved/test.parquet, for sft.py (`prompt`, `response`),
dpo.py (`prompt`, `chosen`, `rejected`: a wrong result) and kto.py (`prompt`, `completion`, `label`: one of both).
"""

import random

from verl_rows import add_sizes, make_row, parser, run, write

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
    question of any row of either split. A row's `solved` is the row with answers."""
    rng, mistakes = random.Random(seed), random.Random(seed)
    problems: dict[str, tuple[str, int]] = {}
    while len(problems) < num_train + num_test:
        question, solution, answer = make_problem(rng)
        problems.setdefault(question, (solution, answer))
    rows: dict[str, list[dict]] = {"test": [], "train": []}
    for position, (question, (right, answer)) in enumerate(problems.items()):
        split = "test" if position < num_test else "train"
        example, solution, _ = make_problem(rng)
        while example in problems:
            example, solution, _ = make_problem(rng)
        row = make_row("word_problems", question, str(answer), "math", split, len(rows[split]))
        row["prompt"] = [{"role": "user", "content": example}, {"role": "assistant", "content": solution},
                         *row["prompt"]]
        wrong = answer + mistakes.choice([-2, -1, 1, 2])
        rejected = f"{right.partition('=')[0]}= {wrong}\n#### {wrong}"
        is_right = position % 2 == 0
        row["solved"] = {"prompt": row["prompt"], "response": right, "chosen": right, "rejected": rejected,
                         "completion": right if is_right else rejected, "label": is_right}
        rows[split].append(row)
    return rows


def main() -> None:
    args = parser(__doc__, "word_problems")
    add_sizes(args, 2048, 96)
    args.add_argument("--solved", action="store_true", help="also write rows with answers")
    args = args.parse_args()
    if args.num_train < 1 or args.num_test < 1 or args.num_train + args.num_test > 20_000:
        raise ValueError(f"--num-train {args.num_train} and --num-test {args.num_test} must be at least 1 and together "
                         f"at most 20000")
    for split, rows in make_rows(args.num_train, args.num_test, args.seed).items():
        solved = [row.pop("solved") for row in rows]
        write(rows, args.out / f"{split}.parquet")
        if args.solved:
            write(solved, args.out / "solved" / f"{split}.parquet")


if __name__ == "__main__":
    run(main)
