"""Weight sync against plain copies of the same bytes: `python -m tests.bench.bench_sync`, or under torchrun.

The floor is what the data itself asks for: each weight cast once (float32 to the engine's dtype), sent once to every
rank where there are several, and copied once into the engine, measured here on as many bytes. On CPUs vLLM's kernels
read packed matrices: `pack_s` is vLLM's packing of the new ones. Median of rounds.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed
import tyro

from common.engine.base import Engine, EngineSetup, RolloutConfig
from common.engine.make import make_engine
from common.model.loading import load_policy, read_config
from common.model.policy import ModelConfig, Policy
from common.parallel import ranks
from common.sync.weights import pack_on_cpu
from tests.bench.record import report


@dataclass
class Args:
    model: str = "models/SmolLM2-135M-Instruct"
    tp: int = 1
    rounds: int = 7


def main(args: Args) -> None:
    world, model_config = ranks.init(), ModelConfig()
    config = RolloutConfig(max_response_length=40, max_num_seqs=16, kv_cache_gb=0.1, tp=args.tp)
    hf_config = read_config(args.model, model_config)
    engine = make_engine(EngineSetup(args.model, hf_config, config, model_config, world, [[5, 6, 7]], [2], 128, 0))
    policy = load_policy(args.model, model_config, world)
    engine.wake(policy)
    engine.sleep()
    # the first ones touch new memory
    rows = [measure_sync(engine, policy) for _ in range(args.rounds + 2)][2:]
    result = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    if world.is_main:
        report("sync", ranks=world.size, tp=args.tp, **result)
    engine.close()
    ranks.shutdown()


def measure_sync(engine: Engine, policy: Policy) -> dict[str, float]:
    """Seconds of one sync (checksums included), of its gathering alone, and of the floor. The engine is asleep before
    and after."""
    device, dtype = engine.world.device, engine.dtype
    policy.version += 1
    engine._wake_weights()
    sync = timed(device, lambda: engine._sync(policy))
    pack = timed(device, lambda: pack_on_cpu(engine.model)) if device.type == "cpu" else 0.0
    gather = timed(device, lambda: [None for _ in policy.full_tensors(dtype)])
    numel = sum(parameter.numel() for parameter in policy.parameters())
    floor = plain_copies(numel, 256 * 2**20 // dtype.itemsize, dtype, engine.world)
    engine._wake_cache()
    engine.awake = True
    engine.sleep()
    gb = numel * dtype.itemsize / 2**30
    return {"weights_gb": gb, "sync_s": sync, "gather_s": gather, "floor_s": floor,
            "pack_s": pack, "gb_per_s": gb / sync, "ratio": sync / floor, "ratio_with_pack": sync / (floor + pack)}


def plain_copies(numel: int, bucket: int, dtype: torch.dtype, world: ranks.World) -> float:
    """Seconds to cast, gather and copy `numel` elements in buckets, from and to the same buffers again and again."""
    masters = torch.randn(bucket // world.size, device=world.device)
    mine = torch.empty_like(masters, dtype=dtype)
    whole = mine.new_empty(len(mine) * world.size)
    into = torch.zeros_like(whole)

    def work() -> None:
        for _ in range(round(numel / bucket) or 1):
            mine.copy_(masters)
            if world.size > 1:
                torch.distributed.all_gather_single(whole, mine)
            into.copy_(whole if world.size > 1 else mine)

    work()                                                              # touch the pages
    return timed(world.device, work) * numel / bucket / (round(numel / bucket) or 1)


def timed(device: torch.device, work: Callable[[], object]) -> float:
    if torch.distributed.get_world_size() > 1:
        torch.distributed.barrier()
    clock = time.perf_counter if device.type == "cuda" else time.process_time     # CPU-seconds, where cores are shared
    start = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
