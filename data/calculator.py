"""Word problems that need the calculator of envs/calculator.py: python data/calculator.py --out data/calculator

The sentences of word_problems.py with numbers of two and three digits, which a small model cannot add or multiply in
its head. Writes train.parquet and test.parquet in verl's columns; no test problem is in train. The same seed gives the
same bytes. conversations/train.parquet is for sft.py: it shows the form of a conversation, and in half of its rows the
operator is wrong, so that a model that imitates it solves half of the problems.
"""

import random

from verl_rows import add_sizes, make_row, parser, run, write
from word_problems import NAMES, TEMPLATES, THINGS

INSTRUCTION = "Write a calculation such as <<2 + 3>> to learn its value. Then write the answer after ####."


def make_problem(rng: random.Random) -> tuple[str, str, int]:
    """(question, what to type into the calculator, answer)."""
    kind = rng.choice(["+", "and", "-", "-", "*", "*"])  # each operator is as frequent as the others
    n, m = rng.sample(NAMES, 2)
    a, b = rng.randint(101, 899), rng.randint(101, 899)
    if kind == "-":
        a += b  # something is left
    elif kind == "*":
        a, b = rng.randint(11, 99), rng.randint(11, 99)
    operator = "+" if kind == "and" else kind
    answer = {"+": a + b, "-": a - b, "*": a * b}[operator]
    return TEMPLATES[kind].format(n=n, m=m, a=a, b=b, th=rng.choice(THINGS)), f"{a} {operator} {b}", answer


def make_rows(num_train: int, num_test: int, rng: random.Random) -> dict[str, list[dict]]:
    """Rows of both splits; all questions are different."""
    problems: dict[str, int] = {}
    while len(problems) < num_train + num_test:
        question, _, answer = make_problem(rng)
        problems.setdefault(question, answer)
    rows: dict[str, list[dict]] = {"test": [], "train": []}
    for position, (question, answer) in enumerate(problems.items()):
        split = "test" if position < num_test else "train"
        question = f"{question}\n{INSTRUCTION}"
        rows[split].append(make_row("calculator", question, str(answer), "math", split, len(rows[split])))
    return rows


def make_conversation(rng: random.Random) -> dict[str, list[dict]]:
    question, expression, _ = make_problem(rng)
    a, operator, b = expression.split()
    if rng.random() < 0.5:
        operator = rng.choice(sorted({"+", "-", "*"} - {operator}))
    value = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operator]
    texts = [f"{question}\n{INSTRUCTION}", f"<<{a} {operator} {b}>>", str(value), f"#### {value}"]
    roles = ["user", "assistant", "user", "assistant"]
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts)]}


def main() -> None:
    args = parser(__doc__, "calculator")
    add_sizes(args, 2048, 96)
    args.add_argument("--num-conversations", type=int, default=512, help="rows for a supervised warm start (512)")
    args = args.parse_args()
    if min(args.num_train, args.num_test, args.num_conversations) < 1:
        raise ValueError(f"--num-train {args.num_train}, --num-test {args.num_test} and --num-conversations "
                         f"{args.num_conversations} must be at least 1")
    rng = random.Random(args.seed)
    for split, rows in make_rows(args.num_train, args.num_test, rng).items():
        write(rows, args.out / f"{split}.parquet")
    conversations = [make_conversation(rng) for _ in range(args.num_conversations)]
    write(conversations, args.out / "conversations/train.parquet")


if __name__ == "__main__":
    run(main)
