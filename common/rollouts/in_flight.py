"""Groups that are unfinished at the end of a step continue in the next step (--rollout.in-flight).

An engine samples more groups than its share of a step. The step ends for it when that share is complete. The tokens and
log-probs of the other groups are kept. In the next step, after the weight sync, they are part of a request's prompt:
the new weights compute the keys and values again and sample the rest, with another random seed.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import torch

from common.curriculum.sampler import PromptSampler
from common.engine.base import Engine, Request, Until
from common.flags.rollout import SamplingConfig
from common.metrics import Meter
from common.parallel.exchange import deliver
from common.parallel.ranks import all_gather_objects, seed_of
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


@dataclass
class Share:
    """An engine's groups in a step. Those that complete are taken for the step, as many as it asks of the
    engine."""

    groups: list[Group]
    pending: PendingRollout
    num_samples: int  # of each group
    num_wanted: int  # groups that the step asks of this engine
    due: set[int]  # numbers of groups not yet taken whose tokens would be too old in the next step
    taken: list[int] = field(default_factory=list)

    def is_complete(self) -> bool:
        return len(self.taken) == self.num_wanted

    @property
    def responses(self) -> list[Response]:
        return [response for group in self.groups for response in group.responses]

    def take(self, number: int) -> None:
        """Score a complete group, unless the remaining places are reserved for groups that are due."""
        group = self.groups[number]
        num_reserved = len(self.due - {number})
        if len(self.taken) + num_reserved >= self.num_wanted:
            return
        if not all(response.finish_reason for response in group.responses):
            return
        for k, response in enumerate(group.responses):
            self.pending.score(number * self.num_samples + k, response, group.outcomes[k])
        self.taken.append(number)
        self.due.discard(number)

    def end(self, i: int, response: Response, outcome: dict[str, Any] | None = None) -> None:
        """Response i of this engine, or its episode, has ended."""
        number, k = divmod(i, self.num_samples)
        self.groups[number].responses[k] = response
        self.groups[number].outcomes[k] = outcome
        self.take(number)

    def left(self) -> list[Group]:
        """The groups that are in flight after the step."""
        return [group for number, group in enumerate(self.groups) if number not in self.taken]


def continue_rollout(source: RolloutSource, request: RolloutRequest, state: dict[str, Any], sampler: PromptSampler,
                     meter: Meter) -> PendingRollout:
    """Like `start_rollout`, but the groups returned may come from earlier steps; extra prompts are drawn from
    `sampler`. A group is scored when it is complete. Between two rollouts `state` says on all ranks which groups are in
    flight, the oldest first, and holds the responses of this engine's groups, both as checkpoints store them. A group
    stays on its engine, where its episodes go on between two steps; after a resume they restart, and groups that do not
    fit the engines are distributed anew. If --rollout.in-flight is lower after a resume, groups without room are
    dropped, and groups that were sampled with other flags. All ranks call this together."""
    engine = source.engine
    episodes = source.scoring.episodes
    sampling = request.sampling
    step = int(request.seed[1])
    flags = flags_of_sampling(request)

    saved, free_places = places_of(state.get("in_flight", []), request, engine, flags)
    rows = [*request.rows, *sampler.take(len(free_places))]
    owners = [place % engine.num_engines for place in range(len(request.rows))]     # of the new groups
    owners += free_places
    held, num_carried = held_groups(state, saved, engine)
    groups = held + begin_groups(request, rows, owners, engine, flags)

    samples: list[Sample] = []
    asked: list[Request] = []
    for group in groups:
        for k, response in enumerate(group.responses):
            prompt = source.data[group.row]
            samples.append(Sample(k, 0, group.row, prompt))        # it gets its numbers when its group is taken
            asked.append(Request(prompt, group.seeds[k], response))

    due = set()
    for number, group in enumerate(groups):
        if group.step + sampling.max_staleness <= step > group.step:
            due.add(number)
    share = Share(
        groups,
        PendingRollout(engine, source.scoring, samples, sampling, request.num_samples),
        request.num_samples,
        num_wanted=len(engine.local_prompts(len(request.rows))),
        due=due,
    )

    for number in range(len(groups)):                               # some were complete before this step
        share.take(number)
    until = Until(source.stop, share.is_complete)
    if episodes is None:
        engine.complete(asked, sampling, share.end, until)
    else:
        episodes.run(engine, asked, sampling, share.end, until, keep=sampling.max_staleness > 0)
        meter.total("episode/restarted", episodes.num_restarted if engine.tp_rank == 0 else 0)
    number_samples(share, samples, engine)

    num_kept = num_sampled_tokens(share.responses) if engine.tp_rank == 0 else 0
    meter.total("rollout/dropped_tokens", num_carried - num_kept)
    for response in share.responses:
        for part in response.parts:
            num_new = part.num_sampled - len(part.versions)
            part.versions = [*part.versions, *[step] * num_new]

    left = share.left() if engine.tp_rank == 0 else []
    keep_groups(state, left, engine)
    carried = chain.from_iterable(group.responses for group in left)
    meter.total("rollout/carried_tokens", num_sampled_tokens(carried))
    measure_staleness(meter, share, step)
    return share.pending


def flags_of_sampling(request: RolloutRequest) -> str:
    """What a group is sampled with: under other flags it is not continued."""
    values = [getattr(request.sampling, field.name) for field in fields(SamplingConfig)]
    return repr([request.num_samples, request.sampling.episode, *values])


def places_of(carried: list[dict[str, Any]], request: RolloutRequest, engine: Engine,
              flags: str) -> tuple[list[dict[str, Any]], list[int]]:
    """The carried groups that are continued, each with its engine, and the engines of the places left for new
    groups."""
    step = int(request.seed[1])
    sampling = request.sampling
    # each engine has as many places as it must have complete groups at most, if all of them are due
    room = round(sampling.in_flight * len(request.rows)) - len(request.rows)
    free_places = [place % engine.num_engines for place in range(room)]
    saved = []
    for old in carried:
        is_young = old["step"] + sampling.max_staleness >= step     # none is with --rollout.max-staleness 0
        if is_young and old["flags"] == flags:
            saved.append(old)
    saved = saved[:room]
    used = Counter(old["engine"] for old in saved)
    if used - Counter(free_places):                                 # after a resume with other engines
        saved = [old | {"engine": place} for old, place in zip(saved, free_places)]
    for old in saved:
        free_places.remove(old["engine"])
    return saved, free_places


def held_groups(state: dict[str, Any], saved: list[dict[str, Any]], engine: Engine) -> tuple[list[Group], int]:
    """This engine's groups among those saved, and how many tokens this rank held of all groups."""
    held = dict(unpack(state.get("in_flight_responses", b"")))
    num_carried = sum(num_sampled_tokens(group["responses"]) for group in held.values())
    mine = [old["number"] for old in saved if old["engine"] == engine.engine_rank]
    held |= deliver(held, [number for number in mine if number not in held])
    return [Group(**held[number]) for number in mine], num_carried


