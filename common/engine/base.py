"""The engine that samples: `wake` (weights in, cache back), `complete`, `sleep`. Token ids in, token ids out.

Two engines stand behind the three verbs: vLLM inside the training process (`vllm.py`), and Hugging Face's `generate`
(`hf.py`), which needs nothing else and checks the first one independently. Both keep their own copy of the weights in
the compute dtype.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig

from common.batch import Batch
from common.dataset.images import Images
from common.flags.model import ModelConfig, OffloadConfig
from common.flags.rollout import RolloutConfig, SamplingConfig
from common.memory.offload import Offload
from common.metrics import Meter
from common.model.policy import PackedModel, Policy
from common.parallel.ranks import World, all_max, all_names, all_sum, seed_of
from common.prompts import Prompt
from common.sync.checksums import Checksum, check_difference, checksum
from envs.runtime.conversation import constrains
from envs.runtime.response import Response

PROBE_TOKENS = 256
"""Most tokens of a prompt of the probe, which is scored in one pass, whatever the token budget: any beginning of a
prompt shows whether engine and trainer agree, also one that ends inside an image, whose tokens are text here."""

ASK_EVERY = 8
"""Steps after which the ranks of a tensor-parallel engine ask their first one whether to stop: a broadcast takes as
long as some 5% of a step."""


def validation_sampling(config: RolloutConfig, temperature: float) -> RolloutConfig:
    """How validation samples; temperature 0 is greedy."""
    return replace(config, temperature=temperature, top_p=config.val_top_p, top_k=config.val_top_k, drop=())


@dataclass
class Request:
    """A response to sample. An unfinished one is continued, with its tokens as part of the prompt."""

    prompt: Prompt
    seed: int | None  # None: greedy
    response: Response = field(default_factory=Response)  # as an earlier call left it


class Until(NamedTuple):
    """What ends sampling before all responses have ended."""

    stop: Callable[[], bool] = lambda: False  # the first rank of an engine decides for all of them, within some steps
    is_complete: Callable[[], bool] = lambda: False  # follows from the responses alone: all ranks know it at once


ALL_RESPONSES = Until()


@dataclass
class EngineSetup:
    """What an engine is started with."""

    model: str  # folder or hub name; vLLM reads config and tokenizer from it
    hf_config: PretrainedConfig
    config: RolloutConfig
    model_config: ModelConfig
    world: World
    probe: Sequence[Sequence[int]]  # a few prompts on which engine and trainer are compared after some syncs
    stop_token_ids: list[int]
    max_model_len: int  # tokens of prompt and response
    seed: int
    trainer_gb: float = 0.0  # GiB that the trainer keeps on each GPU while the engine is awake
    num_responses: int = 0  # of a step, those of one engine; 0: unknown


class Engine:
    """The parts that both engines share: which prompts an engine samples, the order of calls, checks after a sync."""

    def __init__(self, setup: EngineSetup):
        config = self.config = setup.config
        world = self.world = setup.world
        self.dtype = getattr(torch, setup.model_config.compute_dtype)
        self.stop_token_ids = setup.stop_token_ids
        self.num_engines = (world.num_samplers or world.size) // config.tp
        self.engine_rank, self.tp_rank = divmod(world.rank, config.tp)
        """The number of this rank's engine, and this rank's number in it."""
        self.probe = [list(prompt[:PROBE_TOKENS]) for prompt in setup.probe]
        self.name_of: Callable[[str], str] = lambda weight: weight  # the engine's name of a weight of the trainer's
        self.awake = False
        self.pool_bytes = 0  # of the engine's own allocator on a GPU
        self.offload = Offload(OffloadConfig(), [], [])
        """Moves trainer tensors to the host while the engine is awake. Set it once the optimizer exists."""
        self.policy: Policy | None = None
        """The policy whose weights the engine was given last."""
        self._version = -1  # of that policy when it was given
        self.probe_every = 10
        has_filters = config.top_p < 1 or config.top_k != 0 or (config.episode != "" and constrains())
        has_older_tokens = config.in_flight > 1 or world.num_samplers > 0
        if has_filters or has_older_tokens:
            self.probe_every = 1  # a step's own tokens, which `check_sampled` compares, are no probe then
        self._sleeps_to_probe = 0

    def wake(self, policy: Policy) -> dict[str, float]:
        """Load the weights, get the cache back, check that the engine holds the trainer's weights. It always
        loads them: several policies may take turns, and weights may change by more than optimizer steps. The
        order matters:

        1. torch's cached blocks go to the GPU, and the moments that a save has brought back to the host;
        2. the engine's weights get their memory, then their values, one by one; checksums are compared;
        3. the trainer's weights go to the host (with `--offload.params`);
        4. the cache gets its memory and forgets the prefixes that the old weights computed.

        Raises RuntimeError when checksums disagree.
        """
        self.must_be(False, "awake already: call engine.sleep() first")
        start = time.perf_counter()
        for moments in self.offload.moments:
            moments.to_host()
        self._wake_weights()
        if policy is not self.policy:
            self._sleeps_to_probe = 0  # what the engine makes of this one's weights was not compared by the last probe
        self.policy = policy
        self._version = policy.version
        metrics = self._sync(policy)
        self.offload.params.to_host()
        self._wake_cache()
        self.awake = True
        return metrics | {"timing_s/update_weights": time.perf_counter() - start}

    def complete(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        on_finish: Callable[[int, Response], Any] = lambda *_: None,
        until: Until = ALL_RESPONSES,
    ) -> list[Response]:
        """The response of each request, in order. All ranks of an engine pass the same requests.

        A prompt equal to the one before it is not computed again. `on_finish(i, response)` is called when response i
        ends. Where `until` ends sampling, responses may be unfinished."""
        self.begin(until.stop)
        responses = [request.response for request in requests]
        for i in self.order(requests):
            if not requests[i].response.finish_reason:
                self._add_rest(i, requests[i], sampling)
        while self.has_unfinished() and not until.is_complete() and not self.stop():
            for i, part in self.step():
                responses[i].extend(part, part.finish_reason)
                on_finish(i, responses[i])
        unfinished = {i for i, response in enumerate(responses) if not response.finish_reason}
        for i, part in self.abort(unfinished):
            reason = "" if part.finish_reason == "abort" else part.finish_reason  # a server's may have ended meanwhile
            responses[i].extend(part, reason)
        return responses

    def _add_rest(self, number: int, request: Request, sampling: SamplingConfig) -> None:
        """Queue what is left to sample of a request."""
        num_sampled = len(request.response.tokens)
        limited = replace(sampling, max_response_length=sampling.max_response_length - num_sampled)
        tokens = [*request.prompt.tokens, *request.response.tokens]
        seed = request.seed
        if num_sampled:
            seed = seed_of(request.seed, num_sampled)
        self.add(number, tokens, seed, limited, request.prompt.images)

    def begin(self, stop: Callable[[], bool]) -> None:
        """Call before requests are added. `stop`: see `Until`."""
        self.must_be(True, "asleep: call engine.wake(policy) first")
        self._stop = stop
        self._num_stop_calls = 0

    def stop(self) -> bool:
        """Whether to sample no more, the same on all ranks of an engine. While several ranks decode, most calls ask
        nobody (`ASK_EVERY`)."""
        is_due = self._num_stop_calls % ASK_EVERY == 0
        self._num_stop_calls += 1
        if self.config.tp > 1 and self.has_unfinished() and not is_due:
            return False
        return self.from_first_rank(self._stop())

    def order(self, requests: Sequence[Request]) -> Sequence[int]:
        """The numbers of the requests, in the order in which they are queued."""
        return range(len(requests))

    def must_be(self, awake: bool, otherwise: str) -> None:
        """Raises RuntimeError, which names the call to make, where calls come in the wrong order."""
        if self.awake != awake:
            raise RuntimeError(f"the engine is {otherwise}")

    def local_prompts(self, num_prompts: int) -> range:
        """The prompts of a step that this engine samples."""
        return range(self.engine_rank, num_prompts, self.num_engines)

    def sleep(self) -> dict[str, float]:
        """Give memory back to the trainer until the next `wake`; the trainer's weights return from the host.

        On the first and every `probe_every`-th call, the engine first samples a few tokens and the trainer scores them.
        Raises RuntimeError if the two disagree (`max_probe_diff`)."""
        self.must_be(True, "asleep already: call engine.wake(policy) first")
        start = time.perf_counter()
        batch = None
        if self._sleeps_to_probe == 0:
            batch = self._sample_probe()
            self._sleeps_to_probe = self.probe_every
        self._sleeps_to_probe -= 1
        sampled = time.perf_counter()
        metrics = self._sleep()
        self.awake = False
        self.offload.params.to_device()
        slept = time.perf_counter()
        metrics["timing_s/sleep"] = slept - sampled
        if batch is not None:
            metrics |= self._check_probe(batch)
            metrics["timing_s/probe"] = sampled - start + time.perf_counter() - slept
        return metrics

    def close(self) -> None:
        """Shut the engine down, before the process group is destroyed: vLLM's groups are part of it."""

    def _sync(self, policy: Policy) -> dict[str, float]:
        """Load the trainer's weights and compare checksums. Tells how many tensors were compared, and if some could
        not be, because the engine quantises them or names them otherwise, how many."""
        sent: dict[str, Checksum] = {}

        def tensors() -> Iterator[tuple[str, Tensor]]:
            # on one rank nothing travels, and the engine's copy casts: one pass over the weights instead of two
            dtype = None
            if self.world.size > 1 or self.world.num_samplers:
                dtype = self.dtype
            for name, tensor in policy.full_tensors(dtype):
                sent[self.name_of(name)] = checksum(tensor, self.dtype)
                yield name, tensor

        num_compared, differing = self._load(tensors(), sent)
        names = all_names(differing)  # of any rank: all of them raise
        if names:
            raise RuntimeError(
                "weight sync: checksums differ, the engine does not hold the trainer's weights "
                f"in {len(names)} tensors: {', '.join(names[:5])}"
            )
        metrics = {"sync/num_checksums": num_compared}
        num_left = len(sent) - num_compared
        if num_left:
            metrics["sync/num_not_compared"] = num_left
        return metrics

    def _sample_probe(self) -> Batch:
        sampling = SamplingConfig(self.config.temperature, min(8, self.config.max_response_length))
        requests = []
        for seed, tokens in enumerate(self.probe):
            requests.append(Request(Prompt(tokens, "", "", {}, []), seed))
        responses = self.complete(requests, sampling)
        batch = Batch.build(
            self.probe,
            [response.tokens for response in responses],
            rollout_logps=[response.logp for response in responses],
        )
        return batch.to(self.world.device)

    def _check_probe(self, batch: Batch) -> dict[str, float]:
        """Means of |p_engine - p_trainer| and |log p_engine - log p_trainer| over the probe, on the worst rank."""
        logp = self.policy.score(batch, self.config.temperature)
        logps = torch.stack([logp, batch.rollout_logp])[:, batch.mask]                    # [trainer, engine; N]
        differences = torch.stack([logps.exp(), logps]).diff(dim=1).abs()                       # [2, 1, N]
        differences = differences.nan_to_num(nan=torch.inf)
        prob_diff, logp_diff = all_max(differences.mean(dim=(1, 2))).tolist()
        check_difference(prob_diff, self.config.max_probe_diff, "the probe")
        return {"sync/probe_prob_diff": prob_diff, "sync/probe_logp_diff": logp_diff}

    def check_sampled(self, model: PackedModel, meter: Meter) -> None:
        """Before the policy's first update after `wake`: compare engine and trainer on the tokens that were sampled in
        this step (older ones come from other weights), as `correction.measure` added them to the meter. If there are
        none, the next `sleep` has a probe."""
        if self.probe_every == 1 or model is not self.policy or model.version != self._version:
            return
        name = "_training/rollout_probs_diff_fresh"
        total, count = all_sum([float(meter.sums[name]), float(meter.counts[name])]).tolist()
        if count:
            check_difference(total / count, self.config.max_probe_diff, "the tokens of this step")
        else:
            self._sleeps_to_probe = 0

    def _wake_weights(self) -> None:
        """Allocate the memory of the weights."""

    def _wake_cache(self) -> None:
        """Allocate the memory of the cache, without entries that old weights computed."""

    def _sleep(self) -> dict[str, float]:
        return self.measured()

    def measured(self) -> dict[str, float]:
        """What the engine has measured since the last call, the same on all of its side's ranks."""
        return {}

    def _load(self, tensors: Iterator[tuple[str, Tensor]], sent: dict[str, Checksum]) -> tuple[int, set[str]]:
        """Load all `tensors`. `sent`: their checksums, filled while `tensors` is read. Returns the number of tensors
        that were compared and the names of those that differ."""

    def add(self, request: int, prompt: Sequence[int], seed: int | None, sampling: SamplingConfig,
            images: Images | None = None, schema: dict[str, Any] | None = None) -> None:
        """Queue a request under this number; no seed: greedy. `schema`: a JSON schema whose grammar the response obeys
        (vLLM's engine only). All ranks of an engine add the same, in order."""

    def has_unfinished(self) -> bool:
        """Whether a request is queued that has not ended."""

    def step(self) -> Iterator[tuple[int, Response]]:
        """Sample at least one more token of a request; yield (request, response) for each request that ends."""

    def from_first_rank(self, value: Any) -> Any:
        """`value` of the engine's first rank, returned on all of its ranks."""
        return value

    def abort(self, requests: set[int]) -> list[tuple[int, Response]]:
        """Abort requests; those that have ended are ignored. Returns (request, the tokens sampled for it)."""
