"""transformers' own forward, cache and attention as the engine: no vLLM, and an independent check of it.

Groups are sampled one after the other. A prompt is computed alone and once; its cache is repeated for blocks of `ROWS`
responses, which are decoded in lock step: all rows have the same length, so there is no padding. A response depends on
its prompt, its seed and the weights only: matrix products always have the same number of rows (their rounding depends
on that number, not on the other rows).
"""

import copy
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, PretrainedConfig
from transformers.generation import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from common.engine.base import Engine, Response, RolloutConfig, SamplingConfig
from common.engine.sync import Sent, checksum
from common.model.policy import ModelConfig, saved_buffers
from common.parallel.ranks import World

ROWS = 8
"""Number of responses of a group that one forward decodes."""


class Queued(NamedTuple):
    """A request that waits for its turn."""

    number: int
    prompt: list[int]
    seed: int | None  # None: greedy
    sampling: SamplingConfig


class HFEngine(Engine):
    """transformers' own model and sampling in the trainer's process."""

    def __init__(
        self, hf_config: PretrainedConfig, config: RolloutConfig, model_config: ModelConfig, world: World,
        probe: Sequence[Sequence[int]], stop_token_ids: list[int],
    ):
        super().__init__(config, model_config, world, probe)
        self.stop_token_ids = stop_token_ids
        with torch.device(world.device):
            self.model = AutoModelForCausalLM.from_config(
                copy.deepcopy(hf_config),  # from_config changes it
                dtype=self.dtype,
                attn_implementation="eager",  # the only one that has soft caps and attention sinks in every family
                trust_remote_code=model_config.trust_remote_code,
            )
        self.model.eval().requires_grad_(False)
        self.waiting: list[Queued] = []
        self.running: dict[int, Response] = {}
        """Unfinished responses of the group that is being sampled, by request."""
        self.generators: dict[int, torch.Generator] = {}
        """One for each request of that group that is not greedy."""

    @torch.no_grad()
    def _load(self, tensors: Iterator[tuple[str, Tensor]], sent: dict[str, Sent]) -> tuple[int, set[str]]:
        own = dict(self.model.named_parameters()) | saved_buffers(self.model)
        missing = set(own)
        for name, tensor in tensors:
            own[name].copy_(tensor)
            missing.remove(name)
        assert not missing, f"weights that the trainer did not send: {sorted(missing)}"
        differing = {name for name in sent if checksum(own[name], self.dtype) != sent[name].checksum}
        return len(sent), differing

    def add(self, request: int, prompt: Sequence[int], seed: int | None, sampling: SamplingConfig) -> None:
        self.waiting.append(Queued(request, list(prompt), seed if sampling.temperature else None, sampling))

    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    @torch.no_grad()
    def step(self) -> Iterator[tuple[int, Response]]:
        """The first token of the next group, or one more token of every response of the group that is sampled."""
        if self.running:
            for block, cache in self.blocks:
                rows = [row for row, request in enumerate(block) if request in self.running]
                tokens = [[0]] * ROWS  # a row without a running request computes something that nobody reads
                for row in rows:
                    tokens[row] = self.running[block[row]].tokens[-1:]
                if rows:
                    logits, _ = self._forward(tokens, cache)
                    yield from self._sample([block[row] for row in rows], logits[rows], self.sampling)
            return
        first = self.waiting[0]
        group = list(takewhile(lambda q: (q.prompt, q.sampling) == (first.prompt, first.sampling), self.waiting))
        del self.waiting[: len(group)]
        self.sampling = first.sampling
        requests = [queued.number for queued in group]
        self.running = {i: Response([], [], "length") for i in requests}
        sampled = [queued for queued in group if queued.seed is not None]
        self.generators = {q.number: torch.Generator(self.world.device).manual_seed(q.seed) for q in sampled}
        logits, prompt_cache = self._forward([first.prompt], None)
        self.blocks = []
        for start in range(0, len(requests), ROWS):
            cache = copy.deepcopy(prompt_cache)
            cache.batch_repeat_interleave(ROWS)
            self.blocks.append((requests[start : start + ROWS], cache))
        yield from self._sample(requests, logits.expand(len(requests), -1), self.sampling)

    def _forward(self, tokens: list[list[int]], cache: Cache | None) -> tuple[Tensor, Cache]:
        """Logits of each row's last token, float32 [rows, V], and the cache, which has all tokens then."""
        ids = torch.tensor(tokens, device=self.world.device)  # [rows, L]
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].float(), out.past_key_values

    def _sample(self, requests: list[int], logits: Tensor, sampling: SamplingConfig) -> Iterator[tuple[int, Response]]:
        """Sample one token for each of these requests [n], from `logits` [n, V]; yield the responses that end."""
        logp = filtered_logp(logits, sampling)  # [n, V]
        noise = torch.ones_like(logp)
        for row, request in zip(noise, requests):
            if request in self.generators:  # argmax of p / Exp(1) draws from p
                row.exponential_(generator=self.generators[request])
        sampled = (logp.exp() / noise).argmax(-1)
        sampled_logp = logp.gather(1, sampled[:, None])[:, 0]
        stops = {*self.stop_token_ids, *sampling.stop_token_ids}
        for request, token, token_logp in zip(requests, sampled.tolist(), sampled_logp.tolist()):
            if request not in self.running:
                continue  # aborted when an earlier one of these ended
            response = self.running[request]
            response.tokens.append(token)
            response.logp.append(token_logp)
            if token in stops:
                response.finish_reason = "stop"
            elif len(response.tokens) < sampling.max_response_length:
                continue
            del self.running[request]
            yield request, response

    def abort(self, requests: set[int]) -> list[tuple[int, Response]]:
        self.waiting = [queued for queued in self.waiting if queued.number not in requests]
        return [(request, self.running.pop(request)) for request in requests & self.running.keys()]


def filtered_logp(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Log-probs [n, V] of the distribution that is sampled: temperature, then min_p, top_k, top_p, in vLLM's order."""
    logits = logits / (sampling.temperature or 1.0)
    if sampling.min_p:
        logits = MinPLogitsWarper(sampling.min_p)(None, logits)
    if sampling.top_k:
        logits = TopKLogitsWarper(sampling.top_k)(None, logits)
    if sampling.top_p < 1:
        logits = TopPLogitsWarper(sampling.top_p)(None, logits)
    return logits.log_softmax(-1)
