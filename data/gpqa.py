"""GPQA (Rein et al. 2023), multiple choice in biology, chemistry and physics: python data/gpqa.py --out data/gpqa

From Idavidrein/gpqa on the Hugging Face hub, which asks for an account and its conditions to be accepted (`hf auth
login`); writes test.parquet. By default the 198 questions of the diamond set. The four answers are shuffled with
--seed, each question by itself; the ground truth is the letter of the correct one.
"""

import random
from collections.abc import Iterable, Iterator

from verl_rows import download, make_row, parser, run, write

LETTERS = "ABCD"
INSTRUCTION = 'Think step by step. The last line must be "Answer: " and the letter of the correct answer.'


def rows(source_rows: Iterable[dict], seed: int, data_source: str) -> Iterator[dict]:
    """{Question, Correct Answer, Incorrect Answer 1, 2, 3, ...} -> verl's rows."""
    for index, row in enumerate(source_rows):
        answers = [row["Correct Answer"], *(row[f"Incorrect Answer {number}"] for number in (1, 2, 3))]
        answers = [answer.strip() for answer in answers]
        order = random.Random(f"{seed} {index}").sample(range(4), 4)
        lines = [f"{letter}) {answers[i]}" for letter, i in zip(LETTERS, order)]
        question = "\n".join([row["Question"].strip(), "", *lines, "", INSTRUCTION])
        yield make_row(data_source, question, LETTERS[order.index(0)], "science", "test", index,
                       domain=row["High-level domain"])


def main() -> None:
    args = parser(__doc__, "gpqa", "Idavidrein/gpqa")
    args.add_argument("--subset", default="gpqa_diamond", choices=("gpqa_diamond", "gpqa_main", "gpqa_extended"),
                      help="questions (gpqa_diamond)")
    args.add_argument("--seed", type=int, default=0, help="random seed of the order of answers (0)")
    args = args.parse_args()
    found = download(args.source, args.subset, split="train")
    write(rows(found, args.seed, args.subset), args.out / "test.parquet")


if __name__ == "__main__":
    run(main)
