"""Send responses, and a few numbers of each, from rank to rank."""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common.batch import Batch, offsets
from common.parallel.ranks import all_gather_objects, all_sum


def exchange(batch: Batch, destination: np.ndarray | Tensor) -> Batch:
    """Send response i of this rank's batch to rank `destination[i]` [S_local]. Returns what arrives, sorted by index.

    Ranks first tell each other their fields and sizes; then one message goes from each rank to each. A rank may bring
    or get nothing; ranks that bring responses must bring the same fields. Without a process group it only sorts."""
    destination = torch.as_tensor(destination, dtype=torch.int64).cpu()
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size == 1:
        return batch.sort()
    counts = torch.bincount(destination, minlength=world_size).tolist()
    by_destination = [batch.select(part) for part in destination.argsort(stable=True).split(counts)]
    outgoing = [[part.lengths, *(tensor for tensor, _ in part.present().values())] for part in by_destination]
    fields = tuple((name, tensor.dtype) for name, (tensor, _) in batch.present().items())
    by_rank = all_gather_objects((len(batch) > 0, fields))
    _, fields = max(by_rank, key=lambda brought: (brought[0], len(brought[1])))     # an empty batch may lack some

    # the sizes: how many numbers each field has in the message to each rank
    home = batch.tokens.device
    wire = "cuda" if dist.get_backend() == "nccl" else home                    # NCCL takes no CPU tensors
    no_responses = [0] * (1 + len(fields))
    sizes_out = [[len(column) for column in message] if len(batch) else no_responses for message in outgoing]
    sizes_in = torch.empty(world_size, 1 + len(fields), dtype=torch.int64, device=wire)
    dist.all_to_all_single(sizes_in, torch.tensor(sizes_out, device=wire))
    totals_in = sizes_in.sum(1).tolist()
    totals_out = [sum(sizes) for sizes in sizes_out]

    # the messages, as float64: it holds lengths, token ids, float32 and flags exactly, so all fit in one message
    sent = torch.cat([column.double() for message in outgoing for column in message]).to(wire)
    received = sent.new_empty(sum(totals_in))
    dist.all_to_all_single(received, sent, totals_in, totals_out)
    arrived = []
    for message, sizes in zip(received.to(home).split(totals_in), sizes_in.tolist()):
        lengths, *columns = message.split(sizes)
        values = {name: column.to(dtype) for (name, dtype), column in zip(fields, columns)}
        arrived.append(Batch(**values, cu_seqlens=offsets(lengths)))
    return Batch.cat(arrived).sort()


def gather_numbers(numbers: Tensor, index: Tensor) -> Tensor:
    """Give all ranks a few numbers of every response: [S_local, k] and index [S_local] -> float64 [S, k] by index.

    The indices must be 0 .. S-1, once each, over all ranks."""
    counted = torch.cat([torch.ones(len(index), 1), numbers.cpu().double()], dim=1)             # [S_local, 1 + k]
    num_responses = int(all_sum([len(index)]).item())
    rows = counted.new_zeros(num_responses, counted.shape[1]).index_copy(0, index.cpu(), counted)
    rows = all_sum(rows)                                                                        # [S, 1 + k]
    assert (rows[:, 0] == 1).all(), "indices are not 0 .. S-1, once each"
    return rows[:, 1:].contiguous()
