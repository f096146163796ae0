"""Structured outputs: the JSON schema that a request asks for, and the tool that it names.

AGENT_STRUCTURED says what is done with a schema:

    prompt      it is written into the prompt, and nothing is forced. Replies that are no JSON are counted.
    constrain   the engine samples under a grammar of it (Willard and Louf 2023, arXiv 2307.09702). Then the tokens come
                from another distribution than the model's, as with top-p, and training needs an importance weight.

A request with tools may be answered by a call, so its schema is only written. So is the name of a tool.
"""

import json
from collections.abc import Sequence
from typing import Any

from envs.endpoint.asked import ApiError, Asked, Message, expected, optional

MODES = ("prompt", "constrain")
ANY_OBJECT = {"type": "object"}
SCHEMA = "\n\nAnswer with JSON alone, without other text. It must satisfy this JSON schema: {}"
OBJECT = "\n\nAnswer with a JSON object alone, without other text."
CALL = "\n\nCall the tool {}."


def schema_of(body: dict[str, Any], name: str, inner: str = "") -> dict[str, Any] | None:
    """The schema of a request's field: {"type": "json_schema", "schema": ...}, where `inner` names the object that has
    the schema, if it is a further one; {"type": "json_object"}: any object. None for texts. Raises ApiError."""
    given = optional(body, name, dict)
    kind = (given or {}).get("type", "text")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        raise ApiError(f"{name}.type={kind!r:.100} is not supported; there are text, json_object and json_schema",
                       code="unsupported_value")
    holder = expected(given, inner, dict) if inner else given
    return expected(holder, "schema", dict)


def told_of(asked: Asked) -> str:
    """What the model is told of a schema or of a tool's name. It is the same text for the same request."""
    told = ""
    if asked.schema == ANY_OBJECT:
        told += OBJECT
    elif asked.schema is not None:
        told += SCHEMA.format(json.dumps(asked.schema))
    if asked.called:
        told += CALL.format(asked.called)
    return told


def with_text(messages: Sequence[Message], text: str) -> list[Message]:
    """The messages with a text at the end of the last one."""
    *before, last = messages
    content = last["content"]
    if isinstance(content, list):
        return [*before, last | {"content": [*content, text.strip()]}]
    return [*before, last | {"content": content + text}]


def is_json(text: str, schema: dict[str, Any]) -> bool:
    """Whether a reply can be read; one of any object as an object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return schema != ANY_OBJECT or isinstance(value, dict)
