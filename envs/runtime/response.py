"""What the model wrote: a response to a prompt, and the episode of many turns that becomes one."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from envs.runtime.conversation import Conversation


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
    """Further sequences of the same episode, whose history was rewritten; they are trained like this sequence. For an
    episode that has not ended: the model's replies so far, each with the tokens between it and the previous reply."""
    num_turns: int = 1
    end_reason: str = ""
    """Why the episode ended: done (its function returned), length, turns, timeout or error."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation."""
    tools: dict[str, float] = field(default_factory=dict)
    """Number of tool_calls and of tool_errors, and tool_s, the seconds that the episode's own code ran."""

    # of --rollout.in-flight alone
    versions: list[int] = field(default_factory=list)
    """The step in which the policy sampled each token."""
    routing: Tensor | None = field(default=None, compare=False)
    """Experts of all tokens but the last (--policy.router-replay rollout): [prompt + response - 1, layers, k]."""

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) if self.mask is None else sum(self.mask)

    @property
    def num_sampled_in_all(self) -> int:
        return self.num_sampled + sum(sequence.num_sampled for sequence in self.earlier)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it."""
        return vars(self) | {"earlier": [sequence.to_dict() for sequence in self.earlier]}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> "Response":
        return cls(**saved | {"earlier": [cls.from_dict(sequence) for sequence in saved["earlier"]]})

    def extend(self, part: "Response", finish_reason: str) -> None:
        """Append tokens that were sampled later."""
        self.tokens = self.tokens + part.tokens
        self.logp = self.logp + part.logp
        self.finish_reason, self.routing = finish_reason, part.routing


@dataclass
class Episode:
    """One episode, on every rank of its engine."""

    conversation: Conversation
    seed: int | None  # None: greedy
    begun: Response  # has the model's replies, also those of earlier steps
    num_turns: int = 0
    end_reason: str = "done"  # length: the last reply was cut for want of room, or refused; turns: it was refused
    is_sampling: bool = False  # the model writes; else its process is busy
    limit: int = 0  # tokens that the reply being sampled may have at most for want of room
    tool_s: float = 0.0

    def next_reply(self, before: list[int]) -> Response:
        """The reply after these tokens: one from an earlier step, unless the environment has sent other tokens since,
        or a new one."""
        replies = self.begun.earlier
        if self.num_turns < len(replies) and replies[self.num_turns].prompt != before:
            del replies[self.num_turns :]
            del self.begun.versions[self.begun.num_sampled_in_all :]
        if self.num_turns == len(replies):
            replies.append(Response(prompt=before))
        return replies[self.num_turns]


def response_of(episode: Episode, message: dict[str, Any]) -> Response:
    """An episode that has ended, as a response to its prompt."""
    conversation = episode.conversation
    end_reason = episode.end_reason
    if "failure" in message:
        end_reason = "timeout" if message["failure"] == "timeout" else "error"
    finish_reason = "length" if end_reason == "length" else "stop"
    earlier = [
        Response(before.tokens, before.logp, "stop", before.mask, before.prompt, routing=before.routing)
        for before in conversation.left_behind
    ]
    return Response(
        conversation.tokens, conversation.logp, finish_reason, conversation.mask, conversation.prompt, earlier,
        episode.num_turns, end_reason, conversation.messages,
        {"tool_calls": message.get("num_tool_calls", 0), "tool_errors": message.get("num_tool_errors", 0),
         "tool_s": episode.tool_s},
        episode.begun.versions, conversation.routing,
    )
