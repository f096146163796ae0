"""Rewards: one file a task, each with verl's `compute_score(data_source, solution_str, ground_truth, extra_info=None)`.

A score is a number or a dict with `score`; other keys are kept beside it. `TABLE` picks the file by a row's
`data_source`; `load_reward` takes a user's file instead. A file of this folder may have `check(**kwargs)`, which is
called once before training and raises if the task cannot be scored here. Importing this package is cheap.
"""

import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

# data_source (a shell pattern) -> file in this folder, imported when it is needed; the names are verl's
TABLE = {
    "openai/gsm8k": "gsm8k",
    "word_problems": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "numina_*": "math",
    "math_dapo": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "math": "math_dapo",
    "aime*": "math_dapo",
    "amc*": "math_dapo",
    "gpqa*": "multiple_choice",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "mbpp": "code",
    "mbpp_plus": "code",
    "humaneval_plus": "code",
    "livecodebench": "code",
    "ifeval": "ifeval",
    "countdown": "countdown",
    "searchR1_*": "search_qa",
    "reasoning_gym*": "reasoning_gym",
    "hiyouga/geometry3k": "geo3k",
    "shapes": "shapes",
}


class BrokenForm(ValueError):
    """A judge's answer does not have the form that it was asked for: counted as reward/form_frac."""


def find(data_source: str) -> Callable | None:
    """The table's scoring function for a data source, None if it has none."""
    files = [TABLE[pattern] for pattern in TABLE if fnmatchcase(data_source, pattern)]
    return importlib.import_module(f"rewards.{files[0]}").compute_score if files else None


def lookup(data_sources: Iterable[str], kwargs: str = "{}") -> dict[str, Callable]:
    """The scoring function of every data source, checked before training: ValueError for a source that the table does
    not know, a keyword (--reward.kwargs) that no function takes, or a task that cannot be scored on this machine."""
    functions = {source: find(source) for source in data_sources}
    unknown = sorted(source for source, function in functions.items() if function is None)
    if unknown:
        raise ValueError(f"no reward for data_source {', '.join(map(repr, unknown))}; the table in rewards/__init__.py "
                         f"knows {', '.join(sorted(TABLE))}; give your own with --reward.function path/to/file.py:name")
    prepare(functions.values(), resolve(json_object("--reward.kwargs", kwargs)))
    return functions


def prepare(functions: Iterable[Callable], kwargs: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of `kwargs` that each function takes, after the `check` of its file. ValueError for one that none takes."""
    functions = list(functions)
    taken = [{key: value for key, value in kwargs.items() if takes(function, key)} for function in functions]
    if unused := kwargs.keys() - set().union(*taken):
        raise ValueError(f"--reward.kwargs {', '.join(sorted(unused))}: no reward function of this run takes it")
    for function in functions:
        module = inspect.getmodule(function)
        if module and module.__name__.startswith("rewards.") and "check" in vars(module):
            module.check(**kwargs)
        check_signature(function, kwargs)
    return taken


def check_signature(function: Callable, kwargs: dict[str, Any]) -> None:
    """ValueError for a function that cannot be called with verl's arguments and these further ones."""
    parameters = inspect.signature(function).parameters
    plural = "s" if "solution_strs" in parameters else ""
    given = [f"{name}{plural}" for name in ("data_source", "solution_str", "ground_truth", "extra_info")]
    if plural and "data_source" in parameters:  # all responses to one prompt
        given = ["data_source", "solution_strs", "ground_truth", "extra_info"]
    lacking = [name for name in given if not takes(function, name)]
    needed = [name for name, parameter in parameters.items() if parameter.default is parameter.empty
              and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)]
    if lacking or (unknown := [name for name in needed if name not in (*given, *kwargs)]):
        what = f"does not take {', '.join(lacking)}" if lacking else f"also needs {', '.join(unknown)}"
        raise ValueError(f"--reward.function: a function of {', '.join(parameters) or 'nothing'} {what}; it is called "
                         f"with {', '.join(given)} and what --reward.kwargs has (docs/data.md). Functions of TRL's "
                         f"signature: rewards/trl_functions.py")


def takes(function: Callable, keyword: str) -> bool:
    parameters = inspect.signature(function).parameters
    return keyword in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def json_object(flag: str, text: str) -> dict[str, Any]:
    """The arguments that a flag gives as JSON."""
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"{flag} {text} must be a JSON object, e.g. '{{\"name\": 1, \"other\": \"text\"}}'")
    return arguments


def resolve(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments with each {"env": NAME} replaced by that environment variable. To be called where they are
    used, so that what is written down (config.json, logs) has the variable's name and not its value."""
    values = {}
    for key, value in kwargs.items():
        if isinstance(value, dict) and value.keys() == {"env"}:
            if value["env"] not in os.environ:
                raise ValueError(f"--reward.kwargs {key}: the environment variable {value['env']} is not set; set it "
                                 f"where the trainer starts")
            value = os.environ[value["env"]]
        values[key] = value
    return values


def load_reward(spec: str) -> Callable:
    """The reward function named by "path/to/file.py:name" (":compute_score" if no name is given)."""
    return load_function(spec, "--reward.function", "compute_score")


def load_function(spec: str, flag: str, default_name: str) -> Callable:
    """The function that a flag names as "path/to/file.py:name". The file may import its neighbours. Raises
    ValueError for a file that cannot be imported, with the line and the exception, and for a name that it lacks."""
    file, _, name = spec.rpartition(":") if ":" in spec else (spec, "", default_name)
    path = Path(file).resolve()
    if path.suffix != ".py" or not path.is_file():
        what = "is not a Python file" if path.exists() else "does not exist"
        raise ValueError(f"{flag} {spec}: {path} {what}; the form is path/to/file.py:name")
    package = Path(__file__).resolve().parent
    if path.parent in (package, package.parent / "envs"):  # one of ours
        module = importlib.import_module(f"{path.parent.name}.{path.stem}")
    else:
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        module_spec = importlib.util.spec_from_file_location(f"file_{path.stem}", path)
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[module_spec.name] = module  # pickle and dataclasses look it up there
        try:
            module_spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
            where = f"line {lines[-1]}: " if lines else ""
            raise ValueError(f"{flag} {spec} cannot be imported: {where}{type(error).__name__}: "
                             f"{' '.join(str(error).split())}; `python {path}` shows where") from None
    if not callable(vars(module).get(name)):
        known = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ValueError(f"{flag} {spec}: no function {name} in {path}; it has {', '.join(known) or 'none'}")
    return vars(module)[name]
