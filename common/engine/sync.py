"""Checks that the engine holds the trainer's weights: checksums, and a search for weights that a load did not write."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

BLOCK = 1 << 22
"""Number of elements that are cast and multiplied at a time."""
MAX_COLUMNS = 1 << 16
"""Number of products of two bytes that are added in 32 bits."""
EXPERTS = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
"""The experts of a mixture in vLLM and in transformers: [experts, rows, columns], the same rows in the same order."""


class Sent(NamedTuple):
    """What the trainer sent under a name."""

    checksum: int
    shape: torch.Size


class Held(NamedTuple):
    """What one rank of the engine holds of it. `copies`: number of ranks that hold the same part."""

    checksum: int
    copies: int


def checksum(tensor: Tensor, dtype: torch.dtype, first_row: int = 0, first_column: int = 0) -> int:
    """Sum of the elements of a matrix, each weighted by its row and its column, exact modulo 2**64.

    All dimensions but the last are rows; a vector is one column. An element, cast to `dtype`, is its bytes, each with a
    sign. The sum over the parts of a matrix is the checksum of the matrix, if each part says where it begins.
    """
    matrix = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)
    total = 0
    for column in range(0, matrix.shape[1], MAX_COLUMNS):
        columns = matrix[:, column : column + MAX_COLUMNS]
        num_rows = max(BLOCK // columns.shape[1], 1)
        for row in range(0, len(matrix), num_rows):
            block = columns[row : row + num_rows].to(dtype)
            total += _block_checksum(block, first_row + row, first_column + column)
    return _signed(total)


def _block_checksum(block: Tensor, first_row: int, first_column: int) -> int:
    num_rows, num_columns = block.shape
    size = block.element_size()
    row_weights = _mixed(first_row, num_rows, block.device) | 1  # [rows] int64
    column_weights = ((_mixed(first_column, num_columns, block.device) >> 57) * 2 + 1).to(torch.int8)  # [columns] odd
    data = block.contiguous().view(torch.int8)  # [rows, columns * size]
    if block.device.type == "cpu":  # torch's sum of a product is 9 times slower than this product of matrices
        by_byte = torch.einsum("c,bd->cbd", column_weights, torch.eye(size, dtype=torch.int8)).reshape(-1, size)
        sums = torch._int_mm(data, by_byte)  # [rows, size] int32
    else:
        products = data.view(num_rows, num_columns, size) * column_weights.to(torch.int16)[:, None]
        sums = products.sum(1, dtype=torch.int64)
    byte_values = 1 << 8 * torch.arange(size, device=block.device)  # [size] int64
    return int(((sums * byte_values).sum(1) * row_weights).sum())


def _mixed(start: int, count: int, device: torch.device) -> Tensor:
    """64 pseudo-random bits for each of the integers start, start + 1, ... (splitmix64), int64 [count]."""
    x = (torch.arange(start, start + count, device=device) + 1) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ (x >> 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27)) * _signed(0x94D049BB133111EB)
    return x ^ (x >> 31)


def _signed(value: int) -> int:
    """The integer of 64 bits with a sign that equals `value` modulo 2**64."""
    return (value + 2**63) % 2**64 - 2**63


def held_checksums(
    module: nn.Module, prefix: str, sent: dict[str, Sent], fused: dict[str, list[str]], dtype: torch.dtype
) -> Iterator[tuple[str, Held]]:
    """Checksums of what a module of vLLM's holds of each tensor in `sent`, by the tensor's name.

    `fused`: vLLM's packed_modules_mapping, the parts of a matrix such as qkv_proj, one below the other. Left out: what
    is quantised, what has another name or another layout than in transformers.
    """
    from vllm.distributed import get_tp_group

    rank, num_ranks = get_tp_group().rank_in_group, get_tp_group().world_size
    path, _, own_name = prefix.rpartition(".")
    for name, parameter in module.named_parameters(recurse=False):
        sizes = [len(parameter)] if parameter.dim() else []
        names = [f"{prefix}.{name}"]
        if own_name in fused:
            names = [f"{path}.{part}.{name}" for part in fused[own_name]]
            sizes = module.output_partition_sizes
        elif name in EXPERTS:
            names = [f"{prefix}.{EXPERTS[name]}".replace(".routed_experts", "")]
        if parameter.element_size() < dtype.itemsize or sum(sizes) != len(parameter) or len(sizes) != len(names):
            continue
        for part_name, part in zip(names, parameter.split(sizes)):
            if part_name in sent:
                held = _held(part, sent[part_name], rank, num_ranks, dtype)
                if held is not None:
                    yield part_name, held


def _held(part: Tensor, sent: Sent, rank: int, num_ranks: int, dtype: torch.dtype) -> Held | None:
    """The shard's place in the whole tensor follows from the two shapes. None: it is no block of rows or columns."""
    if part.dim() != len(sent.shape) or part.shape[1:-1] != sent.shape[1:-1]:
        return None
    rows, whole_rows = len(part), sent.shape[0]
    if part.dim() > 2 and rows < whole_rows:  # experts may be dealt to ranks in any order
        return None
    if part.dim() > 1 and part.shape[-1] < sent.shape[-1]:
        return Held(checksum(part, dtype, first_column=rank * part.shape[-1]), copies=1)
    if rows >= whole_rows:  # rows of padding are 0
        return Held(checksum(part, dtype), copies=num_ranks)
    copies = max(rows * num_ranks // whole_rows, 1)  # above 1: heads of keys and values on several ranks
    return Held(checksum(part, dtype, first_row=rank // copies * rows), copies)


def differing(sent: dict[str, Sent], held: dict[str, Held]) -> set[str]:
    """Names of the tensors whose parts, over the tensor-parallel ranks, are not what was sent."""
    from vllm.distributed import get_tp_group

    names = sorted(held)
    total = torch.tensor([held[name].checksum for name in names], dtype=torch.int64)
    dist.all_reduce(total, group=get_tp_group().cpu_group)
    return {
        name
        for name, value in zip(names, total.tolist())
        if value != _signed(sent[name].checksum * held[name].copies)
    }


@torch.no_grad()
def fill_with_nan(model: nn.Module) -> None:
    """Every floating-point parameter becomes NaN: after a load, `nan_parameters` are those that it did not write."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.fill_(torch.nan)


def nan_parameters(module: nn.Module) -> set[str]:
    """Names of the parameters that hold a NaN."""
    return {name for name, parameter in module.named_parameters() if parameter.isnan().any()}
