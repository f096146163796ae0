"""The engine that samples: `wake` (weights in, cache back), `generate`, `sleep`. Token ids in, token ids out.

Two engines stand behind the three verbs: vLLM inside the training process (`vllm_engine.py`), and Hugging Face's own
forward (`hf_engine.py`), which needs nothing else and checks the first one independently. Both keep their own copy of
the weights in the compute dtype.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import psutil
import torch
from torch import Tensor

from common.batch import Batch
from common.engine.sync import Recording, checksum
from common.model.offload import Offload, OffloadConfig
from common.model.policy import ModelConfig, Policy
from common.parallel.ranks import World, all_max, all_sum
from common.parallel.seeds import seed_of


@dataclass
class RolloutConfig:
    engine: Literal["vllm", "hf"] = "vllm"
    """Who samples. hf needs no vLLM and is slow: for machines without vLLM and as an independent check."""
    temperature: float = 1.0
    """Sampling temperature of training rollouts. Log-probs, ratios and entropy are taken at the same temperature."""
    top_p: float = 1.0
    """Sample from the fewest tokens that hold this probability. Below 1 training needs the engine correction."""
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0: all. Above 0 training needs the engine correction."""
    min_p: float = 0.0
    """Sample from tokens at least this share as likely as the likeliest. Above 0 training needs the correction."""
    val_top_p: float = 1.0
    """top_p of validation."""
    val_top_k: int = 0
    """top_k of validation."""
    val_min_p: float = 0.0
    """min_p of validation."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, besides the end token. The response keeps the tokens that spell it."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, besides the model's own end tokens."""
    max_response_length: int = 1024
    """Most tokens of a response."""
    oversample: float = 0.0
    """Ask for this share of responses more per prompt, keep those that end first and abort the rest: no waiting for
    stragglers, at the price of a bias towards short responses. Counted in rollout/aborted_frac."""
    max_num_seqs: int = 256
    """Responses that one engine decodes at once."""
    tp: int = 1
    """Tensor-parallel ranks per engine: world size / tp engines."""
    gpu_memory_utilization: float = 0.0
    """Share of a GPU's whole memory that weights and cache of the engine may take while it is awake. 0: what the
    trainer leaves."""
    kv_cache_gb: float = 0.5
    """Key-value cache of one engine in GiB, on CPUs and for hf."""
    enforce_eager: bool = False
    """On GPUs: no CUDA graphs (faster start, slower decoding). CPUs always run eagerly."""
    quantization: Literal["none", "fp8"] = "none"
    """On GPUs: fp8 weights in the engine, quantised again at every sync. Use it with the engine correction."""
    sleep_level: Literal[1, 2] = 2
    """On GPUs, while the engine sleeps its weights are 2: discarded, or 1: in pinned host memory."""
    sync_bucket_mb: int = 0
    """MiB of weights that are unsharded and handed to the engine at a time; two such exist at once. 0: from free
    memory."""
    seeds: Literal["auto", "response", "engine"] = "auto"
    """response: each response has a seed of its own. engine: one seed per engine and step. auto: response, except on
    GPUs where vLLM runs the model by its first runner, which has a random generator per response: slow there."""
    batch_invariant: bool = False
    """On GPUs: vLLM's batch-invariant kernels, so that a response with its own seed does not depend on what else is
    decoded beside it. Slower, for the trainer too: they replace torch's kernels, and NCCL is left one channel."""
    max_probe_diff: float = 0.0
    """Stop when, after a weight sync, mean |p_engine - p_trainer| on the probe exceeds this. 0: report only."""
    extra: tuple[str, ...] = ()
    """More arguments for vLLM's LLM(...), each key=value, values as Python writes them."""


@dataclass(frozen=True)
class Sampling:
    """How one call of `generate` samples; temperature 0 is greedy."""

    temperature: float
    max_tokens: int
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    oversample: float = 0.0

    @classmethod
    def training(cls, config: RolloutConfig) -> "Sampling":
        return cls(config.temperature, config.max_response_length, config.top_p, config.top_k, config.min_p,
                   config.stop, config.stop_token_ids, config.oversample)

    @classmethod
    def validation(cls, config: RolloutConfig, temperature: float) -> "Sampling":
        cuts = {"top_p": config.val_top_p, "top_k": config.val_top_k, "min_p": config.val_min_p}
        return replace(cls.training(config), temperature=temperature, oversample=0.0, **cuts)


