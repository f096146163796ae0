"""A layout of packed sequences in which the tokens that several of them begin with run once.

The sequences are sorted, so that each one follows the one with which it has the longest beginning in common, and what
is left of it is one segment: its queries see the keys of the whole sequence, whose beginning ran in earlier segments.
So each node of the trie of all sequences runs once. A node needs no segment of its own, because causal attention lets
no token depend on those after it. The keys that are gathered are as many as the tokens of all sequences together.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

LEAST_COMMON = 0.02
"""A sequence shares no beginning that is shorter than this part of it. To gather its keys and to add up their gradients
costs 0.1 to 1% of what its tokens cost; of small models with many key heads up to 6%. tools.plan calculates it."""


class SharedPrefixes(NamedTuple):
    """Which tokens run, and what they see. A segment is what a sequence adds to those before it."""

    run: Tensor  # [T'] positions in the batch of the tokens that run
    row: Tensor  # [T] where in `run` each token of the batch is found
    cu_seqlens: Tensor  # [segments + 1] int32, where each segment begins in `run`
    key_rows: Tensor  # [K] rows of `run` that a segment's queries see: those of its whole sequence
    cu_seqlens_k: Tensor  # [segments + 1] int32, where each segment's keys begin in `key_rows`

    def at_branches(self) -> tuple["SharedPrefixes", Tensor]:
        """The same tokens in segments that also end wherever another one goes on, for layers that carry a state; and
        of each token that runs, its segment and the one that this segment continues, which is itself if it begins a
        sequence: [2, T']."""
        ends = self.cu_seqlens.long()
        key_ends = self.cu_seqlens_k.long()
        lengths = ends.diff()
        num_before = key_ends.diff() - lengths                          # keys of earlier segments
        continues = num_before > 0
        last_before = self.key_rows[(key_ends[1:] - lengths - 1).clamp(min=0)]
        bounds = torch.cat([ends, last_before[continues] + 1]).unique()
        starts = bounds[:-1]
        stops = bounds[1:]
        whole = torch.searchsorted(ends, starts, right=True) - 1        # the segment that a piece is of
        num_keys = num_before[whole] + stops - ends[whole]
        cu_seqlens_k = torch.nn.functional.pad(num_keys.cumsum(0), (1, 0))
        place = torch.arange(int(cu_seqlens_k[-1]), device=ends.device)
        key_places = place + (key_ends[whole] - cu_seqlens_k[:-1]).repeat_interleave(num_keys)
        number = torch.arange(len(starts), device=ends.device)
        row_before = torch.where(starts > ends[whole], starts - 1, last_before[whole])
        is_first = (starts == ends[whole]) & ~continues[whole]
        parent = torch.where(is_first, number, torch.searchsorted(bounds, row_before, right=True) - 1)
        pieces = self._replace(cu_seqlens=bounds.int(), key_rows=self.key_rows[key_places],
                               cu_seqlens_k=cu_seqlens_k.int())
        return pieces, torch.stack([number, parent]).repeat_interleave(stops - starts, dim=1)


def sort_by_prefix(tokens: Tensor, mask: Tensor, cu_seqlens: Tensor, rows: Tensor | None, routing: Tensor | None,
                   groups: Tensor | None = None) -> tuple[np.ndarray, np.ndarray]:
    """An order of the sequences in which those with a common beginning follow each other, and how many tokens each of
    them begins with like the one before it in this order: two int64 [S]. Any two of them have the least of the numbers
    between them in common.

    `rows` [S]: -1 for a sequence without images. Others have images that may differ where the tokens are the same, so
    they share with the same row alone, and only the tokens before the first one that the policy sampled. `routing`
    [T, layers, k]: tokens with other experts are other tokens. `groups` [S]: nothing is common to two groups."""
    columns = [tokens.cpu().int()[:, None].numpy().view(np.uint8)]                              # [T, bytes] each
    if routing is not None:
        columns.append(routing.cpu().flatten(1).contiguous().numpy().view(np.uint8))
    content = np.concatenate(columns, axis=1)
    ends = cu_seqlens.tolist()
    sampled = mask.cpu().numpy()
    row_of = [-1] * (len(ends) - 1) if rows is None else rows.tolist()
    group_of = [0] * (len(ends) - 1) if groups is None else groups.tolist()
    keys = []
    may_share = []                                                      # the tokens of each that others may use
    for group, row, (start, end) in zip(group_of, row_of, pairwise(ends)):
        keys.append((group, row, content[start:end].tobytes()))
        if row == -1:
            may_share.append(end - start)
        else:
            may_share.append(int(np.append(sampled[start:end], True).argmax()))
    order = sorted(range(len(keys)), key=keys.__getitem__)
    common = np.zeros(len(keys), dtype=np.int64)
    for place, (first, second) in enumerate(pairwise(order), start=1):
        if keys[first][:2] == keys[second][:2]:
            most = min(may_share[first], may_share[second])
            one = content[ends[first] : ends[first] + most]
            other = content[ends[second] : ends[second] + most]
            differs = np.append((one != other).any(axis=1), True)
            common[place] = differs.argmax()                            # the first that differs
    return np.array(order, dtype=np.int64), common


def worth_sharing(common: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """How many of the common tokens are shared: all, or 0 where they are too small a part of the sequence, [S] each."""
    return np.where(common >= LEAST_COMMON * lengths, common, 0)


def share_prefixes(tokens: Tensor, mask: Tensor, cu_seqlens: Tensor, rows: Tensor | None,
                   routing: Tensor | None) -> SharedPrefixes | None:
    """The layout of a batch, of `sort_by_prefix`'s arguments. None: its sequences have too little in common."""
    order, common = sort_by_prefix(tokens, mask, cu_seqlens, rows, routing)
    starts = cu_seqlens[:-1].cpu().numpy().astype(np.int64)
    lengths = cu_seqlens.diff().cpu().numpy().astype(np.int64)
    shared = worth_sharing(common, lengths[order])
    if not shared.any():
        return None
    row = np.zeros(len(tokens), dtype=np.int64)
    run: list[np.ndarray] = []
    key_rows: list[np.ndarray] = []
    num_run = 0
    for place, number in enumerate(order):
        start = starts[number]
        new = start + shared[place]
        end = start + lengths[number]
        if place:
            before = starts[order[place - 1]]
            row[start:new] = row[before : before + shared[place]]
        row[new:end] = np.arange(num_run, num_run + end - new)
        num_run += end - new
        if new < end:
            run.append(np.arange(new, end))
            key_rows.append(row[start:end])

    def offsets_of(parts: list[np.ndarray]) -> Tensor:
        return torch.tensor(np.cumsum([0, *map(len, parts)]), dtype=torch.int32, device=tokens.device)

    return SharedPrefixes(
        run=torch.from_numpy(np.concatenate(run)).to(tokens.device),
        row=torch.from_numpy(row).to(tokens.device),
        cu_seqlens=offsets_of(run),
        key_rows=torch.from_numpy(np.concatenate(key_rows)).to(tokens.device),
        cu_seqlens_k=offsets_of(key_rows),
    )
