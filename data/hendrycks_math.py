r"""MATH (Hendrycks et al. 2021), competition problems: python data/hendrycks_math.py --out data/hendrycks_math

From DigitalLearningGmbH/MATH-lighteval on the Hugging Face hub (the name that verl uses): 7,500 train and 5,000 test
problems. The ground truth is what the solution's last \boxed{} holds. The file is not called math.py because that would
replace Python's math module while the script runs.
"""

import re
from collections.abc import Iterable, Iterator

from verl_rows import download, make_row, parser, run, write

INSTRUCTION = r"Think step by step, and put the final answer within \boxed{}."


def boxed_answer(solution: str) -> str:
    r"""What the last \boxed{...} (or \fbox{...}) holds, its braces balanced; also the form `\boxed 5`. "" without."""
    found = list(re.finditer(r"\\(?:boxed|fbox)\s*(\{|[^\s{$]+)", solution))
    if not found:
        return ""
    if found[-1][1] != "{":
        return found[-1][1].rstrip(".,")
    depth, start = 1, found[-1].end()
    for end in range(start, len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[end], 0) if solution[end - 1] != "\\" else 0
        if depth == 0:
            return solution[start:end]
    return ""


def rows(source_rows: Iterable[dict], split: str) -> Iterator[dict]:
    """{problem, level, type, solution} -> verl's rows."""
    for index, row in enumerate(source_rows):
        answer = boxed_answer(row["solution"])
        if not answer:
            raise ValueError(f"{split} row {index}: the solution {row['solution']!r:.80} has no boxed answer")
        yield make_row("DigitalLearningGmbH/MATH-lighteval", f"{row['problem']}\n{INSTRUCTION}", answer, "math", split,
                       index, level=row["level"], type=row["type"])


def main() -> None:
    args = parser(__doc__, "hendrycks_math", "DigitalLearningGmbH/MATH-lighteval").parse_args()
    for split in ("train", "test"):
        write(rows(download(args.source, split=split), split), args.out / f"{split}.parquet")


if __name__ == "__main__":
    run(main)
