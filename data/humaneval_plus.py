"""HumanEval+ (Liu et al. 2023), Python functions: python data/humaneval_plus.py --out data/humaneval_plus

From evalplus/humanevalplus on the Hugging Face hub: 164 problems; writes test.parquet. The ground truth is JSON,
{"functional": the source's tests, which call the function}; they need numpy where they run. Scores are 0 or 1.
"""

import json
from collections.abc import Iterable, Iterator

from verl_rows import download, make_row, parser, run, write

INSTRUCTION = ("Complete this Python function. Answer with the whole code, imports and helper functions included, in "
               "one ```python block.")


def rows(source_rows: Iterable[dict]) -> Iterator[dict]:
    """{task_id, prompt, entry_point, test, ...} -> verl's rows."""
    for index, row in enumerate(source_rows):
        tests = f"{row['test'].rstrip()}\n\ncheck({row['entry_point']})\n"
        question = f"{INSTRUCTION}\n```python\n{row['prompt'].rstrip()}\n```"
        yield make_row("humaneval_plus", question, json.dumps({"functional": tests}), "code", "test", index,
                       task_id=row["task_id"])


def main() -> None:
    args = parser(__doc__, "humaneval_plus", "evalplus/humanevalplus").parse_args()
    write(rows(download(args.source, split="test")), args.out / "test.parquet")


if __name__ == "__main__":
    run(main)
