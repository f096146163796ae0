"""Groups that are unfinished at the end of a step continue in the next step (--rollout.in-flight).

An engine samples more groups than its share of a step. The step ends for it when that share is complete. The tokens and
log-probs of the other groups are kept. In the next step, after the weight sync, they are part of a request's prompt:
the new weights compute the keys and values again and sample the rest, with another random seed.
"""

from collections import Counter
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

import torch

from common.engine.base import Request, SamplingConfig
from common.metrics import Meter
from common.parallel.exchange import deliver
from common.parallel.ranks import all_gather_objects, seed_of
from common.prompts import PromptSampler
from common.rollout import Sample
from common.rollouts.scoring import PendingRollout, RolloutRequest, RolloutSource
from envs.runtime.response import Response
from envs.stored import pack, unpack


@dataclass
class Group:
    """The responses to a prompt, as far as they were sampled."""

    row: int  # of the prompt in the data set
    step: int  # in which it began
    seeds: list[int]
    responses: list[Response]
    outcomes: list[dict[str, Any] | None]  # of episodes that have ended, what they sent last
    flags: str  # with which it is sampled


def continue_rollout(source: RolloutSource, request: RolloutRequest, state: dict[str, Any], sampler: PromptSampler,
                     meter: Meter) -> PendingRollout:
    """Like `start_rollout`, but the groups returned may come from earlier steps; extra prompts are drawn from
    `sampler`. A group is scored when it is complete. Between two rollouts `state` says on all ranks which groups are in
    flight, the oldest first, and holds the responses of this engine's groups, both as checkpoints store them. A group
    stays on its engine, where its episodes go on between two steps; after a resume they restart, and groups that do not
    fit the engines are distributed anew. If --rollout.in-flight is lower after a resume, groups without room are
    dropped, and groups that were sampled with other flags. All ranks call this together."""
    engine, scoring, data = source.engine, source.scoring, source.data
    rows, num_samples, sampling, seed = request.rows, request.num_samples, request.sampling, request.seed
    step = int(seed[1])
    num_wanted = len(engine.local_prompts(len(rows)))
    carried = state.get("in_flight", [])
    room = round(sampling.in_flight * len(rows)) - len(rows)
    flags = repr([num_samples, sampling.episode, *(getattr(sampling, field.name) for field in fields(SamplingConfig))])
    # with --rollout.max-staleness 0 none is young enough
    saved = [old for old in carried if old["flags"] == flags and old["step"] + sampling.max_staleness >= step][:room]
    # as many places on each engine as it must have complete groups at most, if all of them are due
    places = [place % engine.num_engines for place in range(room)]
    if Counter(old["engine"] for old in saved) - Counter(places):
        saved = [old | {"engine": places[i]} for i, old in enumerate(saved)]
    for old in saved:
        places.remove(old["engine"])
    new_rows = [*rows, *sampler.take(len(places))]
    engines = [*(i % engine.num_engines for i in range(len(rows))), *places]
    mine = [old["number"] for old in saved if old["engine"] == engine.engine_rank]
    held = dict(unpack(state.get("in_flight_responses", b"")))
    num_carried = sum(len(response.all_versions) for group in held.values() for response in group["responses"])
    held |= deliver(held, [number for number in mine if number not in held])
    groups = [Group(**held[number]) for number in mine]
    for number, (row, owner) in enumerate(zip(new_rows, engines)):
        if owner == engine.engine_rank:
            seeds = [seed_of(*seed, number, k) for k in range(num_samples)]
            groups.append(Group(row, step, seeds, [Response() for _ in seeds], [None] * num_samples, flags))
    # tokens of groups that are due would be too old in the next step
    due = {number for number, group in enumerate(groups) if group.step + sampling.max_staleness <= step > group.step}
    samples = [Sample(k, 0, group.row, data[group.row]) for group in groups for k in range(num_samples)]
    pending = PendingRollout(engine, scoring, samples, sampling)
    taken: list[int] = []

    def take(number: int) -> None:
        """Score a complete group, unless the remaining places are reserved for groups that are due."""
        group = groups[number]
        is_complete = all(response.finish_reason for response in group.responses)
        if is_complete and len(taken) + len(due - {number}) < num_wanted:
            for k, response in enumerate(group.responses):
                pending.score(number * num_samples + k, response, group.outcomes[k])
            taken.append(number)
            due.discard(number)

    def end(i: int, response: Response, outcome: dict[str, Any] | None = None) -> None:
        number, k = divmod(i, num_samples)
        groups[number].responses[k], groups[number].outcomes[k] = response, outcome
        take(number)

    def has_ended() -> bool:
        return len(taken) == num_wanted or source.stop()

    for number in range(len(groups)):
        take(number)
    pairs = chain.from_iterable(zip(group.seeds, group.responses) for group in groups)
    asked = [Request(sample.prompt, seed, response) for sample, (seed, response) in zip(samples, pairs)]
    if scoring.episodes is not None:
        scoring.episodes.run(engine, asked, sampling, end, has_ended, keep=sampling.max_staleness > 0)
        meter.total("episode/restarted", scoring.episodes.num_restarted if engine.tp_rank == 0 else 0)
    else:
        engine.complete(asked, sampling, end, has_ended)
    for place, number in enumerate(sorted(taken)):
        for sample in samples[number * num_samples : (number + 1) * num_samples]:
            sample.group = engine.engine_rank + engine.num_engines * place
            sample.index += sample.group * num_samples
    num_kept = sum(len(response.all_versions) for group in groups for response in group.responses)
    meter.total("rollout/dropped_tokens", num_carried - (num_kept if engine.tp_rank == 0 else 0))
    for part in chain.from_iterable(response.parts for group in groups for response in group.responses):
        part.versions = [*part.versions, *[step] * (part.num_sampled - len(part.versions))]

    left = [group for number, group in enumerate(groups) if number not in taken and engine.tp_rank == 0]
    # all ranks know these of each, and the engine that samples it, whose episodes go on between two steps
    known = [{"number": engine.engine_rank + engine.num_engines * place, "engine": engine.engine_rank,
              "row": group.row, "step": group.step, "flags": group.flags} for place, group in enumerate(left)]
    state["in_flight"] = sorted(chain(*all_gather_objects(known)), key=lambda group: group["step"])
    state["in_flight_responses"] = pack([[told["number"], vars(group)] for told, group in zip(known, left)])
    versions = [response.all_versions for number in taken for response in groups[number].responses]
    ages = [step - version for version in chain(*versions)]
    spans = torch.tensor([max(found) - min(found) for found in versions if found], dtype=torch.float64)
    meter.spread("rollout/staleness", torch.tensor(ages, dtype=torch.float64))
    meter.mean("fully_async/partial/partial_ratio", spans > 0)  # verl's names and meanings
    meter.max("fully_async/partial/max_partial_span", spans)
    meter.total("rollout/carried_tokens", sum(len(r.all_versions) for group in left for r in group.responses))
    return pending
