"""What was sampled and scored in a step, in one container, and its way to the ranks that train on it.

A `Rollout` holds this rank's responses, and a few numbers of every response on every rank (made by
common/rollouts/gather.py). `to_minibatches` sends each response to the rank that trains on it.

Three ideas say what a response takes part in. A reward of NaN: it has no reward and is in no group's statistics.
`in_loss` False: its tokens are in no loss and in no denominator. Left out, where the script says skip_zero_advantage:
its advantage is 0 and so is the gradient of every term of the loss, so it counts in the denominators and does not run
through the model. One of these in each mini-batch does run, the canary: a gradient on it ends the step.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.batch import Batch
from common.layout.outside import check_outside_mask
from common.layout.shared_prefixes import sort_by_prefix
from common.model.flops import sequence_cost
from common.packing import Sequences, plan_step
from common.parallel.exchange import exchange, gather_numbers, routing_of
from common.parallel.ranks import World, all_sum
from common.prompts import Prompt
from common.segments import segment_sum
from envs.runtime.response import Response


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
    step: int = -1  # in which it was sampled, from 0; -1: the engine did not sample it in this run's steps

    @property
    def sequences(self) -> list[tuple[list[int], Response]]:
        """(prompt tokens, response) pairs that the model saw; an episode may have several."""
        found = []
        for part in [*self.response.earlier, self.response]:
            found.append((part.prompt or self.prompt.tokens, part))
        return found


@dataclass
class Rollout:
    """Responses with their scores. All tensors are [S], by `Sample.index`, and the same on every rank."""

    samples: list[Sample]  # those that this rank scored, by their index
    scores: Tensor  # float64; NaN: no score
    group: Tensor  # int64; responses of one prompt have the same number
    row: Tensor  # int64; the prompt's row of the data set
    step: Tensor  # int64; the step in which the response was sampled, from 0
    prompt_lengths: Tensor  # float64, tokens
    response_lengths: Tensor  # float64, tokens that the policy sampled
    other_lengths: Tensor  # float64, other tokens after the prompt: those of users and tools in episodes
    num_sequences: Tensor  # float64; more than 1: an episode whose history was rewritten
    truncated: Tensor  # bool; the response was cut at the maximum response length

    def __len__(self) -> int:
        return len(self.scores)

    @cached_property
    def batch(self) -> Batch:
        """This rank's responses as a flat batch on the CPU, in the order of their numbers: [T] tokens.

        What a script writes into its fields, `advantage` or `extra`, travels with the responses to the ranks that train
        on them. An episode whose history was rewritten has several sequences."""
        prompts = []
        responses = []
        numbers = []
        indices = []
        logps = []
        masks = []
        rows = []
        for number, sample, prompt, part in self.sequences():
            prompts.append(prompt)
            responses.append(part.tokens)
            numbers.append(number)
            indices.append(sample.index)
            logps.append(part.logp)
            masks.append(part.mask or [True] * len(part.tokens))
            row = -1  # without images, also after the prompt
            is_rows_prompt = part.prompt is None or (prompt == sample.prompt.tokens and not sample.prompt.images)
            if is_rows_prompt and (sample.prompt.images or part.images):
                row = sample.row
            elif part.images:
                # a prompt that is not its row's shares its images with no other: a number of its own below -1
                row = -2 - number
            rows.append(row)
        batch = Batch.build(prompts, responses, number=numbers, index=indices, rollout_logps=logps, masks=masks)
        batch.image_row = torch.tensor(rows, dtype=torch.int64)
        return batch

    def sequences(self) -> list[tuple[int, Sample, list[int], Response]]:
        """This rank's sequences in the order of `batch`: number in the step, sample, prompt's tokens, response."""
        first = (self.num_sequences.cumsum(0) - self.num_sequences).long().tolist()                 # [S]
        found = []
        for sample in sorted(self.samples, key=lambda sample: sample.index):
            for n, (prompt, response) in enumerate(sample.sequences):
                found.append((first[sample.index] + n, sample, prompt, response))
        return found

    @property
    def has_score(self) -> Tensor:
        """[S] bool: the scorers gave the response a score."""
        return self.scores.isfinite()

    @property
    def sequence_lengths(self) -> np.ndarray:
        """[S] int64, tokens of prompt and response."""
        return (self.prompt_lengths + self.response_lengths + self.other_lengths).numpy().astype(np.int64)

    def to_tokens(self, values: Tensor) -> Tensor:
        """A number for each response, [S] -> float32 [T] of `batch`: the response's number on each of the tokens that
        the policy sampled, 0 elsewhere."""
        return self.batch.to_tokens(values)

    def numbers_of(self, number: Callable[[Sample], float]) -> Tensor:
        """A number of each response, computed from its sample on the rank that has it: float64 [S], the same on every
        rank. All ranks call this together."""
        found = torch.zeros(len(self), dtype=torch.float64)
        for sample in self.samples:
            found[sample.index] = number(sample)
        return all_sum(found)

    def any_token(self, is_true: Tensor) -> Tensor:
        """[T] bool of `batch` -> [S] bool, the same on every rank: it is true for a token of the response. All ranks
        call this together."""
        return sum_per_response(self.batch, is_true.double(), len(self)) > 0

    def token_numbers(self, name: str) -> Tensor:
        """The lists that the reward function returned under `name`, one number for each response token: float32 [T] of
        `batch`, 0 on prompts and on responses without a score. Raises ValueError, naming the row, for another length.
        """
        whole = torch.zeros(len(self.batch.tokens))
        for start, (_, s, prompt, response) in zip(self.batch.cu_seqlens.tolist(), self.sequences()):
            if not math.isfinite(s.score):
                continue
            numbers = s.extras.get(name)
            found = repr(numbers)[:80]
            is_right = False
            if isinstance(numbers, list | tuple):
                found = f"a list of {len(numbers)}"
                is_right = len(numbers) == len(response.tokens) and len(s.sequences) == 1
            if not is_right:
                raise ValueError(f"row {s.row} of --train-data: the reward function returned {name} = {found}, must be "
                                 f"a list of {len(response.tokens)} numbers, one for each response token (and an "
                                 f"episode must be one sequence, this one has {len(s.sequences)})")
            first = start + len(prompt)
            whole[first : first + len(numbers)] = torch.tensor(numbers, dtype=torch.float32)
        return whole

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: vars(self)[f.name] for f in fields(self) if f.name != "samples"}

    def cat(self, other: "Rollout", same_groups: bool = False) -> "Rollout":
        """Both; responses and groups of `other` are numbered after those of this one. With `same_groups` the groups of
        `other` are further responses of the groups here with these numbers. `batch` is made anew. Raises ValueError for
        groups of the same number and another row."""
        self._check_unwritten(other)
        num_groups = 0
        if len(self) and not same_groups:
            num_groups = int(self.group.max()) + 1
        moved = [replace(s, index=s.index + len(self), group=s.group + num_groups) for s in other.samples]
        theirs = other.tensors() | {"group": other.group + num_groups}
        joined = {name: torch.cat([mine, theirs[name]]) for name, mine in self.tensors().items()}
        pairs = torch.stack([joined["group"], joined["row"]]).unique(dim=1)                         # [2, groups]
        if same_groups and len(pairs[0].unique()) != pairs.shape[1]:
            raise ValueError("rollout.cat(same_groups=True): a group has another row here than there; sample both from "
                             "the same rows, in the same order")
        return Rollout(self.samples + moved, **joined)

    def select(self, groups: Sequence[int]) -> "Rollout":
        """The responses of these groups, for a replay buffer or dynamic sampling. Groups are numbered in this order,
        from 0, and responses group by group. `batch` is made anew."""
        new_group = {int(old): new for new, old in enumerate(groups)}
        number = torch.tensor([new_group.get(old, -1) for old in self.group.tolist()], dtype=torch.int64)   # [S]
        order = number.argsort(stable=True)[int((number < 0).sum()) :]
        return self._taken(order, number[order])

    def take(self, responses: Sequence[int]) -> "Rollout":
        """These responses, such as the best of each group: numbered from 0 in their present order, as are the groups
        that have some left. All ranks give the same numbers. `batch` is made anew."""
        order = torch.tensor(sorted({int(i) for i in responses}), dtype=torch.int64)                # [S']
        if len(order) and not 0 <= int(order[0]) <= int(order[-1]) < len(self):
            raise ValueError(f"rollout.take: responses {int(order[0])} to {int(order[-1])} of {len(self)}, must be "
                             f"numbers from 0 to {len(self) - 1}")
        return self._taken(order, self.group[order].unique(return_inverse=True)[1])

    def _taken(self, order: Tensor, group: Tensor) -> "Rollout":
        """The responses with the numbers `order` [S'], which get these groups [S']."""
        self._check_unwritten()
        new_index = {old: new for new, old in enumerate(order.tolist())}
        samples = []
        for s in self.samples:
            if s.index in new_index:
                index = new_index[s.index]
                samples.append(replace(s, index=index, group=int(group[index])))
        taken = {name: values[order] for name, values in self.tensors().items()}
        return Rollout(samples, **taken | {"group": group})

    def _check_unwritten(self, *others: "Rollout") -> None:
        """Raises ValueError if a script wrote fields of its own into `batch`, which `cat` and the like make anew."""
        for rollout in (self, *others):
            batch = vars(rollout).get("batch")  # made at its first use
            if batch is None:
                continue
            own = [*batch.extra, *batch.response_extra]
            if own:
                raise ValueError(f"Rollout.cat, select and take would lose the fields {own} of rollout.batch: write "
                                 f"them afterwards")


# --------------------------------------------------------------------------- to the ranks that train

@dataclass
class Minibatch:
    """This rank's share of one optimizer step. Iterating gives its micro-batches, as many on every rank."""

    microbatches: list[Batch]
    left_out_lengths: Tensor
    """[S] float64, the same on every rank: sampled tokens of the responses of this mini-batch that were left out. They
    count in denominators. 0 for all others."""

    def __post_init__(self) -> None:
        for microbatch in self.microbatches:
            microbatch.ends_minibatch = microbatch is self.microbatches[-1]

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.microbatches)

    def __len__(self) -> int:
        return len(self.microbatches)

    @property
    def num_left_out(self) -> int:
        return int((self.left_out_lengths > 0).sum())


