"""transformers' forward as the engine: no vLLM, and an independent check of it.

Continuous batching over a static cache: every response has a slot, each forward decodes one token for `ROWS` slots, and
a slot that ends is given to the next prompt. A prompt is computed alone and once per group. There is no padding inside
a sequence, and a response depends on its prompt, its seed and the weights only: matrix products are computed for the
same number of rows whoever else is there (their rounding depends on that number, not on the other rows), attention
over the same capacity.
"""

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from common.engine.base import Engine, Response, RolloutConfig, Sampling
from common.engine.sync import checksum
from common.model.gather import saved_buffers
from common.model.policy import ModelConfig
from common.parallel.ranks import World

ROWS = 32
"""Slots that one forward decodes."""


@dataclass
class Slot:
    """A response on its way. `length`: tokens whose keys and values are in the cache."""

    request: int
    response: Response
    generator: torch.Generator
    length: int


class Cache:
    """Keys and values of some slots, a [slots, kv_heads, capacity, D] pair per layer, made when first written."""

    def __init__(self, slots: int, capacity: int):
        self.slots, self.capacity = slots, capacity
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if index not in self.layers:
            shape = (self.slots, like.shape[1], self.capacity, like.shape[3])
            self.layers[index] = (like.new_zeros(shape), like.new_zeros(shape))
        return self.layers[index]

    def fill(self, slot: int, prompt: "Cache") -> None:
        for index, (keys, values) in prompt.layers.items():
            mine = self.layer(index, keys)
            mine[0][slot, :, : prompt.capacity] = keys[0]
            mine[1][slot, :, : prompt.capacity] = values[0]


