"""Reward functions of TRL's signature, unchanged: `f(prompts, completions, **columns)` returns a number for each
completion.

    --reward.function rewards/trl_functions.py
    --reward.kwargs '{"functions": ["my_rewards.py:accuracy", "trl.rewards:think_format_reward"], "weights": [1, 0.2]}'

A function is named as file.py:name or package.module:name. It gets as columns what `extra_info` holds, and
`ground_truth`, also under the name that `truth_column` gives ("solution"). data/from_table.py writes every column of a
table into extra_info. `completions` are lists of one assistant message, or texts with `"conversational": false`.
`prompts` come from a column `prompt` of extra_info; without one they are empty lists (or texts).

What differs from TRL: a call has the samples that wait for a score, not all responses of a GPU, so a function must not
compare the samples of a group; `completion_ids`, `trainer_state`, `log_extra` and `log_metric` are not given. As in
TRL, None leaves a function out of a sample's sum. A sample that all functions leave out has no reward.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from rewards import load_function

NOT_GIVEN = {"completion_ids", "prompt_ids", "trainer_state", "log_extra", "log_metric", "environments"}


@functools.cache
def load(spec: str) -> tuple[str, Callable]:
    """(its name, the function) of file.py:name or package.module:name. ValueError if it asks for what is not given."""
    place, _, name = spec.rpartition(":")
    if place.endswith(".py"):
        function = load_function(spec, "--reward.kwargs functions", "")
    else:
        try:
            function = getattr(importlib.import_module(place), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"--reward.kwargs functions {spec}: {error}; the form is file.py:name or "
                             f"package.module:name") from None
    required = {key for key, parameter in inspect.signature(function).parameters.items()
                if parameter.default is parameter.empty}
    if missing := sorted(required & NOT_GIVEN):
        raise ValueError(f"--reward.kwargs functions {spec}: the function asks for {', '.join(missing)}, which exists "
                         f"in TRL's trainer only")
    return name, function


def check(functions: Sequence[str] = (), weights: Sequence[float] = (), **_: Any) -> None:
    """Called once before training: that the functions can be loaded, and have a weight each."""
    if isinstance(functions, str) or not functions:
        raise ValueError("rewards/trl_functions.py needs a list of functions: --reward.kwargs "
                         "'{\"functions\": [\"my_rewards.py:name\"]}'")
    if weights and len(weights) != len(functions):
        raise ValueError(f"--reward.kwargs has {len(weights)} weights and {len(functions)} functions; give one weight "
                         f"a function")
    names = [load(spec)[0] for spec in functions]
    if len(set(names)) < len(names):
        raise ValueError(f"--reward.kwargs functions {' '.join(functions)}: two are called "
                         f"{max(names, key=names.count)}, and their numbers could not be told apart; rename one")


async def compute_score(data_sources, solution_strs, ground_truths, extra_infos, *, functions, weights=(),
                        truth_column="solution", conversational=True) -> list[dict | None]:
    """Of each sample the weighted sum as score, and each function's number under its name; that of a function which is
    itself called `score` under `score_1`."""
    infos = [info or {} for info in extra_infos]
    names = dict.fromkeys(key for info in infos for key in info)
    columns = {key: [info.get(key) for info in infos] for key in names}
    columns["ground_truth"] = list(ground_truths)
    columns.setdefault(truth_column, list(ground_truths))
    prompts = columns.pop("prompt", [[] if conversational else "" for _ in infos])
    completions = [[{"role": "assistant", "content": text}] if conversational else text for text in solution_strs]
    sums: list[float | None] = [None] * len(infos)
    numbers_by_name: list[dict[str, float]] = [{} for _ in infos]
    for spec, weight in zip(functions, weights or [1.0] * len(functions)):
        name, function = load(spec)
        numbers = function(prompts=prompts, completions=completions, **columns)
        numbers = list(await numbers if inspect.isawaitable(numbers) else numbers)
        if len(numbers) != len(infos):
            raise ValueError(f"{spec} returned {len(numbers)} numbers for {len(infos)} completions")
        for i, number in enumerate(numbers):
            if number is not None:
                sums[i] = (sums[i] or 0.0) + weight * number
                numbers_by_name[i]["score_1" if name == "score" else name] = number
    return [None if total is None else found | {"score": total} for total, found in zip(sums, numbers_by_name)]
