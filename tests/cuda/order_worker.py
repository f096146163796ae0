"""What comes before what on the stand-in for CUDA: `python -m tests.cuda.order_worker FOLDER`. FOLDER holds a model;
what was seen is printed as JSON."""

import json
import os
import sys
from pathlib import Path

from tests.cuda import fake_cuda

BATCH = [[5, 6, 7], [9]], [[11, 12], [13, 14, 15]]                      # prompts, responses
KINDS = "adamw", "adamw-bf16", "adamw-8bit"


# --------------------------------------------------------------------------- streams, alone

def use_in(side, waits_for_writer: bool, waits_for_reader: bool) -> list[float]:
    """A tensor is made in the default stream, used in another one, and the result is used in the default stream."""
    import torch

    x, default = torch.ones(4, device="cuda"), torch.cuda.current_stream()
    if waits_for_writer:
        side.wait_event(default.record_event())
    with torch.cuda.stream(side):
        y = x * 2
    if waits_for_reader:
        default.wait_stream(side)
    return (y + 1).tolist()


def free_while_used(side, how: str) -> list[float]:
    """A tensor is freed in whose memory another stream may still work, and its own stream allocates again."""
    import torch

    x, default = torch.ones(4, device="cuda"), torch.cuda.current_stream()
    side.wait_stream(default)
    with torch.cuda.stream(side):
        y = x * 2
    if how == "record_stream":
        x.record_stream(side)
    if how == "a wait":
        default.wait_stream(side)
    del x
    z = torch.ones(4, device="cuda")
    default.wait_stream(side)
    return (y + z).tolist()


