"""Units with their own reward and advantage: responses or, with --advantage-per-step, turns of an episode or, with
--advantage-per-role, sequences of its conversations."""

import math
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from common.batch import Batch, offsets
from common.parallel.ranks import all_gather_objects
from common.rollout import Rollout, Sample
from envs.runtime.conversation import EpisodeConfig
from rewards.runtime.replies import MAX_SCORE


def check_turns(config: EpisodeConfig, per_turn: bool, per_role: bool = False) -> None:
    if (per_turn or per_role) and not config.episode:
        flag = "--advantage-per-step" if per_turn else "--advantage-per-role"
        raise ValueError(f"{flag} needs --rollout.episode: only an episode has turns and roles")
    if per_turn and per_role:
        raise ValueError("--advantage-per-step and --advantage-per-role exclude each other: a token has one advantage")


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
    rows = []
    first = (rollout.num_sequences.cumsum(0) - rollout.num_sequences).long().tolist()               # [S] sequences
    found = sorted(chain(*all_gather_objects([*map(turns_of if per_turn else sequences_of, rollout.samples)])))
    names = sorted({name for *_, kinds in found for name in kinds})                                 # of groups
    for index, row, turns, scores, kinds in found:
        if not isinstance(scores, list) or len(scores) != len(turns) or max(map(abs, scores), default=0) > MAX_SCORE:
            raise ValueError(f"row {row} of --train-data: turn_scores is {scores!r:.80}, with --advantage-per-step an "
                             f"episode (--rollout.episode) must return a list of one number a turn, of at most "
                             f"{MAX_SCORE:g} in size, here {len(turns)}")
        for (part, at), score, name in zip(turns, scores, kinds):
            rows.append((score, index, names.index(name), first[index] + part, at))
    rows = rows or [(math.nan, 0, 0, 0, 0)]
    scores, *numbers = torch.tensor(rows, dtype=torch.float64).view(-1, 5).T                        # [U] each
    index, n, sequence, first_token = (values.long() for values in numbers)
    scores = reward_coef * scores + (rewards - reward_coef * rollout.scores)[index]
    _, group = (rollout.group[index] * len(rows) + n).unique(return_inverse=True)
    # the turn of a token is the last one that has begun; what stands before the first turn has no mask. Turns are in
    # the episode's order, which puts its own conversation first; in the batch that one's sequences come last
    longest, of_token = int(rollout.lengths.max()) + 1, batch.sequence_ids                          # [T]
    begins, turn_of = (sequence * longest + first_token).sort()                                     # [U]
    place = batch.number[of_token] * longest + batch.position_ids
    turn = turn_of[torch.searchsorted(begins, place, right=True) - 1]                               # [T]
    _, lengths = torch.stack([of_token, turn]).unique_consecutive(dim=1, return_counts=True)
    starts = offsets(lengths)[:-1].long()
    number = batch.number[of_token[starts]]
    units = replace(batch, cu_seqlens=offsets(lengths), index=turn[starts], number=number, row=None, fresh=None,
                    response_extra={}, known={})
    return units, scores, group


def turns_of(sample: Sample) -> tuple[int, int, list[tuple[int, int]], list[float] | str, range]:
    """Returns (index, row, turns, rewards, numbers) of each episode; a turn is (number of its sequence in the episode,
    position of its first token), and only the model's turns count: those of the episode's own conversation, then those
    of others in the order in which they were begun. A failed or uncounted episode's rewards are 0."""
    sequences = sorted(enumerate(sample.sequences), key=lambda numbered: numbered[1][1].conversation)
    turns = [
        (number, len(prompt) + at) for number, (prompt, part) in sequences
        for at, is_sampled in enumerate(part.mask or []) if is_sampled and not (at and part.mask[at - 1])
    ]
    scores = [0.0] * len(turns) if has_failed(sample) else sample.extras.get("turn_scores", "")
    return sample.index, sample.row, turns, scores, range(len(turns))


def sequences_of(sample: Sample) -> tuple[int, int, list[tuple[int, int]], list[float], list[str]]:
    """The same for whole sequences, with the roles of their conversations."""
    numbered = [(number, part) for number, (_, part) in enumerate(sample.sequences) if part.num_sampled]
    scores = [sample.extras.get(f"{part.role}_score", sample.score) for _, part in numbered]
    return (sample.index, sample.row, [(number, 0) for number, _ in numbered],
            [0.0] * len(scores) if has_failed(sample) else scores, [part.role for _, part in numbered])


def has_failed(sample: Sample) -> bool:
    return math.isnan(sample.score) or sample.response.end_reason in ("timeout", "error")
