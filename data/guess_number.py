"""Numbers to guess for envs/guess_number.py: python data/guess_number.py --out data/guess_number

The secret number is in extra_info; the prompt says how large it may be. The same seed gives the same bytes.
"""

import random

from verl_rows import add_sizes, make_row, parser, run, write


def rows(split: str, num_rows: int, largest: int, rng: random.Random) -> list[dict]:
    question = (f"I think of a number from 1 to {largest}. Guess it: write one number each turn. I answer Higher if "
                f"mine is higher, Lower if it is lower.")
    secrets = [rng.randint(1, largest) for _ in range(num_rows)]
    return [make_row("guess_number", question, str(secret), "game", split, index, secret=secret)
            for index, secret in enumerate(secrets)]


def main() -> None:
    args = parser(__doc__, "guess_number")
    add_sizes(args, 1024, 64)
    args.add_argument("--largest", type=int, default=20, help="largest secret number (20)")
    args = args.parse_args()
    if min(args.num_train, args.num_test) < 1 or args.largest < 2:
        raise ValueError(f"--num-train {args.num_train} and --num-test {args.num_test} must be at least 1, --largest "
                         f"{args.largest} at least 2")
    rng = random.Random(args.seed)
    write(rows("train", args.num_train, args.largest, rng), args.out / "train.parquet")
    write(rows("test", args.num_test, args.largest, rng), args.out / "test.parquet")


if __name__ == "__main__":
    run(main)
