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
from common.dataset.store import PromptSet
from common.engine.base import Response
from common.model.flops import sequence_cost
from common.model.sequence_parallel import plan_groups
from common.parallel.exchange import exchange, gather_numbers
from common.parallel.ranks import World, all_gather_objects, all_sum
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
    extras: dict[str, Any] = field(default_factory=dict)  # what the reward function returned besides its score


@dataclass
class Rollout:
    """Responses with their scores. All tensors are [S], by `Sample.index`, and the same on every rank."""

    samples: list[Sample]  # those that this rank scored
    scores: Tensor  # float64; NaN: no score
    group: Tensor  # int64; responses of one prompt have the same number
    prompt_lengths: Tensor  # float64, tokens
    response_lengths: Tensor  # float64, tokens
    truncated: Tensor  # bool; the response was cut at the maximum response length
    in_loss: Tensor  # bool; its tokens are in the loss and in the denominators; at first: it has a score

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def lengths(self) -> np.ndarray:
        """[S] int64, tokens of prompt and response."""
        return (self.prompt_lengths + self.response_lengths).numpy().astype(np.int64)

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

    def state_dict(self) -> list[list]:
        """The samples of all ranks, for JSON. All ranks call this together."""
        mine = [
            [s.index, s.group, s.row, s.response.tokens, s.response.logp, s.response.finish_reason, s.score, s.extras]
            for s in self.samples
        ]
        return sorted(chain(*all_gather_objects(mine)), key=lambda saved: saved[0])

    @classmethod
    def from_state(cls, state: list[list], data: PromptSet, world: World) -> "Rollout":
        """What `state_dict` returned, its groups dealt to the ranks in turn. All ranks call this together."""
        samples = [
            Sample(index, group, row, data[row], Response(tokens, logp, reason), score=score, extras=extras)
            for index, group, row, tokens, logp, reason, score, extras in state
            if group % world.size == world.rank
        ]
        return gather_rollout(samples)


def gather_rollout(samples: list[Sample]) -> Rollout:
    """The samples of this rank, with the numbers of all ranks' samples on every rank."""
    rows = [
        (math.isfinite(s.score), np.nan_to_num(s.score), s.group, len(s.prompt.tokens), len(s.response.tokens),
         s.response.finish_reason == "length")
        for s in samples
    ]
    index = torch.tensor([s.index for s in samples], dtype=torch.int64)
    numbers = gather_numbers(torch.tensor(rows, dtype=torch.float64).view(-1, 6), index)            # [S, 6]
    scored, scores, group, prompt_lengths, response_lengths, truncated = numbers.unbind(1)
    has_score = scored > 0
    return Rollout(
        samples, torch.where(has_score, scores, torch.nan), group.long(), prompt_lengths, response_lengths,
        truncated > 0, in_loss=has_score,
    )


# --------------------------------------------------------------------------- to the ranks that train

@dataclass
class Minibatch:
    """This rank's share of one optimizer step. Iterating gives its micro-batches, as many on every rank."""

    microbatches: list[Batch]
    skipped_lengths: Tensor  # of responses that run nowhere and count in denominators, on all ranks the same

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
    lengths = rollout.lengths
    runs = in_update.numpy()
    plan = plan_groups(
        lengths, sequence_cost(lengths, hf_config), num_minibatches, world, max_tokens, seed, trained=runs,
        groups=rollout.group.numpy() if share_prompt else None, prompt_lengths=rollout.prompt_lengths.numpy(),
    )
    samples = rollout.samples
    batch = Batch.build(
        [s.prompt.tokens for s in samples], [s.response.tokens for s in samples], index=[s.index for s in samples],
        rollout_logps=[s.response.logp for s in samples],
    )
    batch = batch.select(torch.from_numpy(np.flatnonzero(runs[batch.index.numpy()])))
    batch = exchange(batch, plan.rank[batch.index.numpy()])
    batch.mask &= rollout.in_loss[batch.index][batch.sequence_ids]
    counted_lengths = rollout.response_lengths * rollout.in_loss                                    # [S]
    return [
        Minibatch([batch.microbatch(shares[world.rank]).to(world.device, share_prompt) for shares in planned],
                  counted_lengths[skipped])
        for planned, skipped in zip(plan.minibatches, plan.idle)
    ]


def check_skipped(advantages: Tensor, in_update: Tensor, rollout: Rollout) -> None:
    """Refuse advantages [S] other than 0 for responses that run through no model but count in the loss."""
    for i in (rollout.in_loss & ~in_update & (advantages != 0)).nonzero()[:1, 0]:
        raise ValueError(
            f"response {int(i)} was left out of the update, as its advantage was 0 when it was scored, and now has the "
            f"advantage {advantages[i]:.4g}: --run-zero-advantage runs all responses"
        )


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
    sums[batch.index[real]] = segment_sum(x.double(), batch.cu_seqlens)[real]
    return all_sum(sums)


Component = tuple[float, Tensor]                        # a factor, and a number [S] that the reward function returned


def gather_components(rollout: Rollout, factors: dict[str, float]) -> list[Component]:
    """These numbers, which reward functions returned beside the score, of all responses on every rank; NaN: no score.
    All ranks call this together. Raises ValueError, naming row and component, where one is missing."""
    scored = [sample for sample in rollout.samples if math.isfinite(sample.score)]
    mine = [(sample.index, sample.row, [sample.extras.get(name) for name in factors]) for sample in scored]
    values = torch.full((len(factors), len(rollout)), torch.nan, dtype=torch.float64)
    for index, row, numbers in sorted(chain(*all_gather_objects(mine))):
        for k, (name, number) in enumerate(zip(factors, numbers)):
            if not isinstance(number, float):
                raise ValueError(f"row {row} of --train-data: the reward function returned {name} = {number!r:.80}, "
                                 f"must be a number (--reward-components)")
            values[k, index] = number
    return list(zip(factors.values(), values))
