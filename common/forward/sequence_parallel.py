"""Sequence parallel: consecutive ranks run a micro-batch together, each a part of every sequence.

Each rank brings its own responses and gets their log-probs back, so losses, weights and the factor `world.size` do not
change. A sequence is cut into two chunks a rank, and rank r of n runs chunks r and 2n - 1 - r: a late token sees more
keys than an early token, so all ranks have the same amount of work. Only attention needs tokens of other ranks: keys
and values are gathered around it, and their gradients summed on the way back.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.nn.functional import all_reduce

from common.batch import Batch, offsets
from common.parallel.ranks import all_gather_objects, all_gather_single


@dataclass
class Row:
    """The part of a micro-batch that this rank runs, as one packed row."""

    before: Tensor  # [N] the row whose hidden state predicts a sampled token
    sampled: Tensor  # [N] where these tokens are in the micro-batch
    batch: Batch  # the micro-batch
    layout: dict[str, Any]  # what attention is told
    run: Tensor  # [t] where the tokens that run here are in the micro-batch
    runs_as: Tensor  # [T] of each token of the micro-batch the one that runs in its place, on any rank
    own: slice  # of its tokens those of this rank's responses
    group: dist.ProcessGroup | None = None  # the ranks that run the micro-batch together

    def per_token(self, numbers: Tensor) -> Tensor:
        """[N] -> [T] of this rank's responses, 0 where the policy sampled no token."""
        whole = numbers.new_zeros(len(self.batch.tokens)).index_copy(0, self.sampled, numbers)
        if self.group is None:
            return whole
        return all_reduce(whole, group=self.group)[self.own]

    def routing(self, chosen: Tensor) -> Tensor:
        """The experts [t, layers, k] of the tokens that run here -> [T, layers, k] of this rank's responses."""
        whole = chosen.new_zeros(len(self.batch.tokens), *chosen.shape[1:], dtype=torch.int32)  # int16 cannot be sent
        whole[self.run] = chosen.int()
        if self.group is not None:
            dist.all_reduce(whole, dist.ReduceOp.MAX, self.group)
        return whole[self.runs_as[self.own]].short()


def make_row(batch: Batch, share_prompt: bool, group: dist.ProcessGroup | None, has_states: bool = False) -> Row:
    """The row of a micro-batch; with a `group`, this rank's part of the row of its ranks' micro-batches. `has_states`:
    of a model whose layers carry a state from one shared segment into those that go on from its end."""
    own = slice(None)
    if group is not None:                       # the micro-batches of all its ranks, one after the other
        mine = Batch(batch.tokens, batch.mask, batch.cu_seqlens, batch.index, batch.number, routing=batch.routing)
        batches = all_gather_objects(mine.to("cpu"), group)
        start = sum(len(earlier.tokens) for earlier in batches[: dist.get_rank(group)])
        own = slice(start, start + len(mine.tokens))
        batch = Batch.cat(batches).to(mine.tokens.device, share_prompt)
    # the shift from "next token" to "this token" is here and nowhere else: position t is scored by that of t - 1
    before = batch.sampled - 1                                                                  # [N]
    run = torch.arange(len(batch.tokens), device=batch.tokens.device)
    runs_as = run
    layout = {
        "cu_seq_lens_q": batch.cu_seqlens,
        "cu_seq_lens_k": batch.cu_seqlens,
        "max_length_q": max(batch.host_lengths),
        "max_length_k": max(batch.host_lengths),
        "seq_idx": batch.sequence_ids[None].int(),              # what transformers tells layers with a state
    }
    shared = batch.shared_prefixes if share_prompt else None
    if shared is not None:
        if has_states:
            shared, continued = shared.at_branches()
            layout["seq_idx"] = continued.int()
        before = shared.row[before]
        run = shared.run
        runs_as = shared.run[shared.row]
        layout["cu_seq_lens_q"] = shared.cu_seqlens
        layout["cu_seq_lens_k"] = shared.cu_seqlens_k
        layout["key_rows"] = shared.key_rows
    row = Row(before, batch.sampled, batch, layout, run, runs_as, own, group)
    if group is None:
        return row
    return cut(row, group)


def cut(row: Row, group: dist.ProcessGroup) -> Row:
    """This rank's part of a row that is known on all ranks of the group."""
    n = dist.get_world_size(group)
    me = dist.get_rank(group)
    device = row.run.device
    ends = row.layout["cu_seq_lens_q"].cpu().long()
    key_ends = row.layout["cu_seq_lens_k"].cpu().long()
    chunk, owner = zigzag(ends, n)
    most = int(owner.bincount().max())
    number = F.one_hot(owner, n).cumsum(0).gather(1, owner[:, None])[:, 0] - 1          # among those of its rank
    place = owner * most + number                                           # where the gathered rows have each row
    # with fewer tokens than ranks, some run row 0, and nobody reads it
    local = (owner == me).nonzero()[:, 0]
    if not len(local):
        local = torch.tensor([0])
    chunks, lengths = chunk[local].unique_consecutive(return_counts=True)
    segment = chunks // (2 * n)
    # a chunk sees its segment's keys, up to its own end
    stops = local[lengths.cumsum(0) - 1] + 1
    first_keys = key_ends[segment]
    last_keys = key_ends[segment + 1] - ends[segment + 1] + stops
    keys = torch.cat([torch.arange(first, last) for first, last in zip(first_keys, last_keys)]).to(device)
    if "key_rows" in row.layout:
        keys = row.layout["key_rows"][keys]
    place = place.to(device)
    local = local.to(device)
    layout = {
        "cu_seq_lens_q": offsets(lengths).to(device),
        "cu_seq_lens_k": offsets(last_keys - first_keys).to(device),
        "key_rows": place[keys],
        "sequence_group": group,
        "num_rows": most,
    }
    here = place[row.before] // most == me
    return replace(
        row,
        before=(place[row.before] % most)[here],
        sampled=row.sampled[here],
        run=row.run[local],
        layout=row.layout | layout,
    )


def zigzag(ends: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """For each token of segments with these ends: the number of its chunk, with 2n chunks a segment, and the rank (of
    n) that runs it. The remainder of a division by 2n goes to other chunks in every second segment: [t], [t]."""
    segment = torch.arange(len(ends) - 1).repeat_interleave(ends.diff())
    following = torch.arange(1, len(segment) + 1) - ends[segment]           # the position after it in its segment
    chunk = (2 * n * following - segment % 2 * n - 1) // ends.diff()[segment]
    return 2 * n * segment + chunk, torch.minimum(chunk, 2 * n - 1 - chunk)


def gather_keys(key: Tensor, value: Tensor, group: dist.ProcessGroup, num_rows: int) -> tuple[Tensor, Tensor]:
    """The keys and values of all ranks of the group, `num_rows` each: [1, kv_heads, t, D] -> [1, kv_heads, K, D]."""
    both = torch.cat([key[0], value[0]], dim=-1).transpose(0, 1)                        # [t, kv_heads, D of both]
    both = F.pad(both, (0, 0, 0, 0, 0, num_rows - len(both))).contiguous()
    # its gradient is summed over the ranks; it must be contiguous, as the gradient of split is
    key, value = wait_tensor(all_gather_single(both, 0, group)).split([key.shape[3], value.shape[3]], dim=2)
    return key.transpose(0, 1)[None], value.transpose(0, 1)[None]
