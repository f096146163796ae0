"""Success rates of rows, their pools, and a sampler that passes rows over: against slow loops, and in whole runs."""

import json
import math
import re
import signal
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from common.curriculum.rates import from_text, pool_metrics, pool_weights, to_text, update_rates
from common.curriculum.sampler import PromptSampler
from common.flags.data import DataConfig
from common.flags.rules import check_pool
from tests.checkpoint.faulty import server
from tests.conftest import STOPS, launch
from tools import try_script

POOL = DataConfig(pool="learning", pool_hard=0.2, pool_easy=0.8, pool_rest=0.25)


def rollout_of(groups: list[tuple[int, list[float]]]) -> SimpleNamespace:
    """Groups of a row and the scores of its responses."""
    numbers, rows, scores = [], [], []
    for number, (row, of_group) in enumerate(groups):
        numbers += [number] * len(of_group)
        rows += [row] * len(of_group)
        scores += of_group
    return SimpleNamespace(group=torch.tensor(numbers), row=torch.tensor(rows),
                           scores=torch.tensor(scores, dtype=torch.float64))


def test_rates_are_decayed_means():
    """A slow loop over all visits to a row: the newest mean counts a half, the one before a quarter, and so on."""
    generator = np.random.default_rng(0)
    rates, history = torch.full((6,), torch.nan), defaultdict(list)
    for _ in range(7):
        groups = []
        for row in generator.integers(0, 5, 3).tolist():
            scores = generator.integers(0, 2, 4).astype(float).tolist()
            scores[0] = math.nan if generator.random() < 0.5 else scores[0]
            groups.append((row, scores))
            history[row].append(np.nanmean(scores))
        update_rates(rates, rollout_of([*groups, (4, [math.nan, math.nan])]))
    for row, means in history.items():
        weights = [0.5 ** (len(means) - 1)] + [0.5 ** (len(means) - i) for i in range(1, len(means))]
        assert sum(weights) == 1 and rates[row].item() == pytest.approx(np.dot(weights, means), abs=1e-6)
    assert len(history) == 5 and rates[5].isnan() and len({round(x, 3) for x in rates[:5].tolist()}) > 2


def test_pools_weights_and_metrics():
    rates = torch.tensor([torch.nan, 0.0, 0.2, 0.21, 0.5, 0.79, 0.8, 1.0])
    assert pool_weights(rates, POOL).tolist() == [1, 0.25, 0.25, 1, 1, 1, 0.25, 0.25]
    assert pool_metrics(rates, POOL, 3) == {
        "curriculum/passed_over": 3, "curriculum/unseen_frac": 1 / 8, "curriculum/too_hard_frac": 2 / 8,
        "curriculum/learning_frac": 3 / 8, "curriculum/too_easy_frac": 2 / 8,
    }
    np.testing.assert_array_equal(from_text(json.loads(json.dumps(to_text(rates)))), rates.numpy())


@pytest.mark.parametrize(("changes", "words"), [
    ({"pool_hard": 0.95}, "--data.pool-hard 0.95 must be below --data.pool-easy 0.95"),
    ({"pool_rest": 0.0}, r"--data.pool-rest 0.0 must be in \(0, 1\]: with 0 no row would ever come back"),
])
def test_pools_that_cannot_be_meant_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        check_pool(DataConfig(pool="learning", **changes))


# --------------------------------------------------------------------------- the sampler

WEIGHTS = np.array([1, 2, 4, 4, 0, 3, 2, 1, 4, 4], dtype=np.float32)


def slow_order(num_epochs: int, weights_of: list[np.ndarray]) -> list[list[int]]:
    """What a sampler of seed 1 draws in each epoch: one prompt after another, each with its own comparison."""
    epochs = []
    for epoch in range(num_epochs):
        luck = np.random.default_rng((1, epoch, 1)).random(10)
        drawn = []
        for position, row in enumerate(np.random.default_rng((1, epoch)).permutation(10).tolist()):
            if luck[position] < weights_of[epoch][row] / max(weights_of[epoch]):
                drawn.append(row)
        epochs.append(drawn)
    return epochs


@pytest.mark.parametrize("size", [1, 3, 4, 30])
def test_a_weighted_sampler_passes_rows_over(size):
    """The batch size does not matter, no prompt comes twice in an epoch, and one without a weight never."""
    epochs = slow_order(40, [WEIGHTS] * 40)
    expected = [row for epoch in epochs for row in epoch]
    sampler = PromptSampler(10, "a", seed=1)
    sampler.weights = WEIGHTS
    taken = []
    while len(taken) + size <= len(expected):
        taken += sampler.take(size)
    assert taken == expected[: len(taken)] and len(taken) > 150
    assert all(len({*epoch}) == len(epoch) for epoch in epochs) and 4 not in taken
    assert sampler.num_passed_over == sampler.epoch * 10 + sampler.position - len(taken) > 0


def test_rows_are_drawn_as_often_as_they_weigh():
    sampler = PromptSampler(10, "a", seed=0)
    sampler.weights = torch.from_numpy(3 * WEIGHTS)
    counts = Counter(sampler.take(40_000))
    shares = np.array([counts[row] for row in range(10)]) / 40_000
    np.testing.assert_allclose(shares, WEIGHTS / WEIGHTS.sum(), atol=0.005)


def test_equal_weights_change_nothing_and_none_ends_them():
    plain, equal = PromptSampler(10, "a", seed=3), PromptSampler(10, "a", seed=3)
    equal.weights = torch.full((10,), 0.2)
    assert plain.take(33) == equal.take(33)
    equal.weights = WEIGHTS
    equal.weights = None
    assert plain.take(33) == equal.take(33) and equal.num_passed_over == 0


