"""transformers' forward as the engine: no vLLM, and an independent check of it.

Continuous batching over a static cache: every response has a slot, each forward decodes one token for `ROWS` slots, and
a slot whose response has ended is given to the next prompt. A prompt is computed alone and once per group. There is no
padding inside a sequence. A response depends on its prompt, its seed and the weights only: matrix products always have
the same number of rows (their rounding depends on that number, not on the other rows), and attention always runs over
the same capacity.
"""

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from common.engine.base import Engine, Response, RolloutConfig, Sampling
from common.engine.sync import Sent, checksum
from common.model.gather import saved_buffers
from common.model.policy import ModelConfig
from common.parallel.ranks import World

ROWS = 32
"""Number of slots that one forward decodes."""


@dataclass
class Slot:
    """A response that is being sampled. `length`: number of tokens whose keys and values are in the cache."""

    request: int
    response: Response
    generator: torch.Generator
    length: int


class Cache:
    """Keys and values of some slots: a pair [slots, kv_heads, capacity, D] per layer, allocated when first written."""

    def __init__(self, slots: int, capacity: int):
        self.slots = slots
        self.capacity = capacity
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if index not in self.layers:
            shape = (self.slots, like.shape[1], self.capacity, like.shape[3])
            self.layers[index] = (like.new_zeros(shape), like.new_zeros(shape))
        return self.layers[index]

    def fill(self, slot: int, prompt: "Cache") -> None:
        """Copy the keys and values of a prompt into a slot."""
        for index, (prompt_keys, prompt_values) in prompt.layers.items():
            keys, values = self.layer(index, prompt_keys)
            keys[slot, :, : prompt.capacity] = prompt_keys[0]
            values[slot, :, : prompt.capacity] = prompt_values[0]


