"""Unsharded weights of an FSDP2 model, a bucket at a time."""

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def unshard_parameters(
    parameters: Iterable[tuple[str, DTensor]], dtype: torch.dtype, bucket_mb: float,
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter in full and in `dtype`, in the order given. All ranks must iterate to the end, in step.

    Shards are cast first and gathered in one collective per bucket of `bucket_mb` (of the full size). The next bucket
    travels while the caller reads this one, so at most two buckets and one tensor exist beside the shards."""
    previous = None
    for bucket in _buckets(parameters, dtype.itemsize, bucket_mb * 2**20):
        gathering = _Gathering(bucket, dtype)
        gathering.start()
        if previous is not None:
            yield from previous.tensors()
        previous = gathering
    if previous is not None:
        yield from previous.tensors()


def _buckets(
    parameters: Iterable[tuple[str, DTensor]], itemsize: int, max_bytes: float,
) -> Iterator[list[tuple[str, DTensor]]]:
    bucket, size = [], 0
    for name, parameter in parameters:
        bucket.append((name, parameter))
        size += parameter.numel() * itemsize
        if size >= max_bytes:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


class _Gathering:
    """The all-gather of one bucket of parameters. On one rank nothing moves."""

    def __init__(self, bucket: list[tuple[str, DTensor]], dtype: torch.dtype):
        self.bucket = bucket
        self.dtype = dtype
        self.mesh = bucket[0][1].device_mesh
        self.num_ranks = self.mesh.size()
        # FSDP2 cuts dimension 0 into equal chunks, the last ones shorter or empty: pad to the first one's size
        self.rows = [-(-parameter.shape[0] // self.num_ranks) for _, parameter in bucket]
        self.sizes = [rows * math.prod(parameter.shape[1:]) for rows, (_, parameter) in zip(self.rows, bucket)]

    def start(self) -> None:
        if self.num_ranks == 1:
            return
        self.mine = torch.zeros(sum(self.sizes), dtype=self.dtype, device=self.bucket[0][1].device)
        for part, (_, parameter) in zip(self.mine.split(self.sizes), self.bucket):
            local = parameter.to_local().flatten()
            part[: local.numel()].copy_(local)
        self.everyone = self.mine.new_empty(self.num_ranks, self.mine.numel())
        self.work = dist.all_gather_single(
            self.everyone.view(-1), self.mine, group=self.mesh.get_group(), async_op=True
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Wait for the bucket and give its parameters in full."""
        if self.num_ranks == 1:
            yield from ((name, parameter.to_local().to(self.dtype)) for name, parameter in self.bucket)
            return
        self.work.wait()
        for shares, rows, (name, parameter) in zip(self.everyone.split(self.sizes, dim=1), self.rows, self.bucket):
            full = shares.reshape(self.num_ranks * rows, *parameter.shape[1:])
            yield name, full[: parameter.shape[0]]


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that a checkpoint holds (the expert biases of GLM-4.5); rotary frequencies, for one, are not."""
    return {
        f"{path}.{name}".lstrip("."): buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
