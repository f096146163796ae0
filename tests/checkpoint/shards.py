"""Checkpoints' tensors as tests write and read them."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from common.checkpoint.state import save_shards


def save(tensors: dict[str, Tensor], folder: Path) -> None:
    """Every rank's file, when they are all there."""
    save_shards(tensors, folder, dist.get_rank() if dist.is_initialized() else 0)
    if dist.is_initialized():
        dist.barrier()


def whole(folder: Path) -> dict[str, Tensor]:
    """All tensors, put together one element at a time of what files say about themselves. Fails if an element is
    stored by no rank, or twice where ranks have shards."""
    tensors, counts = {}, {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            entries = json.loads(file.metadata()["entries"])
        stored = load_file(path)
        for name, entry in entries.items():
            dtype = getattr(torch, entry["dtype"])
            tensor = tensors.setdefault(name, torch.zeros(entry["shape"], dtype=dtype))
            count = counts.setdefault(name, torch.zeros(entry["shape"], dtype=torch.int32))
            if name not in stored:
                continue
            data = stored[name]
            assert data.dtype == dtype
            if list(data.shape) == entry["shape"]:                      # each rank stores what is not in shards
                assert not count.any() or torch.equal(tensor, data), name
                tensor.copy_(data)
                count.fill_(1)
                continue
            place = tuple(torch.arange(a, a + n) for a, n in zip(entry["start"], data.shape, strict=True))
            grid = torch.meshgrid(*place, indexing="ij")
            tensor[grid] = data
            count[grid] += 1
    assert all((count == 1).all() for count in counts.values())
    return tensors
