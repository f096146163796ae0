"""GSM8K (Cobbe et al. 2021), grade school word problems: python data/gsm8k.py --out data/gsm8k

From openai/gsm8k on the Hugging Face hub: 7,473 train and 1,319 test problems. The ground truth is the number after
`####` without commas.
"""

from collections.abc import Iterable, Iterator

from verl_rows import download, make_row, parser, run, write

INSTRUCTION = 'Think step by step, and end with the answer, a number alone, after "####".'


def rows(source_rows: Iterable[dict], split: str) -> Iterator[dict]:
    """{question, answer} -> verl's rows."""
    for index, row in enumerate(source_rows):
        answer = row["answer"].partition("####")[2].replace(",", "").strip()
        if not answer:
            raise ValueError(f"{split} row {index}: the answer {row['answer']!r:.80} has no number after ####")
        yield make_row("openai/gsm8k", f"{row['question']}\n{INSTRUCTION}", answer, "math", split, index,
                       question=row["question"], answer=row["answer"])


def main() -> None:
    args = parser(__doc__, "gsm8k", "openai/gsm8k").parse_args()
    for split in ("train", "test"):
        write(rows(download(args.source, "main", split=split), split), args.out / f"{split}.parquet")


if __name__ == "__main__":
    run(main)
