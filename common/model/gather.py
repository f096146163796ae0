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
    previous: Iterator[tuple[str, Tensor]] = iter(())
    for bucket in _buckets(parameters, dtype.itemsize, bucket_mb * 2**20):
        started = _start_gathering(bucket, dtype)
        yield from previous
        previous = started
    yield from previous


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


def _start_gathering(bucket: list[tuple[str, DTensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Start the all-gather of a bucket. The iterator waits for its end and gives the parameters in full.

    On one rank nothing moves."""
    mesh = bucket[0][1].device_mesh
    if mesh.size() == 1:
        return ((name, parameter.to_local().to(dtype)) for name, parameter in bucket)
    # FSDP2 cuts dimension 0 into equal chunks, the last ones shorter or empty: pad to the first one's size
    rows = [-(-parameter.shape[0] // mesh.size()) for _, parameter in bucket]
    sizes = [num_rows * math.prod(parameter.shape[1:]) for num_rows, (_, parameter) in zip(rows, bucket)]
    mine = torch.zeros(sum(sizes), dtype=dtype, device=bucket[0][1].device)
    for part, (_, parameter) in zip(mine.split(sizes), bucket):
        local = parameter.to_local().flatten()
        part[: local.numel()].copy_(local)
    everyone = mine.new_empty(mesh.size(), mine.numel())
    work = dist.all_gather_single(everyone.view(-1), mine, group=mesh.get_group(), async_op=True)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        work.wait()
        for shares, num_rows, (name, parameter) in zip(everyone.split(sizes, dim=1), rows, bucket):
            full = shares.reshape(mesh.size() * num_rows, *parameter.shape[1:])
            yield name, full[: parameter.shape[0]]

    return tensors()


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that a checkpoint holds (the expert biases of GLM-4.5); rotary frequencies, for one, are not."""
    buffers = dict(model.named_buffers())
    return {name: buffers[name] for name in model.state_dict() if name in buffers}