@dataclass
class Layout:
    """How a step's responses are laid out over mini-batches, ranks, and micro-batches."""

    hf_config: Any  # of the policy: costs follow from its sizes
    world: World
    num_minibatches: int
    max_tokens: int  # the budget of a micro-batch on one rank
    seed: int  # of the order in which responses come into mini-batches
    share_prompt: bool = False  # what begins alike stays together where it fits
    most_keys: float = math.inf  # that a micro-batch may gather for each token of its budget


def to_minibatches(rollout: Rollout, in_loss: Tensor, layout: Layout, step: int = -1,
                   skip_zero_advantage: bool = False) -> list[Minibatch]:
    """Send every response to the rank that trains on it, with the fields of `rollout.batch`.

    `in_loss` [S] bool: responses whose tokens are in the loss and in its denominators; no others run. `step`: responses
    that were sampled in another step are not `fresh`. `skip_zero_advantage`: those whose `rollout.batch.advantage` is 0
    on all of their tokens are left out but for one of each mini-batch, the canary, and a gradient on that one makes
    `Phase.optimizer_step` raise ValueError. It is for losses that are 0, with a gradient of 0, where the advantage is.
    """
    if not isinstance(skip_zero_advantage, bool):
        raise TypeError(f"run.to_minibatches: skip_zero_advantage is a {type(skip_zero_advantage).__name__}, must be "
                        f"True or False: advantages decide which responses are skipped")
    if in_loss.dtype != torch.bool or in_loss.shape != rollout.scores.shape:
        raise ValueError(f"run.to_minibatches: in_loss is {in_loss.dtype} of shape {list(in_loss.shape)}, must be "
                         f"torch.bool of shape [{len(rollout)}]: whether a response is in the loss; by how much is a "
                         f"matter of its advantage")
    batch = replace(rollout.batch, cache={})
    runs = in_loss                                                                                  # [S]
    counted_lengths = rollout.response_lengths * in_loss                                            # [S]
    if skip_zero_advantage:
        if batch.advantage is None:
            raise ValueError("skip_zero_advantage: rollout.batch.advantage must be written before run.to_minibatches, "
                             "which leaves out responses by it")
        runs = in_loss & rollout.any_token((batch.advantage != 0) & batch.mask)
        # the script may have narrowed the mask
        counted_lengths = sum_per_response(batch, batch.mask.double(), len(rollout)) * in_loss
    if batch.advantage is not None:
        check_outside_mask(batch.advantage, batch.mask)
    batch.fresh = rollout.step[batch.index] == step
    parts = rollout.sequences()
    batch.routing = routing_of(batch.sequence_lengths.tolist(), [part.routing for *_, part in parts])
    world = layout.world
    place, common = torch.zeros(2, len(batch), dtype=torch.int64)   # in the order in which sequences begin alike
    if layout.share_prompt:
        group = rollout.group[batch.index]
        content = batch.tokens, batch.mask, batch.cu_seqlens, batch.image_row, batch.routing
        order, shared = sort_by_prefix(*content, group)
        place[order] = torch.arange(len(batch))
        common[order] = torch.from_numpy(shared)
    known = torch.stack([batch.index, batch.sequence_lengths, torch.full_like(place, world.rank), place, common], dim=1)
    index, lengths, *ranks_places, common = gather_numbers(known, batch.number).long().T            # [N] of sequences
    lengths = lengths.numpy()
    order = None
    if layout.share_prompt:
        rank, place = ranks_places
        order = np.lexsort((place, rank, rollout.group[index]))
    sequences = Sequences(
        lengths, sequence_cost(lengths, layout.hf_config), runs[index].numpy(), index.numpy(),
        order, common.numpy(), layout.most_keys, can_watch=(counted_lengths > 0)[index].numpy(),
    )
    plan = plan_step(sequences, layout.num_minibatches, world.size, layout.max_tokens, layout.seed, world.group_size)
    if skip_zero_advantage:
        batch.canary = torch.from_numpy(plan.is_canary[batch.number.numpy()])
    batch = exchange(batch, plan.rank[batch.number.numpy()])
    minibatches = []
    for planned, left_out in zip(plan.minibatches, plan.left_out):
        mine = [batch.microbatch(of_ranks[world.rank]) for of_ranks in planned]
        responses = index[left_out]
        left_out_lengths = torch.zeros_like(counted_lengths).index_copy(0, responses, counted_lengths[responses])
        minibatches.append(Minibatch([x.to(world.device, layout.share_prompt) for x in mine], left_out_lengths))
    return minibatches


