"""The replay of recorded responses against slow simulations, and against an engine that drafts."""

import dataclasses
import json

import numpy as np
import pytest

from common.engine.base import SamplingConfig
from common.rollouts.record import write_rows
from common.speculation import history
from common.speculation.history import History
from tests.bench.recorded import Group, advice, in_flight, read_steps, replay
from tests.bench.simulate import in_slots
from tests.engine.conftest import frozen_imports  # noqa: F401
from tests.engine.engine_models import PROMPTS, SEEDS, make_model, start
from tests.generate import generate


def groups_of(rng, count: int, samples: int = 4, longest: int = 60) -> list[Group]:
    groups = []
    for number in range(count):
        responses = [rng.integers(0, 500, rng.integers(1, longest)).tolist() for _ in range(samples)]
        groups.append(Group([number, 1, 2], responses))
    return groups


@pytest.mark.parametrize("slots", [1, 3, 7, 100])
def test_without_drafts_it_is_a_queue(slots):
    """Oracle: the simulator's, which has a heap of ends."""
    groups = groups_of(np.random.default_rng(0), 6)
    lengths = np.array([length for group in groups for length in group.lengths])
    ends = in_slots(lengths, slots) + lengths
    passes = replay(groups, slots, 0, History(), 60)
    left = [(ends > i).sum() for i in range(ends.max())]
    assert passes.count == ends.max()
    assert passes.in_tail == sum(number < len(lengths) / 4 for number in left)


def test_a_response_that_repeats_another_is_drafted(monkeypatch):
    """By hand, with guesses that end nowhere: 11 passes for the first of 11 tokens; then one for a first token, and two
    of which each has four drafts and a token of its own."""
    monkeypatch.setattr(history, "FLOOR", 0.0)
    response = [*range(100, 111)]
    passes = replay([Group([1, 2], [response, response])], 1, 4, History(), 11)
    assert dataclasses.astuple(passes) == (14, 0, 8, 8)
    assert replay([Group([1, 2], [response, response])], 1, 0, History(), 60).count == 22
    assert replay([Group([1, 2], [response, [*range(200, 211)]])], 1, 4, History(), 60).count == 22


@pytest.mark.engine
@pytest.mark.usefixtures("frozen_imports")
def test_passes_are_those_of_an_engine(world, tmp_path, monkeypatch):
    """Oracle: vLLM, on prompts that it knows from a first rollout and on some that it does not."""
    engine, policy = start(make_model("qwen2", True, tmp_path), world, drafts=4)
    engine.stop_token_ids = [*range(20)]
    engine.wake(policy)
    kept = History()
    steps = []
    engine_step = engine.step

    def step():
        steps.append(1)
        return engine_step()

    monkeypatch.setattr(engine, "step", step)
    for seeds in (SEEDS, SEEDS, [seed + 1 for seed in SEEDS]):
        engine.measured()
        steps.clear()
        responses = generate(engine, PROMPTS, seeds, SamplingConfig(1.0, 24))
        groups = [Group(list(prompt), [response.tokens]) for prompt, response in zip(PROMPTS, responses)]
        passes = replay(groups, 16, 4, kept, 24)
        found = engine.measured()
        assert passes.count == len(steps)
        if passes.drafted:
            assert found["rollout/spec_accept_rate"] == pytest.approx(passes.kept / passes.drafted)
    engine.close()


@pytest.mark.parametrize(("slots", "share", "staleness"), [(100, 1.5, 4), (6, 2.0, 4), (100, 1.5, 1)])
def test_in_flight_token_by_token(slots, share, staleness):
    """Oracle: one token a response and pass, in lists."""
    rng = np.random.default_rng(1)
    steps = [groups_of(rng, 4) for _ in range(8)]
    found = in_flight(steps, slots, share, staleness)
    groups = [group for step in steps for group in step]
    running, counts, begun = [], [], 0                                  # of a group: tokens that are left, and its age
    for _ in found:
        new = round(share * 4) - len(running)
        running += [([*group.lengths], 0) for group in groups[begun : begun + new]]
        begun += new
        ended, passes, places = [], 0, []
        due = [i for i, (_, age) in enumerate(running) if age >= staleness]
        while len(ended) < 4:
            queue = [(i, k) for i, (left, _) in enumerate(running) for k, n in enumerate(left) if n]
            places = [place for place in places if place in queue]
            places += [place for place in queue if place not in places][: slots - len(places)]
            for i, k in places:
                running[i][0][k] -= 1
            passes += 1
            for i, (left, _) in enumerate(running):
                reserved = len([j for j in due if j not in ended and j != i])
                if not any(left) and i not in ended and len(ended) + reserved < 4:
                    ended.append(i)
        counts.append(passes)
        running = [(left, age + 1) for i, (left, age) in enumerate(running) if i not in ended]
    assert found == counts and len(found) > 4


def test_a_run_is_read(tmp_path):
    rng = np.random.default_rng(2)
    for step in range(5):
        rows = []
        for number, group in enumerate(groups_of(rng, 4)):
            rows += [{"step": step, "index": 4 * number + k, "group": number, "prompt": f"prompt {number}", "tokens": x}
                     for k, x in enumerate(group.responses)]
        write_rows(tmp_path / f"rollouts/step_{step:06d}.parquet", rows)
    flags = {"max_num_seqs": 8, "max_response_length": 60, "drafts": 0, "max_staleness": 4}
    (tmp_path / "config.json").write_text(json.dumps({"rollout": flags}))
    metrics = {"step": 1, "timing_s/gen": 4.0, "timing_s/gen/tail": 3.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    text = advice(tmp_path, engines=1)
    assert "4 s a rollout, 3 s of it with under a quarter" in text and "5 recorded steps of 16 responses" in text
    for way in ("as it is", "--rollout.max-num-seqs 16", "--rollout.drafts 4", "--rollout.in-flight 1.5"):
        assert f"| {way}" in text
    assert advice(tmp_path, engines=2) != text

    write_rows(tmp_path / "rollouts/step_000009.parquet", [rows[0] | {"num_turns": 3}])
    with pytest.raises(ValueError, match="has episodes"):
        advice(tmp_path, engines=1)
    with pytest.raises(ValueError, match="has no steps: record some"):
        read_steps(tmp_path / "rollouts")
