"""What was sampled and scored in a step, in one container, and its way to the ranks that train on it.

A `Rollout` holds this rank's responses, and a few numbers of every response on every rank (common/engine/scoring.py
makes it). `to_minibatches` sends each response to the rank that trains on it.

Two ideas say what a response takes part in. A reward of NaN: it has no reward and is in no group's statistics.
`in_loss` False: its tokens are in no loss and in no denominator.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.batch import Batch
from common.engine.base import Response
from common.model.flops import sequence_cost
from common.packing import plan_step
from common.parallel.exchange import exchange, gather_numbers, routing_of
from common.parallel.ranks import World, all_sum
from common.prompts import Prompt
from common.segments import segment_sum


@dataclass
class Sample:
    """One response, on the rank that scored it."""

    index: int  # its number in the step, 0 .. S-1 over all ranks
    group: int  # the number of its prompt in the step
    row: int  # the row of its prompt in the data set
    prompt: Prompt
    response: Response | None = None  # None until the engine has finished it, and on ranks that do not score it
    text: str = ""
    score: float = math.nan  # the scorers' number; NaN: the scorers failed
    extras: dict[str, Any] = field(default_factory=dict)  # float, list[float] or str: the rest of the reward's dict

    @property
    def sequences(self) -> list[tuple[list[int], Response]]:
        """What the model saw: pairs of a prompt's tokens and a response. Of an episode there may be several."""
        return [(part.prompt or self.prompt.tokens, part) for part in [*self.response.earlier, self.response]]


@dataclass
class Rollout:
    """Responses with their scores. All tensors are [S], by `Sample.index`, and the same on every rank."""

    samples: list[Sample]  # those that this rank scored
    scores: Tensor  # float64; NaN: no score
    group: Tensor  # int64; responses of one prompt have the same number
    prompt_lengths: Tensor  # float64, tokens
    response_lengths: Tensor  # float64, tokens that the policy sampled
    other_lengths: Tensor  # float64, other tokens after the prompt: those of users and tools in episodes
    num_sequences: Tensor  # float64; more than 1: an episode whose history was rewritten
    truncated: Tensor  # bool; the response was cut at the maximum response length
    in_loss: Tensor  # bool; its tokens are in the loss and in the denominators; at first: it has a score

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def lengths(self) -> np.ndarray:
        """[S] int64, tokens of prompt and response."""
        return (self.prompt_lengths + self.response_lengths + self.other_lengths).numpy().astype(np.int64)

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: vars(self)[f.name] for f in fields(self) if f.name != "samples"}

    def cat(self, other: "Rollout") -> "Rollout":
        """Both; responses and groups of `other` are numbered after those of this one."""
        num_groups = int(self.group.max()) + 1 if len(self) else 0
        moved = [replace(s, index=s.index + len(self), group=s.group + num_groups) for s in other.samples]
        theirs = other.tensors()
        theirs["group"] = theirs["group"] + num_groups
        joined = {name: torch.cat([mine, theirs[name]]) for name, mine in self.tensors().items()}
        return Rollout(self.samples + moved, **joined)


def gather_rollout(samples: list[Sample]) -> Rollout:
    """The samples of this rank, with the numbers of all ranks' samples on every rank."""
    rows = []
    for s in samples:
        num_prompt = sum(len(prompt) for prompt, _ in s.sequences)
        num_sampled = sum(part.num_sampled for _, part in s.sequences)
        num_other = sum(len(part.tokens) for _, part in s.sequences) - num_sampled
        rows.append((math.isfinite(s.score), np.nan_to_num(s.score), s.group, num_prompt, num_sampled, num_other,
                     len(s.sequences), s.response.finish_reason == "length"))
    index = torch.tensor([s.index for s in samples], dtype=torch.int64)
    numbers = gather_numbers(torch.tensor(rows, dtype=torch.float64).view(-1, 8), index)            # [S, 8]
    scored, scores, group, *lengths, truncated = numbers.unbind(1)
    has_score = scored > 0
    return Rollout(
        samples, torch.where(has_score, scores, torch.nan), group.long(), *lengths, truncated > 0, in_loss=has_score
    )


# --------------------------------------------------------------------------- to the ranks that train

