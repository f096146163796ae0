"""What a client gets of the model's reply: its text and calls of tools; or why there is none."""

import hashlib
import time
from typing import Any

from envs.endpoint.asked import Answer, ApiError, Asked
from envs.endpoint.structured import is_json
from envs.endpoint.tools import is_readable


def answer_of(chat: Any, text: str, asked: Asked, name: str, counts: dict[str, int]) -> tuple[Answer, int]:
    """The answer to a request from the last reply of `chat`, and how many of its calls cannot be read. Adds to
    `counts` what a request asked for and did not get."""
    calls = chat.tool_calls if asked.choice != "none" else []
    read = [call for call in calls if is_readable(call)]
    # templates of Mistral's take ids of nine letters or digits
    ids = [hashlib.sha256(f"{name} {i}".encode()).hexdigest()[:9] for i in range(len(read))]
    is_called = bool(read)
    if asked.called:
        is_called = asked.called in [call["name"] for call in read]
    counts["not_called"] += asked.choice == "required" and not is_called
    has_calls_in_text = chat.tool_calls and not read  # which are shown if they are not read
    content = text.rpartition("</think>")[2] if has_calls_in_text else chat.content
    if asked.schema is not None and not read:
        counts["unparsed"] += not is_json(content, asked.schema)
    found = {stop: content.find(stop) for stop in asked.stop if stop in content}
    stop = min(found, key=found.get, default="")
    answer = Answer(
        name, int(time.time()), content[: found[stop]] if stop else content,
        [{"id": id} | call for id, call in zip(ids, read)], chat.finish_reason == "length" and not stop, stop,
        *chat.usage,
    )
    return answer, len(calls) - len(read)


def refusal_of(reason: str) -> ApiError:
    """The error of a request that gets no reply."""
    if reason == "length":
        return ApiError("prompt is too long: it exceeds the model's maximum context length, which here counts all "
                        "tokens of the episode (--rollout.max-response-length)", code="context_length_exceeded")
    return ApiError("the episode has no turn left (--rollout.max-turns)", code="turns_exceeded")