def begin_groups(request: RolloutRequest, rows: Sequence[int], owners: Sequence[int], engine: Engine,
                 flags: str) -> list[Group]:
    """This engine's new groups. A group's seeds depend on its place in `rows`, not on the engine."""
    groups = []
    for number, (row, owner) in enumerate(zip(rows, owners)):
        if owner != engine.engine_rank:
            continue
        seeds = [seed_of(*request.seed, number, k) for k in range(request.num_samples)]
        groups.append(Group(
            row=row,
            step=int(request.seed[1]),
            seeds=seeds,
            responses=[Response() for _ in seeds],
            outcomes=[None] * len(seeds),
            flags=flags,
        ))
    return groups


def number_samples(share: Share, samples: list[Sample], engine: Engine) -> None:
    """Number the taken groups, and their samples, among those of all engines."""
    for place, number in enumerate(sorted(share.taken)):
        first = number * share.num_samples
        for sample in samples[first : first + share.num_samples]:
            sample.group = engine.engine_rank + engine.num_engines * place
            sample.index += sample.group * share.num_samples


def keep_groups(state: dict[str, Any], left: list[Group], engine: Engine) -> None:
    """Write what is in flight into `state`: on all ranks which groups, on this rank the responses of `left`."""
    known = []      # of each group its engine, too, where its episodes go on between two steps
    stored = []
    for place, group in enumerate(left):
        number = engine.engine_rank + engine.num_engines * place
        stored.append([number, vars(group)])
        known.append({
            "number": number,
            "engine": engine.engine_rank,
            "row": group.row,
            "step": group.step,
            "flags": group.flags,
        })
    known_to_all = chain(*all_gather_objects(known))
    state["in_flight"] = sorted(known_to_all, key=lambda group: group["step"])
    state["in_flight_responses"] = pack(stored)


def measure_staleness(meter: Meter, share: Share, step: int) -> None:
    """How many steps old the tokens of the taken groups are, and how many steps a response spans."""
    ages: list[int] = []
    spans: list[int] = []
    for number in share.taken:
        for response in share.groups[number].responses:
            versions = response.all_versions
            ages += [step - version for version in versions]
            if versions:
                spans.append(max(versions) - min(versions))
    spans_of_responses = torch.tensor(spans, dtype=torch.float64)
    meter.spread("rollout/staleness", torch.tensor(ages, dtype=torch.float64))
    meter.mean("fully_async/partial/partial_ratio", spans_of_responses > 0)     # verl's names and meanings
    meter.max("fully_async/partial/max_partial_span", spans_of_responses)


def num_sampled_tokens(responses: Iterable[Response]) -> int:
    """Tokens whose versions are noted: until the end of a step, those of earlier steps alone."""
    return sum(len(response.all_versions) for response in responses)
