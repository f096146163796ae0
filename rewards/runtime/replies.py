"""What a reward function returned, as a worker's reply: {"score", "extra", "texts"}, or {"failure", "text"}."""

import binascii
import itertools
import numbers
import sys
import traceback
from array import array
from decimal import Decimal
from pathlib import Path
from typing import Any

from rewards import BrokenForm

MAX_SCORE = 1e9     # larger ones would make sums and squares of float32 infinite
MAX_NUMBER = 1e100  # the other numbers of a reward dict: larger ones would make their mean infinite
MAX_NAMES = 64      # keys of a reward dict, beside its score
MAX_NAME = 100      # characters
MAX_TEXT = 10_000   # characters of a text in a reward dict, and of a traceback
MAX_NUMBERS = 1_000_000  # in the lists of one reward dict: a list of one number a token is whole
OWN = Path(__file__).parent  # its files are no place where a reward function failed


def reply_of(name: str, result: Any) -> dict:
    """What the function `name` returned, a number or a dict with `score`, as this worker's reply."""
    values = {"score": result}
    if isinstance(result, dict):
        values = dict(result)
    score = plain(values.pop("score", "no key 'score'"))
    if isinstance(score, str) or not abs(score) <= MAX_SCORE:
        return {"failure": "invalid",
                "text": f"{name} returned {result!r:.500}; the rule is a finite number of at most {MAX_SCORE:g} in "
                        f"size, or a dict with such a 'score'"}
    given = ((str(key)[:MAX_NAME], value) for key, value in values.items() if value is not None)
    first = dict(itertools.islice(given, MAX_NAMES))
    lists = {}
    for key, value in first.items():
        found = numbers_of(value)
        if found is not None:
            lists[key] = found
    fault = fault_of(lists)
    if fault:
        return {"failure": "invalid", "text": f"{name} returned {fault}"}
    extra: dict[str, Any] = {}
    texts = {}
    for key, value in first.items():
        if key in lists:
            extra[key] = lists[key]
            continue
        extra[key] = metric_or_text(value)
        is_same_text = isinstance(value, str) and len(value) <= MAX_TEXT
        if isinstance(extra[key], str) and not is_same_text:
            texts[key] = type(value).__name__
    return {"score": score, "extra": extra, "texts": texts}


def fault_of(lists: dict[str, list[float]]) -> str:
    """What is wrong with the lists of a reward dict; "" if nothing is."""
    count = 0
    for key, found in lists.items():
        count += len(found)
        if count > MAX_NUMBERS:
            return (
                f"{key!r}, a list of {len(found)} numbers; the rule is at most {MAX_NUMBERS} in all lists of a "
                f"dict"
            )
        for i, number in enumerate(found):
            if not abs(number) <= MAX_NUMBER:
                return (
                    f"{key!r}, a list of {len(found)} numbers with {number} at place {i}; the rule is finite "
                    f"numbers of at most {MAX_NUMBER:g} in size"
                )
    return ""


def plain(value: Any) -> float | str:
    """A number as float (numpy and torch scalars too), anything else as text. An int or a fraction that is
    larger than any float is infinite."""
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (ValueError, RuntimeError):  # more than one element
            return str(value)
    try:
        if isinstance(value, numbers.Real | Decimal):
            return float(value)
        return str(value)
    except OverflowError:
        if value > 0:
            return float("inf")
        return float("-inf")


def metric_or_text(value: Any) -> float | str:
    """A number that can be averaged as float, anything else as text."""
    value = plain(value)
    if isinstance(value, float) and abs(value) <= MAX_NUMBER:
        return value
    return str(value)[:MAX_TEXT]


def numbers_of(value: Any) -> list[float] | None:
    """The numbers of a list, a tuple, or an array of one dimension (numpy, torch). None: it is something
    else."""
    if getattr(value, "ndim", 0) == 1 and hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return None
    kinds = set(map(type, value))
    if kinds <= {float, bool}:  # the usual case, many times faster
        return list(map(float, value))
    if not all(issubclass(kind, numbers.Real | Decimal) or hasattr(kind, "item") for kind in kinds):
        return None
    found: list[Any] = [plain(number) for number in value]
    if str in map(type, found):
        return None
    return found


def packed(reply: dict) -> dict:
    """A reply for a pipe, as JSON: each list of numbers is {"float64": base64}, some ten times as fast as
    digits."""
    if "group" in reply:
        return {"group": [packed(of_one) for of_one in reply["group"]]}
    if "extra" not in reply:
        return reply
    extra = dict(reply["extra"])
    for name, value in reply["extra"].items():
        if isinstance(value, list):
            data = binascii.b2a_base64(array("d", value), newline=False)
            extra[name] = {"float64": data.decode()}
    return reply | {"extra": extra}


def unpacked(reply: dict) -> dict:
    """The reply that was `packed`. No other value of "extra" is a dict."""
    if "group" in reply:
        return {"group": [unpacked(of_one) for of_one in reply["group"]]}
    if "extra" not in reply:
        return reply
    extra = dict(reply["extra"])
    for name, value in reply["extra"].items():
        if isinstance(value, dict):
            data = binascii.a2b_base64(value["float64"])
            extra[name] = array("d", data).tolist()
    return reply | {"extra": extra}


def failure_of(error: BaseException) -> dict:
    """The exception's name, place and traceback, whose middle is left out if it is long."""
    text = "".join(traceback.format_exception(error))
    if len(text) > MAX_TEXT:
        half = MAX_TEXT // 2
        text = f"{text[:half]}\n... {len(text) - MAX_TEXT} characters left out ...\n{text[-half:]}"
    name = type(error).__name__
    failure = "exception"
    if isinstance(error, BrokenForm):
        failure = "form"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent != OWN]
    of_user = [frame for frame in frames if not frame.filename.startswith((sys.prefix, sys.base_prefix))]
    if of_user:
        frames = of_user  # and not of a library
    place = ""
    if frames:
        place = f"{frames[-1].filename}, line {frames[-1].lineno}: "
    return {
        "failure": failure,
        "kind": name,
        "text": text,
        "where": f"{place}{name}: {str(error)[:500]}",
    }
