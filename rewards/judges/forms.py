"""What judge.py asks of a judge beside one number: a form in JSON with a number for each name, and how it is read.

What the judge reads was written by the policy, which learns whatever raises its score. So a response stands between two
lines that it cannot know, without a model's control tokens; and of the answer nothing counts but a whole form.
"""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from rewards import BrokenForm

MAX_ANSWER = 100_000  # characters of a judge's answer that are looked at
# What a server reads as a token in any text: <|im_end|>, DeepSeek's wide bars; <s>, </s>, <start_of_turn> and others;
# [INST] and others of Mistral; <<SYS>>.
CONTROL = re.compile(
    r"<(?=[|\uff5c])"
    r"|<(?=/?(?:s|bos|eos|pad|unk|mask|tool_call|tool_response|think|\w+_(?:start|end)|extra_id_\d+)>)"
    r"|<(?=/?(?:start|end|begin)_of_\w+>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|IMG)\])"
    r"|<(?=</?SYS>>)", re.IGNORECASE)


def harmless(text: str) -> tuple[str, bool]:
    """The text with a space inside of what is a control token of a chat, and whether there was one."""
    changed = CONTROL.sub(lambda match: f"{match[0]} ", text)
    return changed, changed != text


def fenced(text: str, name: str) -> str:
    """The text between two lines with a code that is made from it."""
    code = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
    return f"<{name} {code}>\n{text}\n</{name} {code}>"


def form_request(names: Sequence[str], low: int, high: int) -> dict[str, Any]:
    """OpenAI's `response_format` of an object with a whole number from low to high for each name, and no more."""
    number = {"type": "integer", "enum": [*range(low, high + 1)]}
    schema = {
        "type": "object",
        "properties": dict.fromkeys(names, number),
        "required": [*names],
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema, "strict": True}}


def read_form(text: str, names: Sequence[str], low: float, high: float) -> dict[str, float]:
    """The numbers of the form with which a judge's answer ends. Raises BrokenForm for an answer without one, for a name
    that is missing, there twice or not asked for, and for what is no number from low to high."""
    form = last_object(text)
    if form is None:
        raise BrokenForm(f"the judge's answer does not end with a form in JSON: {text[-300:]!r}")
    if set(form) != set(names):
        raise BrokenForm(f"the judge's form has the names {[*form][:20]}, must have {[*names]}: {text[-300:]!r}")
    for name, value in form.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not low <= value <= high:
            raise BrokenForm(f"the judge's form has {name} = {value!r:.100}, must be a number from {low:g} to {high:g}")
    return {name: float(form[name]) for name in names}


def last_object(text: str) -> dict[str, Any] | None:
    """The JSON object at the end of a text, after which only a code fence may come."""
    text = text[-MAX_ANSWER:].rpartition("</think>")[2].strip().removesuffix("```").rstrip()
    if not text.endswith("}"):
        return None
    decoder = json.JSONDecoder(object_pairs_hook=without_repeats, parse_constant=refuse_constant)
    for match in re.finditer(r"\{", text):
        try:
            value, end = decoder.raw_decode(text, match.start())
        except BrokenForm:
            raise
        except (ValueError, RecursionError):
            continue
        if end == len(text):
            return value
    return None


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise BrokenForm(f"the judge's form has a name twice: {[name for name, _ in pairs][:20]}")
    return found


def refuse_constant(name: str) -> Any:
    raise BrokenForm(f"the judge's form has {name}, which is no number")


def win_rates(places: Sequence[float]) -> list[float]:
    """Places, 1 is best -> for each the share of the others that it is ahead of, a tie counts half."""
    rates = []
    for i, mine in enumerate(places):
        wins = 0.0
        for j, other in enumerate(places):
            if j != i:
                wins += (mine < other) + 0.5 * (mine == other)
        rates.append(wins / (len(places) - 1))
    return rates


def read_criteria(criteria: Any) -> tuple[dict[str, float], dict[str, str]]:
    """Weights and texts by name. Raises ValueError for what is neither."""
    if not isinstance(criteria, dict) or not criteria or {"score", "judge", "judge_escaped"} & criteria.keys():
        raise ValueError(f"judge: criteria {criteria!r:.200} must be a JSON object of names and texts, and no name is "
                         f"score, judge or judge_escaped; set it in --reward.kwargs")
    weights: dict[str, float] = {}
    texts: dict[str, str] = {}
    for name, given in criteria.items():
        if isinstance(given, str):
            given = {"text": given}
        if not isinstance(given, dict) or not isinstance(given.get("text"), str) or given.keys() - {"text", "weight"}:
            raise ValueError(f"judge: criteria {name!r} is {given!r:.200}, must be a text, or "
                             f'{{"text": ..., "weight": 1.0}}')
        weight = given.get("weight", 1.0)
        if not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise ValueError(f"judge: the weight of {name!r} is {weight!r:.100}, must be a number above 0")
        weights[name] = float(weight)
        texts[name] = given["text"]
    return weights, texts
