"""How the ranks are grouped: copies of the model, and the ranks that hold the shards of a copy."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def num_shards(num_ranks: int, replicas: int) -> int:
    """Over how many ranks each copy of the model is sharded. Raises ValueError where the ranks cannot be divided so."""
    if replicas < 1 or num_ranks % replicas:
        raise ValueError(f"--policy.replicas {replicas} must be at least 1 and divide the {num_ranks} ranks evenly")
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
