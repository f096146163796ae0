"""Anthropic's /v1/messages (docs.anthropic.com, API reference, messages and streaming)."""

import json
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
    read=("model", "messages", "system", "tools", "tool_choice", "max_tokens", "temperature", "stop_sequences",
          "stream", "output_config.format", "output_format"),
    fixed={"top_p": (1,), "top_k": (), "mcp_servers": ([],), "container": (), "output_config.task_budget": (),
           "compaction": (), "thread": (), "fallbacks": ([],)},
    hints={"thinking": (), "output_config.effort": (), "speed": ("standard",), "context_management": ({}, [])},
    beside=("betas", "billing_policy", "cache_control", "diagnostics", "fallback_credit_token", "inference_geo",
            "metadata", "service_tier", "user_profile_id", "workspace_id"),
    objects=("output_config",),
)


def read(body: dict[str, Any], earlier: dict[str, list[Message]]) -> Asked:
    """`earlier` is for other forms."""
    FIELDS.check(body)
    if body.get("max_tokens") is None:
        raise ApiError("max_tokens: field required")
    messages = [{"role": "system", "content": text_of(body, "system")}] if body.get("system") else []
    for message in objects_in(body, "messages"):
        messages += read_message(message)
    if not messages or messages[-1]["role"] == "assistant":
        raise ApiError("messages must end with the user's: the model does not continue a text of the assistant here")
    # the beta of structured outputs had a field of its own
    schema = schema_of(optional(body, "output_config", dict) or {}, "format") or schema_of(body, "output_format")
    return Asked(
        body, with_names(messages), [read_tool(tool) for tool in objects_in(body, "tools")],
        count_of(body, "max_tokens"), temperature_of(body), stops_of(body, "stop_sequences"), choice_of(body),
        called_of(body), schema,
    )


def read_message(message: dict[str, Any]) -> list[Message]:
    """A user's message may hold the results of several tools and a text: each is a message of its own here."""
    role, content = expected(message, "role", str), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ApiError(f"a message's role is {role!r:.100}; there are user and assistant")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else objects_in(message, "content")
    calls, results, others = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            arguments = json.dumps(expected(block, "input", dict))
            calls.append(call_of({"id": expected(block, "id", str), "name": expected(block, "name", str),
                                  "arguments": arguments}))
        elif kind == "tool_result":
            results.append({"role": "tool", "content": parts_of(block),
                            "tool_call_id": expected(block, "tool_use_id", str)})
        elif kind not in ("thinking", "redacted_thinking"):  # these are not shown to the model again
            others.append(block)
    if results and not others:
        return results
    content = (parts_of if role == "user" else text_of)({"content": others})
    return [*results, {"role": role, "content": content} | ({"tool_calls": calls} if calls else {})]


def read_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise ApiError(f"a tool's type is {tool['type']!r:.100}; there are tools of your own alone",
                       code="unsupported_value")
    expected(tool, "input_schema", dict)
    return function_of(tool, "input_schema")


def write(asked: Asked, answer: Answer) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    if answer.text or not answer.calls:
        blocks.append({"type": "text", "text": answer.text})
    blocks += [{"type": "tool_use", "id": call["id"], "name": call["name"], "input": json.loads(call["arguments"])}
               for call in answer.calls]
    return {
        "id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": asked.model, "content": blocks,
        "stop_reason": reason_of(answer), "stop_sequence": answer.stop or None,
        "usage": {"input_tokens": answer.num_prompt, "output_tokens": answer.num_sampled,
                  "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0},
    }


def events(asked: Asked, answer: Answer) -> Iterator[dict[str, Any]]:
    """The stream's events: each block is opened, filled in one piece and closed."""
    message = write(asked, answer)
    begun = {"content": [], "stop_reason": None, "stop_sequence": None,
             "usage": message["usage"] | {"output_tokens": 0}}
    yield {"type": "message_start", "message": message | begun}
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty = {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
        yield {"type": "content_block_start", "index": index, "content_block": block | empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    delta = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": answer.num_sampled}}
    yield {"type": "message_stop"}


def write_error(error: ApiError) -> dict[str, Any]:
    return {"type": "error", "error": {"type": error.kind, "message": str(error)}}


def reason_of(answer: Answer) -> str:
    if answer.calls:
        return "tool_use"
    if answer.stop:
        return "stop_sequence"
    return "max_tokens" if answer.is_truncated else "end_turn"
