"""The simulator of rollouts against loops that decode token by token; the advice at its ends."""

import numpy as np
import pytest

from tests.bench.advise import Question, advice, ways
from tests.bench.h100 import H100, SIZES
from tests.bench.simulate import InFlight, Job, Shape, decode_seconds, in_slots


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
