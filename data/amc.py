"""AMC 12, American Mathematics Competitions: python data/amc.py --out data/amc

From AI-MO/aimo-validation-amc on the Hugging Face hub: 83 problems of 2022 and 2023, worded so that each answer is an
integer; writes test.parquet. `--source math-ai/amc23 --split test` are the 40 problems that some papers call AMC 23.
The ground truth is the number, without the ".0" that the sources give to integers.
"""

from collections.abc import Iterable, Iterator

from verl_rows import download, make_row, parser, run, write

INSTRUCTION = 'Think step by step. The last line must be "Answer: " and the answer, a number.'


def rows(source_rows: Iterable[dict]) -> Iterator[dict]:
    """{problem or question, answer} -> verl's rows."""
    for index, row in enumerate(source_rows):
        problem = row["problem"] if "problem" in row else row["question"]
        try:
            answer = float(row["answer"])
        except (TypeError, ValueError):
            raise ValueError(f"AMC row {index}: the answer {row['answer']!r:.80} is no number") from None
        truth = str(int(answer)) if answer.is_integer() else repr(answer)
        yield make_row("amc", f"{problem}\n\n{INSTRUCTION}", truth, "math", "test", index)


def main() -> None:
    args = parser(__doc__, "amc", "AI-MO/aimo-validation-amc")
    args.add_argument("--split", default="train", help="the split of the source that has the problems (train)")
    args = args.parse_args()
    write(rows(download(args.source, split=args.split)), args.out / "test.parquet")


if __name__ == "__main__":
    run(main)
