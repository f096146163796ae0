"""The prompt of a group once per micro-batch."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from common.batch import Batch


class SharedPrompts(NamedTuple):
    """A layout in which equal prompts appear once: their tokens, then each response as a segment of its own."""

    run: Tensor  # [T'] the tokens of the batch to run
    row: Tensor  # [T] where in `run` each token of the batch is found
    cu_seqlens: Tensor  # [segments + 1], of the queries
    key_rows: Tensor  # [K] rows of `run` that the segments' queries see: a response's prompt, then its own
    cu_seqlens_k: Tensor  # [segments + 1], of `key_rows`


def share_prompts(batch: Batch) -> SharedPrompts:
    tokens, bounds, device = batch.tokens.tolist(), batch.cu_seqlens.tolist(), batch.tokens.device
    first = torch.where(batch.mask, batch.position_ids, len(tokens)).tolist()
    begins: dict[tuple[int, ...], int] = {}                             # prompt -> its first row in `run`
    run, row, ends, key_rows, key_ends = [], [], [0], [], [0]

    def add_segment(start: int, end: int, prefix: range) -> None:
        key_rows.extend((*prefix, *range(len(run), len(run) + end - start)))
        run.extend(range(start, end))
        ends.append(len(run))
        key_ends.append(len(key_rows))

    for start, end in pairwise(bounds):
        split = start + min(end - start, *first[start:end])             # where the policy's first token is
        prompt = tuple(tokens[start:split])
        if prompt not in begins:
            begins[prompt] = len(run)
            add_segment(start, split, range(0))
        prefix = range(begins[prompt], begins[prompt] + len(prompt))
        row += prefix
        if split < end:
            row += range(len(run), len(run) + end - split)
            add_segment(split, end, prefix)
    rows = (torch.tensor(x, device=device) for x in (run, row, key_rows))
    cu_seqlens, cu_seqlens_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (ends, key_ends))
    run, row, key_rows = rows
    return SharedPrompts(run, row, cu_seqlens, key_rows, cu_seqlens_k)
