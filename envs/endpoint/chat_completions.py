"""OpenAI's /v1/chat/completions (developers.openai.com, API reference, chat completions)."""

from collections.abc import Iterator
from typing import Any

from envs.endpoint.asked import (
    Answer,
    ApiError,
    Asked,
    Fields,
    Message,
    call_of,
    called_of,
    choice_of,
    count_of,
    expected,
    function_of,
    objects_in,
    optional,
    parts_of,
    stops_of,
    temperature_of,
    text_of,
    with_names,
)
from envs.endpoint.structured import schema_of

FIELDS = Fields(
    read=("model", "messages", "tools", "tool_choice", "max_completion_tokens", "max_tokens", "temperature", "stop",
          "stream", "stream_options.include_usage", "response_format"),
    fixed={
        "n": (1,), "logprobs": (False,), "top_logprobs": (0,), "top_p": (1,), "frequency_penalty": (0,),
        "presence_penalty": (0,), "logit_bias": ({},),
        "modalities": (["text"],), "functions": ([],), "function_call": ("none", "auto"), "audio": (),
        "web_search_options": (),
        # of vLLM's server
        "top_k": (-1, 0), "min_p": (0,), "repetition_penalty": (1,), "min_tokens": (0,), "ignore_eos": (False,),
        "structured_outputs": (), "chat_template_kwargs": ({},),
    },
    hints={"seed": (), "reasoning_effort": (), "verbosity": ("medium",), "parallel_tool_calls": (True,),
           "prediction": ()},
    beside=("metadata", "moderation", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
            "safety_identifier", "service_tier", "store", "stream_options.include_obfuscation", "user"),
    objects=("stream_options",),
)
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
END = "[DONE]"


def read(body: dict[str, Any], earlier: dict[str, list[Message]]) -> Asked:
    """`earlier` is for other forms."""
    FIELDS.check(body)
    return Asked(
        body, with_names([read_message(message) for message in objects_in(body, "messages")]),
        [read_tool(tool) for tool in objects_in(body, "tools")],
        count_of(body, "max_completion_tokens", "max_tokens"), temperature_of(body), stops_of(body, "stop"),
        choice_of(body), called_of(body), schema_of(body, "response_format", "json_schema"),
    )


def read_message(message: dict[str, Any]) -> Message:
    role = ROLES.get(expected(message, "role", str))
    if role is None:
        raise ApiError(f"a message's role is {message['role']!r:.100}; there are {', '.join(ROLES)}")
    takes_pictures = role in ("user", "tool")
    found = {"role": role, "content": (parts_of if takes_pictures else text_of)(message)}
    found |= {key: message[key] for key in ("name", "tool_call_id") if optional(message, key, str)}
    calls = [read_call(call) for call in objects_in(message, "tool_calls")]
    return found | ({"tool_calls": calls} if calls else {})


def read_call(call: dict[str, Any]) -> dict[str, Any]:
    function = expected(call, "function", dict)
    return call_of({"id": optional(call, "id", str) or "", "name": expected(function, "name", str),
                    "arguments": expected(function, "arguments", str)})


def read_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ApiError(f"a tool's type is {tool.get('type')!r:.100}; there are functions alone",
                       code="unsupported_value")
    return function_of(expected(tool, "function", dict))


def write(asked: Asked, answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.calls:
        message |= {"content": answer.text or None, "tool_calls": list(map(write_call, answer.calls))}
    choice = {"index": 0, "message": message, "finish_reason": reason_of(answer), "logprobs": None}
    return head(asked, answer, "chat.completion") | {"choices": [choice], "usage": usage_of(answer)}


def events(asked: Asked, answer: Answer) -> Iterator[dict[str, Any] | str]:
    """The stream's data, one after the other: the whole text is one piece, for it is complete before it is sent."""
    top = head(asked, answer, "chat.completion.chunk")
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if answer.text:
        deltas.append({"content": answer.text})
    deltas += [{"tool_calls": [{"index": i} | write_call(call)]} for i, call in enumerate(answer.calls)]
    for delta in deltas:
        yield top | {"choices": [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}]}
    yield top | {"choices": [{"index": 0, "delta": {}, "finish_reason": reason_of(answer), "logprobs": None}]}
    if (asked.body.get("stream_options") or {}).get("include_usage"):
        yield top | {"choices": [], "usage": usage_of(answer)}
    yield END


def write_error(error: ApiError) -> dict[str, Any]:
    return {"error": {"message": str(error), "type": error.kind, "param": None, "code": error.code}}


def head(asked: Asked, answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": asked.model,
            "system_fingerprint": None}


def write_call(call: dict[str, str]) -> dict[str, Any]:
    return {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}


def reason_of(answer: Answer) -> str:
    if answer.calls:
        return "tool_calls"
    return "length" if answer.is_truncated else "stop"


def usage_of(answer: Answer) -> dict[str, int]:
    return {"prompt_tokens": answer.num_prompt, "completion_tokens": answer.num_sampled,
            "total_tokens": answer.num_prompt + answer.num_sampled}
