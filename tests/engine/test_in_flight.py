"""--rollout.in-flight: what a step leaves unfinished continues in the next one."""

import copy
import itertools
import statistics
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from common.curriculum.sampler import PromptSampler
from common.engine.base import SamplingConfig
from common.metrics import Meter
from common.model.reward_model import RewardModelConfig
from common.parallel.ranks import seed_of
from common.prompts import TemplateConfig
from common.rollouts.episodes import start_episodes
from common.rollouts.in_flight import continue_rollout
from common.rollouts.scoring import RolloutRequest, RolloutSource, Scoring
from envs.stored import split, unpack
from rewards.runtime.pool import RewardConfig
from tests.engine.engine_models import make_model, start
from tests.engine.episode_runs import FILE, make_prompt
from tests.engine.in_flight_runs import DATA, ENDS, NO_SCORERS, Steps, carry, stored
from tests.engine.test_conversation import make_tokenizer
from tests.generate import generate

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model("llama", True, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def vllm(model, world, frozen_imports):
    engine, policy = start(model, world)
    yield engine, policy
    engine.close()


@pytest.fixture
def awake(vllm):
    engine, policy = vllm
    engine.wake(policy)
    yield engine
    engine.sleep()


@pytest.fixture(scope="module")
def carried(model, vllm):
    return carry(model, *vllm, num_steps=8)


def test_every_token_has_the_log_prob_of_the_version_that_sampled_it(carried):
    """Scored by saved copies of all versions; the current one disagrees, so the copies tell versions apart."""
    assert max(r["off"] for r in carried) < 1e-4
    late = [r for r in carried if r["off_now"] is not None]
    assert len(late) > 5 and min(r["off_now"] for r in late) > 1e-3
    assert any(len(set(r["versions"])) > 1 and r["reason"] == "length" for r in late)    # carried over, and cut
    for response in carried:
        versions = response["versions"]
        assert versions == sorted(versions) and versions[-1] <= response["step"]
        assert response["reason"] == ("stop" if response["tokens"][-1] in {2, *ENDS} else "length")
        assert response["reason"] == "stop" or len(response["tokens"]) == 30
        assert not {2, *ENDS} & set(response["tokens"][:-1])
    long = [tuple(r["tokens"]) for r in carried if len(r["tokens"]) > 4]
    assert len(set(long)) == len(long) > 10


def test_a_response_that_continues_draws_other_random_numbers(carried):
    """The model hardly prefers any token, so the same numbers would mostly give the same tokens again."""
    firsts = [r["versions"].count(r["versions"][0]) for r in carried]
    pairs = [pair for r, first in zip(carried, firsts) for pair in zip(r["tokens"], r["tokens"][first:])]
    assert len(pairs) > 40 and sum(a == b for a, b in pairs) < 0.1 * len(pairs)


def test_a_step_is_as_large_as_without(carried):
    """Groups of two; each prompt once in an epoch."""
    for _, step in itertools.groupby(carried, key=lambda r: r["step"]):
        step = sorted(step, key=lambda r: r["index"])
        assert [r["index"] for r in step] == list(range(8))
        assert all(a["row"] == b["row"] for a, b in zip(step[::2], step[1::2]))
    assert set(Counter(r["row"] for r in carried).values()) == {2}


def test_rows_in_flight_are_drawn_by_weight(awake):
    """Those of the step and those begun early come from one order, from which none is lost and none comes twice, also
    if a resumed run goes on after the second step."""
    weights = np.arange(len(DATA)) % 3
    expected = PromptSampler(len(DATA), "", 0)
    expected.weights = weights
    found = []
    for restart in (False, True):
        steps, rows = Steps(awake, in_flight=2.0), []
        for step in range(4):
            if restart and step == 2:
                saved = steps.sampler.state_dict()
                steps.sampler = PromptSampler(len(DATA), "", 0)
                steps.sampler.load_state_dict(saved)
            steps.sampler.weights = weights
            rows += [sample.row for sample in steps(awake, step).samples[::2]]
        found.append(rows)
        left = [group["row"] for group in steps.state["in_flight"]]
    assert found[0] == found[1] and left
    assert sorted(found[0] + left) == sorted(expected.take(16 + len(left)))


def test_new_responses_are_those_of_a_run_without(awake):
    """A group that begins and ends in the first step: the seeds, and so the tokens, of its place in the step."""
    rollout = Steps(awake, in_flight=2.0)(awake, 0)
    rows = PromptSampler(len(DATA), "", 0).take(8)
    sampling = SamplingConfig(1.0, 30, stop_token_ids=ENDS)
    for sample in rollout.samples:
        seed = seed_of(0, 0, rows.index(sample.row), sample.index % 2)
        assert generate(awake, [sample.prompt.tokens], [seed], sampling)[0].tokens == sample.response.tokens
    assert {sample.row for sample in rollout.samples} != set(rows[:4])  # the first four to end, not the first four


def test_staleness_is_bounded_and_measured(vllm):
    engine, policy = vllm
    oldest = {}
    for bound in (1, 4):
        steps = Steps(engine, in_flight=2.0, num_groups=2, max_staleness=bound)
        oldest[bound] = 0
        for step in range(16):
            engine.wake(policy)
            rollout = steps(engine, step)
            engine.sleep()
            ages = [step - version for s in rollout.samples for version in s.response.versions]
            spans = [s.response.versions[-1] - s.response.versions[0] for s in rollout.samples]
            assert steps.metrics["rollout/staleness/mean"] == pytest.approx(sum(ages) / len(ages))
            assert steps.metrics["rollout/staleness/max"] == max(ages)
            assert steps.metrics["fully_async/partial/partial_ratio"] == sum(s > 0 for s in spans) / len(spans)
            assert steps.metrics["fully_async/partial/max_partial_span"] == max(spans)
            oldest[bound] = max(oldest[bound], max(ages))
            tokens = sum(len(response.tokens) for response in steps.left())
            assert steps.metrics["rollout/carried_tokens"] == tokens == sum(len(r.versions) for r in steps.left())
            assert len(steps.state["in_flight"]) == 2
    assert oldest[1] == 1 < oldest[4]


def test_without_staleness_unfinished_groups_are_dropped_and_counted(vllm):
    """Oversampling: each step takes its share of the first groups to end, all of its own weights."""
    engine, policy = vllm
    steps = Steps(engine, in_flight=2.0, max_staleness=0)
    left, rows = 0, []
    for step in range(4):
        engine.wake(policy)
        rollout = steps(engine, step)
        engine.sleep()
        assert steps.metrics["rollout/dropped_tokens"] == left and steps.metrics["rollout/staleness/max"] == 0
        left = steps.metrics["rollout/carried_tokens"]
        rows.append({sample.row for sample in rollout.samples})
        assert left > 0 and len(rollout.samples) == 8 and len(steps.state["in_flight"]) == 4
    taken = PromptSampler(len(DATA), "", 0).take(8 * 4)
    assert all(found < {*taken[8 * step : 8 * step + 8]} for step, found in enumerate(rows))


def test_a_lower_in_flight_drops_the_youngest_groups_and_counts_them(awake):
    """After a resume with --save.allow-changes. Without --rollout.in-flight all of them are dropped, and the prompts of
    the step are answered in their order."""
    steps = Steps(awake, in_flight=2.0, max_staleness=9)
    for step in range(3):
        steps(awake, step)
    saved, before = copy.deepcopy(steps.state), steps.state["in_flight"]
    tokens_of = {number: sum(len(r.tokens) for r in group["responses"])
                 for number, group in unpack(saved["in_flight_responses"])}
    assert before[0]["step"] <= before[3]["step"]
    for in_flight, room in ((1.5, 2), (1.0, 0)):
        steps.state, steps.sampling = copy.deepcopy(saved), replace(steps.sampling, in_flight=in_flight)
        rows = copy.deepcopy(steps.sampler).take(4)
        rollout = steps(awake, 3)
        seen = {sample.row for sample in rollout.samples} | {group["row"] for group in steps.state["in_flight"]}
        assert seen == {*rows, *(group["row"] for group in before[:room])} and len(rollout.samples) == 8
        num_tokens = sum(tokens_of[group["number"]] for group in before[room:])
        assert steps.metrics["rollout/dropped_tokens"] == num_tokens > 0
    assert [sample.row for sample in sorted(rollout.samples, key=lambda s: s.index)[::2]] == rows
    assert steps.state["in_flight"] == [] and steps.metrics["rollout/staleness/max"] == 0


@pytest.mark.parametrize("flags", [{"num_samples": 3}, {"max_response_length": 4}, {"temperature": 0.5}], ids=str)
def test_groups_that_were_sampled_with_other_flags_are_dropped_and_counted(flags, awake):
    """After a resume with --save.allow-changes. Here they would have too few responses, or be longer than allowed."""
    before, after = Steps(awake, in_flight=2.0), Steps(awake, in_flight=2.0, **flags)
    before(awake, 0)
    left, after.state, after.sampler = before.state["in_flight"], before.state, before.sampler
    num_tokens = sum(len(response.tokens) for response in before.left())
    rows = copy.deepcopy(after.sampler).take(8)
    rollout = after(awake, 1)
    assert after.metrics["rollout/dropped_tokens"] == num_tokens > 4 * len(left)
    seen = [sample.row for sample in rollout.samples[:: after.num_samples]]
    assert sorted(seen + [group["row"] for group in after.state["in_flight"]]) == sorted(rows)
    assert after.metrics["rollout/staleness/max"] == 0


def test_a_rollout_in_the_same_step_continues_what_the_one_before_left(awake):
    """dapo.py's dynamic sampling: several rollouts by one version of the policy."""
    steps = Steps(awake, in_flight=2.0)
    rows = [sample.row for _ in range(3) for sample in steps(awake, 7).samples]
    assert len(set(rows)) == 12 and steps.metrics["rollout/staleness/max"] == 0
    assert steps.metrics["fully_async/partial/partial_ratio"] == 0


def test_other_engines_share_what_is_in_flight(awake):
    """Four groups of one engine go to two, or to three: each one once, with its tokens; then new prompts."""
    steps = Steps(awake, in_flight=2.0)
    steps(awake, 0)
    saved = copy.deepcopy(steps.state)
    for num_engines in (2, 4):
        seen, left = [], []
        for rank in range(num_engines):
            awake.num_engines, awake.engine_rank = num_engines, rank
            steps.state, sampler = copy.deepcopy(saved), PromptSampler(len(DATA), "", 0)
            sampler.take(8)
            request = RolloutRequest(sampler.take(4), 2, steps.sampling, (0, 1))
            pending = continue_rollout(
                RolloutSource(awake, NO_SCORERS, DATA), request, steps.state, sampler, Meter()
            )
            scored = [sample for sample in pending.samples if sample.response is not None]
            seen += [sample.row for sample in scored[::2]]
            left += [group["row"] for group in steps.state["in_flight"]]
            assert len(scored) == 8 // num_engines
        new = PromptSampler(len(DATA), "", 0).take(12)[8:]
        assert sorted(seen + left) == sorted([group["row"] for group in saved["in_flight"]] + new)
    awake.num_engines, awake.engine_rank = 1, 0


def test_what_is_in_flight_is_exact(awake):
    """The tokens themselves, through a checkpoint, and what is sampled after them. They are nowhere in the JSON."""
    steps = Steps(awake)
    steps(awake, 0)
    assert stored(steps.state) == steps.state and steps.left()
    assert len(split(steps.state)[0]["in_flight"]) == 4 and len(str(split(steps.state)[0])) < 2000
    one, other = Steps(awake), Steps(awake)
    for step in range(3):
        first, second = one(awake, step), other(awake, step)
        assert [s.response for s in first.samples] == [s.response for s in second.samples]
        assert one.state == other.state


# --------------------------------------------------------------------------- episodes

TURNS = 3


@pytest.fixture(scope="module")
def episodes(vllm, world):
    """The arguments of `Steps` for an episode of episodes_of_tests.py."""
    engine, _ = vllm
    tokenizer = make_tokenizer("SmolLM2", 0)
    stops = [*engine.stop_token_ids, *ENDS, tokenizer.eos_token_id]
    made = []

    def arguments(name: str) -> dict:
        flags = {"episode": f"{FILE}:{name}", "max_response_length": 160, "lockstep": True}
        scoring = Scoring(tokenizer, RewardConfig(num_workers=1), RewardModelConfig(), [], name)
        made.append(scoring)
        scoring.episodes = start_episodes(
            replace(engine.config, **flags), tokenizer, TemplateConfig(), stops, 256, world
        )
        return flags | {"scoring": scoring, "data": [make_prompt(tokenizer, number) for number in range(40)]}

    yield arguments
    for scoring in made:
        scoring.close()


def test_episodes_continue_with_the_replies_that_they_had(model, vllm, episodes):
    """Also in the middle of a reply. What the environment says stands once between the replies."""
    found = carry(model, *vllm, num_steps=8, **episodes("long_talk"))
    assert [r["dropped"] for r in found] == [0] * 64 and max(r["off"] for r in found) < 1e-4
    late = [r for r in found if r["off_now"] is not None]
    assert len(late) > 5 and min(r["off_now"] for r in late) > 1e-3
    num_inside = 0
    for r in found:
        roles = [message["role"] for message in r["messages"]]
        replies = [len(list(run)) for is_sampled, run in itertools.groupby(r["mask"]) if is_sampled]
        assert roles == ["user", "assistant"] * len(replies) and r["versions"] == sorted(r["versions"])
        bounds = {0, *itertools.accumulate(replies)}
        num_inside += sum(a != b and i not in bounds for i, (a, b) in enumerate(itertools.pairwise(r["versions"]), 1))
    assert num_inside > 3 and sum(len(r["messages"]) == 2 * TURNS for r in found) > 32     # others have no room left


def test_episodes_go_on_between_two_steps(model, vllm, episodes):
    """The process that asked is told: what it says is random, and nothing is sampled again."""
    found = carry(model, *vllm, num_steps=6, **episodes("moody"))
    assert max(r["off"] for r in found) < 1e-4
    assert [r["dropped"] for r in found] == [0] * 48 and [r["restarted"] for r in found] == [0] * 48
    assert any(len(set(r["versions"])) > 1 for r in found)


@pytest.mark.parametrize("restart", [False, True])
def test_conversations_of_one_episode_in_flight(restart, model, vllm, episodes):
    """Two that are sampled at the same time, and carried over together: each token has the log-prob of the weights that
    sampled it, whether the episode goes on or begins anew."""
    found = carry(model, *vllm, num_steps=5, restart=restart, **episodes("with_critics"))
    assert max(r["off"] for r in found) < 1e-4 and {r["conversation"] for r in found} == {0, 1, 2}
    assert all(r["versions"] == sorted(r["versions"]) for r in found)
    carried = {r["conversation"] for r in found if len(set(r["versions"])) > 1}
    # to other weights a single token may be as likely; of one token in a carried part that is all there is to see
    assert carried >= {0, 2} and statistics.median(r["off_now"] for r in found if r["off_now"] is not None) > 1e-3
    assert (max(r["restarted"] for r in found) > 0) == restart


def test_replies_to_what_is_no_longer_said_are_sampled_anew_and_counted(model, vllm, episodes):
    """By episodes that begin anew, as after a resume."""
    found = carry(model, *vllm, num_steps=6, restart=True, **episodes("moody"))
    assert max(r["off"] for r in found) < 1e-4 and max(r["restarted"] for r in found) > 0
    assert max(r["dropped"] for r in found) > 20
    assert any(len(set(r["versions"])) > 1 for r in found)                     # the first reply is kept


def test_episodes_in_flight_are_exact(awake, episodes):
    """What one run carries over in memory, and the other one reads from a checkpoint of another run."""
    one, other = (Steps(awake, **episodes("long_talk")) for _ in range(2))
    for step in range(3):
        other.state = copy.deepcopy(one.state)
        other.scoring.episodes.end_kept()
        first, second = one(awake, step), other(awake, step)
        assert [s.response.tokens for s in first.samples] == [s.response.tokens for s in second.samples]
        assert [s.score for s in first.samples] == [s.score for s in second.samples]
        restarted = [steps.metrics["episode/restarted"] for steps in (one, other)]
        assert restarted[0] == 0 and (step == 0 or restarted[1] > 0)
    assert one.state["in_flight"] and one.metrics["rollout/staleness/max"] > 0