def test_a_weighted_sampler_resumes_anywhere():
    straight = PromptSampler(10, "a", seed=1)
    for step in range(12):
        resumed = PromptSampler(10, "a", seed=1)
        resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
        straight.weights = resumed.weights = np.roll(WEIGHTS, step)
        assert straight.take(3) == resumed.take(3)


@pytest.mark.parametrize(("weights", "words"), [
    ([1.0] * 9, r"sampler.weights has the shape \[9\], must have a number for each of the 10 rows: \[10\]"),
    ([1.0] * 9 + [-1.0], "sampler.weights of row 9 is -1.0, must be 0 or more and finite"),
    ([1.0, math.inf] + [1.0] * 8, "sampler.weights of row 1 is inf"),
    ([0.0] * 10, "sampler.weights is 0 for all rows: none could be drawn"),
])
def test_weights_that_cannot_be_meant_are_refused(weights, words):
    with pytest.raises(ValueError, match=words):
        PromptSampler(10, "a", seed=1).weights = weights


# --------------------------------------------------------------------------- whole runs

@pytest.fixture(scope="module")
def flags(tiny_llama, small_train) -> list[str]:
    return ["--model", tiny_llama, "--train-data", small_train, "--prompts-per-step", "8", "--samples-per-prompt", "4",
            "--total-steps", "7", "--rollout.engine", "hf", "--policy.compute-dtype", "float32",
            "--data.max-prompt-length", "200", "--rollout.max-response-length", "4", "--reward.num-workers", "1",
            "--reward.function", f"{try_script.__file__}:compute_score_of_some", "--log.rollouts-every", "1", *STOPS,
            "--save.hf", "never", "--save.every", "1", "--data.pool", "learning"]


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("pool") / "run"
    launch("grpo.py", *flags, "--run-dir", run, warm=True)
    return run


def metrics_of(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    varies = re.compile(r"timing|perf|sync|sleep|rollout/tokens_per_s")
    return [{name: value for name, value in line.items() if not varies.match(name)} for line in lines]


def rows_of(run: Path, step: int) -> list[dict]:
    """The responses of a step, each with the number of its row in the data, whose questions all differ."""
    (data,) = json.loads((run / "config.json").read_text())["train_data"]
    questions = [messages[-1]["content"] for messages in pq.read_table(data)["prompt"].to_pylist()]
    rows = pq.read_table(run / f"rollouts/step_{step:06d}.parquet").to_pylist()
    for row in rows:
        (row["row"],) = [i for i, question in enumerate(questions) if f"{question}<|im_end|>" in row["prompt"][-400:]]
    return rows


def test_the_rows_of_a_run(whole):
    """Each step draws what a slow loop draws from the scores of the steps before; in the second epoch most rows whose
    scores are all equal are passed over."""
    rates, means = {}, []
    epoch = position = 0
    orders = [np.random.default_rng((0, epoch)).permutation(32) for epoch in range(4)]
    luck = [np.random.default_rng((0, epoch, 1)).random(32) for epoch in range(4)]
    for step in range(1, 8):
        expected = []
        while len(expected) < 8:
            if position == 32:
                epoch, position = epoch + 1, 0
            row = int(orders[epoch][position])
            chance = 1.0 if 0.05 < rates.get(row, 0.5) < 0.95 else np.float32(0.1)
            if luck[epoch][position] < chance:
                expected.append(row)
            position += 1
        rows = rows_of(whole, step)
        assert [row["row"] for row in rows[::4]] == expected
        for i in range(0, 32, 4):
            mean = np.mean([row["score"] for row in rows[i : i + 4]])
            rates[rows[i]["row"]] = (rates.get(rows[i]["row"], mean) + mean) / 2
        constant = np.mean([len({row["score"] for row in rows[i : i + 4]}) == 1 for i in range(0, 32, 4)])
        means.append(constant)
    lines = metrics_of(whole)
    assert epoch >= 1 and sum(line["curriculum/passed_over"] for line in lines) == 32 * epoch + position - 56 > 5
    assert lines[-1]["curriculum/too_easy_frac"] == np.mean([rates.get(row, 0.5) >= 0.95 for row in range(32)])
    assert np.mean(means[5:]) < np.mean(means[:4])


def test_a_killed_run_continues_exactly(flags, whole, tmp_path):
    """kill -9 as the sixth of seven steps is logged, in the second epoch: metrics byte for byte."""
    command = ["grpo.py", *flags, "--run-dir", tmp_path / "run"]
    assert server()(tmp_path / "log", "log:6:0:kill", *map(str, command)) == -signal.SIGKILL
    assert "resumed after step 5" in launch(*command, warm=True).stdout
    assert metrics_of(tmp_path / "run") == metrics_of(whole)
    assert rows_of(tmp_path / "run", 7) == rows_of(whole, 7)


def test_two_ranks_draw_the_same_rows(flags, whole, tmp_path):
    launch("grpo.py", *flags, "--run-dir", tmp_path, ranks=2, warm=True)
    for step in (5, 6, 7):
        assert [row["row"] for row in rows_of(tmp_path, step)] == [row["row"] for row in rows_of(whole, step)]
    ours, theirs = ([{name: value for name, value in line.items() if name.startswith("curriculum")}
                     for line in metrics_of(run)] for run in (tmp_path, whole))
    assert ours == theirs
