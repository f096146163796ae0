"""vLLM inside the training process: one engine core per `tp` ranks, on the trainer's own process group.

On GPUs it sleeps at level 2 between rollouts (its weights are discarded: they come back from the trainer anyway).
"""

import contextlib
import gc
import importlib.util
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from common.dist import World, seed_of
from common.policy import ModelConfig
from common.rollout import Engine, Response, RolloutConfig


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
    ):
        super().__init__(config, model_config, world, probe)
        self.stop_token_ids = stop_token_ids
        self.on_cpu = world.device.type == "cpu"
        self.seeds = config.seeds if config.seeds != "auto" else ("response" if self.on_cpu else "engine")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if importlib.util.find_spec("flashinfer") is None:
            os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # imported unasked otherwise
        if self.on_cpu:
            options: dict[str, Any] = {
                "enforce_eager": True,
                "block_size": 32,  # 128, the default, never prefix-caches a prompt of about 100 tokens
                "kv_cache_memory_bytes": int(config.kv_cache_gb * 2**30),
                # whole prompts only: the CPU build cannot rewind a response's generator after a partial prefill
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(max_model_len, 2048),
            }
        else:
            options = {
                "enforce_eager": config.enforce_eager,
                "gpu_memory_utilization": config.gpu_memory_utilization,
                "enable_sleep_mode": True,
            }
            gc.collect()
            torch.cuda.empty_cache()
        with _unchanged_process(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # inside vLLM
            from vllm import LLM

            self.llm = LLM(
                model=model,
                load_format="dummy",  # weights come from the trainer, all of them, before the first use
                dtype=model_config.compute_dtype,
                trust_remote_code=model_config.trust_remote_code,
                tensor_parallel_size=config.tp,
                distributed_executor_backend="external_launcher",
                max_model_len=max_model_len,
                max_num_seqs=config.max_num_seqs,
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
                use_tqdm_on_load=False,
                seed=seed_of(seed, self.rank),
                **options,
            )
        self._sleep()

    def _wake_weights(self) -> None:
        if not self.on_cpu:
            gc.collect()
            torch.cuda.empty_cache()  # before waking: vLLM's allocator cannot use torch's cached blocks
            self.llm.wake_up(tags=["weights"])

    def _load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        if self.on_cpu:
            # vLLM packs linear weights for oneDNN and empties the originals: only a reload may write them
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
            self.llm.apply_model(_pack_heads)
        else:
            self.llm.apply_model(lambda model: model.load_weights(tensors) and None)

    def _wake_cache(self) -> None:
        if not self.on_cpu:
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()  # it holds keys and values of the old weights

    def _sleep(self) -> None:
        if not self.on_cpu:  # the CPU build keeps weights and cache where they are
            self.llm.sleep(level=2)
            self._loaded = None
            gc.collect()
            torch.cuda.empty_cache()

    def _generate(self, prompts, seeds, sampling) -> Iterator[tuple[int, Response]]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        with _engine_seed(seeds, self.world.device) if self.seeds == "engine" else contextlib.nullcontext():
            for i, (prompt, seed) in enumerate(zip(prompts, seeds)):
                params = SamplingParams(
                    temperature=sampling.temperature,
                    max_tokens=sampling.max_tokens,
                    stop_token_ids=self.stop_token_ids,
                    seed=seed if self.seeds == "response" else None,
                    logprobs=0,  # of the sampled token only
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                engine.add_request(str(i), {"prompt_token_ids": list(prompt)}, params)
            while engine.has_unfinished_requests() and not self.stop():
                for request in engine.step():
                    out = request.outputs[0]
                    tokens = list(out.token_ids)
                    logp = [entry[token].logprob for token, entry in zip(tokens, out.logprobs)]
                    yield int(request.request_id), Response(tokens, logp, out.finish_reason)


    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def _pack_heads(model: torch.nn.Module) -> None:
    """A tied output head has no tensor of its own in the reload, so vLLM 0.32 keeps the old weights in the packed copy
    that its CPU kernels read: pack again from the embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


@contextlib.contextmanager
def _unchanged_process() -> Iterator[None]:
    """`LLM()` seeds every global generator, edits the environment and, on CPUs, replaces torch.set_num_threads and pins
    the process: put back what belongs to the trainer."""
    rng, set_num_threads, threads = torch.get_rng_state(), torch.set_num_threads, torch.get_num_threads()
    environment, cores = dict(os.environ), os.sched_getaffinity(0)
    yield
    torch.set_rng_state(rng)
    torch.set_num_threads = set_num_threads
    torch.set_num_threads(threads)
    os.sched_setaffinity(0, cores)
    for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
        if name in environment:
            os.environ[name] = environment[name]


@contextlib.contextmanager
def _engine_seed(seeds: Sequence[int], device: torch.device) -> Iterator[None]:
    """One seed for all responses of this call, from theirs; the trainer's generators come back afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed_of(*seeds))
        yield
