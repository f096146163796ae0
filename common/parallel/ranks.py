"""Processes: the group that torchrun made (or a group of one), the device, groups of ranks, sums, seeds."""

import atexit
import hashlib
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.flags.rules import check_at_least as check_at_least
from common.flags.rules import num_shards

Errors = type[Exception] | tuple[type[Exception], ...]
DEVICES = Path("/dev")
SAMPLERS = "RL_SAMPLERS"

# torch 2.11 has other names for them
all_gather_single = getattr(functional, "all_gather_single", functional.all_gather_tensor_autograd)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class World:
    """This process and its groups of ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    sequence: dist.ProcessGroup | None = None  # the ranks that run a micro-batch together
    experts: DeviceMesh | None = None  # [shard, expert] over all ranks; None: experts are sharded as all weights are
    trains: bool = True
    samples: bool = True
    num_samplers: int = 0  # above 0: no rank trains and samples, and all numbers above are of one side
    samplers_on_cpu: bool = False  # they ask servers
    job_store: dist.Store | None = None  # of both sides
    timeout: timedelta = timedelta(seconds=3900)  # of a collective

    @property
    def is_main(self) -> bool:
        return self.rank == 0 and self.trains

    @property
    def group_size(self) -> int:
        """Ranks that run a micro-batch together."""
        return 1 if self.sequence is None else self.sequence.size()


def init(timeout_s: float = 3600.0, replicas: int = 1, sequence_parallel: int = 1, expert_parallel: int = 1) -> World:
    """Join the process group that torchrun describes in the environment; without torchrun, a group of one. Its
    collectives wait for `timeout_s`, the time of a phase (`--save.timeout-s`), and a little longer; 0: no limit. With
    SAMPLERS in the environment, that number of the last ranks only sample and the others only train. Each side is then
    a group of its own, whose ranks count from 0. The word `server` after the number: the samplers need no GPU.

    GPUs use NCCL (and gloo for CPU tensors), machines without GPUs use gloo. Raises ValueError if a machine with GPUs
    has none for a rank, if torch cannot use the GPUs, and if the ranks cannot be grouped as requested.
    """
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}   # vLLM reads them
    job_rank = int(os.environ["RANK"])
    job_size = int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    count, _, engine = os.environ.get(SAMPLERS, "0").partition(" ")
    num_samplers = int(count)
    samplers_on_cpu = engine == "server"
    num_trainers = job_size - num_samplers
    trains = job_rank < num_trainers
    rank = job_rank
    size = num_trainers
    if not trains:
        rank = job_rank - num_trainers
        size = num_samplers
        replicas = sequence_parallel = expert_parallel = 1  # they are of the trainers' models
    num_shards(size, replicas, sequence_parallel, expert_parallel)  # before the ranks wait for each other
    if torch.cuda.is_available() and (trains or not samplers_on_cpu):
        num_gpus = torch.cuda.device_count()
        if local_rank >= num_gpus:
            raise ValueError(f"local rank {local_rank} needs a GPU of its own, this machine has "
                             f"{num_gpus}: set torchrun --nproc-per-node {num_gpus}")
        device = torch.device("cuda", local_rank)
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    else:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        if torch.version.cuda and not hidden and any(DEVICES.glob("nvidia[0-9]*")):     # it would train on the CPU
            raise ValueError(f"torch {torch.__version__} cannot use this machine's NVIDIA GPUs: its driver "
                             f"(see nvidia-smi) may be too old for CUDA {torch.version.cuda}: update it "
                             f"(docs/gpus.md), or set CUDA_VISIBLE_DEVICES=-1")
        device = torch.device("cpu")
        backend = "gloo"
    atexit.register(wait_for_gloo)
    timeout = collective_timeout(timeout_s)
    store = dist.HashStore()                                                                        # this needs no port
    if job_size > 1:
        # torchrun 2.13 keeps one store over all restarts: without a prefix, ranks find addresses of those that are gone
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        store = dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        check_address(store, job_rank, job_size)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}                                      # vLLM reads them
    own = dist.PrefixStore("trainers" if trains else "samplers", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)
    groups = make_groups(device.type, timeout, replicas, sequence_parallel, expert_parallel)
    return World(
        rank,
        size,
        device,
        **groups,
        trains=trains,
        samples=not trains or num_samplers == 0,
        num_samplers=num_samplers,
        samplers_on_cpu=samplers_on_cpu,
        job_store=store,
        timeout=timeout,
    )


def check_address(store: dist.Store, rank: int, size: int) -> None:
    """gloo listens on the address of the machine's name. Where that is the machine itself, as in Debian's images
    (127.0.1.1), ranks of other machines would wait for it until the time limit: ValueError."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", size)) == size:
        return
    name = socket.gethostname()
    store.set(f"machine_of_{rank}", name)
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]  # the first, as gloo
    except OSError:
        address = "127.0.0.1"  # gloo takes it for a name without an address
    if not ipaddress.ip_address(address).is_loopback:
        return
    for other in (0, size - 1):
        other_name = store.get(f"machine_of_{other}").decode()
        if other_name != name:
            raise ValueError(
                f"this machine's name {name} is {address} to itself, where {other_name} cannot reach it: "
                f"set GLOO_SOCKET_IFNAME to the network interface between the machines (`ip -br address` lists "
                f"them), or give the name its address in /etc/hosts"
            )