class HFEngine(Engine):
    """transformers' own model and sampling in the trainer's process."""

    def __init__(
        self, model: str, hf_config: PretrainedConfig, config: RolloutConfig, model_config: ModelConfig, world: World,
        probe: Sequence[Sequence[int]], stop_token_ids: list[int], max_model_len: int,
    ):
        super().__init__(config, model_config, world, probe)
        self.stop_token_ids = stop_token_ids
        self.capacity = max_model_len
        self.tokenizer = None
        if config.stop:
            self.tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=model_config.trust_remote_code)
        AttentionInterface.register("slots", attend)
        with torch.device(world.device):
            self.model = AutoModelForCausalLM.from_config(
                copy.deepcopy(hf_config),  # from_config changes it
                dtype=self.dtype,
                attn_implementation="slots",
                trust_remote_code=model_config.trust_remote_code,
            )
        self.model.eval().requires_grad_(False)
        self.caches: list[Cache] = []
        self.waiting: deque[int] = deque()
        self.running: dict[int, Slot] = {}

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

    def _sleep(self) -> dict[str, float]:
        self.caches = []
        return {}

    @torch.no_grad()
    def _generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
    ) -> Iterator[tuple[int, Response]]:
        self.waiting = deque(range(len(prompts)))
        self.running = {}
        num_slots = min(self._num_slots(), -(-len(prompts) // ROWS) * ROWS)
        while len(self.caches) * ROWS < num_slots:
            self.caches.append(Cache(ROWS, self.capacity))
        prompt, prompt_cache, prompt_logits = None, None, None
        while self.waiting or self.running:
            free_slots = [slot for slot in range(num_slots) if slot not in self.running]
            for slot in free_slots:
                if not self.waiting:
                    break
                i = self.waiting.popleft()
                if prompts[i] != prompt:
                    prompt = prompts[i]
                    prompt_cache = Cache(1, len(prompt))
                    prompt_logits = self._forward([prompt], [0], prompt_cache)
                generator = torch.Generator(self.world.device).manual_seed(seeds[i])
                self.running[slot] = Slot(i, Response([], [], "length"), generator, len(prompt))
                self.caches[slot // ROWS].fill(slot % ROWS, prompt_cache)
                yield from self._sample([slot], prompt_logits, sampling)
            for block, cache in enumerate(self.caches):
                yield from self._decode(range(block * ROWS, (block + 1) * ROWS), cache, sampling)

    def _decode(self, block: range, cache: Cache, sampling: Sampling) -> Iterator[tuple[int, Response]]:
        """One more token for every running slot of a block."""
        slots = [slot for slot in block if slot in self.running]
        if not slots:
            return
        tokens = [[0]] * ROWS  # a free slot computes something that nobody reads
        starts = [0] * ROWS
        for slot in slots:
            tokens[slot - block.start] = self.running[slot].response.tokens[-1:]
            starts[slot - block.start] = self.running[slot].length
            self.running[slot].length += 1
        logits = self._forward(tokens, starts, cache)
        yield from self._sample(slots, logits[[slot - block.start for slot in slots]], sampling)

    def _num_slots(self) -> int:
        """Up to `max_num_seqs` slots that fit into `kv_cache_gb`, in whole blocks of ROWS, at least one block."""
        c = self.model.config
        head_dim = c.head_dim if hasattr(c, "head_dim") and c.head_dim else c.hidden_size // c.num_attention_heads
        bytes_per_token = 2 * c.num_hidden_layers * c.num_key_value_heads * head_dim * self.dtype.itemsize
        fitting_slots = int(self.config.kv_cache_gb * 2**30 / (bytes_per_token * self.capacity))
        wanted_blocks = -(-self.config.max_num_seqs // ROWS)
        return max(min(wanted_blocks, fitting_slots // ROWS), 1) * ROWS

    def _forward(self, tokens: list[list[int]], starts: list[int], cache: Cache) -> Tensor:
        """Logits of each row's last token, float32 [rows, V]. The tokens of row r go to positions starts[r], ..."""
        device = self.world.device
        ids = torch.tensor(tokens, device=device)  # [rows, L]
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(ids.shape[1], device=device)
        inputs = {"input_ids": ids, "position_ids": positions, "slots": cache, "slot_positions": positions}
        return self.model(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1].float()

    def _sample(self, slots: list[int], logits: Tensor, sampling: Sampling) -> Iterator[tuple[int, Response]]:
        """Sample one token for each of these slots [n], from `logits` [n, V]; yield the responses that end with it."""
        logp = filtered_logp(logits, sampling)  # [n, V]
        if sampling.temperature == 0:
            sampled = logp.argmax(-1)
        else:  # argmax of p / Exp(1) draws from p
            generators = [self.running[slot].generator for slot in slots]
            noise = torch.stack([torch.empty_like(logp[0]).exponential_(generator=g) for g in generators])
            sampled = (logp.exp() / noise).argmax(-1)
        sampled_logp = logp.gather(1, sampled[:, None])[:, 0]
        stops = {*self.stop_token_ids, *sampling.stop_token_ids}
        for slot, token, token_logp in zip(slots, sampled.tolist(), sampled_logp.tolist()):
            if slot not in self.running:
                continue  # aborted when an earlier one of these ended
            response = self.running[slot].response
            response.tokens.append(token)
            response.logp.append(token_logp)
            if token in stops or self._spells_stop(response.tokens, sampling.stop):
                response.finish_reason = "stop"
            elif len(response.tokens) < sampling.max_tokens:
                continue
            request = self.running.pop(slot).request
            yield request, response

    def _spells_stop(self, tokens: list[int], stop: Sequence[str]) -> bool:
        """Whether the last token completes one of these texts. A character is at most four tokens."""
        if not stop:
            return False
        tail = tokens[-4 * max(map(len, stop)) :]
        return any(text in self.tokenizer.decode(tail) for text in stop)

    def _abort(self, requests: set[int]) -> None:
        self.waiting = deque(i for i in self.waiting if i not in requests)
        self.running = {number: slot for number, slot in self.running.items() if slot.request not in requests}


def check_hf(config: RolloutConfig) -> None:
    """Refuse flags that only vLLM has."""
    defaults = RolloutConfig()
    for field in ("tp", "batch_invariant", "quantization", "extra"):
        value = getattr(config, field)
        if value != getattr(defaults, field):
            raise ValueError(f"--rollout.{field.replace('_', '-')} {value} needs --rollout.engine vllm")
    if config.seeds == "engine":
        raise ValueError("--rollout.seeds engine needs --rollout.engine vllm: hf always seeds each response")


def filtered_logp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Log-probs [n, V] of the distribution that is sampled: temperature, then min_p, top_k, top_p, in vLLM's order."""
    logits = logits / (sampling.temperature or 1.0)
    if sampling.min_p:
        lowest = logits.max(-1, keepdim=True).values + torch.tensor(sampling.min_p, device=logits.device).log()
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    if sampling.top_k and sampling.top_k < logits.shape[-1]:
        lowest = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        outside = probs.cumsum(-1) - probs >= sampling.top_p  # the more likely tokens are enough already
        logits = logits.masked_fill(outside.scatter(1, order, outside), -torch.inf)
    return logits.log_softmax(-1)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    slots: Cache | None = None, slot_positions: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write keys and values [rows, kv_heads, L, D] into the cache at their positions [rows, L]; each query attends to
    all positions up to its own."""
    if kwargs.get("s_aux") is not None:
        raise ValueError("--rollout.engine hf has no attention sinks: this model needs --rollout.engine vllm")
    keys, values = slots.layer(module.layer_idx, key)
    rows = torch.arange(len(key), device=key.device)[:, None]  # [rows, 1]
    keys[rows, :, slot_positions] = key.transpose(1, 2)
    values[rows, :, slot_positions] = value.transpose(1, 2)
    distance = slot_positions[..., None] - torch.arange(slots.capacity, device=key.device)  # [rows, L, C]
    mask = distance >= 0
    if sliding_window is not None:
        mask &= distance < sliding_window
    if softcap is None:
        is_grouped = query.shape[1] != keys.shape[1]
        out = F.scaled_dot_product_attention(query, keys, values, mask[:, None], scale=scaling, enable_gqa=is_grouped)
        return out.transpose(1, 2), None
    # Gemma 2: a tanh between the scores and the softmax
    repeats = query.shape[1] // keys.shape[1]
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    scores = query @ keys.repeat_interleave(repeats, 1).transpose(2, 3)
    scores = torch.tanh(scores * scale / softcap) * softcap
    weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1, dtype=torch.float32).to(query.dtype)
    out = weights @ values.repeat_interleave(repeats, 1)
    return out.transpose(1, 2), None
