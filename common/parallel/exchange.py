"""Responses and their numbers on their way between ranks."""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common.batch import Batch, _offsets


def exchange(batch: Batch, destination: np.ndarray | Tensor, group: dist.ProcessGroup | None = None) -> Batch:
    """Send response i of this rank's batch to rank `destination[i]` [S_local]; what arrives here, sorted by index.

    After the sizes, one message from each rank to each. A rank may bring or get nothing; ranks that bring responses
    must bring the same fields. Without a process group it only sorts."""
    destination = torch.as_tensor(destination, dtype=torch.int64).cpu()
    world_size = dist.get_world_size(group) if dist.is_initialized() else 1
    if destination.shape != (len(batch),) or ((destination < 0) | (destination >= world_size)).any():
        raise ValueError(f"destination {destination} must name a rank below {world_size} for {len(batch)} responses")
    if world_size == 1:
        return batch.sort()
    counts = torch.bincount(destination, minlength=world_size).tolist()
    parts = [batch.select(part) for part in destination.argsort(stable=True).split(counts)]     # by rank
    outgoing = [[part.lengths, *(tensor for tensor, _ in part.present().values())] for part in parts]   # [to][column]
    columns = tuple((name, tensor.dtype) for name, (tensor, _) in batch.present().items())
    brought = [None] * world_size
    dist.all_gather_object(brought, columns if len(batch) else None, group=group)
    brought = set(brought) - {None} or {columns}
    if len(brought) > 1:
        raise ValueError(f"exchange: ranks bring different fields {brought}; fill an optional one on all ranks or none")
    columns = brought.pop()
    home = batch.tokens.device
    wire = "cuda" if dist.get_backend(group) == "nccl" else home                    # NCCL takes no CPU tensors
    send = [[len(column) for column in row] if len(batch) else [0] * (1 + len(columns)) for row in outgoing]
    receive = torch.empty(world_size, 1 + len(columns), dtype=torch.int64, device=wire)
    dist.all_to_all_single(receive, torch.tensor(send, device=wire), group=group)
    receive, totals = receive.tolist(), receive.sum(1).tolist()
    # As float64, which holds lengths, token ids, float32 and flags exactly, so that all fit in one message.
    sent = torch.cat([column.double() for row in outgoing for column in row]).to(wire)
    received = sent.new_empty(sum(totals))
    dist.all_to_all_single(received, sent, totals, [sum(row) for row in send], group=group)
    arrived = []
    for message, row in zip(received.to(home).split(totals), receive):
        lengths, *values = message.split(row)
        values = {name: value.to(dtype) for (name, dtype), value in zip(columns, values)}
        arrived.append(Batch(**values, cu_seqlens=_offsets(lengths)))
    return Batch.cat(arrived).sort()


def gather_numbers(numbers: Tensor, index: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """A few numbers a response, from all ranks to all: [S_local, k] and index [S_local] -> float64 [S, k] by index.

    Raises ValueError, the same on every rank, unless the indices are 0 .. S-1 once each and all numbers are finite."""
    rows = torch.cat([index[:, None].double(), numbers.double()], dim=1)            # [S_local, 1 + k]
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        shares = [None] * dist.get_world_size(group)
        dist.all_gather_object(shares, rows.cpu().numpy(), group=group)
        rows = torch.from_numpy(np.concatenate(shares)).to(numbers.device)
    rows = rows[rows[:, 0].argsort(stable=True)]                                    # [S, 1 + k]
    for i in (rows[:, 0] != torch.arange(len(rows), device=rows.device)).nonzero()[:1, 0]:
        raise ValueError(f"indices must be 0 .. {len(rows) - 1}, once each; {rows[i, 0]:.0f} is in the place of {i}")
    for i, column in (~rows[:, 1:].isfinite()).nonzero()[:1]:
        raise ValueError(f"response {i}: number {column} (length, reward, ...) is {rows[i, 1 + column]}, not finite")
    return rows[:, 1:].contiguous()