def scatter_fields(minibatches: list[Minibatch], advantages: Tensor | None = None, **values: Tensor) -> None:
    """Write per-token tensors [T] of `Batch.cat` over all micro-batches back into each of them.

    With `advantage`, `advantages` [S] are those of all responses. Raises ValueError if one that was left out has an
    advantage there, and as `check_outside_mask`."""
    microbatches = list(chain(*minibatches))
    if "advantage" in values and microbatches:
        check_outside_mask(values["advantage"].cpu(), torch.cat([batch.mask for batch in microbatches]).cpu())
    sizes = [len(microbatch.tokens) for microbatch in microbatches]
    for name, whole in values.items():
        for microbatch, share in zip(microbatches, whole.split(sizes)):
            setattr(microbatch, name, share.to(microbatch.tokens.device))
    if advantages is None:
        return
    for minibatch in minibatches:
        if not minibatch.num_left_out:  # then `advantages` may be of other units than responses
            continue
        lost = ((minibatch.left_out_lengths > 0) & (advantages != 0)).nonzero()[:, 0]
        if len(lost):
            raise ValueError(f"response {int(lost[0])} was left out of the update, as its advantage was 0 when it was "
                             f"scored, and now has the advantage {advantages[lost[0]]:.4g}: give "
                             f"skip_zero_advantage=False to run.to_minibatches")


def sum_per_response(batch: Batch, x: Tensor, num_responses: int) -> Tensor:
    """[T] of this rank's batch -> [S] float64 on every rank: the sum over each response, 0 where no rank has it."""
    sums = torch.zeros(num_responses, dtype=torch.float64)
    real = batch.index >= 0
    sums.index_add_(0, batch.index[real], segment_sum(x.double(), batch.cu_seqlens)[real])
    return all_sum(sums)
