"""What an engine samples: a response, and a group of responses to one prompt."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.parallel.ranks import seed_of


@dataclass
class Response:
    tokens: list[int]
    """What the engine sampled, including the stop token."""
    logp: list[float]
    """The log-prob of each token under the distribution it was drawn from: after temperature, min_p, top_k, top_p."""
    finish_reason: str
    """stop: it ended by itself. length: it was truncated at max_tokens. Empty: it has not ended."""

    # of episodes alone
    mask: list[bool] | None = None
    """False on tokens that users or tools wrote. None: the model sampled all."""
    prompt: list[int] | None = None
    """The tokens before, where they are not those of the row's prompt."""
    earlier: list["Response"] = field(default_factory=list)
    """Sequences of the same episode that ended as its history was rewritten. They are trained like this one."""
    num_turns: int = 1
    end_reason: str = ""
    """Why the episode ended: done (its function returned), length, turns, timeout or error."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation."""
    tools: dict[str, float] = field(default_factory=dict)
    """Number of tool_calls, and of tool_errors among them, and tool_s, the seconds of the episode's own code."""

    # of --rollout.in-flight alone
    versions: list[list[int]] = field(default_factory=list)
    """Pairs of a step and how many of the tokens, one after another, the policy sampled as it was in that step."""

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) if self.mask is None else sum(self.mask)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> "Response":
        """What `dataclasses.asdict` returned."""
        return cls(**saved | {"earlier": [cls.from_dict(sequence) for sequence in saved["earlier"]]})


@dataclass
class Group:
    """A prompt and its responses, as far as they were sampled. Plain JSON can hold it."""

    prompt: list[int]
    num_kept: int  # the group is complete when so many responses have ended; the others are aborted then
    seeds: list[int]  # one for each response
    responses: list[Response]
    row: int = 0  # of the prompt in the data set
    step: int = 0  # in which it began

    @classmethod
    def start(cls, prompt: Sequence[int], seeds: list[int], oversample: float, *place: int) -> "Group":
        """`place`: row and step."""
        num_extra = math.ceil(oversample * len(seeds))
        all_seeds = [*seeds, *(seed_of(seeds[0], "extra", k) for k in range(num_extra))]
        return cls(list(prompt), len(seeds), all_seeds, [Response([], [], "") for _ in all_seeds], *place)

    @property
    def ended(self) -> list[Response]:
        return [response for response in self.responses if response.finish_reason]

    @property
    def is_complete(self) -> bool:
        return len(self.ended) == self.num_kept

    def extend(self, k: int, part: Response, finish_reason: str) -> None:
        """Append to response `k` what was sampled further."""
        response = self.responses[k]
        response.tokens = response.tokens + part.tokens
        response.logp = response.logp + part.logp
        response.finish_reason = finish_reason
