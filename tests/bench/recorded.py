"""What a recorded run's rollouts would have taken in other ways, in passes of an engine: `python -m tests.bench.advise
--run runs/quickstart --gpus 1` prints it.

The responses are those of RUN/rollouts. A replay decodes them again, one pass after the other, without a model: which
response has a place, which drafts the run's own history guesses, and which of them are the response's next tokens. No
draft changes a token, so the passes with drafts are exact for these responses; with `--rollout.in-flight` other weights
would have sampled the rest of some. **Passes are not seconds**: one with more rows takes longer, the less so the fewer
rows a GPU has.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from common.engine.tail import SHARE
from common.speculation.drafts import largest_batch
from common.speculation.history import LONGEST, History, sample_major
from tests.bench.simulate import InFlight
from tools.runs import read_rows

MOST_NUM_SEQS = 1024  # that --rollout.max-num-seqs 0 takes
WORTH = 1.05
"""Times as few passes: below, a way is not worth it."""


@dataclass
class Group:
    """The responses to one prompt."""

    prompt: list[int]  # numbers in place of its tokens, which are not recorded
    responses: list[list[int]]

    @property
    def lengths(self) -> list[int]:
        return [len(response) for response in self.responses]


@dataclass
class Passes:
    """Of one engine."""

    count: int = 0
    in_tail: int = 0  # with fewer than a quarter of the responses
    kept: int = 0  # drafted tokens
    drafted: int = 0


def read_steps(run: Path) -> list[list[Group]]:
    """The groups of each recorded step. Raises ValueError where there are none, or where they are of episodes."""
    files = sorted((run / "rollouts").glob("step_*.parquet"))
    if not files:
        raise ValueError(f"{run}/rollouts has no steps: record some (--log.rollouts-every 5)")
    steps = []
    for file in files:
        groups: dict[int, Group] = {}
        for row in pq.read_table(file, columns=["group", "prompt", "tokens", "num_turns"]).to_pylist():
            if row["num_turns"] is not None:
                raise ValueError(f"{file} has episodes: their turns wait for tools, which no replay knows")
            group = groups.setdefault(row["group"], Group([*row["prompt"].encode()], []))
            group.responses.append(row["tokens"])
        steps.append([*groups.values()])
    return steps


def replay(groups: Sequence[Group], slots: int, num_drafts: int, history: History, limit: int) -> Passes:
    """Decode the groups' responses, `slots` at most at once, with drafts from `history`, which keeps the responses.
    `limit`: tokens that a response may have, up to which there are drafts."""
    requests = [(group, response) for group in groups for response in group.responses if response]
    waiting = [*range(len(requests))]
    if num_drafts:
        waiting = sample_major([group.prompt for group, _ in requests])
    waiting.reverse()
    keys = [history.find(group.prompt)[0] for group, _ in requests]
    done: dict[int, int] = {}  # of those that run: how many tokens they have
    passes = Passes()
    num_left = len(requests)
    while num_left:
        while waiting and len(done) < slots:
            done[waiting.pop()] = 0
        passes.count += 1
        passes.in_tail += num_left < SHARE * len(requests)
        has_drafts = len(done) <= largest_batch(num_drafts)
        for i in [*done]:
            group, response = requests[i]
            num_done = done[i]
            draft: list[int] = []
            most = min(num_drafts, limit - num_done - 1)
            if has_drafts and num_done and most > 0:
                last = [*group.prompt, *response[:num_done]][-LONGEST:]
                draft = history.guess(keys[i], last, len(last) - num_done, most)
            num_kept = 0
            while num_kept < len(draft) and draft[num_kept : num_kept + 1] == response[num_done + num_kept :][:1]:
                num_kept += 1
            num_kept = min(num_kept, len(response) - num_done - 1)  # the last token ends it, drafted or not
            passes.drafted += len(draft)
            passes.kept += num_kept
            done[i] += 1 + num_kept
            if done[i] == len(response):
                del done[i]
                num_left -= 1
                last = group.prompt[-LONGEST:]
                history.add(keys[i], last, len(last), response)
    return passes


def in_flight(steps: Sequence[Sequence[Group]], slots: int, share: float, max_staleness: int) -> list[int]:
    """Passes of an engine in each step with --rollout.in-flight: the recorded groups in their order, `share` times as
    many as a step takes at once. The last steps are left out, for which no further groups are recorded."""
    groups = [group for step in steps for group in step]
    wanted = len(steps[0])
    engine = InFlight()
    counts = []
    begun = 0
    while True:
        room = round(share * wanted) - len(engine.age)
        if begun + room > len(groups):
            return counts
        new = groups[begun : begun + room]
        begun += room
        engine.add(np.array([len(group.prompt) for group in new]), np.array([group.lengths for group in new]))
        *_, stop = engine.rollout(wanted, slots, max_staleness)
        counts.append(stop)


def advice(run: Path, engines: int) -> str:
    """A table of the ways, and which of them is worth it."""
    flags = json.loads((run / "config.json").read_text())["rollout"]
    steps = read_steps(run)
    of_engine = [[step[i::engines] for step in steps if len(step) >= engines] for i in range(engines)]
    most = max(sum(len(group.responses) for group in step) for step in of_engine[0])
    limit = flags["max_response_length"]
    slots = flags["max_num_seqs"] or MOST_NUM_SEQS
    more = max(slots, min(most, MOST_NUM_SEQS))
    ways = {"as it is, without drafts": (slots, 0)}
    if more > slots:
        ways[f"--rollout.max-num-seqs {more}"] = (more, 0)
    for num_drafts in sorted({4, flags["drafts"] or 4}):
        ways[f"--rollout.drafts {num_drafts}"] = (slots, num_drafts)
    rows: dict[str, tuple[float, str]] = {}
    for way, (places, num_drafts) in ways.items():
        found = []
        for engine in of_engine:
            history = History()
            found.append([replay(groups, places, num_drafts, history, limit) for groups in engine])
        slowest = [max(step, key=lambda passes: passes.count) for step in zip(*found)]
        count = sum(passes.count for passes in slowest)
        note = f"{sum(passes.in_tail for passes in slowest) / count:.0%} with under a quarter left"
        if num_drafts:
            drafted = sum(passes.drafted for step in found for passes in step)
            note += f", {sum(passes.kept for step in found for passes in step) / max(drafted, 1):.0%} of drafts kept"
        rows[way] = (count / len(slowest), note)
    left_out = []
    for share in (1.5, 2.0):
        counts = [in_flight(engine, slots, share, flags["max_staleness"]) for engine in of_engine]
        each = [max(step) for step in zip(*counts)]
        if len(each) > 1:  # the first step has nothing that an earlier one began
            rows[f"--rollout.in-flight {share:g}"] = (float(np.mean(each[1:])), f"mean of {len(each) - 1} steps")
        else:
            left_out.append(f"--rollout.in-flight {share:g} needs more recorded steps than {len(steps)}.")
    return "\n".join([*measured(run, steps), *table(rows), *left_out])


def measured(run: Path, steps: Sequence[Sequence[Group]]) -> list[str]:
    """What the run's own metrics say."""
    metrics = read_rows(run / "metrics.jsonl")
    num_recorded = sum(len(group.responses) for group in steps[0])
    lines = [f"{len(steps)} recorded steps of {num_recorded} responses (--log.rollouts-max)"]
    gen = [row["timing_s/gen"] for row in metrics if "timing_s/gen" in row]
    tail = [row["timing_s/gen/tail"] for row in metrics if "timing_s/gen/tail" in row]
    if gen and tail:
        lines.append(f"measured: {np.mean(gen):.3g} s a rollout, {np.mean(tail):.3g} s of it with under a quarter of "
                     f"the responses left")
    kept = [row["rollout/spec_accept_length"] for row in metrics if "rollout/spec_accept_length" in row]
    if kept:
        lines.append(f"measured: {np.mean(kept):.2f} tokens of a response a pass, with drafts")
    return lines


def table(rows: dict[str, tuple[float, str]]) -> list[str]:
    (base, _), *_ = rows.values()
    lines = ["", "| way | passes a step | times as few | |", "| --- | --- | --- | --- |"]
    for way, (count, note) in rows.items():
        lines.append(f"| {way} | {count:.0f} | {base / count:.2f} | {note} |")
    best = min(rows, key=lambda way: rows[way][0])
    gain = base / rows[best][0]
    taken = f"Fewest: {best}." if gain >= WORTH else f"Nothing has {WORTH:g} times as few passes."
    return [*lines, "", f"{taken} Passes are not seconds: one with more rows takes longer."]
