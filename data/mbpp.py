"""MBPP (Austin et al. 2021), Python functions judged by assertions: python data/mbpp.py --out data/mbpp

From google-research-datasets/mbpp on the Hugging Face hub: 374 train and 500 test problems. The ground truth is JSON:
{"assert_case": ["assert f(1) == 2", ...]}; the first case is shown in the prompt, because it names the function.
"""

import json
from collections.abc import Iterable, Iterator

from verl_rows import download, make_row, parser, run, write


def rows(source_rows: Iterable[dict], split: str) -> Iterator[dict]:
    """{task_id, text, code, test_list, test_setup_code, challenge_test_list} -> verl's rows."""
    for index, row in enumerate(source_rows):
        cases = [*row["test_list"], *row["challenge_test_list"]]
        setup = row["test_setup_code"] + "\n" if row["test_setup_code"] else ""
        question = (f"{row['text']}\nAnswer with the Python code in one ```python block. It must pass tests such as:\n"
                    f"{cases[0]}")
        yield make_row("mbpp", question, json.dumps({"assert_case": [setup + case for case in cases]}), "code", split,
                       index, task_id=row["task_id"])


def main() -> None:
    args = parser(__doc__, "mbpp", "google-research-datasets/mbpp").parse_args()
    for split in ("train", "test"):
        write(rows(download(args.source, "full", split=split), split), args.out / f"{split}.parquet")


if __name__ == "__main__":
    run(main)
