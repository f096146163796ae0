"""Conversations of several turns as tokens. The model's text is never encoded again: between two of its turns only the
new messages are rendered and encoded. The tokens of users and tools have mask False."""

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.runtime.template import GUARD, rendered, special_tokens, text_of

Message = dict[str, Any]


class FlagError(ValueError):
    """A mistake in the flags that every episode would meet: it stops the run, where another error ends one episode."""


def constrains() -> bool:
    """Whether replies may be sampled under the grammar of a JSON schema. Their tokens then come from another
    distribution than the model's, which is decided once for all ranks and for the whole run."""
    return os.environ.get("AGENT_STRUCTURED") == "constrain"


def environments(spec: str) -> dict[str, str]:
    """What --rollout.episode names: its name, "" if it is alone -> path/to/file.py:name. Raises ValueError for one of
    several that has no name of its own."""
    if "=" not in spec:
        return {"": spec}
    found = [part.strip().rpartition("=") for part in spec.split(",")]
    named = {name: file for name, _, file in found}
    if "" in named or len(named) < len(found):
        raise ValueError(f"--rollout.episode {spec}: several environments are NAME=FILE,NAME=FILE, each name once")
    return named


class ChatTemplate:
    """The text that the chat template renders, and its tokens."""

    def __init__(self, tokenizer: Any, arguments: dict[str, Any], stops: Sequence[int],
                 show: Callable[[bytes], list[int]] | None = None):
        """`arguments`: of `apply_chat_template`; `stops`: ids that end a reply; `show`: the file of a picture -> the
        tokens that the model sees for it."""
        self.tokenizer = tokenizer
        self.arguments = arguments
        self.stops = set(stops)
        self.show = show
        self.place = f"@@{secrets.token_hex(8)}"
        """What stands for a picture in messages. Nobody knows it who might write it."""
        self.special = special_tokens(tokenizer)

    def render(self, messages: Sequence[Message], tools: list[dict] | None) -> str:
        """The text up to the start of the model's next turn. What messages say is guarded in it where it spells a
        special token: only so can that be told from the template's own, if it is the same token."""
        roles = ", ".join(message["role"] for message in messages)
        return rendered(self.tokenizer, messages, f"an episode's messages ({roles})", tools=tools or None,
                        add_generation_prompt=True, **self.arguments)

    def encode(self, text: str, files: Sequence[bytes] = ()) -> list[int]:
        """The tokens of a rendered text, and of `files`, the pictures in it, which are shown at their places. What is
        guarded is text: a web page cannot end a turn."""
        first, *others = map(self.special.encode, text.split(self.place))
        left = iter(files)
        tokens = list(first)
        for piece in others:
            tokens += self.show(next(left))
            tokens += piece
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return text_of(self.tokenizer, tokens, self.stops)

    def shortened(self, text: str, limit: int) -> str:
        """A tool's text; if it has more than `limit` tokens, without its middle, and it says so. 0: no limit."""
        if not limit:
            return text
        tokens = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        num_cut = len(tokens) - limit
        if num_cut <= 0:
            return text
        end = limit // 2
        start = end + num_cut
        return f"{self.decode(tokens[:end])}\n[{num_cut} tokens were cut here]\n{self.decode(tokens[start:])}"

    def after_reply(self, messages: Sequence[Message], new: Sequence[Message], tools: list[dict] | None) -> str:
        """The text between the reply that ends `messages` and the next reply. Raises ValueError for a chat template
        that leaves a message out, or writes a reply twice."""
        place = f"@@{secrets.token_hex(8)}"  # in no message
        with_place = [*messages[:-1], messages[-1] | {"content": place}, *new]
        pieces = self.render(with_place, tools).split(place)
        if len(pieces) != 2:
            raise ValueError(f"the chat template writes the last reply {len(pieces) - 1} times, must be once: "
                             f"--data.chat-template-file FILE names another")
        after = pieces[1]
        check_shown(new, after)
        return after


def check_shown(messages: Sequence[Message], text: str) -> None:
    """Raises ValueError for a message of users or tools that the template has left out of the text. It may write the
    content as it is, or as JSON."""
    text = text.replace(GUARD, "")
    for message in messages:
        if message["role"] == "assistant":  # a template may shorten what it has said earlier
            continue
        content = message["content"].strip()
        forms = (content, json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1])
        if not any(form in text for form in forms):
            raise ValueError(
                f"the chat template does not show the model the content of this message, role "
                f"{message['role']}: {content[:80]!r}. --data.chat-template-file FILE names another"
            )


