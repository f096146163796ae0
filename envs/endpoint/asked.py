"""A request for the model's next turn, the same in whichever API's form it came in, its answer and its error."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.pictures import content_of, is_picture
from envs.runtime.template import object_of

Message = dict[str, Any]
Key = tuple
KINDS = {str: "a text", dict: "an object", list: "a list", bool: "true or false"}


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


@dataclass(frozen=True)
class Fields:
    """What a request may have in one API. A field that is none of these is refused, as OpenAI and Anthropic do: what a
    client asks for it gets, or it is told. Fields of the objects in `objects` are named OBJECT.FIELD."""

    read: tuple[str, ...]
    fixed: dict[str, tuple]
    """Fields with the values that ask for what is done anyway; other values are refused."""
    hints: dict[str, tuple]
    """Fields of which the model is not told; what is no value of these is counted ("unheeded")."""
    beside: tuple[str, ...]
    """Fields of storage, billing and caching, on which no answer depends."""
    objects: tuple[str, ...] = ()

    def check(self, body: dict[str, Any]) -> None:
        """Raise ApiError for what is not served."""
        for name, value in self.of(body):
            if name in self.fixed and value not in self.fixed[name]:
                raise ApiError(f"{name}={value!r:.100} is not supported here: leave it out", code="unsupported_value")
            if not any(name in known for known in (self.read, self.fixed, self.hints, self.beside)):
                raise ApiError(f"the field {name!r:.100} is not read here: leave it out", code="unsupported_field")

    def has_hint(self, body: dict[str, Any]) -> bool:
        return any(name in self.hints and value not in self.hints[name] for name, value in self.of(body))

    def of(self, body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Those that are not null."""
        for name, value in body.items():
            if name in self.objects:
                yield from ((f"{name}.{inner}", found) for inner, found in (optional(body, name, dict) or {}).items()
                            if found is not None)
            elif value is not None:
                yield name, value


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
    called: str = ""
    """The tool that the client names in tool_choice; then `choice` is required."""
    schema: dict[str, Any] | None = None
    """The JSON schema that the text must satisfy (structured.py)."""

    @property
    def model(self) -> str:
        return optional(self.body, "model", str) or ""

    @property
    def is_stream(self) -> bool:
        return optional(self.body, "stream", bool) or False


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


def expected(body: dict[str, Any], name: str, kind: type) -> Any:
    """The value of this field, which is of this kind. Raises ApiError."""
    found = body.get(name)
    if not isinstance(found, kind):
        raise ApiError(f"{name} is {found!r:.100}, and must be {KINDS[kind]}", code="malformed")
    return found


def optional(body: dict[str, Any], name: str, kind: type) -> Any:
    """The same, or None for one that is null or not there."""
    return None if body.get(name) is None else expected(body, name, kind)


def objects_in(body: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of objects; none where it is null or not there."""
    found = optional(body, name, list) or []
    for i, item in enumerate(found):
        if not isinstance(item, dict):
            raise ApiError(f"{name}[{i}] is {item!r:.100}, and must be an object", code="malformed")
    return found


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


def text_of(message: dict[str, Any], name: str = "content") -> str:
    """The text of a message's content: a text, or a list of parts. Raises ApiError for parts that are no text."""
    content = message.get(name)
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(map(text_of_part, objects_in(message, name)))


def text_of_part(part: dict[str, Any]) -> str:
    kind = part.get("type")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise ApiError(f"a part of type {kind!r:.100} in a message's content: the model takes text alone here",
                       code="unsupported_content")
    return optional(part, "refusal", str) or "" if kind == "refusal" else expected(part, "text", str)


def parts_of(message: dict[str, Any], name: str = "content") -> str | list:
    """The content of a user's or a tool's message: its text, or with pictures a list of texts and of the client's
    parts, which `read_pictures` reads."""
    content = message.get(name)
    parts = [] if isinstance(content, str) else objects_in(message, name)
    if not any(map(is_picture, parts)):
        return text_of(message, name)
    return [part if is_picture(part) else text_of_part(part) for part in parts]


def read_pictures(messages: Sequence[Message]) -> list[Message]:
    """The messages with the files of pictures in their contents. Raises ApiError for a picture that cannot be read, is
    too large, or is at another URL than a data URL."""
    try:
        return [message | {"content": content_of(message["content"])} for message in messages]
    except ValueError as error:
        raise ApiError(str(error), code="unsupported_content") from None


def function_of(tool: dict[str, Any], schema: str = "parameters") -> dict[str, Any]:
    """A tool in the form that chat templates take. `schema`: the field of its arguments' JSON schema."""
    if not expected(tool, "name", str):
        raise ApiError("a tool's name is empty")
    function = {"name": tool["name"], "description": optional(tool, "description", str) or "",
                "parameters": optional(tool, schema, dict) or {"type": "object", "properties": {}}}
    return {"type": "function", "function": function}


def choice_of(body: dict[str, Any]) -> str:
    """The request's tool_choice: auto, none, or required, which Anthropic calls any. A tool's name is required too."""
    choice = body.get("tool_choice")
    kind = choice.get("type", "") if isinstance(choice, dict) else choice
    kinds = {None: "auto", "auto": "auto", "none": "none", "required": "required", "any": "required",
             "function": "required", "tool": "required"}
    if not isinstance(kind, str | None) or kind not in kinds:
        raise ApiError(f"tool_choice={choice!r:.100} is not supported: there are auto, required, none and a tool's "
                       f"name", code="unsupported_value")
    return kinds[kind]


def called_of(body: dict[str, Any]) -> str:
    """The name of the tool that a request's tool_choice has, or "". Raises ApiError for a tool that is not given."""
    choice = body.get("tool_choice")
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "tool"):
        return ""
    holder = choice if "name" in choice else expected(choice, "function", dict)
    name = expected(holder, "name", str)
    tools = [tool["function"] if isinstance(tool.get("function"), dict) else tool for tool in objects_in(body, "tools")]
    if name not in [tool.get("name") for tool in tools]:
        raise ApiError(f"tool_choice names {name!r:.100}, which is none of the request's tools")
    return name


def count_of(body: dict[str, Any], *names: str) -> int | None:
    """The first of these fields that the request has: a number of tokens."""
    for name in names:
        value = body.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ApiError(f"{name}={value!r:.100} must be a whole number of at least 1")
            return value
    return None


def temperature_of(body: dict[str, Any]) -> float | None:
    value = body.get("temperature")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 <= value <= 2):
        raise ApiError(f"temperature={value!r:.100} must be a number from 0 to 2")
    return value


def stops_of(body: dict[str, Any], name: str) -> list[str]:
    value = body.get(name)
    stops = [value] if isinstance(value, str) else optional(body, name, list) or []
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise ApiError(f"{name}={value!r:.100} must be texts that are not empty")
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
