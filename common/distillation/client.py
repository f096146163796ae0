"""Requests to a server with OpenAI's completions interface that also returns the log-probs of a prompt, as vLLM does.

Requests go to the host of the address alone: no redirect is followed, no proxy of the environment is used.
"""

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from common.flags.served import Address, ServedConfig

REPEATED = (408, 409, 425, 429, 500, 502, 503, 504)  # statuses of a server that is busy, or starts again
MOST_PAUSE_S = 8.0
BYTES_OF_ENTRY = 1024  # one word of one token, its text included; an answer that is longer is not read to its end
LEAST_LOGP = -1e4  # vLLM writes -9999 for -inf
ROUNDING = 1e-3  # by which probabilities of a bfloat16 model may add up to more than 1


class ServerError(ValueError):
    """What a server answered, or did not, in one line."""


class _Again(Exception):
    """The request may succeed later."""


class Client:
    def __init__(self, address: Address, config: ServedConfig, has_stopped: Callable[[], bool] = lambda: False):
        """`has_stopped`: a request that fails is not repeated any more. Threads may share a client."""
        import httpx  # only here: no other run needs it

        self.address = address
        self.config = config
        self.has_stopped = has_stopped
        self.key = os.environ.get(config.auth_env, "")
        headers = {}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        limits = httpx.Limits(max_connections=config.concurrency)
        self.http = httpx.Client(headers=headers, timeout=config.timeout_s, trust_env=False, limits=limits)

    def call(self, path: str, body: dict[str, Any] | None, most_bytes: int, wait_s: float | None = None) -> Any:
        """The answer to a request, from JSON: POST of `body`, GET without one. Failures that may pass are repeated for
        `wait_s` (default: --served.wait-s), with growing pauses. Raises ServerError."""
        if wait_s is None:
            wait_s = self.config.wait_s
        end = time.monotonic() + wait_s
        pause_s = 0.25
        while True:
            try:
                return self._once(path, body, most_bytes)
            except _Again as error:
                if time.monotonic() + pause_s > end or self.has_stopped():
                    raise self.error(f"{error}, for {wait_s:g} s (--served.wait-s {self.config.wait_s:g})") from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_PAUSE_S)

    def error(self, text: str) -> ServerError:
        """One line that names the server, and never the key."""
        line = " ".join(f"--teacher {self.address.url}: {text}".split())
        if self.key:
            line = line.replace(self.key, f"${self.config.auth_env}")
        return ServerError(line)

    def _once(self, path: str, body: dict[str, Any] | None, most_bytes: int) -> Any:
        import httpx

        method = "GET" if body is None else "POST"
        end = time.monotonic() + self.config.timeout_s
        content = bytearray()
        try:
            with self.http.stream(method, self.address.url + path, json=body) as answer:
                for piece in answer.iter_bytes():
                    content += piece
                    if len(content) > most_bytes:
                        raise self.error(f"answered more than the {most_bytes} bytes that {path} can have")
                    if time.monotonic() > end:  # a server that sends a byte now and then meets no timeout of its own
                        raise _Again(f"no whole answer within --served.timeout-s {self.config.timeout_s:g}")
        except httpx.TransportError as error:
            raise _Again(f"{type(error).__name__}: {error}") from None
        said = content[:500].decode(errors="replace")
        if answer.status_code in REPEATED:
            raise _Again(f"answered {path} with status {answer.status_code}: {said}")
        if answer.status_code != 200:
            raise self.error(f"answered {path} with status {answer.status_code}: {said}")
        try:
            return json.loads(content)
        except ValueError:
            raise _Again(f"answered {path} with no JSON: {said[:100]!r}") from None

    def top_k(self, tokens: Sequence[int], first: int, k: int, vocabulary: int,
              wait_s: float | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The server's k best words for each of the tokens from number `first` on (from 1), given those before: words
        int32 [n, k], the best first, -1 for one outside of the `vocabulary`; log-probs float32 [n, k]."""
        body = {"model": self.address.model, "prompt": [*map(int, tokens)], "max_tokens": 1, "temperature": 0,
                "prompt_logprobs": k, "add_special_tokens": False}
        most_bytes = (1 << 16) + len(tokens) * (k + 1) * BYTES_OF_ENTRY
        answer = self.call("/completions", body, most_bytes, wait_s)
        try:
            return read_top_k(answer, tokens, first, k, vocabulary)
        except ServerError as error:
            raise self.error(f"{error}") from None

    def tokens_of(self, text: str, wait_s: float) -> list[int]:
        """How the server's tokenizer writes a text."""
        body = {"model": self.address.model, "prompt": text, "max_tokens": 1, "temperature": 0,
                "add_special_tokens": False, "return_token_ids": True}
        answer = self.call("/completions", body, 1 << 24, wait_s)
        tokens = _of_choice(answer, "prompt_token_ids")
        if not isinstance(tokens, list):
            raise self.error("its answers have no prompt_token_ids, so that its tokens could not be compared with "
                             "those of --model; vLLM's server has them")
        return tokens


def _of_choice(answer: Any, name: str) -> Any:
    """The entry `name` of the only choice of an answer, None if there is none."""
    match answer:
        case {"choices": [{**choice}]}:
            return choice.get(name)
    return None


def read_top_k(answer: Any, tokens: Sequence[int], first: int, k: int,
               vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """An answer to `Client.top_k`. Raises ServerError for one that is not about these tokens, or has fewer than k words
    or numbers that are no log-probs."""
    of_tokens = _of_choice(answer, "prompt_logprobs")
    if not isinstance(of_tokens, list):
        raise ServerError("its answer has no prompt_logprobs, which vLLM's server has: a teacher must be served by one "
                          "that returns the log-probs of a prompt")
    if len(of_tokens) != len(tokens):
        raise ServerError(f"it gave log-probs for {len(of_tokens)} tokens, must be {len(tokens)}: it has another "
                          f"tokenizer, or cuts the prompt")
    words = []
    logps = []
    for t, entry in islice(enumerate(of_tokens), first, None):
        try:
            found = {int(word): float(value["logprob"]) for word, value in entry.items()}
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ServerError(f"token {t} has no log-probs by number of the word: {str(entry)[:200]!r}") from None
        if int(tokens[t]) not in found:
            raise ServerError(f"token {t} is {tokens[t]}, and its log-prob is not in the answer")
        if len(found) < k:
            raise ServerError(f"token {t} has {len(found)} words, must be --top-k {k}")
        if not all(math.isfinite(logp) and logp <= ROUNDING for logp in found.values()) or min(found) < 0:
            raise ServerError(f"token {t} has log-probs that are none: {str(found)[:200]}")
        best = sorted(found.items(), key=lambda of_word: (-of_word[1], of_word[0]))[:k]
        words.append([word if word < vocabulary else -1 for word, _ in best])
        logps.append([min(max(logp, LEAST_LOGP), 0.0) for _, logp in best])
    found_logps = np.array(logps, dtype=np.float32).reshape(-1, k)
    totals = np.exp(found_logps.astype(np.float64)).sum(axis=1)
    if len(totals) and totals.max() > 1 + ROUNDING:
        raise ServerError(f"the probabilities of a token's {k} words add up to {totals.max():.4g}, must be at most 1")
    return np.array(words, dtype=np.int32).reshape(-1, k), found_logps
