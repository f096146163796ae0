"""Countdown: reach a target from given numbers. Made here, no download: python data/countdown.py --out data/countdown

Every problem has a solution, found by combining 3 or 4 numbers from 1 to 99 at random with + - * / such that all
intermediate results are positive integers; it stands in extra_info. Problems are distinct as (target, numbers in any
order), so no test problem is in train. The same seed gives the same bytes.
"""

import random
from collections.abc import Iterator

from verl_rows import add_sizes, make_row, parser, run, write

QUESTION = ("Write an arithmetic expression of the numbers {numbers} that equals {target}. Use every number exactly "
            "once, with + - * / and brackets. Think first, then give the expression alone between <answer> and "
            "</answer>, for example <answer>(1 + 2) / 3</answer>.")


def make_problem(rng: random.Random) -> tuple[list[int], int, str]:
    """(numbers, target, an expression that reaches it)."""
    numbers = [rng.randint(1, 99) for _ in range(rng.choice((3, 4)))]
    terms = [(number, str(number)) for number in numbers]
    while len(terms) > 1:
        (a, left), (b, right) = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
        results = {"+": a + b, "*": a * b}
        if a > b:
            results["-"] = a - b
        if a % b == 0:
            results["/"] = a // b
        operator = rng.choice(list(results))
        terms.append((results[operator], f"({left} {operator} {right})"))
    target, expression = terms[0]
    return numbers, target, expression[1:-1]


def make_rows(num_train: int, num_test: int, seed: int) -> Iterator[tuple[str, dict]]:
    """(split, row), test first; targets from 10 to 999."""
    rng, seen = random.Random(seed), set()
    while len(seen) < num_train + num_test:
        numbers, target, expression = make_problem(rng)
        problem = (target, *sorted(numbers))
        if not 10 <= target <= 999 or problem in seen:
            continue
        split, index = ("test", len(seen)) if len(seen) < num_test else ("train", len(seen) - num_test)
        seen.add(problem)
        yield split, make_row("countdown", QUESTION.format(numbers=numbers, target=target),
                              {"target": target, "numbers": numbers}, "math", split, index, solution=expression)


def main() -> None:
    args = parser(__doc__, "countdown")
    add_sizes(args, 8192, 512)
    args = args.parse_args()
    if min(args.num_train, args.num_test) < 1 or args.num_train + args.num_test > 1_000_000:
        raise ValueError(f"--num-train {args.num_train} and --num-test {args.num_test} must be at least 1 and together "
                         f"at most 1000000")
    rows = list(make_rows(args.num_train, args.num_test, args.seed))
    for split in ("train", "test"):
        write((row for where, row in rows if where == split), args.out / f"{split}.parquet")


if __name__ == "__main__":
    run(main)
