"""Validation results of a step, by data source, under verl's names."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, groupby
from statistics import multimode

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


def validation_metrics(samples: list[Sample], greedy: bool) -> dict[str, float]:
    """Per data source, over all ranks, with verl's names: val-core/SOURCE/acc/{greedy or mean@N, best@N/mean,
    maj@N/mean} and, in val-aux/, the standard error over prompts and best@k for powers of two below N.

    acc is the reward dict's "acc", or its score if "acc" is no finite number; a lost sample counts 0. For scores of 0
    and 1 best@k/mean is the unbiased pass@k (Chen et al. 2021, sec. 2.1). maj@N is the acc of the most frequent "pred"
    of the reward dicts, ties shared; samples without a score or a "pred" have no vote, a prompt without votes counts 0.
    """
    rows = [(sample.prompt.data_source, sample.group, *acc_and_vote(sample)) for sample in samples]
    return metrics_of([*chain(*all_gather_objects(rows))], greedy)


def metrics_of(rows: list[tuple[str, int, float, str | None]], greedy: bool) -> dict[str, float]:
    """The metrics of `validation_metrics` from (data source, group, acc, vote) of each response, in any order."""
    metrics = {}
    for source, of_source in groupby(sorted(rows, key=lambda row: row[:3]), key=lambda row: row[0]):
        groups = [[row[2:] for row in group] for _, group in groupby(of_source, key=lambda row: row[1])]
        accs = np.array([[acc for acc, _ in group] for group in groups])                        # [P, N]
        core, aux, N = f"val-core/{source}/acc", f"val-aux/{source}/acc", accs.shape[1]
        name = "greedy" if greedy else f"mean@{N}"
        metrics[f"{core}/{name}"] = float(accs.mean())
        metrics[f"{aux}/{name}/stderr"] = float(accs.mean(1).std(ddof=1) / len(accs) ** 0.5) if len(accs) > 1 else 0.0
        if N > 1:
            metrics[f"{core}/best@{N}/mean"] = float(best_at(accs, N).mean())
            for k in (2**e for e in range(1, (N - 1).bit_length())):
                metrics[f"{aux}/best@{k}/mean"] = float(best_at(accs, k).mean())
            if any(vote is not None for group in groups for _, vote in group):
                metrics[f"{core}/maj@{N}/mean"] = float(np.mean([majority(group) for group in groups]))
    return metrics


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
