"""Any task of the reasoning-gym library: python data/reasoning_gym_task.py --task chain_sum --out data/chain_sum

Made here, no download, but needs `pip install reasoning-gym==0.1.25`. data_source is reasoning_gym/TASK, the ground
truth the library's whole entry (question, answer, metadata) as JSON, which its scorer needs. Questions are distinct, so
no test question is in train; a task that runs out of questions gives fewer. The same seed gives the same rows. The file
is not called reasoning_gym.py because that would replace the library while the script runs.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import islice

from verl_rows import add_sizes, distinct, make_row, parse_json_object, parser, run, write

INSTRUCTION = "Think first, then give the final answer alone between <answer> and </answer>."


def rows(entries: Iterable[dict], task: str, split: str) -> Iterator[dict]:
    """The library's entries -> verl's rows."""
    for index, entry in enumerate(entries):
        yield make_row(f"reasoning_gym/{task}", f"{entry['question'].strip()}\n\n{INSTRUCTION}", json.dumps(entry),
                       "reasoning", split, index, task=task)


def make_entries(task: str, size: int, seed: int, config: dict) -> Iterable[dict]:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ModuleNotFoundError as error:
        raise ValueError(f"reasoning-gym is not installed ({error}); run `pip install reasoning-gym==0.1.25`") from None
    if task not in DATASETS:
        raise ValueError(f"--task {task} is unknown; the library has {', '.join(sorted(DATASETS))}")
    try:
        entries = create_dataset(task, size=size, seed=seed, **config)
    except (TypeError, ValueError, AssertionError) as error:  # of a key that the task has not, or of its value
        raise ValueError(f"--config {json.dumps(config)}: the task {task} refuses it: {error}") from None
    first, copy = entries[0], json.loads(json.dumps(entries[0]))
    if entries.score_answer(copy["answer"], copy) != entries.score_answer(first["answer"], first):
        raise ValueError(f"--task {task}: its scorer does not take entries that were JSON (tuples become lists)")
    return distinct(entries, key=lambda entry: entry["question"])


def main() -> None:
    args = parser(__doc__, "reasoning_gym")
    args.add_argument("--task", required=True, help="name of the library's task, e.g. chain_sum")
    args.add_argument("--config", default="{}", help="the task's own settings as JSON, e.g. '{\"min_terms\": 3}'")
    add_sizes(args, 2048, 128)
    args = args.parse_args()
    if min(args.num_train, args.num_test) < 1:
        raise ValueError(f"--num-train {args.num_train} and --num-test {args.num_test} must be at least 1")
    config = parse_json_object("--config", args.config)
    entries = iter(make_entries(args.task, args.num_test + args.num_train, args.seed, config))
    write(rows(islice(entries, args.num_test), args.task, "test"), args.out / "test.parquet")
    write(rows(entries, args.task, "train"), args.out / "train.parquet")


if __name__ == "__main__":
    run(main)
