"""AIME, American Invitational Mathematics Examination: python data/aime.py --out data/aime

Small sets for validation: train.parquet is AIME 2024 (HuggingFaceH4/aime_2024 on the Hugging Face hub), test.parquet
AIME 2025 (opencompass/AIME2025), 30 problems each. Other copies with the columns problem or question, and answer, can
be given (Maxwell-Jia/AIME_2024), with --split and --test-split where theirs have other names. The ground truth is the
integer, without leading zeros or a degree sign.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import chain

from verl_rows import configs_of, download, make_row, parser, run, write

INSTRUCTION = 'Think step by step. The last line must be "Answer: " and the answer, an integer from 0 to 999.'
SOURCE_2025 = "opencompass/AIME2025"
PAPERS = ("AIME2025-I", "AIME2025-II")
"""Its configurations; a copy of another layout has neither."""


def rows(source_rows: Iterable[dict], year: int, split: str) -> Iterator[dict]:
    """{problem or question, answer}, in capitals or not -> verl's rows."""
    for index, row in enumerate(source_rows):
        row = {name.lower(): value for name, value in row.items()}
        problem = row["problem"] if "problem" in row else row["question"]
        answer = re.match(r"\s*(\d{1,3})\b", str(row["answer"]))
        if not answer:
            raise ValueError(f"AIME {year} row {index}: the answer {row['answer']!r:.80} is no integer from 0 to 999")
        yield make_row(f"aime{year}", f"{problem}\n\n{INSTRUCTION}", str(int(answer[1])), "math", split, index)


def main() -> None:
    args = parser(__doc__, "aime", "HuggingFaceH4/aime_2024")
    args.add_argument("--split", default="train", help="split of --source (train)")
    args.add_argument("--test-source", default=SOURCE_2025, help=f"the same for test.parquet ({SOURCE_2025})")
    args.add_argument("--test-split", default="test", help="split of --test-source (test)")
    args = args.parse_args()
    write(rows(download(args.source, split=args.split), 2024, "train"), args.out / "train.parquet")
    known = PAPERS if args.test_source == SOURCE_2025 else configs_of(args.test_source)
    configs = [[paper] for paper in PAPERS if paper in known] or [[]]
    papers = [download(args.test_source, *config, split=args.test_split) for config in configs]
    write(rows(chain(*papers), 2025, "test"), args.out / "test.parquet")


if __name__ == "__main__":
    run(main)