@dataclass
class Conversation:
    """Messages, and the sequence of tokens that the model sees, which grows turn by turn."""

    template: ChatTemplate
    on_rewriting: str  # --rollout.rewritten-history
    prompt: list[int]  # tokens before the first reply
    messages: list[Message]
    tools: list[dict] | None = None  # JSON schemas
    tokens: list[int] = field(default_factory=list)  # after the prompt
    logp: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    left_behind: list["Conversation"] = field(default_factory=list)  # sequences before the history was rewritten
    rendered: str = ""  # the text that the model saw before its last reply
    next_rendered: str = ""  # and will see before the next one, if the messages are added
    routing: Any = None  # as the engine told it with the last reply: of all tokens up to there
    images: list[bytes] = field(default_factory=list)  # the pictures in the prompt and in the tokens, in their order
    role: str = ""
    forms: list[Message | None] = field(init=False)  # of each message: a reply as `keep_form` has it
    num_replies: int = 0
    schema: dict[str, Any] | None = None  # of that reply
    asked: Any = None  # SamplingConfig of the reply that the engine samples; None: it samples none
    room: int = 0  # tokens that this reply may have at most for want of room

    def __post_init__(self):
        self.forms = [None] * len(self.messages)

    def begin(self, new: Sequence[Message], tools: list[dict] | None, files: Sequence[bytes] = ()) -> list[int]:
        """The tokens before the first reply. Without new messages and tools they are the prompt's tokens in the data.
        `files`: the pictures of the new messages."""
        self.tools = tools
        messages = [*self.messages, *new]
        self.next_rendered = self.template.render(messages, tools)
        if tools and self.next_rendered == self.template.render(messages, None):
            raise FlagError("chat.tools: the chat template does not show the model its tools: "
                            "--data.chat-template-file FILE names another")
        check_shown(new, self.next_rendered)
        if not new and not tools:
            return self.prompt
        return self.template.encode(self.next_rendered, [*self.images, *files])

    def between(self, new: Sequence[Message], files: Sequence[bytes] = ()) -> list[int] | None:
        """Tokens between the last reply and the next reply, without the end token that the model sampled. None: the
        chat template now renders text that the model has seen differently, and the conversation must be split."""
        text = self.messages[-1]["content"].removeprefix(self.opened)
        end = ""
        if self.tokens[-1] in self.template.stops:
            end = self.template.tokenizer.decode(self.tokens[-1:])
        try:
            between = self.template.after_reply(self.messages, new, self.tools)
        except ValueError:
            if not end or "tool_calls" not in self.forms[-1]:
                raise
            # some templates know a tool's answer only as that to a call in a field of its own
            self.messages[-1] = self.forms[-1] | {"content": ""}
            self.next_rendered = self.template.render([*self.messages, *new], self.tools)
            text, _, between = self.next_rendered.removeprefix(self.rendered).partition(end)
            check_shown(new, between)
            between = end + between
        self.next_rendered = self.template.render([*self.messages, *new], self.tools)
        if self.is_rewritten(text, between):
            if self.on_rewriting == "error":
                raise FlagError(
                    f"the chat template writes an earlier turn differently now ({len(self.messages)} "
                    f"messages): --rollout.rewritten-history split trains several sequences, append keeps "
                    f"the tokens as they are"
                )
            if self.on_rewriting == "split":
                self.rewrite()
                self.next_rendered = self.template.render([*self.messages, *new], self.tools)
                return None
        return self.template.encode(between.removeprefix(end), files)

    def is_rewritten(self, text: str, between: str) -> bool:
        """Whether `next_rendered` is no longer what the model saw, then its reply, `text`, then `between`."""
        reply = self.next_rendered.removeprefix(self.rendered).removesuffix(between)
        if self.rendered + reply + between != self.next_rendered:
            return True
        # a template may take away white space around a reply
        return reply.replace(GUARD, "").strip() != text.strip()

    def rewrite(self) -> None:
        """Replace each reply by its form, from which the template writes it anew."""
        messages = []
        for form, message in zip(self.forms, self.messages, strict=True):
            messages.append(form or message)
        self.messages = messages
        lost = self.template.special.pattern.search(str(self.forms))
        if lost:
            raise ValueError(
                f"the chat template rewrites the history, and a reply has {lost[0]}, which no text gives back: "
                f"--rollout.rewritten-history append keeps the tokens as they are"
            )

    def keep_form(self, written: str, said: str, calls: Sequence[dict[str, Any]]) -> None:
        """Keep the last reply also in the fields that templates read when they write a history again: what it says, its
        reasoning, its calls of tools. `written`: all of it, with special tokens."""
        form: Message = {"role": "assistant", "content": said.strip()}
        before, _, _ = written.rpartition("</think>")
        reasoning = before.rpartition("<think>")[2].strip()
        if reasoning:
            form["reasoning_content"] = reasoning
        with contextlib.suppress(ValueError, RecursionError):  # arguments that are no JSON stay in the text alone
            tool_calls = []
            for call in calls:
                function = call | {"arguments": json.loads(call["arguments"])}
                tool_calls.append({"type": "function", "function": function})
            if tool_calls:
                form["tool_calls"] = tool_calls
        self.forms[-1] = form

    @property
    def opened(self) -> str:
        """The <think> that the text before the next reply ends with, and that the reply continues."""
        return re.search(r"(<think>\s*)?$", self.rendered)[0]

    def add_messages(self, new: Sequence[Message], between: list[int] | None, files: Sequence[bytes] = ()) -> None:
        """Add messages, with their tokens as `between` returned them, and their pictures."""
        self.messages += new
        self.forms += [None] * len(new)
        self.rendered = self.next_rendered
        if between is None:
            before = Conversation(self.template, "", self.prompt, [], None, self.tokens, self.logp, self.mask)
            before.routing = self.routing
            before.images = self.images
            self.left_behind.append(before)
            self.images = [*self.images, *files]
            self.prompt = self.template.encode(self.rendered, self.images)
            self.tokens = []
            self.logp = []
            self.mask = []
            self.routing = None
            return
        self.images = [*self.images, *files]
        self.tokens += between
        self.logp += [0.0] * len(between)
        self.mask += [False] * len(between)

    def add_reply(self, tokens: Sequence[int], logp: Sequence[float], routing: Any = None,
                  is_trained: bool = True) -> str:
        """Add the tokens that the model sampled. Returns their text, without end tokens."""
        if not is_trained:
            logp = [0.0] * len(tokens)
        self.routing = routing
        self.tokens += tokens
        self.logp += logp
        self.mask += [is_trained] * len(tokens)
        self.num_replies += 1
        text = self.template.decode(tokens)
        self.messages.append({"role": "assistant", "content": self.opened + text})
        self.forms.append(None)
        return text

    @property
    def num_tokens(self) -> int:
        """Of all its sequences, prompts left out."""
        return len(self.tokens) + sum(len(before.tokens) for before in self.left_behind)
