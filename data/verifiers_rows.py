"""Rows of a `verifiers` environment for envs/verifiers_env.py: VERIFIERS_ENV=wordle python data/verifiers_rows.py

The environment variables VERIFIERS_ENV and VERIFIERS_ARGS name the environment, as in training. Its training data and
its evaluation data are train.parquet and test.parquet; `extra_info.verifiers` of a row is the whole row as JSON.
"""

import json
import os

from verl_rows import make_row, parser, run, write


def rows(dataset, name: str, split: str, most: int) -> list[dict]:
    made = []
    for index, row in enumerate(dataset):
        if 0 <= most <= index:
            break
        texts = [message.get("content") for message in row["prompt"]]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{split} row {index} of {name}: a prompt's contents must be texts, not {texts!r:.80}")
        answer = str(row.get("answer") or "")
        new = make_row(f"verifiers/{name}", "", answer, "verifiers", split, index, verifiers=json.dumps(row))
        filled = [{key: value for key, value in message.items() if value is not None} for message in row["prompt"]]
        made.append(new | {"prompt": filled})
    return made


def main() -> None:
    args = parser(__doc__, "verifiers")
    args.add_argument("--num-train", type=int, default=-1, help="rows at most; -1: all (-1)")
    args.add_argument("--num-test", type=int, default=-1, help="rows at most; -1: all (-1)")
    args = args.parse_args()
    name = os.environ.get("VERIFIERS_ENV", "")
    if not name:
        raise ValueError("the environment variable VERIFIERS_ENV names no environment")
    try:
        import verifiers.legacy as vf
    except ImportError as error:
        raise ValueError(f"verifiers' packages are not installed, or not in PYTHONPATH ({error}); run `pip install "
                         f"--no-deps --target verifiers_packages -r requirements-verifiers.txt`, then this with "
                         f"PYTHONPATH=verifiers_packages") from None
    environment = vf.load_environment(name, **json.loads(os.environ.get("VERIFIERS_ARGS", "{}")))
    write(rows(environment.get_dataset(), name, "train", args.num_train), args.out / "train.parquet")
    write(rows(environment.get_eval_dataset(), name, "test", args.num_test), args.out / "test.parquet")


if __name__ == "__main__":
    run(main)
