"""The simulator of rollouts against loops that decode token by token; the advice at its ends."""

from dataclasses import replace

import numpy as np
import pytest

from tests.bench.advise import Question, advice, ways
from tests.bench.h100 import H100, SIZES
from tests.bench.published import LLAMA_8B, PUBLISHED, Published, cell, lengths_of, predict, predictions
from tests.bench.simulate import InFlight, Job, Shape, decode_seconds, in_slots, memory


def by_token(lengths: list[int], slots: int, stop: int | None = None) -> tuple[list[int], list[int]]:
    """The step in which each sequence begins, and its tokens before step `stop`."""
    start = [-1] * len(lengths)
    left = list(lengths)
    done = [0] * len(lengths)
    step = 0
    while any(left) and step != stop:
        running = [i for i, x in enumerate(left) if x and start[i] >= 0]
        for i, x in enumerate(left):
            if x and start[i] < 0 and len(running) < slots:
                start[i] = step
                running.append(i)
        for i in running:
            left[i], done[i] = left[i] - 1, done[i] + 1
        step += 1
    return start, done


@pytest.mark.parametrize("slots", [1, 3, 64])
def test_slots(slots):
    lengths = np.random.default_rng(0).integers(1, 30, 20)
    assert in_slots(lengths, slots).tolist() == by_token(lengths.tolist(), slots)[0]


def test_decode_seconds_are_those_of_every_step():
    shape, rng = Shape.of(SIZES["7B"]), np.random.default_rng(1)
    context, start, lengths = rng.integers(10, 90, (3, 7))
    end = start + lengths
    whole = decode_seconds(H100, shape, 1, context, start, end)
    each = 0.0
    for step in range(end.max()):
        runs = (start <= step) & (step < end)
        if runs.any():
            now = (context + step - start)[runs]
            each += decode_seconds(H100, shape, 1, now, np.zeros(runs.sum(), int), np.ones(runs.sum(), int))
    assert whole == pytest.approx(each, rel=1e-9)


@pytest.mark.parametrize("slots", [5, 64])
def test_groups_in_flight(slots):
    """Every group is decoded once and whole; none is older than allowed; a step ends with its last group."""
    rng = np.random.default_rng(2)
    engine = InFlight()
    given = 0
    ended = 0
    for _ in range(30):
        lengths = np.minimum(rng.lognormal(3, 1, (9 - len(engine.age), 4)).astype(int) + 1, 200)
        engine.add(np.full(len(lengths), 7), lengths)
        given += lengths.sum()
        before = engine.done.sum()
        age = engine.age.copy()
        flat = engine.left.flatten().tolist()
        *_, stop = engine.rollout(6, slots, max_staleness=2)
        _, done = by_token(flat, slots, stop)
        assert len(engine.age) == 3 and engine.age.max() <= 2 and sorted(age)[-1] <= 2
        complete = (np.array(done) == flat).reshape(-1, 4).all(1)
        assert complete.sum() >= 6 and (np.array(by_token(flat, slots, stop - 1)[1]) != np.array(done)).any()
        ended += before + sum(done) - engine.done.sum()
    assert given == ended + engine.done.sum() + engine.left.sum()


def test_advice():
    """Equal lengths: carrying over gains little. A long tail: it gains. A model that does not fit says so."""
    shape = Shape.of(SIZES["7B"])
    found = {}
    for name, longest in {"equal": 2000, "tail": 20000}.items():
        lengths = np.full(1024, 2000)
        lengths[::64] = longest
        found[name] = ways(H100, shape, Job(np.full(1024, 512), lengths, 8, 8, max_tokens=24000, checkpointing=True))
    faster = {name: rows["synchronous"]["step_s"] / rows["--rollout.in-flight 2"]["step_s"]
              for name, rows in found.items()}
    assert faster["equal"] < 1.1 < 1.2 < faster["tail"]
    lengths = np.full(1024, 2000)
    assert "Take: " in advice(H100, shape, Job(np.full(1024, 512), lengths, 8, 8, checkpointing=True))
    large = Job(np.full(1024, 512), lengths, 8, 8, 8, checkpointing=True)
    assert "training takes" in advice(H100, Shape.of(SIZES["70B"]), large)
    assert Question().model in SIZES


def test_a_published_step_is_predicted_by_hand_counts():
    """Two GPUs, one mini-batch of equal responses in one micro-batch each: weights are gathered twice, gradients are
    reduced once, and the update takes 8 FLOPs a weight and token (the head on response tokens)."""
    row = Published("us", "Llama-3.1-8B", 2, 2, 2, 1, 1000, 1, "", prompt=1000, mean=1000)
    lengths = lengths_of(row, 1000)
    assert lengths.min() >= 999                                 # the mean is the longest
    found = predict(row, 1000)
    weights, root = 8.03e9, 2 * 128256 * 4096
    assert found["gathered_gb"] == pytest.approx((4 * (weights - root) + 2 * root) / 2 / 1e9, rel=0.01)
    assert found["scattered_gb"] == pytest.approx(4 * weights / 2 / 1e9, rel=0.01)
    flops = 8 * ((weights - root) * 8000 + root / 2 * 4000)     # and attention, 3 to 4% at 2,000 tokens
    assert 1.0 < found["update_s"] * 2 * H100.flops * found["mfu"] / flops < 1.06
    assert 0.3 < found["mfu"] < H100.update_mfu
    assert found["step_s"] == pytest.approx(sum(found[f"{x}_s"] for x in ("rollout", "sync", "update")), rel=1e-6)


def test_an_unknown_mean_is_that_of_the_published_update():
    row = Published("us", "Llama-3.1-8B", 16, 32, 4, 2, 4000, 1, "", 100, update_s=3.0)
    (found,) = predictions(row)
    assert found["update_s"] == pytest.approx(3.0, rel=0.05)
    assert lengths_of(row, found["mean"]).mean() == pytest.approx(found["mean"], rel=0.01)
    low, high = predictions(Published("us", "Llama-3.1-8B", 16, 32, 4, 2, 4000, 1, ""))
    assert (low["mean"], high["mean"]) == (1000, 2000) and low["step_s"] < high["step_s"]
    assert cell([low, high], "mean") == "1,000 to 2,000" and cell([low], "offload_s") == ""


def test_moments_in_host_memory_leave_room():
    job = Job(np.full(64, 512), np.full(64, 512), 8, 16, checkpointing=True)
    here, away = (memory(H100, Shape.of(LLAMA_8B), replace(job, host_moments=x))["train_gb"] for x in (False, True))
    assert here - away == pytest.approx(8 * 8.03e9 / 16 / 2**30, rel=0.01)


def test_published_recipes_are_of_known_models():
    assert {row.who for row in PUBLISHED} == {"NeMo-RL", "verl", "slime"}
    assert all(row.step_s is None or row.step_s > 0 for row in PUBLISHED)
    assert all(row.prompts * row.samples % row.minibatches == 0 and row.gpus % row.tp == 0 for row in PUBLISHED)
