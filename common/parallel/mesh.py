"""How the ranks are grouped: copies of the model, the ranks that hold the shards of a copy, and those that run a
micro-batch together."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def num_shards(num_ranks: int, replicas: int, sequence_parallel: int = 1) -> int:
    """Over how many ranks each copy of the model is sharded. Raises ValueError where the ranks cannot be divided so."""
    for flag, value in {"replicas": replicas, "sequence-parallel": sequence_parallel}.items():
        if value < 1 or num_ranks % value:
            raise ValueError(f"--policy.{flag} {value} must be at least 1 and divide the {num_ranks} ranks evenly")
    return num_ranks // replicas


def make_mesh(device_type: str, replicas: int, timeout: timedelta) -> DeviceMesh:
    """The mesh for `fully_shard`: [shard], or [replicate, shard] where there are several copies. Ranks that follow each
    other hold one copy, because they are on one machine, where links are fast. Collectives wait for `timeout`."""
    size = dist.get_world_size()
    ranks = torch.arange(size).view(replicas, num_shards(size, replicas))
    if replicas == 1:
        return init_device_mesh(device_type, (size,))
    groups = [dist.new_subgroups_by_enumeration(part.tolist(), timeout)[0] for part in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=("replicate", "shard"))


def make_sequence_group(sequence_parallel: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """The ranks that run a micro-batch together, this one among them: they follow each other. None: each by itself."""
    if sequence_parallel == 1:
        return None
    groups = torch.arange(dist.get_world_size()).view(-1, sequence_parallel)
    return dist.new_subgroups_by_enumeration(groups.tolist(), timeout)[0]
