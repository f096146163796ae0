"""A layout of packed sequences in which the responses to a prompt share it: the prompt runs once per micro-batch."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class SharedPrompts(NamedTuple):
    """Which tokens run, and what they see. Each different prompt is a segment, and so is each response after it."""

    run: Tensor  # [T'] positions in the batch of the tokens that run
    row: Tensor  # [T] where in `run` each token of the batch is found
    cu_seqlens: Tensor  # [segments + 1] int32, where each segment begins in `run`
    key_rows: Tensor  # [K] rows of `run` that a segment's queries see: those of its prompt, then its own
    cu_seqlens_k: Tensor  # [segments + 1] int32, where each segment's keys begin in `key_rows`

    @property
    def continued(self) -> Tensor:
        """Of each token that runs its segment, and the segment that this one continues: a prompt, or itself. [2, T']"""
        lengths = self.cu_seqlens.diff()
        number = torch.arange(len(lengths), device=self.run.device).repeat_interleave(lengths)
        first_keys = self.key_rows[self.cu_seqlens_k[:-1].long()]
        return torch.stack([number, number[first_keys].repeat_interleave(lengths)])


def share_prompts(tokens: Tensor, mask: Tensor, cu_seqlens: Tensor, rows: Tensor | None) -> SharedPrompts:
    """The layout of a batch. A prompt is the tokens before the first token that the policy sampled. `rows` [S]: equal
    prompts of different rows are not shared, because their images may differ."""
    device = tokens.device
    tokens = tokens.tolist()
    mask = mask.tolist()
    begins: dict[tuple[int, ...], int] = {}                             # prompt -> its first row in `run`
    run: list[int] = []
    row: list[int] = []
    key_rows: list[int] = []
    ends = [0]                                                          # of segments in `run`
    key_ends = [0]                                                      # of their keys in `key_rows`

    def add_segment(start: int, end: int, prefix: range) -> None:
        key_rows.extend((*prefix, *range(len(run), len(run) + end - start)))
        run.extend(range(start, end))
        ends.append(len(run))
        key_ends.append(len(key_rows))

    rows = [-1] * (len(cu_seqlens) - 1) if rows is None else rows.tolist()
    for number, (start, end) in zip(rows, pairwise(cu_seqlens.tolist())):
        split = next((t for t in range(start, end) if mask[t]), end)    # where the policy's first token is
        prompt = (number, *tokens[start:split])
        if prompt not in begins:
            begins[prompt] = len(run)
            add_segment(start, split, range(0))
        prefix = range(begins[prompt], begins[prompt] + split - start)
        row += prefix
        if split < end:
            row += range(len(run), len(run) + end - split)
            add_segment(split, end, prefix)
    return SharedPrompts(
        run=torch.tensor(run, device=device),
        row=torch.tensor(row, device=device),
        cu_seqlens=torch.tensor(ends, dtype=torch.int32, device=device),
        key_rows=torch.tensor(key_rows, device=device),
        cu_seqlens_k=torch.tensor(key_ends, dtype=torch.int32, device=device),
    )