@dataclass
class Minibatch:
    """This rank's share of one optimizer step. Iterating gives its micro-batches, as many on every rank."""

    microbatches: list[Batch]
    skipped_lengths: Tensor  # [S] of responses that run nowhere and count in denominators, 0 for the others

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.microbatches)

    def __len__(self) -> int:
        return len(self.microbatches)


def to_minibatches(rollout: Rollout, in_update: Tensor, hf_config, world: World, *, num_minibatches: int,
                   max_tokens: int, seed: int, share_prompt: bool = False) -> list[Minibatch]:
    """Send every response to the rank that trains on it.

    `in_update` [S] bool: responses that run through the model. The others only count in the denominators (those with
    `in_loss`). `max_tokens`: the budget of a micro-batch. `share_prompt`: groups stay together where they fit.
    """
    samples = rollout.samples
    first = (rollout.num_sequences.cumsum(0) - rollout.num_sequences).long()                        # [S] numbers
    parts = [(first[s.index] + n, s.index, *part) for s in samples for n, part in enumerate(s.sequences)]
    batch = Batch.build(
        [prompt for _, _, prompt, _ in parts], [part.tokens for *_, part in parts],
        number=[int(number) for number, *_ in parts], index=[index for _, index, *_ in parts],
        rollout_logps=[part.logp for *_, part in parts],
        masks=[part.mask or [True] * len(part.tokens) for *_, part in parts],
    )
    batch.row = torch.tensor([s.row if s.prompt.images else -1 for s in samples for _ in s.sequences]).long()
    batch.routing = routing_of(batch.lengths.tolist(), [part.routing for *_, part in parts])
    prompt_lengths = torch.tensor([len(prompt) for _, _, prompt, _ in parts], dtype=torch.float64)
    known = torch.stack([batch.index.double(), batch.lengths.double(), prompt_lengths], dim=1)
    index, lengths, prompt_lengths = gather_numbers(known, batch.number).T                          # [N] of sequences
    index, lengths = index.long(), lengths.long().numpy()
    runs = in_update[index].numpy()
    plan = plan_step(
        lengths, sequence_cost(lengths, hf_config), num_minibatches, world.size, max_tokens, seed, trained=runs,
        responses=index.numpy(), groups=rollout.group[index].numpy() if share_prompt else None,
        prompt_lengths=prompt_lengths.numpy(), group_size=world.group_size,
    )
    batch = batch.select(torch.from_numpy(np.flatnonzero(runs[batch.number.numpy()])))
    batch = exchange(batch, plan.rank[batch.number.numpy()])
    batch.mask &= rollout.in_loss[batch.index][batch.sequence_ids]
    counted_lengths = rollout.response_lengths * rollout.in_loss                                    # [S]
    return [
        Minibatch(
            [batch.microbatch(shares[world.rank]).to(world.device, share_prompt) for shares in planned],
            torch.zeros_like(counted_lengths).index_copy(0, index[skipped], counted_lengths[index[skipped]]),
        )
        for planned, skipped in zip(plan.minibatches, plan.idle)
    ]


def check_skipped(advantages: Tensor, in_update: Tensor, rollout: Rollout) -> None:
    """Refuse advantages [S] other than 0 for responses that run through no model but count in the loss."""
    skipped = (rollout.in_loss & ~in_update).nonzero()[:, 0]
    for i in skipped[advantages[skipped] != 0][:1]:
        raise ValueError(f"response {int(i)} was left out of the update, as its advantage was 0 when it was scored, "
                         f"and now has the advantage {advantages[i]:.4g}: --run-zero-advantage runs all responses")


def scatter_fields(minibatches: list[Minibatch], **values: Tensor) -> None:
    """Write per-token tensors [T] of `Batch.cat` over all micro-batches back into each of them."""
    microbatches = list(chain(*minibatches))
    for name, whole in values.items():
        for microbatch, share in zip(microbatches, whole.split([len(b.tokens) for b in microbatches])):
            setattr(microbatch, name, share.to(microbatch.tokens.device))


def sum_per_response(batch: Batch, x: Tensor, num_responses: int) -> Tensor:
    """[T] of this rank's batch -> [S] float64 on every rank: the sum over each response, 0 where no rank has it."""
    sums = torch.zeros(num_responses, dtype=torch.float64)
    real = batch.index >= 0
    sums.index_add_(0, batch.index[real], segment_sum(x.double(), batch.cu_seqlens)[real])
    return all_sum(sums)
