"""Units with their own reward and advantage: responses or, with --advantage-per-step, turns of an episode or, with
--advantage-per-role, sequences of its conversations."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from common.batch import Batch, offsets
from common.flags.rules import check_turns as check_turns
from common.parallel.ranks import all_gather_objects
from common.rollout import Rollout, Sample
from rewards.runtime.replies import MAX_SCORE

Place = tuple[int, int]
"""Where a unit begins: the number of its sequence in the episode, and the position of its first token in it."""


@dataclass
class EpisodeUnits:
    """The units of one episode. The lists have one entry a unit."""

    index: int  # of the episode's response
    row: int
    places: list[Place]
    scores: list[float] | str  # for turns whatever the episode returned as their scores
    kinds: Sequence[int | str]  # a turn's number, a sequence's role: units of one kind are compared


class Units(NamedTuple):
    """All units of a step, in the order of its responses."""

    score: Tensor  # [U] float64
    response: Tensor  # [U] index of the unit's response
    kind: Tensor  # [U] numbers of the kinds
    sequence: Tensor  # [U] number of the unit's sequence among those of the step
    first_token: Tensor  # [U] its position in that sequence


def to_units(batch: Batch, rollout: Rollout, rewards: Tensor, reward_coef: float, per_turn: bool,
             per_role: bool = False) -> tuple[Batch, Tensor, Tensor]:
    """Returns `batch`, `rewards` [S] and groups [S] unchanged. With `per_turn`: this rank's batch with a sequence for
    each turn, whose `index` is the turn's number among all U of the step; the turns' rewards [U]; and their groups [U],
    where turns of the same number in one group of episodes form a group. With `per_role`: the same for each sequence,
    in groups by the role of its conversation. All ranks call it.

    A turn's reward is its number in the episode's `turn_scores`, times `reward_coef`; of a sequence it is the number
    `ROLE_score` that the episode returned, or the episode's score. A penalty on the episode's reward [S] is subtracted
    from the reward of each unit; NaN there makes each unit's reward NaN. Without any turn there is one unit without a
    reward. Raises ValueError, naming the row, if an episode has not one number a turn, or one that is too large for a
    reward."""
    if not (per_turn or per_role):
        return batch, rewards, rollout.group
    units = gather_units(rollout, turns_of if per_turn else sequences_of)
    penalty = reward_coef * rollout.scores - rewards                                                # [S]
    unit_rewards = reward_coef * units.score - penalty[units.response]                              # [U]
    kinds_of_group = len(units.score)                                                               # at most
    _, group = (rollout.group[units.response] * kinds_of_group + units.kind).unique(return_inverse=True)
    return cut(batch, units, int(rollout.sequence_lengths.max())), unit_rewards, group


def gather_units(rollout: Rollout, units_of: Callable[[Sample], EpisodeUnits]) -> Units:
    """The units of all ranks' episodes; one without a score if there are none. All ranks call it."""
    mine = [units_of(sample) for sample in rollout.samples]
    episodes = sorted(chain(*all_gather_objects(mine)), key=lambda episode: episode.index)
    kinds = sorted(set(chain(*(episode.kinds for episode in episodes))))
    number_of_kind = {kind: number for number, kind in enumerate(kinds)}
    first_sequence = (rollout.num_sequences.cumsum(0) - rollout.num_sequences).long().tolist()      # [S]

    scores: list[float] = []
    responses: list[int] = []
    numbers_of_kinds: list[int] = []
    sequences: list[int] = []
    first_tokens: list[int] = []
    for episode in episodes:
        check_scores(episode)
        for (number, at), score, kind in zip(episode.places, episode.scores, episode.kinds):
            scores.append(score)
            responses.append(episode.index)
            numbers_of_kinds.append(number_of_kind[kind])
            sequences.append(first_sequence[episode.index] + number)
            first_tokens.append(at)
    if not scores:
        scores.append(math.nan)
        for column in (responses, numbers_of_kinds, sequences, first_tokens):
            column.append(0)
    return Units(
        score=torch.tensor(scores, dtype=torch.float64),
        response=torch.tensor(responses),
        kind=torch.tensor(numbers_of_kinds),
        sequence=torch.tensor(sequences),
        first_token=torch.tensor(first_tokens),
    )


def check_scores(episode: EpisodeUnits) -> None:
    """Raises ValueError for `turn_scores` that are not one number a turn, or too large for a reward."""
    scores = episode.scores
    num_turns = len(episode.places)
    if not isinstance(scores, list) or len(scores) != num_turns or max(map(abs, scores), default=0) > MAX_SCORE:
        raise ValueError(f"row {episode.row} of --train-data: turn_scores is {scores!r:.80}, with "
                         f"--advantage-per-step an episode (--rollout.episode) must return a list of one number a "
                         f"turn, of at most {MAX_SCORE:g} in size, here {num_turns}")


def cut(batch: Batch, units: Units, longest: int) -> Batch:
    """This rank's batch with a sequence for each unit. `longest`: tokens of the step's longest sequence."""
    # The unit of a token is the last one that has begun; what stands before the first unit has no mask. Units
    # are in the episode's order, which puts its own conversation first; in the batch that one's sequences come
    # last.
    width = longest + 1
    begins, unit_of_begin = (units.sequence * width + units.first_token).sort()                     # [U]
    sequence_of_token = batch.sequence_ids                                                          # [T]
    place_of_token = batch.number[sequence_of_token] * width + batch.sequence_positions         # [T]
    unit_of_token = unit_of_begin[torch.searchsorted(begins, place_of_token, right=True) - 1]       # [T]
    pairs = torch.stack([sequence_of_token, unit_of_token])                                         # [2, T]
    _, lengths = pairs.unique_consecutive(dim=1, return_counts=True)
    starts = offsets(lengths)[:-1].long()
    return replace(
        batch,
        cu_seqlens=offsets(lengths),
        index=unit_of_token[starts],
        number=batch.number[sequence_of_token[starts]],
        image_row=None,
        fresh=None,
        response_extra={},
        cache={},
    )


def turns_of(sample: Sample) -> EpisodeUnits:
    """The model's turns: those of the episode's own conversation, then those of others in the order in which
    they were begun. A failed or uncounted episode's rewards are 0."""
    places: list[Place] = []
    sequences = sorted(enumerate(sample.sequences), key=lambda numbered: numbered[1][1].conversation)
    for number, (prompt, part) in sequences:
        was_sampled = False                                                     # the token before
        for at, is_sampled in enumerate(part.mask or []):
            if is_sampled and not was_sampled:
                places.append((number, len(prompt) + at))
            was_sampled = is_sampled
    scores = sample.extras.get("turn_scores", "")
    if has_failed(sample):
        scores = [0.0] * len(places)
    return EpisodeUnits(sample.index, sample.row, places, scores, range(len(places)))


def sequences_of(sample: Sample) -> EpisodeUnits:
    """The sequences with text of the model, with the roles of their conversations."""
    places: list[Place] = []
    scores: list[float] = []
    roles: list[str] = []
    for number, (_, part) in enumerate(sample.sequences):
        if not part.num_sampled:
            continue
        places.append((number, 0))
        roles.append(part.role)
        scores.append(sample.extras.get(f"{part.role}_score", sample.score))
    if has_failed(sample):
        scores = [0.0] * len(scores)
    return EpisodeUnits(sample.index, sample.row, places, scores, roles)


def has_failed(sample: Sample) -> bool:
    return math.isnan(sample.score) or sample.response.end_reason in ("timeout", "error")
