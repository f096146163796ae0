"""Groups that a step leaves unfinished are continued in the next one (--rollout.in-flight).

An engine samples more groups than its share of a step, which ends for it when that share is complete. Of the others the
tokens and log-probs so far are kept. In the next step, after the weight sync, they are part of a request's prompt: the
new weights compute its keys and values again and sample what follows, with another random seed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from common.dataset.store import PromptSet
from common.engine.base import Engine, Response, RolloutConfig
from common.engine.scoring import PendingRollout, Scoring
from common.metrics import Meter
from common.parallel.ranks import World, all_gather_objects, seed_of
from common.prompts import PromptSampler
from common.rollout import Sample
from common.tracking.console import print_on_main


@dataclass
class Group:
    """The responses to a prompt, as far as they were sampled. Plain JSON can hold it."""

    row: int  # of the prompt in the data set
    step: int  # in which it began
    seeds: list[int]
    responses: list[Response]
    outcomes: list[dict[str, Any] | None]  # of episodes that have ended, what they sent last


def drop_surplus(state: dict[str, Any], sampling: RolloutConfig, num_prompts: int, world: World, meter: Meter) -> None:
    """Before a rollout of `num_prompts` prompts: of the groups in flight, keep the oldest ones that --rollout.in-flight
    has room for. The others come from a checkpoint of a run with other flags; their tokens are counted."""
    groups = state.get("in_flight", [])
    num_kept = round(sampling.in_flight * num_prompts) - num_prompts
    if dropped := groups[num_kept:]:
        state["in_flight"] = groups[:num_kept]
        num_tokens = count_tokens(dropped)
        meter.total("rollout/dropped_tokens", num_tokens if world.is_main else 0)
        print_on_main(world, f"--rollout.in-flight {sampling.in_flight:g} has room for {num_kept} of the {len(groups)} "
                             f"unfinished groups in the checkpoint; the others, with {num_tokens} tokens, are dropped")


def count_tokens(groups: Iterable[dict[str, Any]]) -> int:
    """Number of tokens that were sampled for groups in flight, as checkpoints have them."""
    return sum(len(response["versions"]) for group in groups for response in group["responses"])


def continue_rollout(engine: Engine, scoring: Scoring, data: PromptSet, rows: Sequence[int], num_samples: int,
                     sampling: RolloutConfig, seed: Sequence[int | str], stop: Callable[[], bool],
                     state: dict[str, Any], sampler: PromptSampler, meter: Meter) -> PendingRollout:
    """As `start_rollout`, with as many prompts: not all of them are `rows`, some come from steps before, and further
    ones from `sampler`. `seed`: of the run, the step's number, and perhaps more. A group is scored when it is complete.
    What is in flight between two rollouts is in `state`, the oldest group first, as plain JSON for checkpoints; it is
    dealt anew to the engines, of which there may be others after a resume. All ranks call this together.
    """
    step = int(seed[1])
    num_wanted = len(engine.local_prompts(len(rows)))
    carried = state.get("in_flight", [])
    saved = [old for old in carried if old["step"] + sampling.max_staleness >= step]  # --rollout.max-staleness 0: none
    num_additional = round(sampling.in_flight * len(rows)) - len(rows) - len(saved)
    new = [*enumerate([*rows, *sampler.take(num_additional)])]
    share = slice(engine.engine_rank, None, engine.num_engines)
    groups = [Group(**old | {"responses": [Response.from_dict(r) for r in old["responses"]]}) for old in saved[share]]
    for number, row in new[share]:
        seeds = [seed_of(*seed, number, k) for k in range(num_samples)]
        groups.append(Group(row, step, seeds, [Response([], [], "") for _ in seeds], [None] * num_samples))
    # tokens of groups that are due would be too old in the next step
    due = {number for number, group in enumerate(groups) if group.step + sampling.max_staleness <= step > group.step}
    pending = PendingRollout(scoring, [], sampling)
    taken: list[int] = []

    def take(number: int) -> None:
        """Score a complete group, unless the places that are left are for groups that are due."""
        group = groups[number]
        is_complete = all(response.finish_reason for response in group.responses)
        if is_complete and len(taken) + len(due - {number}) < num_wanted:
            place = engine.engine_rank + engine.num_engines * len(taken)
            for k, response in enumerate(group.responses):
                pending.samples.append(Sample(place * num_samples + k, place, group.row, data[group.row]))
                if k % engine.config.tp == engine.tp_rank:  # each rank of the engine scores its share
                    pending.score(len(pending.samples) - 1, response, group.outcomes[k])
            taken.append(number)
            due.discard(number)

    def end_episode(i: int, response: Response, outcome: dict[str, Any]) -> None:
        number, k = divmod(i, num_samples)
        response.versions = groups[number].responses[k].versions
        groups[number].responses[k], groups[number].outcomes[k] = response, outcome
        take(number)

    def has_ended() -> bool:
        return len(taken) == num_wanted or stop()

    for number in range(len(groups)):
        take(number)
    seeds = [*chain.from_iterable(group.seeds for group in groups)]
    begun = [*chain.from_iterable(group.responses for group in groups)]
    prompts = [data[group.row] for group in groups for _ in group.seeds]
    num_tokens = sum(len(response.versions) for response in begun)
    if scoring.episodes is not None:
        scoring.episodes.run(engine, prompts, seeds, sampling, end_episode, has_ended, begun)
    else:
        engine.generate([prompt.tokens for prompt in prompts], seeds, sampling,
                        lambda i, _: take(i // num_samples), has_ended, begun, [prompt.images for prompt in prompts])
    held = [*chain.from_iterable(group.responses for group in groups)]
    num_dropped = num_tokens - sum(len(response.versions) for response in held)
    if engine.engine_rank == 0:
        num_dropped += count_tokens(carried) - count_tokens(saved)
    meter.total("rollout/dropped_tokens", num_dropped if engine.tp_rank == 0 else 0)
    for response in held:
        response.versions = [*response.versions, *[step] * (response.num_sampled_in_all - len(response.versions))]

    left = [group for number, group in enumerate(groups) if number not in taken and engine.tp_rank == 0]
    mine = [vars(group) | {"responses": [response.to_dict() for response in group.responses]} for group in left]
    state["in_flight"] = sorted(chain(*all_gather_objects(mine)), key=lambda group: group["step"])
    responses = [response for number in taken for response in groups[number].responses]
    ages = [step - version for response in responses for version in response.versions]
    spans = torch.tensor([r.versions[-1] - r.versions[0] for r in responses if r.versions], dtype=torch.float64)
    meter.spread("rollout/staleness", torch.tensor(ages, dtype=torch.float64))
    meter.mean("fully_async/partial/partial_ratio", spans > 0)  # verl's names and meanings
    meter.max("fully_async/partial/max_partial_span", spans)
    meter.total("rollout/carried_tokens", sum(len(r.versions) for group in left for r in group.responses))
    return pending
