"""A request for the model's next turn, the same in whichever API's form it came in, its answer and its error."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.pictures import content_of, is_picture
from envs.runtime.template import object_of

Message = dict[str, Any]
Key = tuple


class ApiError(Exception):
    """What the client is told instead of an answer."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request"):
        super().__init__(message)
        self.status, self.code = status, code

    @property
    def kind(self) -> str:
        """The name that OpenAI's and Anthropic's APIs both give to errors of this status."""
        kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
        return kinds.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")


@dataclass
class Asked:
    """A request. Its messages are {"role": system, user, assistant or tool, "content": text}, and as the case may be
    "name", "tool_call_id" and "tool_calls", whose arguments are an object, as chat templates take them. With pictures
    the content of users and tools is a list of texts and of the client's parts."""

    body: dict[str, Any]  # as the client sent it
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)  # {"type": "function", "function": schema}
    max_tokens: int | None = None
    temperature: float | None = None
    stop: list[str] = field(default_factory=list)
    choice: str = "auto"
    """auto; none: the text is no call, whatever it says; required: the client hopes for a call. Nothing forces the
    model to write one: that would be another distribution than the one that is trained."""

    @property
    def model(self) -> str:
        return self.body.get("model") or ""


@dataclass
class Answer:
    id: str  # without the prefix that each API has
    created: int  # seconds since 1970
    text: str  # without calls of tools
    calls: list[dict[str, str]]  # {"id", "name", "arguments": JSON text of an object}
    is_truncated: bool
    stop: str  # of the request's stop texts the one that ended it, or ""
    num_prompt: int  # tokens
    num_sampled: int

    def message(self) -> Message:
        """As the client will send it back."""
        message = {"role": "assistant", "content": self.text}
        return message | ({"tool_calls": list(map(call_of, self.calls))} if self.calls else {})


def key_of(message: Message) -> Key:
    """By what messages are compared: not by the ids of calls, nor by white space around what the model wrote, nor by
    the name that frameworks give to an agent."""
    role, content = message["role"], message["content"]
    name = message.get("name", "") if role in ("system", "user") else ""
    calls = [
        (call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True))
        for call in message.get("tool_calls", ())
    ]
    if isinstance(content, list):  # pictures are long
        content = hashlib.sha256(json.dumps(content, sort_keys=True).encode(errors="surrogatepass")).hexdigest()
    return role, name, content.strip() if role == "assistant" else content, *calls


def call_of(call: dict[str, str]) -> dict[str, Any]:
    """A call of a tool, {"id", "name", "arguments": JSON text}, as a part of a message."""
    function = {"name": call["name"], "arguments": object_of(call["arguments"])}
    return {"id": call["id"], "type": "function", "function": function}


def text_of(content: Any) -> str:
    """The text of a message's content: a text, or a list of parts. Raises ApiError for parts that are no text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        kind = part.get("type")
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise ApiError(f"a part of type {kind!r} in a message's content: the model takes text alone here",
                           code="unsupported_content")
        texts.append(part.get("refusal", "") if kind == "refusal" else part["text"])
    return "\n".join(texts)


def parts_of(content: Any) -> str | list:
    """The content of a user's or a tool's message: its text, or with pictures a list of texts and of the client's
    parts, which `read_pictures` reads."""
    parts = [] if content is None or isinstance(content, str) else content
    if not any(map(is_picture, parts)):
        return text_of(content)
    return [part if is_picture(part) else text_of([part]) for part in parts]


def read_pictures(messages: Sequence[Message]) -> list[Message]:
    """The messages with the files of pictures in their contents. Raises ApiError for a picture that cannot be read, is
    too large, or is at another URL than a data URL."""
    try:
        return [message | {"content": content_of(message["content"])} for message in messages]
    except ValueError as error:
        raise ApiError(str(error), code="unsupported_content") from None


def function_of(name: str, description: str | None, parameters: dict | None) -> dict[str, Any]:
    """A tool in the form that chat templates take."""
    if not isinstance(name, str) or not name:
        raise ApiError(f"a tool's name is {name!r}, and must be a text")
    nothing = {"type": "object", "properties": {}}
    function = {"name": name, "description": description or "", "parameters": parameters or nothing}
    return {"type": "function", "function": function}


def refuse_unsupported(body: dict[str, Any], allowed: dict[str, tuple]) -> None:
    """Raise ApiError for a field that asks for what the model does not do here: `allowed`: its values without
    effect."""
    for name, values in allowed.items():
        if body.get(name) is not None and body[name] not in values:
            raise ApiError(f"{name}={body[name]!r:.100} is not supported here: leave it out", code="unsupported_value")


def choice_of(body: dict[str, Any]) -> str:
    """The request's tool_choice: auto, none, or required, which Anthropic calls any."""
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    kinds = {None: "auto", "auto": "auto", "none": "none", "required": "required", "any": "required"}
    if kind not in kinds:
        raise ApiError(f"tool_choice={choice!r:.100} is not supported: the model decides what it calls; there are "
                       f"auto, required and none", code="unsupported_value")
    return kinds[kind]


def count_of(body: dict[str, Any], *names: str) -> int | None:
    """The first of these fields that the request has: a number of tokens."""
    for name in names:
        value = body.get(name)
        if value is not None:
            if not isinstance(value, int) or value < 1:
                raise ApiError(f"{name}={value!r:.100} must be a whole number of at least 1")
            return value
    return None


def temperature_of(body: dict[str, Any]) -> float | None:
    value = body.get("temperature")
    if value is not None and not (isinstance(value, int | float) and 0 <= value <= 2):
        raise ApiError(f"temperature={value!r:.100} must be a number from 0 to 2")
    return value


def stops_of(value: str | list[str] | None) -> list[str]:
    stops = [value] if isinstance(value, str) else list(value or [])
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise ApiError(f"stop={value!r:.100} must be texts that are not empty")
    return stops


def with_names(messages: Sequence[Message]) -> list[Message]:
    """The messages of tools with the name of the tool, which some templates need: that of the call they answer."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    found = []
    for message in messages:
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message = {"name": names[message["tool_call_id"]]} | message
        found.append(message)
    return found