class HFEngine(Engine):
    def __init__(
        self,
        model: str,
        hf_config: PretrainedConfig,
        config: RolloutConfig,
        model_config: ModelConfig,
        world: World,
        probe: Sequence[Sequence[int]],
        stop_token_ids: list[int],
        max_model_len: int,
    ):
        super().__init__(config, model_config, world, probe)
        self.stop_token_ids, self.capacity = stop_token_ids, max_model_len
        self.tokenizer = AutoTokenizer.from_pretrained(model) if config.stop else None
        AttentionInterface.register("slots", attend)
        with torch.device(world.device):
            self.model = AutoModelForCausalLM.from_config(
                copy.deepcopy(hf_config),  # from_config writes the attention into it
                dtype=self.dtype,
                attn_implementation="slots",
                trust_remote_code=model_config.trust_remote_code,
            )
        self.model.eval().requires_grad_(False)
        self.caches: list[Cache] = []
        self.waiting: deque[int] = deque()
        self.running: dict[int, Slot] = {}

    @torch.no_grad()
    def _load(self, tensors: Iterator[tuple[str, Tensor]], sent: dict[str, int]) -> dict[str, tuple[int, int]]:
        mine = dict(self.model.named_parameters()) | saved_buffers(self.model)
        names = set(mine)
        for name, tensor in tensors:
            mine[name].copy_(tensor)
            names.remove(name)
        assert not names, f"weights that the trainer did not send: {sorted(names)}"
        return {name: (value, checksum(mine[name])) for name, value in sent.items()}

    def _sleep(self) -> dict[str, float]:
        self.caches = []
        return {}

    @torch.no_grad()
    def _generate(self, prompts, seeds, sampling) -> Iterator[tuple[int, Response]]:
        self.waiting, self.running = deque(range(len(prompts))), {}
        num_slots = min(self._num_slots(), -(-len(prompts) // ROWS) * ROWS)
        while len(self.caches) * ROWS < num_slots:
            self.caches.append(Cache(ROWS, self.capacity))
        prompt, prefix, first = None, None, None
        while self.waiting or self.running:
            for number in [n for n in range(num_slots) if n not in self.running]:
                if not self.waiting:
                    break
                i = self.waiting.popleft()
                if prompts[i] != prompt:
                    prompt = prompts[i]
                    prefix = Cache(1, len(prompt))
                    first = self._forward([prompt], [0], prefix)
                generator = torch.Generator(self.world.device).manual_seed(seeds[i])
                self.running[number] = Slot(i, Response([], [], "length"), generator, len(prompt))
                self.caches[number // ROWS].fill(number % ROWS, prefix)
                yield from self._sample([number], first, sampling)
            for block, cache in enumerate(self.caches):
                numbers = [n for n in range(block * ROWS, (block + 1) * ROWS) if n in self.running]
                if not numbers:
                    continue
                rows = [self.running.get(n) for n in range(block * ROWS, (block + 1) * ROWS)]
                tokens = [[row.response.tokens[-1]] if row else [0] for row in rows]        # a free slot runs idle
                logits = self._forward(tokens, [row.length if row else 0 for row in rows], cache)
                for n in numbers:
                    self.running[n].length += 1
                yield from self._sample(numbers, logits[[n - block * ROWS for n in numbers]], sampling)

    def _num_slots(self) -> int:
        """As many as `max_num_seqs` wants and `kv_cache_gb` holds, in whole blocks of ROWS, at least one."""
        c = self.model.config
        head_dim = c.head_dim if hasattr(c, "head_dim") and c.head_dim else c.hidden_size // c.num_attention_heads
        token = 2 * c.num_hidden_layers * c.num_key_value_heads * head_dim * self.dtype.itemsize
        fitting = int(self.config.kv_cache_gb * 2**30 / (token * self.capacity))
        return max(min(-(-self.config.max_num_seqs // ROWS), fitting // ROWS), 1) * ROWS

    def _forward(self, tokens: list[list[int]], starts: list[int], cache: Cache) -> Tensor:
        """Logits of each row's last token, float32 [rows, V]. Row r's tokens go to positions starts[r], ..."""
        device = self.world.device
        ids = torch.tensor(tokens, device=device)                                                   # [rows, L]
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(ids.shape[1], device=device)
        out = self.model(input_ids=ids, position_ids=positions, slots=cache, slot_positions=positions, use_cache=False,
                         logits_to_keep=1)
        return out.logits[:, -1].float()

    def _sample(self, numbers: list[int], logits: Tensor, sampling: Sampling) -> Iterator[tuple[int, Response]]:
        """One token for each of these slots; those that end leave."""
        logp = cut_logp(logits, sampling)                                                           # [n, V]
        if sampling.temperature == 0:
            picked = logp.argmax(-1)
        else:  # argmax of p / Exp(1) draws from p
            generators = [self.running[n].generator for n in numbers]
            noise = torch.stack([torch.empty_like(logp[0]).exponential_(generator=g) for g in generators])
            picked = (logp.exp() / noise).argmax(-1)
        stops = {*self.stop_token_ids, *sampling.stop_token_ids}
        for n, token, value in zip(numbers, picked.tolist(), logp.gather(1, picked[:, None])[:, 0].tolist()):
            slot = self.running.get(n)
            if slot is None:
                continue                                                                # aborted by an earlier one
            slot.response.tokens.append(token)
            slot.response.logp.append(value)
            if token in stops or self._spells_stop(slot.response.tokens, sampling.stop):
                slot.response.finish_reason = "stop"
            elif len(slot.response.tokens) < sampling.max_tokens:
                continue
            del self.running[n]
            yield slot.request, slot.response

    def _spells_stop(self, tokens: list[int], stop: Sequence[str]) -> bool:
        """Whether the last token completes one of these texts. A character has at most four tokens."""
        if not stop:
            return False
        tail = tokens[-4 * max(map(len, stop)) :]
        return any(text in self.tokenizer.decode(tail) for text in stop)

    def _abort(self, requests: set[int]) -> None:
        self.waiting = deque(i for i in self.waiting if i not in requests)
        for n in [n for n, slot in self.running.items() if slot.request in requests]:
            del self.running[n]


def check_hf(config: RolloutConfig) -> None:
    """Refuse flags that only vLLM has."""
    for flag, off in (("tp", 1), ("batch_invariant", False), ("quantization", "none"), ("extra", ())):
        if getattr(config, flag) != off:
            name = flag.replace("_", "-")
            raise ValueError(f"--rollout.{name} {getattr(config, flag)} needs --rollout.engine vllm")
    if config.seeds == "engine":
        raise ValueError("--rollout.seeds engine needs --rollout.engine vllm: hf always seeds each response")


def cut_logp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Log-probs [n, V] of the distribution that is sampled: temperature, then min_p, top_k, top_p, in vLLM's order."""
    logits = logits / (sampling.temperature or 1.0)
    if sampling.min_p:
        least = logits.max(-1, keepdim=True).values + torch.tensor(sampling.min_p, device=logits.device).log()
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_k and sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[:, -1:], -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        outside = probs.cumsum(-1) - probs >= sampling.top_p                    # what comes before is enough already
        logits = logits.masked_fill(outside.scatter(1, order, outside), -torch.inf)
    return logits.log_softmax(-1)


def attend(
    module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, slots: Cache | None = None,
    slot_positions: Tensor | None = None, **kwargs,
) -> tuple[Tensor, None]:
    """Write keys and values [rows, kv_heads, L, D] at their positions, attend to all up to one's own."""
    if kwargs.get("s_aux") is not None:
        raise ValueError("--rollout.engine hf has no attention sinks: this model needs --rollout.engine vllm")
    keys, values = slots.layer(module.layer_idx, key)
    rows = torch.arange(len(key), device=key.device)[:, None]                                       # [rows, 1]
    keys[rows, :, slot_positions] = key.transpose(1, 2)
    values[rows, :, slot_positions] = value.transpose(1, 2)
    there = torch.arange(slots.capacity, device=key.device)
    back = slot_positions[..., None] - there                                                        # [rows, L, C]
    mask = (back >= 0) if sliding_window is None else (back >= 0) & (back < sliding_window)
    if softcap is None:
        out = F.scaled_dot_product_attention(query, keys, values, mask[:, None], scale=scaling,
                                             enable_gqa=query.shape[1] != keys.shape[1])
    else:                                                           # Gemma 2: tanh between the scores and the softmax
        repeats = query.shape[1] // keys.shape[1]
        scores = query @ keys.repeat_interleave(repeats, 1).transpose(2, 3)
        scores = torch.tanh(scores * (query.shape[3] ** -0.5 if scaling is None else scaling) / softcap) * softcap
        weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1, dtype=torch.float32).to(query.dtype)
        out = weights @ values.repeat_interleave(repeats, 1)
    return out.transpose(1, 2), None
