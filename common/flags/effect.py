"""Flags that do nothing under the other flags of a command, or on this machine.

The help of such a flag says when it acts, in a sentence that is read here, so that the two cannot differ:

    Needs --kl-loss-coef.               the other flag must be on: not 0, empty, False, "none" or "disabled"
    Needs --val-data and --eval-n.      both
    Needs --a b or c.                   --a must have one of these values, or a list with one of them
    Needs --a above 1.
    Needs schedule linear or cosine.    without --: a flag of the same dataclass
    Needs --a or --b.                   at least one of the two
    Needs training.                     the script must train
    Above 0 needs --a.                  0 asks for nothing
    Not with --a.                       the other flag must be off
    Only for --a b. Only for a GPU.     as Needs, of a flag on which only speed, memory or a metric depends

A flag that lacks what it needs is refused, and one of the last kind is named at the start: a command for GPUs also runs
on a CPU. A value that is the flag's default counts as not given.
"""

import ast
import dataclasses
import json
import re
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.flags.secrets import flags_of

SENTENCE = re.compile(r"(?:^|(?<=[.:;)] ))(Needs|Above 0 needs|Not with|Only for) (.+?)\.(?= |$)")
OFF = ("none", "disabled", "{}")
DEVICES = {"a GPU": "cuda", "a CPU": "cpu"}


def check_effect(args: Any, device: str = "") -> list[str]:
    """Raises ValueError for a flag of `args`, a dataclass, that differs from its default and does nothing. Returns a
    line for each one on which only speed, memory or a metric would depend, and does not. `device`: cpu or cuda; "": it
    is not known yet, and nothing is said of what depends on it."""
    given = flags_of(args)
    defaults = flags_of(with_defaults(args))
    said = []
    for flag, sentences in conditions(args).items():
        if given[flag] == defaults[flag]:
            continue
        for kind, condition in sentences:
            if kind == "Above 0 needs" and not given[flag] > 0:
                continue
            why = reason(kind, condition, flag, given, device)
            if not why:
                continue
            text = f"{named(flag, given[flag])} {why}"
            if kind != "Only for":
                raise ValueError(text)
            said.append(text)
            break                                                       # one reason is enough
    return said


def with_defaults(args: Any) -> Any:
    """`args` with the default of every field that has one."""
    required = {}
    for field in dataclasses.fields(args):
        if field.default is not dataclasses.MISSING:
            continue
        if field.default_factory is dataclasses.MISSING:
            required[field.name] = vars(args)[field.name]
    return type(args)(**required)


def conditions(args: Any) -> dict[str, list[tuple[str, str]]]:
    """Each flag whose help has such sentences -> their kinds and what follows, one for each part of `... and ...`."""
    helps = {}
    for name, value in vars(args).items():
        if dataclasses.is_dataclass(value):
            for key, text in help_texts(type(value)).items():
                helps[f"{name}.{key}"] = text
    helps |= help_texts(type(args))
    found = {}
    for name, text in helps.items():
        parts = []
        for kind, clause in SENTENCE.findall(text):
            for part in clause.split(" and "):
                parts.append((kind, part))
        if parts:
            flag = f"--{name.replace('_', '-').rstrip('-')}"
            found[flag] = parts
    return found


def help_texts(flags: type) -> dict[str, str]:
    """The fields of a dataclass -> the text below each, in one line. A class that declares a field again says more."""
    found: dict[str, str] = {}
    for owner in reversed(flags.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        file = vars(sys.modules[owner.__module__]).get("__file__")      # a notebook's own cell has none
        if file:
            found |= texts_of_class(file, owner.__name__)
    return found


@cache
def texts_of_class(file: str, name: str) -> dict[str, str]:
    tree = ast.parse(Path(file).read_text())
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            found |= texts_of_fields(node.body)
    return found


def texts_of_fields(body: list[ast.stmt]) -> dict[str, str]:
    found = {}
    for node, following in pairwise(body):
        match node, following:
            case ast.AnnAssign(target=ast.Name(id=field)), ast.Expr(value=ast.Constant(value=str(text))):
                found[field] = " ".join(text.split())
    return found


def reason(kind: str, condition: str, flag: str, given: dict[str, Any], device: str) -> str:
    """Why a flag does nothing, and what to turn; "" if it acts."""
    values: dict[str, Any] = {}     # of the other flags, as far as the script has them
    holds = []                      # for each alternative, whether it is met
    group = flag.rpartition(".")[0]
    if condition in DEVICES:
        holds.append(device in ("", DEVICES[condition]))
    elif condition == "training":
        holds.append("--train-data" in given)
    else:
        for alternative in re.split(r" or (?=--)", condition):
            name, *wanted = alternative.replace(",", "").split()
            if not name.startswith("--"):
                name = f"{group}.{name}"
            own = f"--{name.rpartition('.')[2]}"        # tools.play has the environment as a flag of its own
            for known in (name, own):
                if known in given:
                    values[known] = given[known]
                    holds.append(is_met(given[known], wanted))
    if any(holds) == (kind != "Not with"):
        return ""
    if kind == "Only for":
        return f"is only for {condition}: the training is the same without it"
    are_off = True
    shown = []
    for other, value in values.items():
        shown.append(named(other, value))
        if value not in (None, "", []):
            are_off = False
    with_others = f"with {' and '.join(shown)}"
    if are_off:
        with_others = f"without {' or '.join(values)}"
    if kind == "Not with":
        return f"does nothing {with_others}: leave one of them out"
    if not values:
        return f"does nothing in this script, as it needs {condition}: leave {flag} out"
    needed = condition
    if not condition.startswith("--"):
        needed = f"{group}.{condition}"
    return f"does nothing {with_others}: set {needed}, or leave {flag} out"


def is_met(value: Any, wanted: list[str]) -> bool:
    """Whether a flag's value is one of those that another flag needs."""
    if wanted[:1] == ["above"]:
        return value > float(wanted[1])
    if wanted:
        values = [value]
        if isinstance(value, list):
            values = value
        return not {*map(str, values)}.isdisjoint(wanted)
    if not value:
        return False
    return value not in OFF


def named(flag: str, value: Any) -> str:
    """A flag with its value as one types it."""
    if value is True:
        return flag
    if value and isinstance(value, str):
        return f"{flag} {value}"
    return f"{flag} {json.dumps(value)}"
