"""Rollouts between engine, reward workers and trainer; group statistics; validation metrics against enumeration."""

import itertools
import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

import dapo
from common.engine.base import RolloutConfig, SamplingConfig
from common.metrics import Meter
from common.parallel.ranks import seed_of
from common.prompts import Prompt
from common.rollout import Response, Rollout, Sample, check_skipped, gather_rollout, to_minibatches
from common.rollouts import scoring
from common.rollouts.scoring import responses_from_state, responses_to_state
from common.rollouts.validation import best_at, evaluate, majority, validation_metrics
from common.segments import group_count, group_lead, group_mean, group_std, group_sum, is_constant
from common.tracking.step import rollout_metrics
from rewards.runtime.pool import Scores

LLAMA = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)
DATA = [Prompt([1] * (3 + row), f"source{row % 2}", str(row), {"row": row}, []) for row in range(6)]


def make_samples(scores, group_size=2, rows=None, extras=None) -> list[Sample]:
    """Responses of 1, 2, 3 ... tokens, a group per prompt; every third was truncated."""
    rows = list(range(len(scores) // group_size)) if rows is None else rows
    samples = []
    for i, score in enumerate(scores):
        response = Response([7] * (i + 1), [-0.5] * (i + 1), "length" if i % 3 == 2 else "stop")
        row = rows[i // group_size]
        samples.append(Sample(i, i // group_size, row, DATA[row], response, score=score,
                              extras=extras[i] if extras else {}))
    return samples


def by_index(rollout: Rollout) -> dict[int, tuple[int, float]]:
    return {s.index: (s.group, s.score) for s in rollout.samples}


def test_a_rollout_knows_every_response(world):
    samples = make_samples([1.0, float("nan"), 0.5, 2.0])
    rollout = gather_rollout([samples[i] for i in (2, 0, 3, 1)])
    assert rollout.scores.nan_to_num(nan=-1).tolist() == [1, -1, 0.5, 2]
    assert rollout.group.tolist() == [0, 0, 1, 1] and len(rollout) == 4
    assert rollout.response_lengths.tolist() == [1, 2, 3, 4] and rollout.prompt_lengths.tolist() == [3, 3, 4, 4]
    assert rollout.truncated.tolist() == [False, False, True, False]
    assert rollout.in_loss.tolist() == [True, False, True, True]
    assert rollout.lengths.tolist() == [4, 5, 7, 8]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_response_is_known_by_its_place_and_has_a_seed_of_its_own(tp):
    """The second of two engines samples prompts 1 and 3 of four, three responses each; all are scored as they end, each
    by one rank of the engine."""
    seen = {}

    def generate(prompts, seeds, sampling, on_finish, stop, images):
        seen.update(prompts=prompts, seeds=seeds)
        for i in reversed(range(len(prompts))):
            on_finish(i, Response([i], [-0.5], "stop"))

    engine = SimpleNamespace(local_prompts=lambda count: range(1, count, 2), generate=generate, tp_rank=tp - 1,
                             config=SimpleNamespace(tp=tp))
    submitted = []
    pool = SimpleNamespace(submit=lambda *given: submitted.append(given))
    tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: f"text {tokens[0]}")
    judge = SimpleNamespace(pool=pool, tokenizer=tokenizer, advance=lambda: None, episodes=None)
    pending = scoring.start_rollout(engine, judge, DATA, [5, 4, 3, 2], 3, SamplingConfig(), (7, "x"))
    assert [(s.index, s.group, s.row) for s in pending.samples] == [
        (3, 1, 4), (4, 1, 4), (5, 1, 4), (9, 3, 2), (10, 3, 2), (11, 3, 2)]
    assert seen["prompts"] == [[1] * 7] * 3 + [[1] * 5] * 3
    assert seen["seeds"] == [seed_of(7, "x", group, number) for group in (1, 3) for number in range(3)]
    assert submitted[0] == (5, "source0", "text 5", "2", {"row": 2})
    assert [given[0] for given in submitted] == [i for i in (5, 4, 3, 2, 1, 0) if i % tp == tp - 1]
    pending = scoring.start_rollout(engine, judge, DATA, [5, 4, 3, 2], 2, SamplingConfig(), (7, "x"), with_greedy=True)
    assert [(s.index, s.group, s.row) for s in pending.samples] == [
        (9, 1, 4), (2, 1, 4), (3, 1, 4), (11, 3, 2), (6, 3, 2), (7, 3, 2)]
    sampled = [[seed_of(7, "x", group, number) for number in range(2)] for group in (1, 3)]
    assert seen["seeds"] == [None, *sampled[0], None, *sampled[1]]


@pytest.mark.parametrize("num_samples", [0, 2])
def test_a_validation_is_one_call_of_the_engine(world, num_samples):
    """Greedy answers are right on rows 4 and 2, sampled ones where the number is 1; a stop leaves no results."""
    calls, recorded = [], []

    def generate(prompts, seeds, sampling, on_finish, stop, images):
        calls.append(sampling)
        for i, seed in enumerate(seeds):
            number = 2 if seed is None else [seed_of(7, "val", i // (1 + num_samples), n) for n in range(2)].index(seed)
            on_finish(i, Response([number], [-0.5], "stop"))

    answers = []
    pool = SimpleNamespace(submit=lambda i, source, text, truth, info: answers.append((int(text), info["row"])),
                           max_error_frac=0.5, results=lambda: Scores(
                               [], [float(row in (4, 2) if number == 2 else number) for number, row in answers],
                               [{} for _ in answers], [None for _ in answers]))
    engine = SimpleNamespace(local_prompts=range, generate=generate, tp_rank=0, config=SimpleNamespace(tp=1))
    tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: f"{tokens[0]}")
    judge = SimpleNamespace(pool=pool, tokenizer=tokenizer, advance=lambda: None, episodes=None, model=None)
    config = RolloutConfig(val_top_k=5, top_k=3)
    given = engine, judge, DATA, [5, 4, 3, 2], config, num_samples, 0.7, (7, "val")
    found = evaluate(*given, stop=lambda: False, record=recorded.extend)
    assert [(call.temperature, call.top_k) for call in calls] == [(0.7, 5)]
    by_source = {name: value for name, value in found.items() if name.startswith("val-core")}
    greedy = {f"source{row % 2}": row in (4, 2) for row in (5, 4)}
    assert {name: by_source[f"val-core/{name}/acc/greedy"] for name in greedy} == greedy
    means = [value for name, value in by_source.items() if name.endswith("/acc/mean@2")]
    assert means == [0.5, 0.5] if num_samples else len(by_source) == 2
    assert {s.index for s in recorded} == set(range(8 if num_samples else 4))
    assert evaluate(*given, stop=lambda: True, record=recorded.extend) is None


def test_lost_scores_and_names_are_counted_over_all_ranks(world, monkeypatch):
    """3 of 4 scores are lost here and none of the other rank's 4: 3 of 8, the run goes on. 5 of 8 are too many. Of
    2 x 40 names in reward dicts, the first 64 become metrics."""
    lost_elsewhere = 0
    names = sorted(f"{name}_{rank}" for name in range(40) for rank in range(2))
    scores = Scores([*range(4)], [float("nan")] * 3 + [1.0], [{f"{n}_0": 1.0 for n in range(40)}] * 4,
                    ["timeout", "crash", "crash", None])
    pool = SimpleNamespace(results=lambda: scores, max_error_frac=0.5)
    judge = SimpleNamespace(pool=pool, model=None, episodes=None)
    monkeypatch.setattr(scoring, "all_sum", lambda here: torch.tensor(here) + torch.tensor([lost_elsewhere, 4]))
    monkeypatch.setattr(scoring, "all_names", lambda here: sorted(here | set(names)))
    pending = scoring.PendingRollout(None, judge, make_samples([0.0] * 4), SamplingConfig())
    meter = Meter()
    assert pending.collect(meter).in_loss.tolist() == [False] * 3 + [True]
    assert meter.reduce()["reward/error_frac"] == 2 / 4 and meter.reduce()["reward/timeout_frac"] == 1 / 4
    assert meter.sums.keys() - {"reward/timeout_frac", "reward/error_frac"} == {f"reward/{n}" for n in names[:64]}
    lost_elsewhere = 2
    with pytest.raises(RuntimeError, match=r"62% of the samples have no reward \(5 of 8 on all ranks\)"):
        pending.collect(Meter())


def test_responses_that_run_nowhere_count_if_they_are_in_the_loss(world):
    """Responses of 1 to 8 tokens in two mini-batches: 2 and 7 have no score, 3 and 8 have one and need not run."""
    scores = torch.tensor([1, torch.nan, 1, 1, 1, 1, torch.nan, 1])
    rollout = gather_rollout(make_samples(scores.tolist(), rows=[0, 1, 2, 3]))
    in_update = rollout.in_loss & torch.tensor([1, 1, 0, 1, 1, 1, 1, 0], dtype=torch.bool)
    minibatches = to_minibatches(rollout, in_update, LLAMA, world, num_minibatches=2, max_tokens=99, seed=0)
    ran = [int(batch.mask.sum()) for minibatch in minibatches for batch in minibatch]
    assert sum(ran) == 1 + 4 + 5 + 6
    skipped = torch.stack([minibatch.skipped_lengths for minibatch in minibatches])        # [mini-batch, S]
    assert skipped.sum(0).tolist() == [0, 0, 3, 0, 0, 0, 0, 8]
    assert min(len(minibatch.skipped_lengths) for minibatch in minibatches) > 0


def test_groups_are_joined_taken_and_numbered_anew(world):
    first = gather_rollout(make_samples([1, 2, 3, 4], rows=[0, 1]))
    second = gather_rollout(make_samples([5, 6, 7, 8], rows=[2, 3]))
    both = first.cat(second)
    assert both.scores.tolist() == [*range(1, 9)] and both.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert by_index(both) == {i: (i // 2, i + 1) for i in range(8)}
    assert by_index(second) == {i: (i // 2, i + 5) for i in range(4)}           # the argument stays as it was
    taken = dapo.take_groups(both, [3, 0])
    assert taken.scores.tolist() == [7, 8, 1, 2] and taken.group.tolist() == [0, 0, 1, 1]
    assert by_index(taken) == {0: (0, 7), 1: (0, 8), 2: (1, 1), 3: (1, 2)}
    assert taken.response_lengths.tolist() == [3, 4, 1, 2]
    nothing = dapo.take_groups(both, [])
    assert nothing.samples == [] and len(nothing) == 0
    assert nothing.cat(first).scores.tolist() == first.scores.tolist()


def test_groups_may_differ_in_size(world):
    samples = make_samples([1, 2, 3, 4, 5], rows=[0, 1, 2])
    for sample, group in zip(samples, [0, 0, 0, 1, 2]):
        sample.group = group
    taken = dapo.take_groups(gather_rollout(samples), [2, 0])
    assert taken.scores.tolist() == [5, 1, 2, 3] and taken.group.tolist() == [0, 1, 1, 1]


def test_a_rollout_survives_a_checkpoint_on_any_number_of_ranks(world, monkeypatch):
    samples = make_samples([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], rows=[4, 2, 5],
                           extras=[{"acc": i, "per_token": [i / 7] * 5000} for i in range(6)])
    state = json.loads(json.dumps(responses_to_state(gather_rollout(samples))))
    assert responses_from_state(state, DATA, world).samples == samples
    monkeypatch.setattr("common.rollouts.scoring.gather_rollout", lambda samples: samples)
    shares = [responses_from_state(state, DATA, replace(world, rank=rank, size=2)) for rank in range(2)]
    assert [[s.index for s in share] for share in shares] == [[0, 1, 4, 5], [2, 3]]
    assert shares[1] == samples[2:4]


def test_group_statistics_by_hand():
    x = torch.tensor([1.0, 3.0, float("nan"), 5.0, 5.0, 2.0, float("nan")], dtype=torch.float64)
    group = torch.tensor([0, 0, 0, 1, 1, 2, 3])
    assert group_sum(x, group).tolist() == [4, 4, 4, 10, 10, 2, 0]
    assert group_count(x, group).tolist() == [2, 2, 2, 2, 2, 1, 0]
    assert group_mean(x, group).nan_to_num(nan=-1).tolist() == [2, 2, 2, 5, 5, 2, -1]
    assert group_std(x, group).nan_to_num(nan=-1).tolist() == pytest.approx([2**0.5] * 3 + [0, 0, 0, 0])
    assert group_lead(x[:6], group[:6]).tolist() == [0, 2, 0, 0, 0, 0]
    assert is_constant(x, group).tolist() == [False, False, False, True, True, True, True]
    assert is_constant(x[:0], group[:0]).tolist() == []


def test_responses_without_an_advantage_may_be_skipped_and_no_others(world):
    """Groups of rewards 1 1 and 0 1, and one of which one response is lost: the equal ones run nowhere."""
    rollout = gather_rollout(make_samples([1, 1, 0, 1, float("nan"), 1]))
    advantages = (rollout.scores - group_mean(rollout.scores, rollout.group)).nan_to_num()
    in_update = rollout.in_loss & (advantages != 0)
    assert advantages.tolist() == [0, 0, -0.5, 0.5, 0, 0]
    assert in_update.nonzero()[:, 0].tolist() == [2, 3]
    check_skipped(advantages, in_update, rollout)
    fork = (rollout.scores - 0.5).nan_to_num()                             # constant groups have an advantage, too
    message = "response 0 was left out of the update, .* now has the advantage 0.5: --run-zero-advantage runs all"
    with pytest.raises(ValueError, match=message):
        check_skipped(fork, in_update, rollout)
    check_skipped(fork, rollout.in_loss, rollout)                          # all run
    rollout.in_loss[[0, 1, 5]] = False
    check_skipped(fork, in_update, rollout)                                # those skipped count in no denominator


def test_constant_groups_are_those_without_two_different_scores():
    """Of four groups those of 1 1, of one score beside a lost one, and of lost ones alone."""
    lost = float("nan")
    scores = torch.tensor([1, 1, 0, 1, lost, 1, lost, lost], dtype=torch.float64)
    group = torch.tensor([0, 0, 1, 1, 2, 2, 5, 5])                         # numbers of groups that are absent
    ones, flags = torch.ones(8, dtype=torch.float64), torch.ones(8, dtype=torch.bool)
    sampled = Rollout([], scores, group, ones, ones, ones, ones, ~flags, in_loss=flags)
    assert rollout_metrics(sampled, 8, 1.0, 9, 9)["reward/constant_group_frac"] == 0.75


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
    got = validation_metrics(samples, greedy=False)
    assert got["val-core/source0/acc/mean@4"] == pytest.approx((1 / 4 + 3 / 4) / 2)
    assert got["val-aux/source0/acc/mean@4/stderr"] == pytest.approx(np.std([0.25, 0.75], ddof=1) / 2**0.5)
    assert got["val-core/source0/acc/best@4/mean"] == 1
    assert got["val-aux/source0/acc/best@2/mean"] == pytest.approx((1 / 2 + 1) / 2)
    assert got["val-core/source0/acc/maj@4/mean"] == 0.5 and got["val-core/source1/acc/maj@4/mean"] == 0
    assert Counter(key.split("/")[1] for key in got) == {"source0": 5, "source1": 5}
    plain = validation_metrics(make_samples([0.5, float("nan")], group_size=1), greedy=True)
    assert plain == {
        "val-core/source0/acc/greedy": 0.5, "val-aux/source0/acc/greedy/stderr": 0.0,
        "val-core/source1/acc/greedy": 0.0, "val-aux/source1/acc/greedy/stderr": 0.0,
    }


def test_the_majority_is_of_the_samples_that_have_a_score_and_an_answer(world):
    """Three prompts, four samples each: one lost, one without answer; none lost; three lost and one without answer."""
    lost = float("nan")
    answers = [(1, "4"), (1, None), (lost, "5"), (0, "5"),
               (0, "7"), (1, "9"), (0, "7"), (0, "8"),
               (1, None), (lost, "1"), (lost, None), (lost, None)]
    extras = [{"pred": pred} for _, pred in answers]
    samples = make_samples([score for score, _ in answers], group_size=4, rows=[0, 2, 4], extras=extras)
    got = validation_metrics(samples, greedy=False)
    # votes: 4 and 5, a tie of 1 and 0; 7 twice, 0; none, 0. The lost 5 would make 5 the majority
    assert got["val-core/source0/acc/maj@4/mean"] == pytest.approx((0.5 + 0 + 0) / 3)
    assert got["val-core/source0/acc/mean@4"] == pytest.approx((2 + 1 + 1) / 12)
    for sample in samples:
        del sample.extras["pred"]
    assert not any("maj" in name for name in validation_metrics(samples, greedy=False))


@pytest.mark.parametrize("acc", [None, "1", [1], {}, float("nan"), float("inf")], ids=repr)
def test_an_acc_that_is_no_number_leaves_the_score(world, acc):
    samples = make_samples([0.5, 0.25, 0.25], group_size=1, rows=[0, 2, 4], extras=[{"acc": acc}, {"acc": 0.75}, {}])
    got = validation_metrics(samples, greedy=True)
    assert got["val-core/source0/acc/greedy"] == pytest.approx((0.5 + 0.75 + 0.25) / 3)
