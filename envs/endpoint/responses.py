"""OpenAI's /v1/responses (developers.openai.com, API reference, responses and their streaming events)."""

from collections.abc import Iterator
from typing import Any

from envs.endpoint import chat_completions
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
    temperature_of,
    with_names,
)
from envs.endpoint.structured import schema_of

FIELDS = Fields(
    read=("model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "max_output_tokens",
          "temperature", "stream", "text.format"),
    fixed={
        "background": (False,), "conversation": (), "prompt": (), "top_logprobs": (0,), "top_p": (1,),
        "stop": ([],),
    },
    hints={"reasoning": (), "text.verbosity": ("medium",), "parallel_tool_calls": (True,), "include": ([],),
           "truncation": ("disabled",), "max_tool_calls": (), "context_management": ([],)},
    beside=("metadata", "moderation", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
            "safety_identifier", "service_tier", "store", "stream_options.include_obfuscation", "user"),
    objects=("text", "stream_options"),
)
write_error = chat_completions.write_error


def read(body: dict[str, Any], earlier: dict[str, list[Message]]) -> Asked:
    """`earlier`: the messages of each response, by its id, for previous_response_id."""
    FIELDS.check(body)
    previous = optional(body, "previous_response_id", str)
    if previous and previous not in earlier:
        raise ApiError(f"previous_response_id={previous!r:.100} is no response of this episode", 404, "not_found")
    instructions = optional(body, "instructions", str)
    messages = [{"role": "system", "content": instructions}] if instructions else []
    messages += earlier[previous] if previous else []
    if isinstance(body.get("input"), str):
        messages.append({"role": "user", "content": body["input"]})
    else:
        for item in objects_in(body, "input"):
            add_item(messages, item)
    return Asked(
        body, with_names(messages), [read_tool(tool) for tool in objects_in(body, "tools")],
        count_of(body, "max_output_tokens"), temperature_of(body), [], choice_of(body),
        called_of(body), schema_of(optional(body, "text", dict) or {}, "format"),
    )


def add_item(messages: list[Message], item: dict[str, Any]) -> None:
    """What the model wrote at once comes as several items, a text and each of its calls; it is one message."""
    kind = item.get("type", "message")
    if kind == "message":
        messages.append(chat_completions.read_message({"role": item.get("role"), "content": item.get("content")}))
    elif kind == "function_call":
        call = call_of({"id": expected(item, "call_id", str), "name": expected(item, "name", str),
                        "arguments": expected(item, "arguments", str)})
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1] = messages[-1] | {"tool_calls": [*messages[-1].get("tool_calls", []), call]}
    elif kind == "function_call_output":
        messages.append({"role": "tool", "content": parts_of(item, "output"),
                         "tool_call_id": expected(item, "call_id", str)})
    elif kind != "reasoning":  # which is not shown to the model again
        raise ApiError(f"an input item of type {kind!r:.100} is not supported here", code="unsupported_content")


def read_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ApiError(f"a tool's type is {tool.get('type')!r:.100}; there are functions alone",
                       code="unsupported_value")
    return function_of(tool)


def write(asked: Asked, answer: Answer) -> dict[str, Any]:
    body = asked.body
    status = "incomplete" if answer.is_truncated else "completed"
    return {
        "id": f"resp_{answer.id}", "object": "response", "created_at": answer.created, "status": status, "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if answer.is_truncated else None,
        "instructions": body.get("instructions"), "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {}, "model": asked.model, "output": items_of(answer, status),
        "parallel_tool_calls": True, "previous_response_id": body.get("previous_response_id"),
        "temperature": asked.temperature, "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [], "top_p": None, "text": {"format": {"type": "text"}},
        "usage": {
            "input_tokens": answer.num_prompt, "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.num_sampled, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.num_prompt + answer.num_sampled,
        },
    }


def items_of(answer: Answer, status: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.text or not answer.calls:
        text = {"type": "output_text", "text": answer.text, "annotations": []}
        items.append({"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "status": status,
                      "content": [text]})
    for call in answer.calls:
        items.append({"id": f"fc_{call['id']}", "type": "function_call", "status": "completed",
                      "call_id": call["id"], "name": call["name"], "arguments": call["arguments"]})
    return items


def events(asked: Asked, answer: Answer) -> Iterator[dict[str, Any]]:
    """The stream's events: each item is opened, filled in one piece and closed."""
    for number, event in enumerate(unnumbered_events(write(asked, answer))):
        yield event | {"sequence_number": number}


def unnumbered_events(response: dict[str, Any]) -> Iterator[dict[str, Any]]:
    begun = response | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(response["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            (part,) = item["content"]
            inner = place | {"content_index": 0}
            yield {"type": "response.output_item.added", "output_index": index,
                   "item": item | {"status": "in_progress", "content": []}}
            yield inner | {"type": "response.content_part.added", "part": part | {"text": ""}}
            yield inner | {"type": "response.output_text.delta", "delta": part["text"], "logprobs": []}
            yield inner | {"type": "response.output_text.done", "text": part["text"], "logprobs": []}
            yield inner | {"type": "response.content_part.done", "part": part}
        else:
            arguments = item["arguments"]
            yield {"type": "response.output_item.added", "output_index": index,
                   "item": item | {"status": "in_progress", "arguments": ""}}
            yield place | {"type": "response.function_call_arguments.delta", "delta": arguments}
            yield place | {"type": "response.function_call_arguments.done", "name": item["name"],
                           "arguments": arguments}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}
