"""Rewards: one file a task, each with verl's `compute_score(data_source, solution_str, ground_truth, extra_info=None)`.

A score is a number or a dict with `score`; other keys are kept beside it. `TABLE` picks the file by a row's
`data_source`; `load_reward` takes a user's file instead. Importing this package is cheap: workers do it at start.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path

# data_source (a shell pattern) -> file in this folder, imported when it is needed
TABLE = {
    "openai/gsm8k": "gsm8k",
    "word_problems": "gsm8k",
}


def lookup(data_sources: Iterable[str]) -> dict[str, Callable]:
    """The scoring function of every data source; ValueError for those that the table does not know."""
    names = {source: [TABLE[pattern] for pattern in TABLE if fnmatchcase(source, pattern)] for source in data_sources}
    unknown = sorted(source for source, found in names.items() if not found)
    if unknown:
        raise ValueError(f"no reward for data_source {', '.join(map(repr, unknown))}; the table in rewards/__init__.py "
                         f"knows {', '.join(sorted(TABLE))}; give your own with --reward.function path/to/file.py:name")
    return {source: importlib.import_module(f"rewards.{found[0]}").compute_score for source, found in names.items()}


def load_reward(spec: str) -> Callable:
    """The function named by "path/to/file.py:name" (":compute_score" if no name is given). The file may import its
    neighbours; what it raises at import is raised here."""
    file, _, name = spec.rpartition(":") if ":" in spec else (spec, "", "compute_score")
    path = Path(file).resolve()
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"--reward.function {spec}: {path} is not a Python file; the form is path/to/file.py:name")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module_spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # pickle and dataclasses look it up there
    module_spec.loader.exec_module(module)
    if not callable(vars(module).get(name)):
        known = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ValueError(f"--reward.function {spec}: no function {name} in {path}; it has {', '.join(known) or 'none'}")
    return vars(module)[name]
