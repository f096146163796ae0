"""Checksums and log-probs, which show that the engine holds the trainer's weights."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

BLOCK = 1 << 20
"""Number of elements that are cast and multiplied at a time."""
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

    All dimensions but the last are rows; a vector is one column. An element, cast to `dtype`, is read as one or two
    integers of 16 bits, each of which has its own column. The sum over the parts of a matrix is the checksum of the
    matrix, if each part says where it begins.
    """
    matrix = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)
    words = dtype.itemsize // 2
    # below 2**15, like the words: sums over 2**23 columns are exact in float64, whatever their order
    column_weights = (_random(first_column * words, matrix.shape[1] * words, tensor.device) >> 48).double()
    row_weights = _random(first_row, len(matrix), tensor.device)
    num_rows = max(BLOCK // matrix.shape[1], 1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for block, weights in zip(matrix.split(num_rows), row_weights.split(num_rows)):
        data = block.to(dtype).contiguous().view(torch.int16)  # [rows, columns * words]
        total += ((data.double() @ column_weights).long() * weights).sum()
    return total.item()


def _random(first: int, count: int, device: torch.device) -> Tensor:
    """64 pseudo-random bits for each of the integers first, first + 1, ..., int64 [count]."""
    x = (torch.arange(first, first + count, device=device) + 1) * -0x61C8864680B583EB  # 2**64 / golden ratio, signed
    return x ^ (x >> 32)


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
    differences = {name: x - sent[name].checksum * held[name].copies for name, x in zip(names, total.tolist())}
    return {name for name, difference in differences.items() if difference % 2**64}


def check_difference(prob_diff: float, limit: float, where: str) -> None:
    """Raises RuntimeError where a mean |p_engine - p_trainer| is above the limit; 0: no limit."""
    if 0 < limit < prob_diff:
        raise RuntimeError(f"after the weight sync, mean |p_engine - p_trainer| is {prob_diff:.4f} on {where}, above "
                           f"--rollout.max-probe-diff {limit}: the engine does not hold the trainer's weights")
