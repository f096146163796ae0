"""The columns of one row of data -> its prompt, or a ValueError with the rule that the row breaks.

Messages come as lists of {role, content}, or as one text. The chat template sees what this file returns.
"""

import json
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from common.flags.data import DataConfig
from common.prompts import Prompt
from envs.runtime.template import object_of


def as_written(value: Any, column: str = "") -> Any:
    """A value of a row as somebody wrote it, whatever the file's format. In parquet all rows have the keys of all, so
    a key without a value is dropped, at any depth; in JSON lines, too. Some writers store text as bytes. Raises
    ValueError for bytes that are no UTF-8."""
    if isinstance(value, dict):
        written = {}
        for key, inner in value.items():
            if inner is not None:
                written[key] = as_written(inner, column)
        return written
    if isinstance(value, list):
        return [as_written(inner, column) for inner in value]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise ValueError(f"the column {column} has bytes that are no UTF-8 text: {value[:40]!r}; write it without "
                             f"that column") from None
    return value


def as_text(value: Any) -> str:
    """What JSON does not have: decimals and times as text. Raises ValueError for another type."""
    if isinstance(value, date | time | timedelta | Decimal | UUID):
        return str(value)
    raise ValueError(f"it has a {type(value).__name__}, {value!r:.80}; write it as a text or a number")


def parse_row(row: dict[str, Any], config: DataConfig) -> Prompt:
    """The prompt of one row, before it is tokenised. Raises ValueError with the rule that the row breaks."""
    messages = parse_messages(row.get("prompt"), config.prompt_column)
    data_source = config.data_source or row.get("data_source")
    if not isinstance(data_source, str) or not data_source:
        raise ValueError(f"{config.data_source_column} is {data_source!r:.80}; it must be a name (--data.data-source)")
    if config.ground_truth_column:
        column = config.ground_truth_column
        truth = {"ground_truth": row.get("ground_truth")}
    else:
        column = config.reward_model_column
        truth = row.get("reward_model")
    has_truth = False
    if isinstance(truth, dict):
        has_truth = truth.get("ground_truth") is not None
    if not has_truth:
        raise ValueError(f"{column} is {truth!r:.80}; it must have a ground_truth (--data.ground-truth-column)")
    if truth["ground_truth"] != truth["ground_truth"]:
        raise ValueError(f"{column} has a ground_truth that is NaN, as pandas writes a missing number: leave the row "
                         f"out")
    extra_info = row.get("extra_info")
    if not isinstance(extra_info, dict | None):
        raise ValueError(f"{config.extra_info_column} is {extra_info!r:.80}; it must be a struct or absent")
    return Prompt(
        tokens=[],
        data_source=data_source,
        ground_truth=truth["ground_truth"],
        extra_info=extra_info or {},
        messages=messages,
        row=row,
    )


def with_response(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The conversation with a response; it continues a last message of the assistant."""
    if messages and messages[-1]["role"] == "assistant":
        return [*messages[:-1], messages[-1] | {"content": messages[-1]["content"] + text}]
    return [*messages, {"role": "assistant", "content": text}]


def parse_messages(prompt: Any, column: str, role: str = "user") -> list[dict[str, str]]:
    """The chat messages of a prompt, which may be one message of `role` as a string."""
    messages = prompt
    if isinstance(prompt, str):
        check_no_json(prompt, column)
        messages = [{"role": role, "content": prompt}]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"{column} is {prompt!r:.80}; it must name a column of strings or lists of {{role, content}}")
    found = []
    for message in messages:
        given = given_keys(message)
        check_message(given, column)
        found.append(given)
    if not found or is_empty(found[-1]):
        raise ValueError(f"{column} is empty; there must be at least one message, and text in the last")
    return found


def check_no_json(text: str, column: str) -> None:
    """Raises ValueError for messages that were written as JSON text, which would be one message with that text."""
    if not text.lstrip().startswith("[") or '"role"' not in text:
        return
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return
    if all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in found):
        raise ValueError(f"{column} is the JSON text of messages, {text!r:.80}; write the list itself")


def check_turns(prompt: list[dict[str, Any]], answer: list[dict[str, Any]]) -> None:
    """Raise ValueError for a prompt that ends with the beginning of an answer: it would be a turn of its own."""
    if prompt and prompt[-1]["role"] == "assistant" and answer[: len(prompt)] != prompt:
        raise ValueError("the prompt ends with a message of the assistant, and the answer would be a turn after it: "
                         "write both as one message")


def given_keys(message: dict[str, Any]) -> dict[str, Any]:
    """The message as templates need it: they ask whether a key is there, and a key without a value is not."""
    found = {}
    for key, value in message.items():
        if value is not None:
            found[key] = value
    if found.get("tool_calls"):
        # a message of calls alone has no content in OpenAI's form, and templates add texts to it
        found = {"content": ""} | found
    return found


def is_empty(message: dict[str, Any]) -> bool:
    return not message["content"].strip() and not message.get("tool_calls")


def check_message(message: dict[str, Any], column: str) -> None:
    """Raises ValueError for a message without a role or content, or with calls that no template can write."""
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            raise ValueError(f"{column} has a message whose {key} is {message.get(key)!r:.80}; it must be a string")
    calls = message.get("tool_calls") or []
    wrong = [calls]
    if isinstance(calls, list):
        wrong = [call for call in calls if not is_call(call)]
    if wrong:
        raise ValueError(f"{column} has a call {wrong[0]!r:.120}; calls are a list, each must have a name, and "
                         f"arguments that are an object or JSON text of one")


def is_call(call: Any) -> bool:
    """Whether this is a call in OpenAI's form, {"function": {name, arguments}}, or such a function alone."""
    if not isinstance(call, dict):
        return False
    match call.get("function", call):
        case {"name": str(), **others}:
            return isinstance(object_of(others.get("arguments")), dict)
    return False
