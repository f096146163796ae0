"""Send responses, and a few numbers of each, from rank to rank."""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common.batch import Batch, offsets
from common.parallel.ranks import all_gather_objects, all_sum


def exchange(batch: Batch, destination: np.ndarray | Tensor) -> Batch:
    """Send response i of this rank's batch, on the CPU, to rank `destination[i]` [S_local]. Returns what arrives, by
    number.

    Ranks first tell each other their fields and sizes; then one message goes from each rank to each. A rank may bring
    or get nothing; ranks that bring responses must bring the same fields."""
    destination = torch.as_tensor(destination, dtype=torch.int64)
    sizes_out = torch.bincount(destination, batch.lengths, dist.get_world_size()).long()        # tokens to each rank
    batch = batch.select(destination.argsort())
    fields = {name: (tensor.dtype, per) for name, (tensor, per) in batch.present().items()}
    fields = max(all_gather_objects(fields), key=len)                           # an empty batch may lack some

    # a row for each token, as float64: it holds token ids, float32 and flags exactly, so all fit in one message
    columns = [tensor if per == "token" else tensor[batch.sequence_ids] for tensor, per in batch.present().values()]
    sent = torch.stack([column.double() for column in columns], dim=1).view(-1, len(fields))    # [T, F]
    sizes_in = torch.empty_like(sizes_out)
    dist.all_to_all_single(sizes_in, sizes_out)
    received = sent.new_empty(int(sizes_in.sum()), len(fields))
    dist.all_to_all_single(received, sent, sizes_in.tolist(), sizes_out.tolist())

    columns = dict(zip(fields, received.T))                                                         # name -> [T]
    _, lengths = columns["number"].unique_consecutive(return_counts=True)
    cu_seqlens = offsets(lengths)
    picks = {"token": slice(None), "response": cu_seqlens[:-1]}
    values = {name: columns[name][picks[per]].to(dtype) for name, (dtype, per) in fields.items()}
    return Batch(**values, cu_seqlens=cu_seqlens).sort()


def gather_numbers(numbers: Tensor, index: Tensor) -> Tensor:
    """Give all ranks a few numbers of every response: [S_local, k] and index [S_local] -> float64 [S, k] by index.

    The indices must be 0 .. S-1, once each, over all ranks."""
    counted = torch.cat([torch.ones(len(index), 1), numbers.cpu().double()], dim=1)             # [S_local, 1 + k]
    num_responses = int(all_sum([len(index)]).item())
    rows = counted.new_zeros(num_responses, counted.shape[1]).index_copy(0, index.cpu(), counted)
    rows = all_sum(rows)                                                                        # [S, 1 + k]
    assert (rows[:, 0] == 1).all(), "indices are not 0 .. S-1, once each"
    return rows[:, 1:].contiguous()
