"""Validation results of a step, by data source, under verl's names."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from statistics import fmean, multimode
from typing import Any, NamedTuple

import numpy as np

from common.metrics import Meter
from common.parallel.ranks import all_gather_objects, all_max
from common.rollout import Sample
from common.rollouts.scoring import RolloutRequest, RolloutSource, start_rollout


def spread_rows(num_rows: int, limit: int) -> list[int]:
    """At most `limit` rows (0: all), evenly spread, so that they include every part of the files."""
    count = num_rows
    if limit:
        count = min(num_rows, limit)
    return [i * num_rows // count for i in range(count)]


def evaluate(source: RolloutSource, request: RolloutRequest,
             record: Callable[[list[Sample]], None]) -> dict[str, float] | None:
    """Results on the requested rows with the weights in the engine: of greedy responses, and of the sampled responses,
    which run together. None if `source.stop()` turned true on any rank: then samples are missing. `record` gets this
    rank's sampled responses, or its greedy responses if there are no sampled ones. The engine is awake before it, and
    sleeps after it: a reward model has the memory for its passes only while it sleeps."""
    meter = Meter()
    pending = start_rollout(source, replace(request, with_greedy=True))
    source.engine.sleep()
    if all_max([source.stop()]).item():
        return None
    samples = pending.collect(meter).samples
    num_sampled = len(request.rows) * request.num_samples
    sampled: list[Sample] = []
    greedy: list[Sample] = []
    for sample in samples:
        if sample.index < num_sampled:
            sampled.append(sample)
        else:
            greedy.append(sample)
    metrics = validation_metrics(greedy, greedy=True) | validation_metrics(sampled, greedy=False)
    for name, value in meter.reduce().items():
        metrics[f"val-aux/{name}"] = value
    record(sampled or greedy)
    return metrics


Value = tuple[str, int, float, str | None]
"""Of one response: its data source, its group, its value of a variable such as acc, and its vote."""


class Scored(NamedTuple):
    """What is counted of a response."""

    data_source: str
    group: int
    acc: float
    vote: str | None
    reward: float
    numbers: dict[str, float]  # the rest of the reward dict, without texts and lists


def validation_metrics(samples: list[Sample], greedy: bool) -> dict[str, float]:
    """Per data source, over all ranks, with verl's names: val-core/SOURCE/acc/{greedy or mean@N, best@N/mean,
    maj@N/mean} and, in val-aux/, the standard error over prompts, the standard deviation over the responses to a prompt
    (std@N) and best@k for powers of two below N. val-aux/SOURCE/reward/ has all of these of the score, and
    val-aux/SOURCE/NAME/{greedy or mean@N} the mean of each other number that the reward dicts have.

    acc is the reward dict's "acc", or its score if "acc" is no finite number; a lost sample counts 0, its score too,
    and has no other numbers. For scores of 0 and 1 best@k/mean is the unbiased pass@k (Chen et al. 2021, sec. 2.1).
    maj@N is the acc of the most frequent "pred" of the reward dicts, ties shared; samples without a score or a "pred"
    have no vote, a prompt without votes counts 0.
    """
    mine = [*map(scored, samples)]
    rows = [*chain(*all_gather_objects(mine))]
    return metrics_of_all(rows, greedy)


def metrics_of_all(rows: list[Scored], greedy: bool) -> dict[str, float]:
    """The metrics of `validation_metrics` from all responses, in any order."""
    accs: list[Value] = []
    rewards: list[Value] = []
    for row in rows:
        accs.append((row.data_source, row.group, row.acc, row.vote))
        rewards.append((row.data_source, row.group, row.reward, row.vote))
    return metrics_of(accs, greedy) | metrics_of(rewards, greedy, "reward") | means_of_numbers(rows, greedy)


def metrics_of(rows: list[Value], greedy: bool, variable: str = "acc") -> dict[str, float]:
    """Those of one variable. As in verl only acc is in val-core/."""
    metrics = {}
    for source, groups in groups_by_source(rows).items():
        values = values_of(groups)                                                      # [P, N]
        N = values.shape[1]
        aux = f"val-aux/{source}/{variable}"
        core = aux
        if variable == "acc":
            core = f"val-core/{source}/acc"
        name = f"mean@{N}"
        if greedy:
            name = "greedy"
        stderr = 0.0
        if len(values) > 1:
            stderr = values.mean(1).std(ddof=1) / len(values) ** 0.5
        metrics[f"{core}/{name}"] = float(values.mean())
        metrics[f"{aux}/{name}/stderr"] = float(stderr)
        if N == 1:
            continue
        metrics[f"{aux}/std@{N}"] = float(values.std(1).mean())
        metrics[f"{core}/best@{N}/mean"] = float(best_at(values, N).mean())
        k = 2
        while k < N:
            metrics[f"{aux}/best@{k}/mean"] = float(best_at(values, k).mean())
            k *= 2
        if any(vote is not None for _, vote in chain(*groups)):
            majorities = [*map(majority, groups)]
            metrics[f"{core}/maj@{N}/mean"] = float(np.mean(majorities))
    return metrics


def groups_by_source(rows: list[Value]) -> dict[str, list[list[tuple[float, str | None]]]]:
    """Data source -> its groups, each with the values and votes of its responses. Everything is sorted, so that
    sums do not depend on the order of `rows`."""
    found: dict[str, dict[int, list[tuple[float, str | None]]]] = {}
    for source, group, value, vote in sorted(rows, key=lambda row: row[:3]):
        groups = found.setdefault(source, {})
        groups.setdefault(group, []).append((value, vote))
    groups_of = {}
    for source, groups in found.items():
        groups_of[source] = [*groups.values()]
    return groups_of


def values_of(groups: list[list[tuple[float, str | None]]]) -> np.ndarray:
    rows = []
    for group in groups:
        rows.append([value for value, _ in group])
    return np.array(rows)


def means_of_numbers(rows: list[Scored], greedy: bool) -> dict[str, float]:
    """val-aux/SOURCE/NAME/{greedy or mean@N}: means over the responses that have the number. A key "reward" has none:
    that name is the score's."""
    found = defaultdict(list)                                                        # (source, name) -> numbers
    num_responses: dict[tuple[str, int], int] = Counter()                               # of each group
    for row in rows:
        num_responses[row.data_source, row.group] += 1
        for name in row.numbers.keys() - {"acc", "reward"}:
            found[row.data_source, name].append(row.numbers[name])
    samples_per_prompt = {}
    for (source, _), number in num_responses.items():
        samples_per_prompt[source] = number
    metrics = {}
    for (source, name), values in sorted(found.items()):
        how = f"mean@{samples_per_prompt[source]}"
        if greedy:
            how = "greedy"
        metrics[f"val-aux/{source}/{name}/{how}"] = fmean(values)
    return metrics


