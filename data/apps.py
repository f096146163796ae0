"""APPS (Hendrycks et al. 2021), programs judged by test cases: python data/apps.py --out data/apps

From codeparrot/apps on the Hugging Face hub (1.3 GB): up to 5,000 train and 5,000 test problems; those without a test
case are left out and counted. The ground truth is the source's own JSON: {"inputs": [...], "outputs": [...]}, for
standard input and output, and with "fn_name" for calls of a function. data/mbpp.py has assert-style cases. The file is
not called code.py because that would replace Python's code module while the script runs.
"""

import json
from collections.abc import Iterable, Iterator

from verl_rows import download, make_row, parser, run, write

PROGRAM = "Write a Python program that reads standard input and writes standard output, in one ```python block."
FUNCTION = "Write the Python function {name}, in one ```python block."


def rows(source_rows: Iterable[dict], split: str) -> Iterator[dict]:
    """{question, input_output, starter_code, difficulty, ...} -> verl's rows."""
    num_without = 0
    for index, row in enumerate(source_rows):
        # parse_int: some cases have integers of more digits than Python reads; the text itself goes on
        cases = json.loads(row["input_output"], parse_int=str) if row["input_output"] else {}
        if not cases.get("inputs") or len(cases["inputs"]) != len(cases.get("outputs", ())):
            num_without += 1
            continue
        instruction = FUNCTION.format(name=cases["fn_name"]) if cases.get("fn_name") else PROGRAM
        starter = f"\n\nBegin with:\n```python\n{row['starter_code']}\n```" if row["starter_code"] else ""
        yield make_row("apps", f"{row['question'].strip()}\n\n{instruction}{starter}", row["input_output"], "code",
                       split, index, difficulty=row["difficulty"])
    if num_without:
        print(f"data: {num_without} {split} problems without test cases left out")


def main() -> None:
    args = parser(__doc__, "apps", "codeparrot/apps").parse_args()
    for split in ("train", "test"):
        source_rows = download(args.source, split=split, json_lines=f"{split}.jsonl")
        write(rows(source_rows, split), args.out / f"{split}.parquet")


if __name__ == "__main__":
    run(main)
