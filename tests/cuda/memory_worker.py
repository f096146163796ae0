"""Runs cases of memory.py: `memory_worker.py cuda|cpu CASES.json` prints the peaks of each as JSON.

It is the first of all ranks, whose shards are the largest; collectives return at once. cuda: on the stand-in. cpu: with
real memory, and torch's profiler records what its allocator gives out.
"""

import contextlib
import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from tests.cuda import fake_cuda

if __name__ == "__main__" and sys.argv[1] == "cuda":
    DEVICE = fake_cuda.install()                                        # before anything asks whether there is a GPU

import torch
from torch.nn.attention import varlen
from torch.profiler import ProfilerActivity, profile, record_function

from common import kernels
from common.memory.offload import OffloadConfig
from common.model import loading
from common.model.lora import LoRAConfig
from common.model.policy import ModelConfig
from common.parallel import ranks
from tests.cuda.memory import PHASES, Case, Peak, nothing_read, run


def join(case: Case) -> ranks.World:
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(case.gpus), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(case.gpus)}
    policy = case.policy
    return ranks.init(3600.0, policy.replicas, policy.sequence_parallel, policy.expert_parallel)


@contextlib.contextmanager
def all_is_finite() -> Iterator[None]:
    """What collectives leave is anything, and a step whose gradient is not finite would be skipped."""
    def isfinite(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(x.shape, dtype=torch.bool)

    with mock.patch.object(torch.Tensor, "isfinite", isfinite), mock.patch.object(torch, "isfinite", isfinite):
        yield


def on_stand_in(case: Case) -> dict[str, Peak]:
    allocator = DEVICE.allocator
    found: dict[str, Peak] = {}

    @contextlib.contextmanager
    def watch(name: str) -> Iterator[None]:
        allocator.reset_peaks()
        moved = Counter(DEVICE.moved)
        yield
        peaks = Peak(allocator.peak_allocated / 2**30, allocator.peak_reserved / 2**30, allocator.requested / 2**30,
                     DEVICE.moved - moved)
        found[name] = peaks.later_than(found[name]) if name in found else peaks

    DEVICE.only_shapes = True
    with DEVICE, nothing_read():
        run(case, join(case), watch)
    torch.distributed.destroy_process_group()
    gc.collect()
    torch.cuda.empty_cache()
    return found


def give_cpu_the_kernels_of_gpus() -> None:
    """The CPU has no kernel for packed attention: these take the memory of its results and compute nothing. Logits come
    in one tile, as on a GPU."""
    def forward(query, key, value, *_):
        return query * 1, torch.zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)

    def backward(grad_out, query, key, value, *_):
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)

    loading.choose_attention = lambda *_: "packed_varlen"
    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)
    kernels.CPU_TILE = 8192, 2**20


def on_cpu(case: Case) -> dict[str, Peak]:
    gc.collect()
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with nothing_read(), profiler, all_is_finite():
        run(case, join(case), record_function)
    torch.distributed.destroy_process_group()
    events = profiler.profiler.kineto_results.events()
    moments = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    found: dict[str, Peak] = {}
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() not in PHASES:
            continue
        total = peak = 0
        for at, size in moments:
            if at > event.start_ns() + event.duration_ns():
                break
            total += size
            peak = max(peak, total) if at >= event.start_ns() else total
        peaks = Peak(peak / 2**30, peak / 2**30, total / 2**30)         # nothing is reserved
        found[event.name()] = peaks.later_than(found.get(event.name(), peaks))
    return found


def read(path: str) -> Iterator[Case]:
    for fields in json.loads(Path(path).read_text()):
        kinds = {"policy": ModelConfig, "offload": OffloadConfig, "lora": LoRAConfig}
        yield Case(**fields | {name: kind(**fields[name]) for name, kind in kinds.items()})


if __name__ == "__main__":
    gc.freeze()
    if sys.argv[1] == "cuda":
        print(json.dumps([on_stand_in(case) for case in read(sys.argv[2])]))
    else:
        give_cpu_the_kernels_of_gpus()
        fake_cuda.fake_process_groups()
        print(json.dumps([on_cpu(case) for case in read(sys.argv[2])]))
