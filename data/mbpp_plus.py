"""MBPP+ (Austin et al. 2021; Liu et al. 2023), Python functions: python data/mbpp_plus.py --out data/mbpp_plus

From evalplus/mbppplus on the Hugging Face hub: 378 of MBPP's problems with many more tests; writes test.parquet. The
ground truth is JSON, {"functional": the source's tests}; they need numpy where they run. Scores are 0 or 1. As in
data/mbpp.py, one of MBPP's own assertions is in the prompt, because it names the function.
"""

import json
from collections.abc import Iterable, Iterator

from verl_rows import download, make_row, parser, run, write


def rows(source_rows: Iterable[dict]) -> Iterator[dict]:
    """{task_id, prompt, test_list, test, ...} -> verl's rows."""
    for index, row in enumerate(source_rows):
        question = (f"{row['prompt'].strip()}\nAnswer with the Python code in one ```python block. It must pass tests "
                    f"such as:\n{row['test_list'][0].strip()}")
        yield make_row("mbpp_plus", question, json.dumps({"functional": row["test"]}), "code", "test", index,
                       task_id=row["task_id"])


def main() -> None:
    args = parser(__doc__, "mbpp_plus", "evalplus/mbppplus").parse_args()
    write(rows(download(args.source, split="test")), args.out / "test.parquet")


if __name__ == "__main__":
    run(main)
