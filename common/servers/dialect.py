"""What is asked of a server that samples, whatever it speaks: each dialect is a class with the verbs of `Dialect`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from common.flags.rollout import SamplingConfig
from common.servers.client import Client, Refused
from common.servers.transfer import Held

Weights = Path | Held
"""What a server is given: a folder of folder.py, or weights that a group sends."""
RUN = "weights_"
"""Begins the name of a run at the servers, with which the names of its versions begin."""
LOGP_ROUNDING = 1e-3
"""By which a log-prob of a bfloat16 model may be above 0."""


@dataclass
class Ask:
    """A response to sample."""

    name: str  # unique at all servers
    tokens: list[int]  # the prompt
    seed: int | None  # None: greedy
    sampling: SamplingConfig  # max_response_length: the most tokens to sample
    stop_token_ids: list[int]  # all of them, the model's end tokens included


@dataclass
class Answer:
    """What was sampled for an `Ask`."""

    tokens: list[int]
    logp: list[float]  # of each token under the distribution that it was drawn from
    finish_reason: str  # stop, length, or abort: tokens as far as they were sampled
    versions: list[str]  # of the weights that sampled each token


@dataclass
class Needs:
    """What training needs of a server."""

    dtype: str  # compute dtype: float32, bfloat16, float16
    max_length: int  # tokens of prompt and response
    sizes: dict[str, int]  # of the model's text config: vocab_size, hidden_size, num_hidden_layers
    transfer: str = "folder"  # of the weights: folder, gloo, nccl


class Dialect(Protocol):
    """The verbs, each of one server. They raise `Gone` or `Refused`; other errors are faults of the dialect."""

    name: ClassVar[str]

    @staticmethod
    async def is_spoken(client: Client) -> bool:
        """Whether this server speaks it. Raises Gone."""

    @staticmethod
    async def problems(client: Client, needs: Needs) -> list[str]:
        """Why this server cannot train, each in one line with the value found, the rule, and the flag of the server
        to turn. An empty list: it can."""

    @staticmethod
    async def version(client: Client) -> str:
        """The name of the weights' version as `load` gave it. The server's engine must answer, not only its front: this
        is also how a server that stands still is found."""

    @staticmethod
    async def generate(client: Client, ask: Ask) -> Answer:
        """Sample a response, in a request that is long. If it is cancelled, so is the server's work."""

    @staticmethod
    async def abort(client: Client, names: Sequence[str]) -> None:
        """End requests early: their `generate` returns what was sampled, with the finish reason abort. Those that the
        server does not know are ignored."""

    @staticmethod
    async def load(client: Client, weights: Weights, version: str) -> int:
        """Abort all requests, load these weights, compare them with their checksums as far as the server can, forget
        the prefixes that older weights computed, and sample on with this version. Returns the number of tensors that
        were compared. Whatever an earlier load left unfinished is no obstacle."""


def check_answer(client: Client, ask: Ask, answer: Answer, vocabulary: int) -> None:
    """Raises Refused for an answer that cannot be one to this request."""
    found = ""
    num_tokens = len(answer.tokens)
    if answer.finish_reason not in ("stop", "length", "abort"):
        found = f"the finish reason {answer.finish_reason!r}"
    elif not num_tokens == len(answer.logp) == len(answer.versions):
        found = f"{num_tokens} tokens, {len(answer.logp)} log-probs and {len(answer.versions)} versions"
    elif num_tokens > ask.sampling.max_response_length:
        found = f"{num_tokens} tokens, of {ask.sampling.max_response_length} that were asked for"
    elif num_tokens == 0 and answer.finish_reason != "abort":
        found = "no tokens"
    elif not all(is_token(token, vocabulary) for token in answer.tokens):
        found = f"tokens outside of the vocabulary of {vocabulary}"
    elif not all(is_logp(logp) for logp in answer.logp):
        found = "log-probs that are none"
    elif answer.finish_reason == "stop" and not ask.sampling.stop and answer.tokens[-1] not in ask.stop_token_ids:
        found = f"a response that ended with token {answer.tokens[-1]}, which is none of {ask.stop_token_ids}"
    elif answer.finish_reason == "length" and num_tokens < ask.sampling.max_response_length:
        found = (f"{num_tokens} tokens, which its own limit cut: it takes shorter sequences than the sum of "
                 f"--data.max-prompt-length and --rollout.max-response-length")
    elif not set(ask.stop_token_ids).isdisjoint(answer.tokens[:-1]):
        found = "tokens after one that ends a response"
    if found:
        raise Refused(client.line(f"answered a request for a response with {found}"))


def versions_of(spans: Sequence[dict[str, Any]], num_tokens: int) -> list[str]:
    """The version of each token, of the spans of tokens that servers tell; a span beyond the tokens makes one too
    many."""
    versions: list[str] = []
    for span in spans:
        length = span["end"] - span["start"]
        versions += [str(span["version"])] * min(length, num_tokens + 1 - len(versions))
    return versions


def is_of_another_run(held: str, version: str) -> bool:
    """Whether a server that holds `held` was given it by another run than that of `version`. One that was started anew
    holds no run's."""
    own_run = version.rpartition("-")[0]
    return RUN in held and own_run not in held


def is_token(token: Any, vocabulary: int) -> bool:
    return type(token) is int and 0 <= token < vocabulary


def is_logp(logp: Any) -> bool:
    return type(logp) in (float, int) and math.isfinite(logp) and -9999 < logp <= LOGP_ROUNDING