def scored(sample: Sample) -> Scored:
    acc, vote = acc_and_vote(sample)
    return Scored(
        data_source=sample.prompt.data_source,
        group=sample.group,
        acc=acc,
        vote=vote,
        reward=float(np.nan_to_num(sample.score)),
        numbers=numbers_of(sample.extras),
    )


def numbers_of(extras: dict[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in extras.items():
        if isinstance(value, float) and math.isfinite(value):
            found[name] = value
    return found


def acc_and_vote(sample: Sample) -> tuple[float, str | None]:
    """A sample's acc, and its "pred" as text; None: no vote."""
    acc = sample.extras.get("acc")
    if not isinstance(acc, int | float) or not math.isfinite(acc):
        acc = np.nan_to_num(sample.score)
    pred = sample.extras.get("pred")
    if pred is None or math.isnan(sample.score):
        return float(acc), None
    return float(acc), str(pred)


def best_at(accs: np.ndarray, k: int) -> np.ndarray:
    """Expected best of k samples drawn from each row without replacement: [P, N] -> [P]. For 0/1 scores with c ones
    this is pass@k = 1 - C(N - c, k) / C(N, k)."""
    N = accs.shape[1]
    num_draws = math.comb(N, k)
    # the i-th smallest is the best of a draw if the other k - 1 are among the i that are smaller
    shares = np.array([math.comb(i, k - 1) / num_draws for i in range(N)])
    return np.sort(accs, axis=1) @ shares


def majority(group: list[tuple[float, str | None]]) -> float:
    """Mean acc of the samples whose answer is the most frequent one (of the most frequent ones); 0 without answers."""
    votes = []
    for _, vote in group:
        if vote is not None:
            votes.append(vote)
    if not votes:
        return 0.0
    most_frequent = multimode(votes)
    accs = []
    for acc, vote in group:
        if vote in most_frequent:
            accs.append(acc)
    return float(np.mean(accs))
