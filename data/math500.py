r"""MATH-500 (Lightman et al. 2023), 500 of MATH's test problems: python data/math500.py --out data/math500

From HuggingFaceH4/MATH-500 on the Hugging Face hub; writes test.parquet. The ground truth is the source's own answer.
The problems are part of the test split that data/hendrycks_math.py writes.
"""

from collections.abc import Iterable, Iterator

from hendrycks_math import INSTRUCTION
from verl_rows import download, make_row, parser, run, write


def rows(source_rows: Iterable[dict]) -> Iterator[dict]:
    """{problem, solution, answer, subject, level, unique_id} -> verl's rows."""
    for index, row in enumerate(source_rows):
        if not str(row["answer"] or "").strip():
            raise ValueError(f"row {index} has no answer")
        yield make_row("HuggingFaceH4/MATH-500", f"{row['problem']}\n{INSTRUCTION}", row["answer"], "math", "test",
                       index, level=str(row["level"]), type=row["subject"], unique_id=row["unique_id"])


def main() -> None:
    args = parser(__doc__, "math500", "HuggingFaceH4/MATH-500").parse_args()
    write(rows(download(args.source, split="test")), args.out / "test.parquet")


if __name__ == "__main__":
    run(main)