def copy_to_host(waits: bool) -> list[float]:
    import torch

    x = torch.full((4,), 3.0, device="cuda").to("cpu", non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    return (x * 1).tolist()


def copy_from_host(pins: bool, waits: bool) -> list[float]:
    """The host writes into the memory that it copies from."""
    import torch

    host, x = torch.full((4,), 3.0, pin_memory=pins), torch.empty(4, device="cuda")
    x.copy_(host, non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    host.zero_()
    return x.tolist()


def draw(generator_device: str) -> list[bool]:
    import torch

    x = torch.empty(4, device="cuda").uniform_(generator=torch.Generator(generator_device))
    return (x < 1).tolist()


def rules() -> dict[str, list]:
    """Name -> what it gave, or what was said against it."""
    import torch

    side = torch.cuda.Stream()
    calls = {
        "used before it is made": lambda: use_in(side, False, True),
        "used before it is changed": lambda: use_in(side, True, False),
        "both waits": lambda: use_in(side, True, True),
        "freed": lambda: free_while_used(side, ""),
        "freed after record_stream": lambda: free_while_used(side, "record_stream"),
        "freed after a wait": lambda: free_while_used(side, "a wait"),
        "read before it arrives": lambda: copy_to_host(False),
        "read when it has arrived": lambda: copy_to_host(True),
        "changed before it leaves": lambda: copy_from_host(True, False),
        "changed when it has left": lambda: copy_from_host(True, True),
        "changed, not pinned": lambda: copy_from_host(False, False),
        "a generator of the host": lambda: draw("cpu"),
        "a generator of the device": lambda: draw("cuda"),
    }
    said = {}
    for name, call in calls.items():
        try:
            said[name] = call()
        except (fake_cuda.Race, fake_cuda.KernelRefuses) as error:
            said[name] = str(error)
        fake_cuda.ORDER.copies.clear()
        torch.cuda.synchronize()
    return said


# --------------------------------------------------------------------------- the project's code

def step(policy, optimizer, world) -> None:
    from common.batch import Batch
    from common.optim import OptimConfig, optimizer_step

    logp, _ = policy(Batch.build(*BATCH).to(world.device), 1.0)
    logp.sum().backward()
    optimizer_step(policy, optimizer, 1e-3, OptimConfig())


def rollouts(folder: Path, world, device) -> dict:
    """Two cycles of an engine with everything offloaded: bytes of the trainer's tensors at each moment; the weights."""
    from common.checkpoint.state import tensors_of
    from common.engine.base import EngineSetup, RolloutConfig
    from common.memory.offload import Offload, OffloadConfig
    from common.model.loading import load_policy
    from common.model.optimizers import make_optimizer
    from common.model.policy import ModelConfig
    from common.optim import OptimConfig
    from tests.cuda.memory import Handover

    moments = []

    class Told(Handover):
        def _wake_weights(self):
            moments.append(["wake weights", device.allocator.requested])

        def _wake_cache(self):
            moments.append(["wake cache", device.allocator.requested])

        def _sleep(self):
            moments.append(["sleep", device.allocator.requested])
            return {}

    policy = load_policy(str(folder), ModelConfig(), world)
    optimizer = make_optimizer(policy, OptimConfig())
    setup = EngineSetup("", None, RolloutConfig(max_probe_diff=0), ModelConfig(), world, BATCH[0], [], 64, 0)
    engine = Told(setup)
    engine.offload = Offload(OffloadConfig(params=True, optimizer=True), [policy], [optimizer])
    step(policy, optimizer, world)
    before = [p.to_local().cpu() for p in policy.parameters()]
    for _ in range(2):
        tensors_of({"policy": (policy, optimizer)})                     # of a save: moments come back
        engine.wake(policy)
        engine.sleep()
        moments.append(["end", device.allocator.requested])
    after = [p.to_local().cpu() for p in policy.parameters()]
    step(policy, optimizer, world)
    buffers = [buffer for tensors in (engine.offload.params, *engine.offload.moments) for buffer in tensors.host]
    return {
        "moments": moments, "bytes": sum(x.nbytes for x in before), "pinned": [x.is_pinned() for x in buffers],
        "same": all(map(type(before[0]).equal, before, after)),
    }


def saves(folder: Path, world, device) -> dict:
    """Two checkpoints that are written while training writes other numbers into the same tensors, and one of moments
    that are on their way back from the host; an export."""
    import torch
    from safetensors.torch import load_file

    from common.checkpoint.export import export
    from common.checkpoint.manager import Checkpoints
    from common.checkpoint.signals import Watchdog
    from common.memory.offload import Offload, OffloadConfig
    from tests.cuda.worker import set_stream_as_vllm
    from tests.rank_worker import STATE, checkpoints_of, everything, start

    set_stream_as_vllm()
    write, watch, loaded = Checkpoints._write, Watchdog(0), []
    Checkpoints._write = lambda self, *arguments: device.in_this_thread(write, self, *arguments)
    policy, optimizer = start(str(folder), world)
    step(policy, optimizer, world)
    run = checkpoints_of(folder / "run", world, policy, optimizer, watch, async_=True)
    for number in (1, 2):
        step(policy, optimizer, world)
        want = {name: tensor.cpu() for name, tensor in everything(policy, optimizer).items()}
        run.after_step(STATE | {"step": number})
        for parameter in policy.parameters():
            parameter.data.to_local().fill_(7)
        run.wait()
        checkpoints_of(folder / "run", world, policy, optimizer, watch).resume()
        found = {name: tensor.cpu() for name, tensor in everything(policy, optimizer).items()}
        loaded.append(all(found[name].equal(want[name]) for name in want))
    offload = Offload(OffloadConfig(optimizer=True), [policy], [optimizer])
    step(policy, optimizer, world)
    optimizer.state_dict()                                              # moments come back
    want = {name: tensor.cpu() for name, tensor in everything(policy, optimizer).items()}
    offload.moments[0].to_host()
    run, said = checkpoints_of(folder / "offloaded", world, policy, optimizer, watch), ""
    try:
        run.after_step(STATE)
        checkpoints_of(folder / "offloaded", world, policy, optimizer, watch).resume()
    except OSError as error:
        said = str(error)
    optimizer.state_dict()
    found = {name: tensor.cpu() for name, tensor in everything(policy, optimizer).items()}
    loaded.append(all(found[name].equal(want[name]) for name in want))
    export(policy, {"config.json": policy.lm.config.to_json_string(use_diff=False).encode()}, folder / "out", world)
    out, mine = load_file(folder / "out/model.safetensors"), dict(policy.lm.named_parameters())
    exported = [tensor.equal(mine[name].full_tensor().to(tensor.dtype).cpu()) for name, tensor in out.items()]
    assert torch.isfinite(found["lm_head.weight"]).all()
    return {"loaded": loaded, "said": said, "exported": exported}


def optimizers(folder: Path, world, device) -> dict[str, int]:
    """Bytes that the second step of each kind takes beside what is there: of a small model, and of one matrix with 16
    million weights."""
    import torch
    from torch.distributed.fsdp import fully_shard

    from common.batch import Batch
    from common.model.loading import Weights, load_policy
    from common.model.optimizers import WEIGHTS, make_optimizer
    from common.model.policy import ModelConfig
    from common.optim import OptimConfig

    found = {}
    for kind in KINDS:
        policy = load_policy(str(folder), ModelConfig(), world, Weights(dtype=WEIGHTS[kind]))
        optimizer = make_optimizer(policy, OptimConfig(kind=kind))
        step(policy, optimizer, world)
        policy(Batch.build(*BATCH).to(world.device), 1.0)[0].sum().backward()
        device.allocator.reset_peaks()
        before = device.allocator.allocated
        optimizer.step()
        found[kind] = device.allocator.peak_allocated - before
        layer = torch.nn.Linear(4096, 4096, bias=False, device=world.device, dtype=WEIGHTS[kind])
        fully_shard(layer, mesh=world.mesh)
        optimizer = make_optimizer(layer, OptimConfig(kind=kind))
        for _ in range(2):
            layer.weight.grad = torch.ones_like(layer.weight)
            device.allocator.reset_peaks()
            before = device.allocator.allocated
            optimizer.step()
        found[f"{kind}, 16 million"] = device.allocator.peak_allocated - before
    return found


def reports(world, device) -> dict:
    """What the host is told of a batch, of a phase, of the most memory; what it waits for while it adds to a meter."""
    import numpy as np
    import torch

    from common.batch import Batch
    from common.metrics import Meter, Timer
    from common.parallel.ranks import all_sum
    from common.tracking.step import step_metrics

    batch = Batch.build(*BATCH).to(world.device)
    back = batch.to("cpu")
    numbers = {"tokens": (back.tokens * 1).tolist(), "cu_seqlens": (back.cu_seqlens * 1).tolist()}
    device.reads.clear()
    timer = Timer()
    with timer("gen"):
        torch.ones(4, device="cuda").mul_(2)
    waited = device.reads["common/metrics.py:__call__"]
    torch.empty(2**26, dtype=torch.uint8, device="cuda")                # is gone at once
    metrics = step_metrics(Meter(), timer, world, np.array([3]), [[batch]], (0.0, None, 2**24))
    peaks = {name: metrics[f"perf/max_memory_{name}_gb"] for name in ("allocated", "reserved")}
    left, meter, values = device.allocator.allocated, Meter(), torch.arange(4.0, device="cuda")
    device.reads.clear()
    meter.spread("x", values, values > 1)
    reads = dict(device.reads)
    summed = all_sum(values)
    return {
        "batch": numbers, "waited": waited, "peaks": peaks, "left": left, "reads": reads, "meter": meter.reduce(),
        "summed": [summed.device.type, summed.tolist()],
    }


def main(folder: str) -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    device = fake_cuda.install()
    from common.parallel import ranks

    world, path = ranks.init(), Path(folder)
    with device:
        parts = {
            "rules": rules,
            "reports": lambda: reports(world, device),
            "rollouts": lambda: rollouts(path, world, device),
            "optimizers": lambda: optimizers(path, world, device),
            "saves": lambda: saves(path, world, device),
        }
        asked = os.environ.get("CUDA_PARTS", " ".join(parts)).split()
        found = {name: parts[name]() for name in asked}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
