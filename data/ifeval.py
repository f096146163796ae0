"""IFEval (Zhou et al. 2023), instructions that a program checks: python data/ifeval.py --out data/ifeval

From google/IFEval on the Hugging Face hub: 541 prompts with 1 to 3 instructions each; writes test.parquet. The ground
truth is JSON, {"key", "prompt", "instruction_id_list", "kwargs"}, which rewards/ifeval.py gives to the checkers of
EleutherAI's package: pip install lm_eval==0.4.13 langdetect immutabledict nltk && python -m nltk.downloader punkt_tab
"""

import json
from collections.abc import Iterable, Iterator

from verl_rows import download, make_row, parser, run, write


def rows(source_rows: Iterable[dict]) -> Iterator[dict]:
    """{key, prompt, instruction_id_list, kwargs} -> verl's rows. Arguments that are None are left out: the source has
    those of all instructions in each of its rows."""
    for index, row in enumerate(source_rows):
        names, kwargs = row["instruction_id_list"], row["kwargs"]
        if not names or len(names) != len(kwargs):
            raise ValueError(f"row {index} has {len(names)} instructions and arguments of {len(kwargs)}; the rule is "
                             f"as many of both and at least one")
        given = [{name: value for name, value in arguments.items() if value is not None} for arguments in kwargs]
        truth = {"key": row["key"], "prompt": row["prompt"], "instruction_id_list": names, "kwargs": given}
        yield make_row("ifeval", row["prompt"], json.dumps(truth), "instructions", "test", index, key=row["key"])


def main() -> None:
    args = parser(__doc__, "ifeval", "google/IFEval").parse_args()
    write(rows(download(args.source, split="train")), args.out / "test.parquet")


if __name__ == "__main__":
    run(main)
