"""Samples and results between engine, reward workers and trainer; validation metrics against enumeration."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.engine.base import Response
from common.experience import Results, Samples, best_at, gather_results, majority, validation_metrics
from common.prompts import Prompt

DATA = [Prompt([1] * (3 + row), f"source{row % 2}", str(row), {"row": row}, []) for row in range(6)]


def make_samples(rewards, group_size=2, rows=None, extras=None) -> Samples:
    """Responses of 1, 2, 3 ... tokens, a group per prompt; every third was cut."""
    rows = list(range(len(rewards) // group_size)) if rows is None else rows
    responses = [Response([7] * (i + 1), [-0.5] * (i + 1), "length" if i % 3 == 2 else "stop")
                 for i in range(len(rewards))]
    row_of = [rows[i // group_size] for i in range(len(rewards))]
    return Samples(list(range(len(rewards))), row_of, [DATA[row] for row in row_of], responses, list(rewards),
                   extras or [{} for _ in rewards])


def test_results_know_every_response(world):
    samples = make_samples([1.0, float("nan"), 0.5, 2.0])
    shuffled = Samples(*([vars(samples)[name][i] for i in (2, 0, 3, 1)] for name in vars(samples)))
    results = gather_results(shuffled)
    assert results.rewards.nan_to_num(nan=-1).tolist() == [1, -1, 0.5, 2]
    assert results.response_lengths.tolist() == [1, 2, 3, 4] and results.prompt_lengths.tolist() == [3, 3, 4, 4]
    assert results.truncated.tolist() == [False, False, True, False]
    assert results.masked.tolist() == [False, True, False, False]
    assert results.lengths.tolist() == [4, 5, 7, 8]


def test_groups_are_joined_taken_and_numbered_anew(world):
    first, second = make_samples([1, 2, 3, 4], rows=[0, 1]), make_samples([5, 6, 7, 8], rows=[2, 3])
    both = first.cat(second, shift=4)
    assert both.index == [*range(8)] and second.index == [0, 1, 2, 3]           # the argument stays as it was
    taken = both.take_groups([3, 0], group_size=2)
    by_number = dict(zip(taken.index, taken.rewards))
    assert [by_number[i] for i in range(4)] == [7, 8, 1, 2]
    results = gather_results(both).take_groups([3, 0], group_size=2)
    assert results.rewards.tolist() == [7, 8, 1, 2]
    assert torch.equal(gather_results(taken).rewards, results.rewards)
    assert torch.equal(gather_results(taken).response_lengths, results.response_lengths)
    joined = gather_results(first).cat(gather_results(second))
    assert torch.equal(joined.rewards, gather_results(both).rewards) and len(joined.masked) == 8
    nothing = both.take_groups([], group_size=2)
    assert nothing.index == [] and len(gather_results(nothing).rewards) == 0
    assert isinstance(gather_results(nothing), Results)


def test_samples_survive_a_checkpoint_on_any_number_of_ranks(world):
    import json

    samples = make_samples([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], rows=[4, 2, 5], extras=[{"acc": i} for i in range(6)])
    state = json.loads(json.dumps(samples.state_dict()))
    assert Samples.from_state(state, DATA, 2, world) == samples
    shares = [Samples.from_state(state, DATA, 2, replace(world, rank=rank, size=2)) for rank in range(2)]
    assert [share.index for share in shares] == [[0, 1, 4, 5], [2, 3]]
    assert shares[1].rows == [2, 2] and shares[1].prompts == [DATA[2]] * 2 and shares[1].rewards == [0.3, 0.4]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_best_at_k_is_the_mean_over_all_subsets(k):
    accs = np.array([[0, 1, 0, 0, 1], [0, 0, 0, 0, 0], [0.5, 2, -1, 0.5, 0]])
    want = [np.mean([max(subset) for subset in itertools.combinations(row, k)]) for row in accs]
    assert best_at(accs, k) == pytest.approx(want)
    assert best_at(accs[:1], k)[0] == pytest.approx(1 - np.prod([(3 - i) / (5 - i) for i in range(k)]))   # pass@k


def test_majority_shares_ties():
    assert majority([(1, "4"), (1, "4"), (0, "5")]) == 1
    assert majority([(1, "4"), (0, "5"), (0, "5")]) == 0
    assert majority([(1, "4"), (0, "5"), (0, "6"), (1, "4"), (0, "5")]) == 0.5


def test_validation_metrics_by_hand(world):
    """Two prompts of source0 (rows 0 and 2), one of source1, 4 samples each; acc and pred come with the reward."""
    accs = [1, 0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1]
    preds = ["4", "5", "5", "6", "9", "9", "1", "9", "2", "3", "3", "8"]
    extras = [{"acc": acc, "pred": pred} for acc, pred in zip(accs, preds)]
    samples = make_samples([0.5] * 12, group_size=4, rows=[0, 2, 1], extras=extras)
    got = validation_metrics(samples, 4, greedy=False)
    assert got["val-core/source0/acc/mean@4"] == pytest.approx((1 / 4 + 3 / 4) / 2)
    assert got["val-aux/source0/acc/mean@4/stderr"] == pytest.approx(np.std([0.25, 0.75], ddof=1) / 2**0.5)
    assert got["val-core/source0/acc/best@4/mean"] == 1
    assert got["val-aux/source0/acc/best@2/mean"] == pytest.approx((1 / 2 + 1) / 2)
    assert got["val-core/source0/acc/maj@4/mean"] == 0.5 and got["val-core/source1/acc/maj@4/mean"] == 0
    assert Counter(key.split("/")[1] for key in got) == {"source0": 5, "source1": 5}
    plain = validation_metrics(make_samples([0.5, float("nan")], group_size=1), 1, greedy=True)
    assert plain == {
        "val-core/source0/acc/greedy": 0.5, "val-aux/source0/acc/greedy/stderr": 0.0,
        "val-core/source1/acc/greedy": 0.0, "val-aux/source1/acc/greedy/stderr": 0.0,
    }
