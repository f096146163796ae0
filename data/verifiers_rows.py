"""Rows of a taskset of `verifiers` 0.4 for envs/verifiers_env.py: the first --num-train tasks, then --num-test.

    VERIFIERS_ENV=bash.toml python data/verifiers_rows.py --out data/bash --num-train 500 --num-test 50

The environment variable is that of the training. `extra_info.verifiers` of a row is the task's data as JSON, from which
the training builds the task again: what loads the taskset (Harbor needs Python 3.12) is not needed there. Paths in it,
such as those of Harbor's tasks, are of this machine.
"""

import json
import os
import tomllib
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from verl_rows import make_row, parser, run, write


def rows(tasks: Iterable, name: str, split: str) -> list[dict]:
    made = []
    for index, task in enumerate(tasks):
        hidden = [field for field, info in type(task.data).model_fields.items() if info.exclude]
        if hidden:
            raise ValueError(f"tasks of {name} keep {', '.join(hidden)} out of their data: they cannot be built again")
        if task.data.timeout.agent is not None:
            raise ValueError(f"task {index} of {name} bounds the agent's seconds, the model's included: Harbor's "
                             f"ignore_timeouts = true leaves that to --rollout.tool-timeout-s")
        data = task.data.model_dump(mode="json")
        made.append(make_row(f"verifiers/{name}", task.data.prompt_text, "", "verifiers", split, index,
                             verifiers=json.dumps(data)))
    return made


def load_taskset(given: str) -> Any:
    """That of the table [env] that VERIFIERS_ENV names."""
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise ValueError(f"verifiers' packages are not installed, or not in PYTHONPATH ({error}); run `pip install "
                         f"--no-deps --target verifiers_packages -r requirements-verifiers.txt`, then this with "
                         f"PYTHONPATH=verifiers_packages") from None
    try:
        table = json.loads(given) if given.startswith("{") else tomllib.loads(Path(given).read_text())["env"]
        return vf.load_taskset(vf.resolve_env_config(table).taskset)
    except (OSError, KeyError, ValueError, ImportError, TypeError, AttributeError) as error:
        cause = f"; {error.__cause__}" if error.__cause__ else ""
        raise ValueError(f"VERIFIERS_ENV={given:.200}: {type(error).__name__}: {error}{cause}") from None


def main() -> None:
    args = parser(__doc__, "verifiers")
    args.add_argument("--num-train", type=int, default=-1, help="tasks at most; -1: all (-1)")
    args.add_argument("--num-test", type=int, default=0, help="tasks at most, those after the training's (0)")
    args = args.parse_args()
    given = os.environ.get("VERIFIERS_ENV", "")
    if not given:
        raise ValueError("the environment variable VERIFIERS_ENV names no TOML file with a table [env]")
    taskset = load_taskset(given)
    name = taskset.config.id
    if args.num_train < 0 and not taskset.bounded:
        raise ValueError(f"{name} has no end: give --num-train")
    tasks = iter(taskset)
    try:
        train = rows(islice(tasks, args.num_train if args.num_train >= 0 else None), name, "train")
        test = rows(islice(tasks, args.num_test), name, "test")
    except LookupError as error:  # textarena's games load word lists by nltk
        raise ValueError(f"{name} needs data that is neither here nor could be downloaded: "
                         f"{' '.join(str(error).replace('*', '').split()):.200}") from error
    write(train, args.out / "train.parquet")
    if test:
        write(test, args.out / "test.parquet")


if __name__ == "__main__":
    run(main)
