"""transformers' own model and `generate` as the engine: no vLLM, and an independent check of it.

Responses to a prompt are sampled in blocks of `ROWS` rows, one block after the other. A response depends on its prompt,
its seed and the weights only: matrix products always have the same number of rows (their rounding depends on that
number, not on the other rows).
"""

from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper

from common.dataset.images import Images
from common.engine.base import Engine, EngineSetup
from common.flags.rollout import SamplingConfig
from common.forward.mixture import use_float32_routers
from common.forward.router_replay import routers_of
from common.forward.vision import auto_class
from common.model.policy import saved_buffers
from common.sync.checksums import Checksum, as_numbers, checksum
from envs.runtime.response import Response

ROWS = 8
"""Number of rows of a block. A row without a response computes a result that is not used."""


class Unfinished(NamedTuple):
    """A response, while it is not complete."""

    number: int
    prompt: list[int]
    images: Images | None
    sampling: SamplingConfig
    generator: torch.Generator | None  # None: greedy
    response: Response


class HFEngine(Engine):
    """transformers' own model and sampling in the trainer's process."""

    def __init__(self, setup: EngineSetup):
        super().__init__(setup)
        with torch.device(self.world.device):
            self.model = auto_class(setup.hf_config).from_config(
                setup.hf_config.from_dict(setup.hf_config.to_dict()),  # a copy: from_config changes it
                dtype=self.dtype,
                attn_implementation="eager",  # the only one that has soft caps and attention sinks in every family
                trust_remote_code=setup.model_config.trust_remote_code,
            )
        self.model.eval().requires_grad_(False)
        if setup.model_config.router_float32:
            use_float32_routers(self.model)
        self.model.generation_config = GenerationConfig()  # config.json may have other end tokens
        self.routers = routers_of(self.model) if setup.model_config.router_replay == "rollout" else []
        self.waiting: list[Unfinished] = []
        self.block: list[Unfinished] = []
        """The first waiting requests that can be sampled together."""

    @torch.no_grad()
    def _load(self, tensors: Iterator[tuple[str, Tensor]], sent: dict[str, Checksum]) -> tuple[int, set[str]]:
        own = dict(self.model.named_parameters()) | saved_buffers(self.model)
        for name, tensor in tensors:
            own[name].copy_(tensor)
        expected = as_numbers(sent)
        held = as_numbers({name: checksum(tensor, self.dtype) for name, tensor in own.items()})
        return len(own), {name for name, number in held.items() if number != expected.get(name)}

    def add(self, request: int, prompt: Sequence[int], seed: int | None, sampling: SamplingConfig,
            images: Images | None = None, schema: dict[str, Any] | None = None) -> None:
        generator = None
        if seed is not None and sampling.temperature:
            generator = torch.Generator(self.world.device).manual_seed(seed)
        self.waiting.append(Unfinished(request, list(prompt), images, sampling, generator, Response()))

    def has_unfinished(self) -> bool:
        return bool(self.waiting)

    @torch.no_grad()
    def step(self) -> Iterator[tuple[int, Response]]:
        """All tokens of a block: responses to the same prompt, sampled in the same way."""
        first = self.waiting[0]
        _, prompt, images, sampling, *_ = first
        self.block = [*islice(takewhile(lambda request: request[1:4] == first[1:4], self.waiting), ROWS)]
        ids = torch.tensor([prompt] * ROWS, device=self.world.device)  # [ROWS, L]
        self.chosen: list[Tensor] = []  # for each input the experts [layers, ROWS, k] that its routers chose
        cache = None
        if len(prompt) > 1:
            cache = self._read_prompt(ids[:1, :-1], images)
        self.model.generate(
            ids,
            GenerationConfig(max_new_tokens=sampling.max_response_length),
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            logits_processor=[self._sample],
            stopping_criteria=[self._has_ended],
        )
        for row, request in enumerate(self.block):
            if request.response.finish_reason:
                if self.routers:
                    num_inputs = len(prompt) + len(request.response.tokens) - 1
                    of_inputs = torch.stack(self.chosen[:num_inputs])  # [num_inputs, layers, ROWS, k]
                    request.response.routing = of_inputs[:, :, row].cpu()
                self.waiting.remove(request)
                yield request.number, request.response

    def _read_prompt(self, ids: Tensor, images: Images | None) -> Any:
        """The cache of a prompt but for its last token, which `generate` adds. `ids` [1, L - 1] is computed
        once, and not for each row."""
        self.model.base_model.rope_deltas = None  # Qwen's vision models keep those of the prompt before
        pixels = {}
        if images:
            pixels = {name: x.to(ids.device) for name, x in images.pixels().items()}
        if "image_grid_thw" in pixels:
            pixels["mm_token_type_ids"] = (ids == self.model.config.image_token_id).long()  # 0: text, 1: image
        if "video_grid_thw" in pixels:
            kinds = pixels.setdefault("mm_token_type_ids", torch.zeros_like(ids))
            kinds[ids == self.model.config.video_token_id] = 2
        cache = self.model(ids, use_cache=True, logits_to_keep=1, **pixels).past_key_values
        cache.reorder_cache(ids.new_zeros(ROWS))  # ROWS times its only row; states of linear attention too
        if self.routers:
            of_layers = torch.stack([router.own for router in self.routers])  # [layers, L - 1, k]
            self.chosen += of_layers[:, :, None].expand(-1, -1, ROWS, -1).unbind(dim=1)
        return cache

    def _has_ended(self, *_: Any) -> bool:
        """Whether `generate` stops: the engine does, or all responses of the block are complete."""
        return self.stop() or all(request.response.finish_reason for request in self.block)

    def _sample(self, _: Tensor, logits: Tensor) -> Tensor:
        """Sample a token for each unfinished response of the block. Returns `logits` [ROWS, V] with infinity at the
        sampled tokens, as `generate` takes the largest one of each row."""
        if self.routers:
            self.chosen.append(torch.stack([router.own for router in self.routers]))  # [layers, ROWS, k]
        rows = [row for row, request in enumerate(self.block) if not request.response.finish_reason]
        logp = filtered_logp(logits[rows], self.block[0].sampling)  # [n, V]
        noise = torch.ones_like(logp)
        for numbers, row in zip(noise, rows):
            if self.block[row].generator is not None:  # argmax of p / Exp(1) draws from p
                numbers.exponential_(generator=self.block[row].generator)
        sampled = (logp.exp() / noise).argmax(-1)
        sampled_logp = logp.gather(1, sampled[:, None])[:, 0]
        for row, token, token_logp in zip(rows, sampled.tolist(), sampled_logp.tolist()):
            sampling = self.block[row].sampling
            response = self.block[row].response
            response.tokens.append(token)
            response.logp.append(token_logp)
            if token in self.stop_token_ids or token in sampling.stop_token_ids:
                response.finish_reason = "stop"
            elif len(response.tokens) == sampling.max_response_length:
                response.finish_reason = "length"
        logits[rows, sampled] = torch.inf
        return logits

    def abort(self, requests: set[int]) -> list[tuple[int, Response]]:
        aborted = [request for request in self.waiting if request.number in requests]
        self.waiting = [request for request in self.waiting if request.number not in requests]
        return [(request.number, request.response) for request in aborted]


def filtered_logp(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Log-probs [n, V] of the sampled distribution: temperature, then top_k, top_p, in vLLM's order."""
    logits = logits / (sampling.temperature or 1.0)
    if sampling.top_k:
        logits = TopKLogitsWarper(sampling.top_k)(None, logits)
    if sampling.top_p < 1:
        logits = TopPLogitsWarper(sampling.top_p)(None, logits)
    return logits.log_softmax(-1)
