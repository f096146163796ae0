"""Weights out of their shards, a bucket at a time."""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# torch 2.13 renamed it
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


class _Gather:
    """A bucket of parameters on its way: created, it travels; `tensors` waits for it. On one rank nothing moves."""

    def __init__(self, bucket: list[tuple[str, DTensor]], dtype: torch.dtype):
        self.bucket, self.dtype, mesh = bucket, dtype, bucket[0][1].device_mesh
        self.ranks = mesh.size()
        if self.ranks == 1:
            return
        # FSDP2 cuts dimension 0 into equal chunks, the last ones shorter or empty: pad to the first one's size
        self.rows = [-(-parameter.shape[0] // self.ranks) for _, parameter in bucket]
        self.sizes = [rows * math.prod(parameter.shape[1:]) for rows, (_, parameter) in zip(self.rows, bucket)]
        self.mine = torch.zeros(sum(self.sizes), dtype=dtype, device=bucket[0][1].device)
        for part, (_, parameter) in zip(self.mine.split(self.sizes), bucket):
            local = parameter.to_local().flatten()
            part[: local.numel()].copy_(local)
        self.everyone = self.mine.new_empty(self.ranks, self.mine.numel())
        self.work = all_gather(self.everyone.view(-1), self.mine, group=mesh.get_group(), async_op=True)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        if self.ranks == 1:
            yield from ((name, parameter.to_local().to(self.dtype)) for name, parameter in self.bucket)
            return
        self.work.wait()
        offset = 0
        for rows, size, (name, parameter) in zip(self.rows, self.sizes, self.bucket):
            full = self.everyone[:, offset : offset + size].reshape(self.ranks * rows, *parameter.shape[1:])
            yield name, full[: parameter.shape[0]]
            offset += size


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that a checkpoint holds (the expert biases of GLM-4.5); rotary frequencies, for one, are not."""
    return {
        f"{path}.{name}".lstrip("."): buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
