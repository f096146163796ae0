"""DAPO-Math-17k and AIME 2024, what DAPO trains and validates on: python data/dapo_math.py --out data/dapo_math

From BytedTsinghua-SIA/DAPO-Math-17k (train) and BytedTsinghua-SIA/AIME-2024 (test) on the Hugging Face hub. Both are in
verl's columns already, prompts with their instruction and all, and go through unchanged, except that the hub's files
hold every problem many times (1.8 million rows for 17 thousand problems): each is written once.
"""

from collections.abc import Iterable, Iterator

from verl_rows import distinct, download, parser, run, write

COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")


def rows(source_rows: Iterable[dict]) -> Iterator[dict]:
    """verl's rows -> the same rows without further columns and without repetitions."""
    for row in distinct(source_rows, key=lambda row: row["prompt"][-1]["content"]):
        yield {name: row[name] for name in COLUMNS}


def main() -> None:
    args = parser(__doc__, "dapo_math", "BytedTsinghua-SIA/DAPO-Math-17k")
    args.add_argument("--test-source", default="BytedTsinghua-SIA/AIME-2024",
                      help="the same for test.parquet (BytedTsinghua-SIA/AIME-2024)")
    args = args.parse_args()
    write(rows(download(args.source, split="train")), args.out / "train.parquet")
    write(rows(download(args.test_source, split="train")), args.out / "test.parquet")


if __name__ == "__main__":
    run(main)
