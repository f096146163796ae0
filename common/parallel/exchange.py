"""What ranks exchange about responses: whole responses, files of images, and a few numbers of each."""

import pickle
import re
from collections import ChainMap
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common.batch import Batch, offsets
from common.parallel.ranks import all_gather_objects, all_max, all_sum


class Field(NamedTuple):
    """What a field of a batch looks like."""

    dtype: torch.dtype
    shape: torch.Size  # of its entry for a token or a response
    per: str  # "token" or "response"


def exchange(batch: Batch, destination: np.ndarray | Tensor) -> Batch:
    """Send response i of this rank's batch, on the CPU, to rank `destination[i]` [S_local]; -1: to none. Returns the
    responses that arrive, by number.

    Ranks first exchange their fields and sizes; then each rank sends one message to each rank. A rank may send or get
    nothing. Raises ValueError where ranks that send responses send different fields."""
    destination = torch.as_tensor(destination, dtype=torch.int64)
    order = destination.argsort(stable=True)
    order = order[destination[order] >= 0]
    if dist.get_world_size() == 1:
        return batch.select(order[batch.number[order].argsort()])
    batch = batch.select(order)
    sizes = batch.sequence_lengths
    sizes_out = torch.bincount(destination[order], sizes, dist.get_world_size()).long()             # tokens to each
    mine = {}
    for name, (values, per) in batch.present().items():
        mine[name] = Field(values.dtype, values.shape[1:], per)
    fields_of_ranks = all_gather_objects((mine, len(batch)))
    fields: dict[str, Field] = {}
    for of_rank, _ in fields_of_ranks:
        if len(of_rank) > len(fields):                                  # an empty batch may lack some
            fields = of_rank
    for rank, (of_rank, num_sequences) in enumerate(fields_of_ranks):
        if num_sequences and [*of_rank] != [*fields]:
            raise ValueError(f"rank {rank} brings the fields {', '.join(of_rank)}, another rank {', '.join(fields)}: "
                             f"write a field of Batch on all ranks, in the same order")

    # a row of bytes for each token, so that all fit in one message
    columns = []                                                                            # [T, bytes] each
    for values, per in batch.present().values():
        of_tokens = values                                                                  # [T, ...]
        if per == "response":
            of_tokens = values[batch.sequence_ids]
        columns.append(of_tokens[:, None].flatten(1).view(torch.uint8))
    widths = []                                                                             # in bytes
    for field in fields.values():
        widths.append(field.dtype.itemsize * field.shape.numel())
    sent = torch.cat(columns, dim=1).view(-1, sum(widths))
    received, _ = all_to_all(sent, sizes_out)                                               # [T', bytes]

    arrived: dict[str, Tensor] = {}                                                         # [T', ...] each
    parts = received.split(widths, dim=1)
    for (name, field), part in zip(fields.items(), parts):
        arrived[name] = part.clone().flatten().view(field.dtype).view(-1, *field.shape)
    _, lengths = arrived["number"].unique_consecutive(return_counts=True)
    cu_seqlens = offsets(lengths)
    for name, field in fields.items():
        if field.per == "response":                                          # each of its tokens brought a copy
            arrived[name] = arrived[name][cu_seqlens[:-1]]
    return Batch.of_fields(arrived, cu_seqlens).sort()


def all_to_all(rows: Tensor, sizes_out: Tensor) -> tuple[Tensor, Tensor]:
    """Send the first `sizes_out[0]` rows to rank 0, the next `sizes_out[1]` to rank 1, and so on. Returns the rows that
    arrive, in the order of ranks, and how many of each rank. All ranks call it."""
    sizes_in = torch.empty_like(sizes_out)
    dist.all_to_all_single(sizes_in, sizes_out)
    received = rows.new_empty(int(sizes_in.sum()), *rows.shape[1:])
    dist.all_to_all_single(received, rows, sizes_in.tolist(), sizes_out.tolist())
    return received, sizes_in


def routing_of(lengths: list[int], told: list[Tensor | None]) -> Tensor | None:
    """[T, layers, k] of this rank's sequences: the experts that the engine reported for the first tokens of each; -1
    for the others, which affect no log-prob. None: no engine reported experts. All ranks call it."""
    shapes: list[tuple[int, ...]] = [(0, 0)]                            # (layers, k)
    for experts in told:
        if experts is not None:
            shapes.append(tuple(experts.shape[1:]))
    shape = all_max(max(shapes)).int().tolist()
    whole = torch.full((sum(lengths), *shape), -1, dtype=torch.int16)
    for of_sequence, experts in zip(whole.split(lengths), told):
        if experts is not None:
            of_sequence[: len(experts)] = experts
    if not all(shape):
        return None
    return whole


def deliver(mine: dict[int, Any], wanted: list[int]) -> dict[int, Any]:
    """What ranks have under numbers, each under others, sent to the ranks that want these. Numbers that no rank has are
    left out. All ranks call it."""
    messages = []                                                                             # one to each rank
    for wanted_there in all_gather_objects(wanted):
        found = {}
        for number in wanted_there:
            if number in mine:
                found[number] = mine[number]
        messages.append(pickle.dumps(found))
    sent = torch.frombuffer(bytearray().join(messages), dtype=torch.uint8)
    sizes_out = torch.tensor([*map(len, messages)])
    received, sizes_in = all_to_all(sent, sizes_out)
    parts = []
    for part in received.split(sizes_in.tolist()):
        parts.append(pickle.loads(part.numpy().tobytes()))
    return dict(ChainMap(*parts))


def gather_numbers(numbers: Tensor, index: Tensor) -> Tensor:
    """Give all ranks a few numbers of every response: [S_local, k] and index [S_local] -> float64 [S, k] by index.

    The indices must be 0 .. S-1, once each, over all ranks."""
    counted = torch.cat([torch.ones(len(index), 1), numbers.cpu().double()], dim=1)             # [S_local, 1 + k]
    num_responses = int(all_sum([len(index)]).item())
    if len(index) and int(index.max()) >= num_responses:
        raise ValueError(f"there are {num_responses} responses, and one has the number {int(index.max())}: take none "
                         f"out of rollout.samples; rollout.select drops groups, a score of NaN drops a response")
    own = counted.new_zeros(num_responses, counted.shape[1]).index_copy(0, index.cpu(), counted)
    rows = all_sum(own)                                                                         # [S, 1 + k]
    assert (rows[:, 0] == 1).all(), "indices are not 0 .. S-1, once each"
    return rows[:, 1:].contiguous()


def check_sizes(error: RuntimeError, num_responses: int, num_here: int, line: str) -> None:
    """Raise ValueError if `error` is torch's of a tensor with a number for each response that this rank scored, and one
    with a number for each of the step. `line`: where it was raised."""
    sizes = re.findall(r"size of tensor . \((\d+)\)", str(error))
    if num_here != num_responses and {*map(int, sizes)} == {num_here, num_responses}:
        raise ValueError(f"{line}: the step has {num_responses} responses, and rollout.samples the {num_here} that "
                         f"this rank scored: rollout.numbers_of(lambda sample: ...) has a number for each") from error