def collective_timeout(timeout_s: float) -> timedelta:
    """Time limit of a collective: longer than a phase of `timeout_s`, because the watchdog's report says more. Every
    group needs it; torch's own default is 10 minutes with NCCL. 0: 24 days, which in milliseconds is still a number of
    32 bits."""
    return timedelta(seconds=timeout_s + 300) if timeout_s else timedelta(days=24)


def make_groups(device_type: str, timeout: timedelta, replicas: int = 1, sequence_parallel: int = 1,
                expert_parallel: int = 1) -> dict[str, Any]:
    """`mesh` (for `fully_shard`: [shard], or [replicate, shard]), `sequence` and `experts` of World. Consecutive ranks
    are on one machine, where links are fast: they hold a copy, run a micro-batch together, have all experts."""
    size = dist.get_world_size()

    def grid(names: tuple[str, str], width: int) -> DeviceMesh:
        ranks = torch.arange(size).view(-1, width)
        groups = []
        for part in (ranks.T, ranks):
            own, _ = dist.new_subgroups_by_enumeration(part.tolist(), timeout)
            groups.append(own)
        return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)

    if replicas == 1:
        mesh = init_device_mesh(device_type, (size,))
    else:
        mesh = grid(("replicate", "shard"), size // replicas)
    sequence = None
    if sequence_parallel > 1:
        sequence, _ = dist.new_subgroups(sequence_parallel, timeout=timeout)
    experts = None
    if expert_parallel > 1:
        experts = grid(("shard", "expert"), expert_parallel)
    return {"mesh": mesh, "sequence": sequence, "experts": experts}


def shutdown() -> None:
    """Leave together: a rank that exits while others still communicate can abort them (gloo)."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def wait_for_gloo() -> None:
    """Called before Python ends, also by an error. A thread of gloo frees the tensors of a collective a moment after
    the collective has returned, for which it needs Python's lock. If Python ends meanwhile, the process aborts:
    "terminate called without an active exception"."""
    while any(map(is_busy_gloo, Path("/proc/self/task").glob("*/stat"))):
        time.sleep(0.001)


def is_busy_gloo(stat: Path) -> bool:
    """Whether a thread of this process works for gloo, or waits for a core to do so. `stat`: its file in /proc."""
    try:
        text = stat.read_text()
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended
        return False
    return "(pt_gloo_runloop)" in text and ") S " not in text       # S: it sleeps


def all_sum(values: Tensor | Sequence[Any], op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Sum (or another `op`) over all ranks, in float64 on the CPU: the same on every rank. [K] -> [K]."""
    total = torch.as_tensor(values, dtype=torch.float64).detach().cpu().clone()
    if dist.is_initialized():
        dist.all_reduce(total, op)
    return total


def all_max(values: Tensor | Sequence[Any]) -> Tensor:
    """Maximum over all ranks, in float64 on the CPU. [K] -> [K]."""
    return all_sum(values, dist.ReduceOp.MAX)


def all_gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks, in the order of ranks, returned on every rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def together(work: Callable[[], Any], error: Errors, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The results of `work` on all ranks, in the order of ranks. If it raises `error` on some ranks, every rank raises
    the error of the first of them."""
    try:
        result = work()
    except error as raised:
        result = raised
    results = all_gather_objects(result, group)
    for of_rank in results:
        if isinstance(of_rank, error):
            raise of_rank
    return results


def on_main(world: World, work: Callable[[], Any]) -> Any:
    """The result of `work` on rank 0, returned on every rank. If it raises ValueError there, every rank raises it."""
    return together(lambda: work() if world.rank == 0 else None, ValueError)[0]


def print_on_main(world: World, text: str) -> None:
    """Rank 0 prints a line."""
    if world.is_main:
        print(text, flush=True)


def all_names(names: set[str]) -> list[str]:
    """The names that at least one rank has, sorted: the same list on every rank."""
    return sorted(set().union(*all_gather_objects(names)))


def combine(of_ranks: Sequence[dict[str, float]], how: Callable[..., Any]) -> dict[str, float]:
    """Each name -> `how` of its numbers on the ranks that have some."""
    names = sorted(set().union(*of_ranks))
    combined = {}
    for name in names:
        values = [numbers[name] for numbers in of_ranks if name in numbers]
        combined[name] = float(how(values))
    return combined


def seed_of(*parts: Any) -> int:
    """A 31-bit seed from names and numbers, the same in every process and Python version."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF
