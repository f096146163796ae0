"""vLLM inside the training process: one engine per `tp` ranks.

Between rollouts it sleeps. On GPUs its cache is freed and its weights are discarded (level 2), because the trainer
sends new weights anyway. On CPUs weights and cache stay.
"""

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from common.dataset.images import Images
from common.engine.base import Engine, EngineSetup, Request
from common.engine.extra import most_sequences
from common.engine.outputs import complete, shorten
from common.engine.tail import Tail
from common.engine.vllm_changes import (
    check_routers,
    kept_classes,
    start_on_cpu,
    use_float32_routers,
)
from common.flags.rollout import SamplingConfig
from common.memory.plan import GRAPHS_GB, RESERVED_GB
from common.model.flops import count_layers
from common.parallel.ranks import all_names, seed_of
from common.speculation.drafts import Drafts, draft_options, prepare_vllm
from common.speculation.history import sample_major
from common.sync.checksums import Checksum, differing, engine_name
from common.sync.names import AS_HELD, PublishedNames
from common.sync.weights import EngineWeights
from envs.pictures import decode
from envs.runtime.conversation import constrains
from envs.runtime.response import Response
from rewards import json_object
from rewards.runtime.cleaner import own_folder


class VLLMEngine(Engine):
    """vLLM's engine core in this process, with its `external_launcher` on the trainer's process group."""

    def __init__(self, setup: EngineSetup):
        super().__init__(setup)
        config = setup.config
        model_config = setup.model_config
        self.on_cpu = self.world.device.type == "cpu"
        dtype = model_config.compute_dtype
        if self.on_cpu and setup.hf_config.model_type == "qwen3_next" and dtype != "bfloat16":
            raise ValueError(f"--policy.compute-dtype {dtype}: vLLM's CPU build computes delta nets in bfloat16 only: "
                             f"set it to bfloat16, or use --rollout.engine hf")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        if len(own_folder()) <= 70:  # 36 more for a name of vLLM are all that the path of a socket may have
            os.environ.setdefault("VLLM_RPC_BASE_PATH", own_folder())  # else sockets between ranks stay, at any end
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it is imported otherwise, and never used with seeds
        options: dict[str, Any] = {
            "model": setup.model,
            "config_format": "hf",  # a folder with Mistral's own files, too, is read as the trainer reads it
            "load_format": "dummy",  # weights come from the trainer, all of them, before the first use
            "dtype": model_config.compute_dtype,
            "trust_remote_code": model_config.trust_remote_code,
            "tensor_parallel_size": config.tp,
            "distributed_executor_backend": "external_launcher",
            "max_model_len": setup.max_model_len,
            "max_num_seqs": config.max_num_seqs or most_sequences(self.world.device, setup.num_responses),
            "logprobs_mode": "processed_logprobs",
            "seed": seed_of(setup.seed, self.engine_rank),
            "limit_mm_per_prompt": {"video": 0},
            "enable_return_routed_experts": model_config.router_replay == "rollout",
        }
        if hasattr(setup.hf_config, "vision_config"):  # vLLM 0.26 has neither, and is refused with images
            # sha256 is part of Python; a tower's buffers for normalizing would be random: the load format is dummy
            options |= {"mm_hasher_algorithm": "sha256", "mm_device_do_normalize": False}
        if count_layers(setup.hf_config).has_states:
            options["mamba_ssm_cache_dtype"] = "float32"  # as the trainer's states; "auto" is the compute dtype
            if self.on_cpu:
                options["enable_prefix_caching"] = False  # of states it needs chunked prefill, see below
        if constrains():
            # white space would be free otherwise, and a small model writes it until there is no room left
            options["structured_outputs_config"] = {"backend": "xgrammar", "disable_any_whitespace": True}
        if self.on_cpu:
            options |= {
                "enforce_eager": True,
                "block_size": 32,  # 128, the default, never prefix-caches a prompt of about 100 tokens
                "kv_cache_memory_bytes": int(config.kv_cache_gb * 2**30),
                # whole prompts only: the CPU build cannot rewind a response's generator after a partial prefill
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(setup.max_model_len, 2048),
            }
        else:
            reserved_gb = RESERVED_GB if config.enforce_eager else RESERVED_GB + GRAPHS_GB
            options |= {
                "enforce_eager": config.enforce_eager,
                "gpu_memory_utilization": config.gpu_memory_utilization or gpu_share(setup.trainer_gb, reserved_gb),
                "enable_sleep_mode": True,
            }
        if config.drafts:
            options |= draft_options(config.drafts, options["max_num_seqs"])
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # CPUs have no Triton
        quiet = warnings.catch_warnings(action="ignore", category=FutureWarning)  # inside vLLM
        # LLM() edits LD_PRELOAD and LOCAL_WORLD_SIZE, on CPUs it replaces torch.set_num_threads, and with
        # VLLM_BATCH_INVARIANT=1 torch.bmm by one without a backward: at their end, these patches take that back
        kept = mock.patch.multiple(torch, bmm=torch.bmm, set_num_threads=torch.set_num_threads)
        cpu = start_on_cpu() if self.on_cpu else contextlib.nullcontext()
        with mock.patch.dict(os.environ), kept, quiet, cpu:
            from vllm import LLM
            from vllm.engine.arg_utils import EngineArgs

            if hasattr(EngineArgs, "cpu_distributed_timeout_seconds"):  # else vLLM's 10 and 30 minutes hold, as in 0.26
                seconds = int(setup.world.timeout.total_seconds())
                options |= {"distributed_timeout_seconds": seconds, "cpu_distributed_timeout_seconds": seconds}
            if model_config.router_float32:
                use_float32_routers()
            if config.drafts:
                prepare_vllm()
            # the other kernels for mixtures keep the experts' weights in another order, which a sync does not write
            extra = ({} if self.on_cpu else {"moe_backend": "triton"}) | json_object("--rollout.extra", config.extra)
            with kept_classes():
                self.llm = LLM(**options | extra)
        self.drafts = Drafts(config.drafts, self.llm) if config.drafts else None
        self.tail = Tail()
        shorten(self.llm.llm_engine.output_processor)
        self.model = self.llm.apply_model(lambda model: model)[0]  # it is in this process
        self.expert_layers = [x.layer_id for x in self.model.modules() if type(x).__name__.endswith("MoERunner")]
        if model_config.router_float32:
            check_routers(self.model, len(self.expert_layers))
        self.weights = EngineWeights(self.model, self.llm.llm_engine.vllm_config, self.dtype, self.on_cpu)
        self.names = None
        if setup.hf_config.model_type not in AS_HELD:
            self.names = PublishedNames(setup.hf_config)
        self.name_of = engine_name(self.model)
        self._sleep()
        self.pool_bytes = torch.cuda.memory_reserved()  # torch counts its pools on, though what they had is unmapped

    def _wake_weights(self) -> None:
        if not self.on_cpu:
            torch.cuda.empty_cache()  # its blocks are of no use to vLLM's own allocator; vLLM 0.26 leaves them
            self.llm.wake_up(tags=["weights"])  # first, always: buffers are restored into the weights' pool

    def _load(self, tensors: Iterator[tuple[str, Tensor]], sent: dict[str, Checksum]) -> tuple[int, set[str]]:
        if self.names is not None:
            tensors = self.names.of(tensors)
        missing = all_names(self.weights.load(tensors))  # of any rank: all of them raise
        if missing:
            raise RuntimeError(
                f"weight sync: nothing that the trainer sends goes into {len(missing)} weights of the "
                f"engine ({', '.join(missing[:3])}): transformers' model has other weights"
            )
        held = self.weights.complete(sent)
        return len(held), differing(sent, held)

    def _wake_cache(self) -> None:
        if not self.on_cpu:
            torch.cuda.empty_cache()  # what the sync took
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.llm_engine.reset_encoder_cache()  # the old tower's
        # the cache holds keys and values of the old weights
        if not self.llm.reset_prefix_cache() or self.llm.llm_engine.is_sleeping():
            raise RuntimeError("vLLM did not wake up: it sleeps, or requests of before are still in its cache")
        if self.drafts is not None and self.config.in_flight > 1:
            # which groups end first depends on the drafts: a run that is resumed has those of its own rollout only
            self.drafts.history.clear()

    def measured(self) -> dict[str, float]:
        metrics = self.tail.metrics()
        if self.drafts is not None:
            metrics |= self.drafts.metrics()
        return metrics

    def _sleep(self) -> dict[str, float]:
        metrics = self.measured()
        if self.on_cpu:
            return metrics
        self.llm.sleep(level=2)
        free, total = torch.cuda.mem_get_info()  # of the whole GPU: torch does not see the engine's pools
        return metrics | {"sleep/used_gb": (total - free) / 2**30}

    def begin(self, stop: Callable[[], bool]) -> None:
        super().begin(stop)
        self.tail.begin()

    def order(self, requests: Sequence[Request]) -> Sequence[int]:
        if self.drafts is None:
            return super().order(requests)
        return sample_major([request.prompt.tokens for request in requests])

    def add(self, request: int, prompt: Sequence[int], seed: int | None, sampling: SamplingConfig,
            images: Images | None = None, schema: dict[str, Any] | None = None) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        grammar = None
        if schema is not None:
            from vllm.sampling_params import StructuredOutputsParams

            grammar = StructuredOutputsParams(json=schema)
        params = SamplingParams(
            temperature=0.0 if seed is None else sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_response_length,
            stop=list(sampling.stop),
            stop_token_ids=[*self.stop_token_ids, *sampling.stop_token_ids],
            seed=seed,
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,  # lists of numbers, not an object a token
            detokenize=bool(sampling.stop), skip_special_tokens=False,  # a stop text may be a special token
            output_kind=RequestOutputKind.FINAL_ONLY,
            structured_outputs=grammar,
        )
        inputs: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        if images is not None:  # vLLM expands the placeholders itself, and would expand expanded ones again
            inputs["prompt_token_ids"] = images.engine_tokens(prompt)
            inputs["multi_modal_data"] = {"image": decode(images.files)}
        self.llm.llm_engine.add_request(str(request), inputs, params)
        self.tail.add()
        if self.drafts is not None:
            self.drafts.begin(request, prompt)

    def has_unfinished(self) -> bool:
        return self.llm.llm_engine.has_unfinished_requests()

    def step(self) -> Iterator[tuple[int, Response]]:
        start = time.perf_counter()
        ended = [to_response(request, self.expert_layers) for request in self.llm.llm_engine.step()]
        self._end(ended, time.perf_counter() - start)
        return iter(ended)

    def _end(self, ended: Sequence[tuple[int, Response]], seconds: float) -> None:
        """Requests have ended with a pass that took so long, or were aborted. What they sampled may be drafted."""
        self.tail.step(seconds, len(ended))
        if self.drafts is not None:
            for request, response in ended:
                self.drafts.end(request, response.tokens)

    def from_first_rank(self, value: Any) -> Any:
        from vllm.distributed import get_tp_group

        return get_tp_group().broadcast_object(value, src=0)  # of a group of one: the value, and nothing is sent

    def abort(self, requests: set[int]) -> list[tuple[int, Response]]:
        from vllm.v1.engine import FinishReason

        outputs = self.llm.llm_engine.output_processor
        numbers = [str(i) for i in sorted(requests)]  # in the same order on all ranks of an engine: this frees cache
        aborted = [outputs.request_states[i] for number in numbers for i in outputs.external_req_ids.get(number, ())]
        self.llm.llm_engine.abort_request(numbers)
        for state in aborted:
            complete(state)
        ended = [to_response(state.make_request_output([], None, FinishReason.ABORT, None)) for state in aborted]
        self._end(ended, 0.0)
        return ended

    def close(self) -> None:
        from vllm.distributed import parallel_state

        # vLLM's shutdown would destroy the trainer's process group too, on each rank at another time
        with mock.patch.object(parallel_state, "destroy_distributed_environment"):
            self.llm.llm_engine.engine_core.shutdown()


def to_response(request: Any, layers: Sequence[int] = ()) -> tuple[int, Response]:
    """Convert a vLLM output (also of an aborted request) to (request number, Response). Keeps the routed experts of
    `layers`; vLLM reports all layers, and 0 for layers without experts."""
    out = request.outputs[0]
    tokens = list(out.token_ids)
    logp = [out.logprobs.logprobs[i] for i in out.logprobs.start_indices[: len(tokens)]]
    response = Response(tokens, logp, out.finish_reason)
    if layers and out.routed_experts is not None:
        response.routing = torch.from_numpy(out.routed_experts[:, layers].astype("int16"))
        num_inputs = len(request.prompt_token_ids) + len(tokens) - 1
        assert len(response.routing) == num_inputs, f"vLLM told no experts of some of {num_inputs} tokens"
    return int(request.request_id), response


def gpu_share(trainer_gb: float, reserved_gb: float) -> float:
    """The memory that the trainer leaves free on a GPU, as a share of the total."""
    free, total = (x / 2**30 for x in torch.cuda.mem_get_info())
    share = min((free - trainer_gb - reserved_gb) / total, 0.92)
    if share < 0.1:
        raise ValueError(f"the trainer keeps {trainer_gb:.1f} of {free:.1f} free GiB on each GPU, "
                         f"{reserved_gb:g} are reserved: nothing is left for the engine; use more GPUs, or "
                         "--offload.optimizer and --offload.params")
    return share