@dataclass
class Response:
    tokens: list[int]
    """What the engine sampled, the stop token included."""
    logp: list[float]
    """Per token, under the distribution it was drawn from: after temperature, min_p, top_k and top_p."""
    finish_reason: str
    """stop: ended by itself; length: cut at max_tokens."""


class Engine:
    """What both engines share: who samples which prompts, the order of calls, the checks after every sync."""

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
        self.offload = Offload(OffloadConfig(), [], [])
        """What leaves the GPU while the engine is awake: set it once the optimizer exists."""
        self._loaded: int | None = None  # version of the weights inside; None: they were discarded
        self._recording: Recording | None = None  # of the engine's loads
        self._probed: tuple[Policy, Batch] | None = None
        self._asked = self._aborted = 0

    def wake(self, policy: Policy) -> dict[str, float]:
        """Weights in, cache back, then the checks that the engine holds the trainer's weights. The order matters:

        1. the optimizer's moments leave, if asked, and torch's cached blocks go back to the GPU;
        2. the engine's weights get their memory, then their values, bucket by bucket; checksums are compared;
        3. the trainer's weights leave, if asked; 4. the cache gets its memory and forgets the old weights' prefixes;
        5. a few tokens are sampled and scored by the trainer (by `sleep`, where the trainer's weights have left).

        Raises RuntimeError when awake already, or when checksums or the probe (`max_probe_diff`) disagree.
        """
        if self.awake:
            raise RuntimeError("wake: the engine is awake already; call sleep() first")
        start = time.perf_counter()
        self._asked = self._aborted = 0
        self.offload.optimizer_out()
        metrics = self._wake_weights()
        if self._loaded != policy.version:
            self._num_checksums = self._sync(policy)
            self._loaded = policy.version
        metrics["sync/num_checksums"] = self._num_checksums
        self.offload.params_out()
        metrics |= self._wake_cache()
        self.awake = True
        metrics["timing_s/update_weights"] = time.perf_counter() - start
        responses = self.generate(
            self.probe, [seed_of("probe", i) for i in range(len(self.probe))], Sampling(self.config.temperature, 8)
        )
        batch = Batch.build(self.probe, [r.tokens for r in responses], rollout_logps=[r.logp for r in responses])
        self._probed = policy, batch.to(self.world.device)
        if not self.offload.config.params:
            metrics |= self._check_probe()
        metrics["timing_s/probe"] = time.perf_counter() - start - metrics["timing_s/update_weights"]
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

        Equal prompts in a row are a group: its prompt is computed once, and with `sampling.oversample` it gets that
        share of responses more, of which the first to end take its places. `on_finish(i, response)` is called as each
        place is taken, on one rank of the engine: the one that scores it. Once `stop()` is true, what is still missing
        may stay None: the caller will not use it.
        """
        if not self.awake:
            raise RuntimeError("generate: the engine is asleep; call wake(policy) first")
        if len(prompts) != len(seeds):
            raise ValueError(f"generate: {len(prompts)} prompts but {len(seeds)} seeds")
        self.stop = stop if self.config.tp == 1 else bool  # ranks of a group hear of it at different times
        groups = [[i for i, _ in run] for _, run in groupby(enumerate(map(list, prompts)), key=lambda x: x[1])]
        asked, asked_seeds, group_of = [], [], []
        for number, group in enumerate(groups):
            extra = math.ceil(sampling.oversample * len(group))
            asked += [prompts[group[0]]] * (len(group) + extra)
            asked_seeds += [seeds[i] for i in group] + [seed_of(seeds[group[0]], "extra", k) for k in range(extra)]
            group_of += [number] * (len(group) + extra)
        running = [{i for i, of in enumerate(group_of) if of == number} for number in range(len(groups))] \
            if sampling.oversample else []
        responses: list[Response | None] = [None] * len(prompts)
        for request, response in self._generate(asked, asked_seeds, sampling):
            place = request
            if sampling.oversample:
                group, rest = groups[group_of[request]], running[group_of[request]]
                if not group:
                    continue                                            # ended in the same step as the last one kept
                place = group.pop(0)
                rest.discard(request)
                if not group:
                    self._abort(rest)
                    self._aborted += len(rest)
            responses[place] = response
            if on_finish is not None and place % self.config.tp == self.tp_rank:
                on_finish(place, response)
            if self.stop():
                break
        self._asked += len(asked)
        return responses

    def deal(self, num_prompts: int) -> range:
        """The prompts of a step that this engine samples."""
        return range(self.rank, num_prompts, self.count)

    def sleep(self) -> dict[str, float]:
        """Give back what the trainer can use until the next `wake`; then the trainer's own tensors come back."""
        if not self.awake:
            raise RuntimeError("sleep: the engine is asleep already")
        start = time.perf_counter()
        metrics = self._sleep()
        self.awake = False
        self.offload.back()
        metrics["timing_s/sleep"] = time.perf_counter() - start
        if self.config.oversample:
            asked, aborted = all_sum([self._asked, self._aborted]).tolist()
            metrics["rollout/aborted_frac"] = aborted / max(asked, 1)
        if self._probed is not None:
            metrics |= self._check_probe()
        return metrics

    def close(self) -> None:
        """Before the process group goes."""

    def _sync(self, policy: Policy) -> int:
        """Load the trainer's weights, then compare checksums of a sample: all tensors outside the layers and those of
        one layer, another one at each version. Returns how many were compared."""
        layer = policy.version % policy.lm.config.num_hidden_layers
        trusted = self._recording is None or self._recording.is_proven
        num_checksums, wrong = self._transfer(policy, layer, everything=not trusted)
        if wrong and not trusted:
            self._by_loaders("the copies that were recorded do not give the trainer's weights")
            num_checksums, wrong = self._transfer(policy, layer, everything=False)
        if wrong:
            raise RuntimeError(f"weight sync: checksums differ, the engine holds other weights: {', '.join(wrong)}")
        return num_checksums

    def _transfer(self, policy: Policy, layer: int, everything: bool) -> tuple[int, list[str]]:
        """Load all weights. Returns how many checksums the sample has, and what differs (in all, if `everything`)."""
        sent: dict[str, int] = {}

        def in_sample(name: str) -> bool:
            number = re.search(r"\.layers\.(\d+)\.", name)
            return number is None or int(number[1]) == layer

        def watched() -> Iterator[tuple[str, Tensor]]:
            bucket_mb = self.config.sync_bucket_mb or self._free_bucket_mb()
            # where nothing travels, whoever copies casts: one pass over the weights instead of two
            for name, tensor in policy.full_tensors(self.dtype if self.world.size > 1 else None, bucket_mb):
                if everything or in_sample(name):
                    sent[name] = sum(checksum(part.to(self.dtype)) for part in tensor.reshape(-1).split(1 << 22))
                yield name, tensor

        held = self._load(watched(), sent)
        wrong = [f"{name} ({want} sent, {have} held)" for name, (want, have) in held.items() if want != have]
        return sum(map(in_sample, held)), wrong

    def _free_bucket_mb(self) -> int:
        """A sixteenth of the memory that is free on the fullest rank, 64 MiB to 1 GiB."""
        if self.world.device.type == "cuda":
            free = torch.cuda.mem_get_info()[0]
        else:
            free = psutil.virtual_memory().available / self.world.size
        return int(min(max(-all_max([-free]).item() / 2**24, 64), 1024))

    def _check_probe(self) -> dict[str, float]:
        """Means of |p_engine - p_trainer| and |log p_engine - log p_trainer| over the probe, of the worst rank."""
        (policy, batch), self._probed = self._probed, None
        logp = policy.score(batch, self.config.temperature)
        ours, theirs = logp[batch.mask], batch.rollout_logp[batch.mask]
        differences = [(ours.exp() - theirs.exp()).abs().mean(), (ours - theirs).abs().mean()]
        prob_diff, logp_diff = all_max([float(x) for x in differences]).tolist()
        if 0 < self.config.max_probe_diff < prob_diff:
            raise RuntimeError(
                f"after the weight sync, mean |p_engine - p_trainer| is {prob_diff:.4f} on the probe, above "
                f"--rollout.max-probe-diff {self.config.max_probe_diff}: the engine does not hold the trainer's weights"
            )
        return {"sync/probe_prob_diff": prob_diff, "sync/probe_logp_diff": logp_diff}

    def _wake_weights(self) -> dict[str, float]:
        return {}

    def _wake_cache(self) -> dict[str, float]:
        return {}

    def _sleep(self) -> dict[str, float]:
        return {}

    def _load(self, tensors: Iterator[tuple[str, Tensor]], sent: dict[str, int]) -> dict[str, tuple[int, int]]:
        """Take all `tensors`. `sent`: checksums of the sample, filled as they pass. Returns the checksums that can be
        compared, by the engine's names: (sent, held)."""
        raise NotImplementedError

    def _generate(self, prompts, seeds, sampling) -> Iterator[tuple[int, Response]]:
        raise NotImplementedError

    def _abort(self, requests: set[int]) -> None:
        raise NotImplementedError
