"""The conversation of an episode with the model. It lives in the episode's own process; the model, the tokens and the
chat template are in the trainer, at the other end of a connection."""

import asyncio
import contextlib
import inspect
import json
import operator
import signal
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

from transformers.utils import chat_template_utils

MAX_RESULT = 100_000  # characters of a tool's result; the rest is cut
MAX_RESULTS = 400_000  # of all results after one reply; of a further result
MIN_RESULT = 1000  # are kept
MAX_CALLS = 32  # calls of tools after one reply; further ones are errors
MAX_REFUSED = 100  # replies that an episode may ask for in vain


class Chat:
    """The argument `chat` of `async def episode(chat, row)`."""

    def __init__(self, messages: list[dict[str, Any]], tokens_left: int, timeout_s: float,
                 ask: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]], tell_tool: Callable[[str], None]):
        self.messages = messages
        """The conversation so far: the row's prompt, then the added messages and the model's replies."""
        self.tokens_left = tokens_left
        """Number of tokens left for the episode, including tokens of the model, of users and of tools."""
        self.turns = 0
        """Number of replies so far."""
        self.finish_reason = ""
        """How the last reply ended. stop: with an end token; length: it was truncated. If there was no reply, the
        reason: length (no tokens left) or turns (--rollout.max-turns)."""
        self.tools: list[Callable] = []
        """Functions with type hints and a docstring, or with an attribute `schema`, that the model may call. Set them
        before the first reply."""
        self.tool_calls: list[dict[str, Any]] = []
        """The tool calls in the last reply, for `tool_call`."""
        self.num_tool_calls = 0
        self.num_tool_errors = 0
        self.timeout_s = timeout_s
        """Time limit in seconds of a tool, and of all code between two replies (--rollout.tool-timeout-s)."""
        self._ask = ask
        self._tell_tool = tell_tool
        self._num_refused = 0
        self._calls_left = MAX_CALLS
        self._characters_left = MAX_RESULTS

    async def reply(self, *messages: dict[str, Any], max_tokens: int | None = None) -> str | None:
        """Add these messages, then let the model write its next turn. Returns its text; None if no room or no turn is
        left, see `finish_reason`. `max_tokens`: of this reply; default: all that are left."""
        for message in messages:
            texts = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError(f"chat.reply takes messages like {{'role': 'user', 'content': '...'}}, not "
                                f"{message!r:.80}")
        if self.turns and not messages:
            raise ValueError("chat.reply() without messages: after the first reply the model must be given something")
        if max_tokens is not None and operator.index(max_tokens) < 1:
            raise ValueError(f"chat.reply(max_tokens={max_tokens}) must be at least 1")
        question: dict[str, Any] = {"messages": messages, "max_tokens": max_tokens and operator.index(max_tokens)}
        if not self.turns:
            question["tools"] = [schema_of(tool) for tool in self.tools]
        answer = await self._ask(question)
        self.finish_reason = answer["finish_reason"]
        self.tokens_left = answer["tokens_left"]
        self.tool_calls = answer.get("tool_calls", [])
        if answer["text"] is None:
            self._num_refused += 1
            if self._num_refused > MAX_REFUSED:
                raise RuntimeError(f"chat.reply() has returned None {MAX_REFUSED} times ({self.finish_reason}): then "
                                   f"the episode must end")
            return None
        self.messages += messages
        self._calls_left, self._characters_left = MAX_CALLS, MAX_RESULTS
        self.turns += 1
        reply = {"role": "assistant", "content": answer["text"]}
        self.messages.append(reply)
        return answer["text"]

    async def tool_call(self, call: dict[str, Any]) -> dict[str, str]:
        """Run one of `tool_calls`. Returns the message for the model: the result, or the error."""
        self.num_tool_calls += 1
        self._calls_left -= 1
        name = call.get("name") or ""
        self._tell_tool(name)  # from here on it has --rollout.tool-timeout-s
        try:
            content = await self._run_tool(name, call)
        except Exception as error:  # any error of a tool is told to the model, and counted
            self.num_tool_errors += 1
            content = f"Error: {type(error).__name__}: {error}"
        self._tell_tool(name)
        content = content[: min(MAX_RESULT, max(self._characters_left, MIN_RESULT))]
        self._characters_left -= len(content)
        return {"role": "tool", "name": name, "content": content}

    async def _run_tool(self, name: str, call: dict[str, Any]) -> str:
        if call.get("error"):
            raise ValueError(call["error"])
        if self._calls_left < 0:
            raise ValueError(f"this is more than {MAX_CALLS} calls after one reply")
        tools = {tool.__name__: tool for tool in self.tools}
        if name not in tools:
            raise ValueError(f"there is no tool {name!r}; there are {', '.join(tools) or 'none'}")
        arguments = json.loads(call["arguments"])
        inspect.signature(tools[name]).bind(**arguments)
        with _alarm(self.timeout_s):
            result = tools[name](**arguments)
            if inspect.isawaitable(result):
                result = await _within(result, self.timeout_s)
        return result if isinstance(result, str) else json.dumps(result)


def schema_of(tool: Callable) -> dict[str, Any]:
    """The JSON schema of a tool: its attribute `schema`, or made from its type hints and docstring. Raises ValueError
    that names what is missing there."""
    if "schema" in vars(tool):
        return vars(tool)["schema"]
    # without torch, which takes seconds to import and is only asked for the type of audio
    with mock.patch.object(chat_template_utils, "is_torch_available", return_value=False):
        try:
            return chat_template_utils.get_json_schema(tool)
        except chat_template_utils.DocstringParsingException as error:
            raise ValueError(f"the tool {tool.__name__} needs a docstring with its arguments: {error}") from None


async def _within(result: Awaitable, seconds: float) -> Any:
    """Await it, or raise TimeoutError."""
    try:
        async with asyncio.timeout(seconds) as deadline:
            return await result
    except TimeoutError:
        if deadline.expired():
            raise TimeoutError(f"it took longer than {seconds:g} s") from None
        raise


@contextlib.contextmanager
def _alarm(seconds: float):
    """Raise TimeoutError in Python code that runs longer. Code that hangs in C ends with the episode's deadline."""
    def expire(*_) -> None:
        if asyncio.current_task():  # else `_within` ends the tool that is awaited; here the error would end the loop
            raise TimeoutError(f"it took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
