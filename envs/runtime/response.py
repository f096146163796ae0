"""What the model wrote: a response to a prompt, and the episode of many turns that becomes one."""

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

from torch import Tensor

from envs.runtime.conversation import Conversation
from envs.runtime.template import special_tokens, text_of


@dataclass
class Response:
    tokens: list[int] = field(default_factory=list)
    """What the engine sampled, including the stop token."""
    logp: list[float] = field(default_factory=list)
    """The log-prob of each token under the distribution it was sampled from: after temperature, top_k, top_p."""
    finish_reason: str = ""
    """stop: it ended with a stop token or text. length: it was truncated at max_tokens. Empty: it has not ended."""

    # of episodes alone
    mask: list[bool] | None = None
    """False on tokens of users or tools. None: the model sampled all tokens."""
    prompt: list[int] | None = None
    """The tokens before the response, if they are not the tokens of the row's prompt."""
    earlier: list["Response"] = field(default_factory=list)
    """Further sequences of the same episode, of other conversations or before the history was rewritten; they are
    trained like this sequence. For an episode that has not ended: the model's replies so far, each with the tokens
    between it and the previous reply as `prompt`."""
    conversation: int = 0
    """Number of the sequence's conversation in its episode. 0: the one that begins with the row's prompt."""
    role: str = ""
    """Of that conversation, as `chat.begin(role)` named it."""
    num_turns: int = 1
    end_reason: str = ""
    """Why the episode ended: done (its function returned), length, turns, timeout or error."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation."""
    tools: dict[str, float] = field(default_factory=dict)
    """Number of tool_calls and of tool_errors, and tool_s, the seconds that the episode's own code ran."""
    images: list[str] = field(default_factory=list)
    """The sequence's pictures in their order, without those of the row's prompt where that begins it: files in base64.
    For `earlier` replies of an episode that has not ended: SHA-256 of the pictures in `prompt`."""

    # of --rollout.in-flight alone
    versions: list[int] = field(default_factory=list)
    """The step in which the policy sampled each token, without those of this step."""
    routing: Tensor | None = field(default=None, compare=False)
    """Experts of all tokens but the last (--policy.router-replay rollout): [prompt + response - 1, layers, k]."""

    def text(self, tokenizer: Any, stop: Sequence[str] = ()) -> str:
        """What the model wrote, as `text_of` has it, and in an episode also what users and tools said, without the
        template's special tokens. `stop`: texts that end a response, and stay."""
        names = {number: name for name, number in special_tokens(tokenizer).tokens.items()}
        is_sampled = self.mask
        if not is_sampled:
            is_sampled = [True] * len(self.tokens)
        last = len(self.tokens) - 1
        kept = []
        for n, token in enumerate(self.tokens):
            if token in names:
                if n == last:
                    ends_turn = self.finish_reason == "stop"
                else:
                    ends_turn = not is_sampled[n + 1]
                is_stop_text = any(text.endswith(names[token]) for text in stop)
                is_templates_own = not is_sampled[n] or (ends_turn and not is_stop_text)
                if is_templates_own:
                    continue
            kept.append(token)
        return text_of(tokenizer, kept)

    @property
    def num_sampled(self) -> int:
        if self.mask is None:
            return len(self.tokens)
        return sum(self.mask)

    @property
    def parts(self) -> list["Response"]:
        """All sequences of the episode, or its replies so far."""
        return [*self.earlier, self]

    @property
    def all_versions(self) -> list[int]:
        """`versions` of all parts."""
        versions = []
        for part in self.parts:
            versions += part.versions
        return versions

    def extend(self, part: "Response", finish_reason: str) -> None:
        """Append tokens that were sampled later."""
        self.tokens = self.tokens + part.tokens
        self.logp = self.logp + part.logp
        self.finish_reason = finish_reason
        self.routing = part.routing


@dataclass
class Episode:
    """One episode, on every rank of its engine."""

    conversations: dict[int, Conversation]  # 0: begins with the row's prompt; others as chat.begin() numbered them
    seed: int | None  # None: greedy
    prompt: Any  # of the row: common/prompts.py
    begun: Response  # has the model's replies, also those of earlier steps
    num_turns: int = 0
    end_reason: str = "done"  # length: the last reply was cut for want of room, or refused; turns: it was refused
    tool_s: float = 0.0
    process: Any = None  # envs.runtime.processes.Process between two rollouts, on the engine's first rank

    @property
    def num_tokens(self) -> int:
        return sum(conversation.num_tokens for conversation in self.conversations.values())

    @property
    def num_asked(self) -> int:
        """Replies that the engine samples; if there are none, the episode's process is busy."""
        return sum(conversation.asked is not None for conversation in self.conversations.values())

    def replies(self, number: int) -> list[Response]:
        """Of conversation `number`."""
        return [reply for reply in self.begun.earlier if reply.conversation == number]

    def next_reply(self, number: int, before: list[int], is_trained: bool, files: Sequence[bytes] = ()) -> Response:
        """The reply after these tokens, with the pictures in them: one from an earlier step, unless the environment has
        sent others since, or a new one."""
        turn = self.conversations[number].num_replies
        old = self.replies(number)[turn:]
        images = [hashlib.sha256(file).hexdigest() for file in files]
        if old and (old[0].prompt, old[0].images) == (before, images):
            return old[0]
        stale = set(map(id, old))
        new = Response(prompt=before, images=images, conversation=number)
        if not is_trained:
            new.mask = []
        kept = [reply for reply in self.begun.earlier if id(reply) not in stale]
        self.begun.earlier = [*kept, new]
        return new


def response_of(episode: Episode, message: dict[str, Any]) -> Response:
    """An episode that has ended, as a response to its prompt."""
    end_reason = episode.end_reason
    if "failure" in message:
        end_reason = "timeout" if message["failure"] == "timeout" else "error"
    numbers = sorted(episode.conversations)
    # the episode's own conversation, unless only others were begun
    main = next((number for number in numbers if episode.conversations[number].num_replies), 0)
    sequences = []
    for number in numbers:
        if number != main:
            sequences += sequences_of(episode, number)
    *before_last, last = sequences_of(episode, main)
    sequences += before_last
    said = episode.conversations[main]
    messages = []
    for said_message in said.messages:
        shown = said_message["content"].replace(said.template.place, "<image>")
        messages.append(said_message | {"content": shown})
    return replace(
        last,
        finish_reason="length" if end_reason == "length" else "stop",
        earlier=[sequence for sequence in sequences if sequence.tokens],
        num_turns=episode.num_turns,
        end_reason=end_reason,
        messages=messages,
        tools={
            "tool_calls": message.get("num_tool_calls", 0),
            "tool_errors": message.get("num_tool_errors", 0),
            "tool_s": episode.tool_s,
        },
    )


def sequences_of(episode: Episode, number: int) -> list[Response]:
    """What is trained of a conversation: more than one sequence if its history was rewritten."""
    conversation = episode.conversations[number]
    versions = chain.from_iterable(reply.versions for reply in episode.replies(number))
    found = []
    for part in [*conversation.left_behind, conversation]:
        prompt = part.prompt
        files = part.images
        if part.prompt is episode.prompt.tokens and episode.prompt.images is not None:
            prompt = None  # the row's, with its pictures
            files = part.images[len(episode.prompt.images.files) :]
        found.append(Response(
            part.tokens,
            part.logp,
            "stop",
            part.mask,
            prompt,
            images=[b64encode(file).decode() for file in files],
            conversation=number,
            role=conversation.role,
            versions=list(islice(versions, sum(part.mask))),
            routing=part.routing,
        ))
    return found
