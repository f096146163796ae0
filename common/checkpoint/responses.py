"""Responses that wait for a later step, as they are kept in checkpoints."""

from dataclasses import asdict
from itertools import chain

from common.dataset.store import PromptSet
from common.engine.base import Response
from common.parallel.ranks import World, all_gather_objects
from common.rollout import Rollout, Sample, gather_rollout


def responses_to_state(rollout: Rollout) -> list[list]:
    """The samples of all ranks, for JSON. All ranks call this together."""
    mine = [[s.index, s.group, s.row, asdict(s.response), s.score, s.extras] for s in rollout.samples]
    return sorted(chain(*all_gather_objects(mine)), key=lambda saved: saved[0])


def responses_from_state(state: list[list], data: PromptSet, world: World) -> Rollout:
    """What `responses_to_state` returned, its groups dealt to the ranks in turn. All ranks call this together."""
    samples = [
        Sample(index, group, row, data[row], Response.from_dict(response), score=score, extras=extras)
        for index, group, row, response, score, extras in state
        if group % world.size == world.rank
    ]
    return gather_rollout(samples)
