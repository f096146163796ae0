"""Run by test_checkpoint.py and test_tracking.py under torchrun: `-m tests.rank_worker TASK FOLDER`."""

import json
import os
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from common.checkpoint import manager
from common.checkpoint.run_folder import open_run_folder
from common.checkpoint.signals import Watchdog
from common.metrics import Meter
from common.model.loading import load_policy
from common.model.optimizers import make_optimizer
from common.model.policy import ModelConfig, Policy
from common.optim import OptimConfig, optimizer_step
from common.parallel import ranks
from common.parallel.ranks import make_groups

STATE = {"step": 2, "total_steps": 2,
         "sampler": {"epoch": 1, "position": 5, "num_prompts": 9, "data_hash": "of these"},
         "tracker": {"step": 2, "wandb_id": None}}


def start(model: str, world: ranks.World) -> tuple[Policy, torch.optim.Optimizer]:
    policy = load_policy(model, ModelConfig(compute_dtype="float32"), world)
    return policy, make_optimizer(policy, OptimConfig(weight_decay=0.1))


def train(policy: Policy, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps with made-up gradients, the same on any number of ranks."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in policy.parameters():
            full = torch.randn(parameter.shape, generator=generator)
            shares, rank = full.chunk(parameter.device_mesh.size()), parameter.device_mesh.get_rank()   # FSDP2's cut
            parameter.grad = torch.zeros_like(parameter)
            if rank < len(shares):
                parameter.grad.to_local().copy_(shares[rank])
        optimizer_step(policy, optimizer, 0.01 * (step + 1), OptimConfig(max_grad_norm=3.0))


def everything(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and optimizer state, unsharded, in a fixed order."""
    found = {}
    for name, parameter in policy.lm.named_parameters():
        found[name] = parameter.detach().full_tensor().clone()
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name} {key}"] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return found


@dataclass
class Flags:
    """A script's flags, as far as checkpoints look at them."""

    save: manager.SaveConfig
    lr: float = 0.01
    run_dir: str = "run"
    total_steps: int = 2
    total_epochs: float = 0.0


def checkpoints_of(run_dir, world, policy, optimizer, watch, files=None, parts=None, args=None,
                   models=None, **flags) -> manager.Checkpoints:
    flags = Flags(manager.SaveConfig(**{"every": 1} | flags), run_dir=str(run_dir))
    files = files or {"config.json": policy.lm.config.to_json_string(use_diff=False).encode()}
    parts = parts or {"policy": (policy, optimizer)}
    return manager.Checkpoints(args or flags, world, parts, files, watch, models or {})


def checkpoints(folder: Path, world: ranks.World) -> None:
    """Load what one rank saved, then save on these ranks, in the background, and train on meanwhile."""
    watch = Watchdog(0)
    policy, optimizer = start(str(folder / "model"), world)
    run = checkpoints_of(folder / "by_one", world, policy, optimizer, watch)
    results = {"state": run.resume(), "loaded": everything(policy, optimizer)}
    train(policy, optimizer, range(2, 4))
    results["trained"] = everything(policy, optimizer)
    run = checkpoints_of(folder / "by_many", world, policy, optimizer, watch, async_=True)
    run.after_step(STATE | {"step": 4})
    train(policy, optimizer, range(4, 6))
    run.wait()
    if world.is_main:
        torch.save(results, folder / "results.pt")


def refused(folder: Path, world: ranks.World) -> None:
    """Save in the background after each of three steps; in the second the disk refuses the last rank alone."""
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fully_shard(model, mesh=world.mesh)
    run = checkpoints_of(folder, world, model, optimizer, Watchdog(0), {"config.json": b"{}"}, async_=True)
    found = {}
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for step in (1, 2, 3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        if step == 2 and world.rank == world.size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        run.after_step(STATE | {"step": step, "total_steps": 9})
        try:
            run.wait()
        except OSError as error:
            found["said"] = str(error)
            run.writing = None                                          # a run ends here; a user's loop may go on
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found |= {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}
    torch.save(found, folder / f"found_{world.rank}.pt")


def not_shared(folder: Path, world: ranks.World) -> None:
    """Each rank has a run folder of its own under the same name, as without a shared file system."""
    os.makedirs(folder / str(world.rank))
    os.chdir(folder / str(world.rank))
    open_run_folder("run", world)


def timeouts(folder: Path, world: ranks.World) -> None:
    """Seconds that the collectives of each group wait."""
    timeout_s = float(sys.argv[3])
    linear = torch.nn.Linear(1, 1)
    run = checkpoints_of(folder, world, linear, torch.optim.SGD(linear.parameters()), Watchdog(0),
                         {"config.json": b"{}"}, timeout_s=timeout_s)
    made = make_groups("cpu", ranks.collective_timeout(timeout_s), world.size, world.size, world.size)
    of_copies = [*made["mesh"].get_all_groups(), made["sequence"], *made["experts"].get_all_groups()]
    groups = (dist.group.WORLD, world.mesh.get_group(), run.group, *of_copies)
    dist.barrier()
    if world.is_main:
        seconds = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
        (folder / "timeouts").write_text(json.dumps(seconds))


def meters(folder: Path, world: ranks.World) -> None:
    torch.save(fill_meter(world.rank).reduce(), folder / f"metrics_{world.rank}.pt")


def fill_meter(rank: int) -> Meter:
    """Rank 0 adds 1 2 3 and 10, rank 1 adds 4 and nothing; each adds names of its own."""
    meter = Meter()
    meter.mean("mean", [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0])][rank])
    meter.mean("mean", [torch.tensor([10.0]), torch.tensor([])][rank])
    meter.mean("masked", torch.tensor([5.0, 7.0, 100.0]), torch.tensor([True, rank == 0, False]))
    meter.mean("flags", torch.tensor([True, False, False, rank == 1]))
    meter.mean("nothing", torch.zeros(3), torch.zeros(3, dtype=torch.bool))
    meter.total("total", torch.tensor(3.0 + rank, requires_grad=True), per=2.0)
    meter.total("total", 5.0, per=2.0)
    meter.max("max", torch.tensor([-9.0, -3.0 - rank]))
    meter.max("max", torch.tensor([-5.0, -8.0]))
    meter.mean(f"of rank {rank}", torch.tensor([1.0 + rank, 3.0]))                       # as many names, not the same
    meter.total(f"total of rank {rank}", 2.0 + rank)
    meter.min(f"least of rank {rank}", torch.tensor([-1.0 - rank, 3.0]))
    meter.max("only rank 0", [torch.tensor([-2.5]), torch.tensor([])][rank])
    return meter


if __name__ == "__main__":
    world = ranks.init(float(sys.argv[3])) if len(sys.argv) > 3 else ranks.init()
    tasks = {"checkpoints": checkpoints, "meters": meters, "not_shared": not_shared, "refused": refused,
             "timeouts": timeouts}
    tasks[sys.argv[1]](Path(sys.argv[2]), world)
    ranks.shutdown()
