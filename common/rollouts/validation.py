"""Validation results of a step, by data source, under verl's names."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, groupby
from statistics import fmean, multimode
from typing import Any, NamedTuple

import numpy as np

from common.metrics import Meter
from common.parallel.ranks import all_gather_objects, all_max
from common.rollout import Sample
from common.rollouts.scoring import RolloutRequest, RolloutSource, start_rollout


def spread_rows(num_rows: int, limit: int) -> list[int]:
    """At most `limit` rows (0: all), evenly spread, so that they include every part of the files."""
    count = min(num_rows, limit or num_rows)
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
    sampled = [sample for sample in samples if sample.index < num_sampled]
    greedy = [sample for sample in samples if sample.index >= num_sampled]
    metrics = validation_metrics(greedy, greedy=True) | validation_metrics(sampled, greedy=False)
    record(sampled or greedy)
    return metrics | {f"val-aux/{name}": value for name, value in meter.reduce().items()}


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
    return metrics_of_all([*chain(*all_gather_objects([scored(sample) for sample in samples]))], greedy)


def metrics_of_all(rows: list[Scored], greedy: bool) -> dict[str, float]:
    """The metrics of `validation_metrics` from all responses, in any order."""
    metrics = metrics_of([(row.data_source, row.group, row.acc, row.vote) for row in rows], greedy)
    metrics |= metrics_of([(row.data_source, row.group, row.reward, row.vote) for row in rows], greedy, "reward")
    return metrics | means_of_numbers(rows, greedy)


def metrics_of(rows: list[tuple[str, int, float, str | None]], greedy: bool, variable: str = "acc") -> dict[str, float]:
    """Those of one variable, from (data source, group, its value, vote) of each response. As in verl only acc is in
    val-core/."""
    metrics = {}
    for source, of_source in groupby(sorted(rows, key=lambda row: row[:3]), key=lambda row: row[0]):
        groups = [[row[2:] for row in group] for _, group in groupby(of_source, key=lambda row: row[1])]
        values = np.array([[value for value, _ in group] for group in groups])                  # [P, N]
        aux, N = f"val-aux/{source}/{variable}", values.shape[1]
        core = f"val-core/{source}/acc" if variable == "acc" else aux
        name = "greedy" if greedy else f"mean@{N}"
        metrics[f"{core}/{name}"] = float(values.mean())
        stderr = values.mean(1).std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
        metrics[f"{aux}/{name}/stderr"] = float(stderr)
        if N > 1:
            metrics[f"{aux}/std@{N}"] = float(values.std(1).mean())
            metrics[f"{core}/best@{N}/mean"] = float(best_at(values, N).mean())
            for k in (2**e for e in range(1, (N - 1).bit_length())):
                metrics[f"{aux}/best@{k}/mean"] = float(best_at(values, k).mean())
            if any(vote is not None for group in groups for _, vote in group):
                metrics[f"{core}/maj@{N}/mean"] = float(np.mean([majority(group) for group in groups]))
    return metrics


def means_of_numbers(rows: list[Scored], greedy: bool) -> dict[str, float]:
    """val-aux/SOURCE/NAME/{greedy or mean@N}: means over the responses that have the number. A key "reward" has none:
    that name is the score's."""
    found = defaultdict(list)
    for row in rows:
        for name in row.numbers.keys() - {"acc", "reward"}:
            found[row.data_source, name].append(row.numbers[name])
    sizes = {row[0]: size for row, size in Counter((row.data_source, row.group) for row in rows).items()}
    return {f"val-aux/{source}/{name}/{'greedy' if greedy else f'mean@{sizes[source]}'}": fmean(values)
            for (source, name), values in sorted(found.items())}


def scored(sample: Sample) -> Scored:
    reward = float(np.nan_to_num(sample.score))
    return Scored(sample.prompt.data_source, sample.group, *acc_and_vote(sample), reward, numbers_of(sample.extras))


def numbers_of(extras: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in extras.items() if isinstance(value, float) and math.isfinite(value)}


def acc_and_vote(sample: Sample) -> tuple[float, str | None]:
    """A sample's acc, and its "pred" as text; None: no vote."""
    acc, pred = sample.extras.get("acc"), sample.extras.get("pred")
    if not isinstance(acc, int | float) or not math.isfinite(acc):
        acc = np.nan_to_num(sample.score)
    return float(acc), None if pred is None or math.isnan(sample.score) else str(pred)


def best_at(accs: np.ndarray, k: int) -> np.ndarray:
    """Expected best of k samples drawn from each row without replacement: [P, N] -> [P]. For 0/1 scores with c ones
    this is pass@k = 1 - C(N - c, k) / C(N, k)."""
    N = accs.shape[1]
    shares = np.array([math.comb(i, k - 1) / math.comb(N, k) for i in range(N)])    # that the i-th smallest is the best
    return np.sort(accs, axis=1) @ shares


def majority(group: list[tuple[float, str | None]]) -> float:
    """Mean acc of the samples whose answer is the most frequent one (of the most frequent ones); 0 without answers."""
    most_frequent = multimode(vote for _, vote in group if vote is not None)
    return float(np.mean([acc for acc, vote in group if vote in most_frequent])) if most_frequent else 0.0
