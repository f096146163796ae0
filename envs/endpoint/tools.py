"""Tools that the client of an episode's endpoint runs, and the calls of them that the model writes."""

import json
from collections.abc import Callable
from typing import Any


def stub_of(tool: dict[str, Any]) -> Callable:
    """A tool that the client runs, for the chat: its name and schema."""

    def stub() -> None:
        raise NotImplementedError("the client runs its tools")

    stub.__name__, stub.schema = tool["function"]["name"], tool
    return stub


def is_readable(call: dict[str, Any]) -> bool:
    """Whether it is a call with an object of arguments, as all clients need."""
    if call.get("error"):
        return False
    try:
        return isinstance(json.loads(call["arguments"]), dict)
    except (json.JSONDecodeError, RecursionError):
        return False
