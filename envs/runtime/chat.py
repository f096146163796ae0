"""The conversation of an episode with the model. It lives in the episode's own process; the model, the tokens and the
chat template are in the trainer, at the other end of a connection."""

import asyncio
import inspect
import json
import operator
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from envs.pictures import Content, shortened, told_of
from envs.tools import call_tool, name_of, schema_of, stopped_clocks

MAX_RESULT = 100_000  # characters of a tool's result; the rest is cut
MAX_RESULTS = 400_000  # of all results after one reply; of a further result
MIN_RESULT = 1000  # are kept
MAX_CALLS = 32  # calls of tools after one reply; further ones are errors
MAX_REFUSED = 100  # replies that an episode may ask for in vain
WRITING = "while the model writes another reply of this conversation: await one, then the next, or"
# the model writes on, and what it writes is in the trainer's conversation alone
CANCELLED = "after a reply of this conversation was cancelled, which cannot be taken back:"


class Chat:
    """The argument `chat` of `async def episode(chat, row)`: a conversation with the model. `chat.begin()` begins
    others."""

    def __init__(self, messages: list[dict[str, Any]], tokens_left: int, timeout_s: float,
                 ask: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]], restart_clock: Callable[[], None]):
        self.role = ""
        """Of this conversation: "" or what `begin` was given."""
        self.all = [self]
        """All conversations of the episode, in the order in which they were begun."""
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
        self.content = ""
        """The last reply without its tool calls and without what stands before </think>."""
        self.usage = (0, 0)
        """Tokens that the model read for the last reply, and that it wrote."""
        self.num_tool_calls = 0
        self.num_tool_errors = 0
        self.timeout_s = timeout_s
        """Time limit in seconds of a tool, and of all code between two replies (--rollout.tool-timeout-s)."""
        self.restart_clock = restart_clock
        """Begin `timeout_s` anew. For code that waits for its turn, as a tool does for one of its places."""
        self._ask = ask
        self._blocked = ""  # why the next reply cannot be asked for
        self._shown: list[Callable] = []  # the tools as the model was told of them
        self._num_refused = 0
        self._calls_left = MAX_CALLS
        self._characters_left = MAX_RESULTS

    def begin(self, role: str = "") -> "Chat":
        """Another conversation of this episode, such as one with a sub-agent. It begins with the messages of its first
        `reply`, is trained like this one, and its replies may be waited for together with others. `role`: a name."""
        other = Chat([], self.tokens_left, self.timeout_s, self._ask, self.restart_clock)
        other.role = role
        other.all = self.all
        self.all.append(other)
        return other

    async def reply(self, *messages: dict[str, Any], max_tokens: int | None = None, stop: Sequence[str] = (),
                    temperature: float | None = None, schema: dict[str, Any] | None = None) -> str | None:
        """Add these messages, then let the model write its next turn. Returns its text; None if no room or no turn is
        left, see `finish_reason`. `max_tokens`: of this reply; default: all that are left. `stop`: further texts that
        end it. `temperature`: a reply with another one than the run's is not trained. `schema`: a JSON schema that the
        reply satisfies, because it is sampled under a grammar: training needs an importance weight."""
        told = [told_of(message) for message in messages]
        if not messages and (self.turns or self is not self.all[0]):
            raise ValueError("chat.reply() without messages: the model must be given something, unless it answers the "
                             "row's prompt")
        if max_tokens is not None and operator.index(max_tokens) < 1:
            raise ValueError(f"chat.reply(max_tokens={max_tokens}) must be at least 1")
        if self._blocked:
            raise RuntimeError(f"chat.reply() was called {self._blocked} chat.begin() another conversation")
        if not self.turns:
            self._shown = [*self.tools]
        elif self.tools != self._shown:
            raise ValueError("chat.tools was set after the first reply: the model has been told of other tools")
        self._blocked = WRITING
        try:
            with stopped_clocks(self.restart_clock):
                answer = await self._ask({
                    "conversation": self.all.index(self),
                    "role": self.role,
                    "messages": told,
                    "tools": [] if self.turns else [schema_of(tool) for tool in self.tools],
                    "max_tokens": max_tokens and operator.index(max_tokens),
                    "stop": [stop] if isinstance(stop, str) else list(stop),
                    "temperature": temperature,
                    "schema": schema,
                })
        except asyncio.CancelledError:
            self._blocked = CANCELLED
            raise
        except Exception:  # of a tool's schema, or a message is too long: nothing was sent
            self._blocked = ""
            raise
        self._blocked = ""
        self.finish_reason = answer["finish_reason"]
        self.tool_calls = answer.get("tool_calls", [])
        for chat in self.all:
            chat.tokens_left = answer["tokens_left"]
        if answer["text"] is None:
            self._num_refused += 1
            if sum(chat._num_refused for chat in self.all) > MAX_REFUSED:
                raise RuntimeError(f"chat.reply() has returned None {MAX_REFUSED} times ({self.finish_reason}): then "
                                   f"the episode must end")
            return None
        self._calls_left = MAX_CALLS
        self._characters_left = MAX_RESULTS
        self.turns += 1
        self.content = answer.get("content", answer["text"])
        self.usage = tuple(answer.get("usage", (0, 0)))
        self.messages += [*messages, {"role": "assistant", "content": answer["text"]}]
        return answer["text"]

    async def call_tools(self) -> list[dict[str, Any]]:
        """Run all of `tool_calls` at the same time. Returns the messages for the model, in their order."""
        return await asyncio.gather(*map(self.tool_call, self.tool_calls))

    async def tool_call(self, call: dict[str, Any]) -> dict[str, Any]:
        """Run one of `tool_calls`. Returns the message for the model: the result, or the error."""
        self.num_tool_calls += 1
        self._calls_left -= 1
        name = call.get("name") or ""
        self.restart_clock()  # from here on it has --rollout.tool-timeout-s
        try:
            content = await self._run_tool(name, call)
        # any error of a tool is told to the model, and counted; SystemExit is argparse's for wrong arguments
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            is_cancelled = asyncio.current_task().cancelling()  # from outside; a library may raise the same by itself
            if isinstance(error, asyncio.CancelledError) and is_cancelled:
                raise
            self.num_tool_errors += 1
            content = f"Error: {type(error).__name__}: {error}"
        self.restart_clock()
        content, num_characters = shortened(content, min(MAX_RESULT, max(self._characters_left, MIN_RESULT)))
        self._characters_left -= num_characters
        return {"role": "tool", "name": name, "content": content}

    async def _run_tool(self, name: str, call: dict[str, Any]) -> Content:
        if call.get("error"):
            raise ValueError(call["error"])
        if self._calls_left < 0:
            raise ValueError(f"this is more than {MAX_CALLS} calls after one reply")
        tools = {name_of(tool): tool for tool in self.tools}
        if name not in tools:
            raise ValueError(f"there is no tool {name!r}; there are {', '.join(tools) or 'none'}")
        tool = tools[name]
        arguments = json.loads(call["arguments"])
        inspect.signature(tool).bind(**arguments)
        return await call_tool(tool, name, arguments, self.timeout_s, self.restart_clock)
