"""--advantage-per-step: rewards of turns, relative to turns of the same number in the group's other episodes. As a
script under torchrun it writes what each rank has: `tests/engine/test_turns.py FOLDER`."""

import math
import random
import sys
from itertools import accumulate, chain, groupby

import pytest
import torch
from transformers import LlamaConfig

from common import losses
from common.batch import Batch
from common.episodes.turns import to_units
from common.parallel import ranks
from common.prompts import Prompt
from common.rollout import Layout, Response, Sample, to_minibatches
from common.rollouts.gather import gather_rollout
from grpo_variants import group_advantages, passk_advantages
from tests.conftest import launch

CONFIG = LlamaConfig(vocab_size=50, hidden_size=24, intermediate_size=9, num_hidden_layers=2, num_attention_heads=4)
COEF = 0.5
REJECTED = 7                                                            # tokens with this id lose their mask


def make_samples() -> list[Sample]:
    """3 groups of 4 episodes of 0 to 4 turns. Episode 2 has no score, 5 failed and has the score 0 (--reward.on-error
    zero); 3 and 8 are two sequences, as their history was rewritten; 4, 9 and 10 have begun other conversations, whose
    sequences stand before their own."""
    rng, samples = random.Random(3), []

    def part(num_turns: int, **fields) -> Response:
        mask = []
        for turn in range(num_turns):
            mask += [False] * rng.randint(1, 4) * (turn > 0) + [True] * rng.randint(1, 5)
        tokens = [rng.randrange(3, 15) for _ in mask]
        return Response(tokens, [-0.5] * len(mask), "stop", mask, **fields)

    for index in range(12):
        num_turns = {0: 1, 6: 0}.get(index, rng.randint(2, 4))
        earlier = [part(2, prompt=[4] * 3)] if index in (3, 8) else []
        others = {4: (1,), 9: (1, 2), 10: (2, 1)}.get(index, ())
        earlier += [part(2, prompt=[6] * number, conversation=number) for number in others]
        response = part(num_turns, prompt=[5] * rng.randint(1, 9), earlier=earlier)
        response.num_turns = num_turns + 2 * len(earlier)
        response.end_reason = "error" if index == 5 else "done"
        scores = [rng.randint(0, 8) / 4 for _ in range(response.num_turns)]
        sample = Sample(index, index // 4, index, Prompt([1, 2], "games", "", {}, []), response, score=1.0)
        sample.extras = {"turn_scores": scores}
        samples.append(sample)
    samples[2].score = math.nan
    samples[5].score, samples[5].extras = 0.0, {}
    return samples


def tokens_of_turns(sample: Sample) -> list[list[tuple[int, int]]]:
    """For each turn the places of its tokens: (sequence in the episode, place after its prompt). The turns of the
    episode's own conversation come first, then those of the others, as an environment lists its turn_scores."""
    found = []
    for number, (_, response) in sorted(enumerate(sample.sequences), key=lambda pair: pair[1][1].conversation):
        for is_sampled, run in groupby(enumerate(response.mask), key=lambda pair: pair[1]):
            if is_sampled:
                found.append([(number, place) for place, _ in run])
    return found


def expected(samples: list[Sample], penalty: list[float]) -> dict[tuple[int, int, int], float]:
    """(response, sequence, place) -> advantage, by loops."""
    rewards = {}
    for sample in samples:
        for turn in range(sample.response.num_turns):
            if not math.isnan(sample.score):
                score = sample.extras["turn_scores"][turn] if sample.index != 5 else 0.0
                rewards[sample.index, turn] = COEF * score - penalty[sample.index]
    found = {}
    for sample in samples:
        for turn, places in enumerate(tokens_of_turns(sample)):
            others = [reward for (index, number), reward in rewards.items()
                      if number == turn and samples[index].group == sample.group]
            advantage = 0.0
            if (sample.index, turn) in rewards:
                mean = sum(others) / len(others)
                std = (sum((reward - mean) ** 2 for reward in others) / max(len(others) - 1, 1)) ** 0.5
                advantage = (rewards[sample.index, turn] - mean) / (std + 1e-6)
            found |= {(sample.index, *place): advantage for place in places}
    return found


PENALTY = [0.25 * (index % 3) for index in range(12)]


def advantages(samples: list[Sample], world, num_minibatches: int, max_tokens: int, seed: int) -> dict:
    """As the scripts compute them, of this rank's tokens: (number of the sequence, place) -> advantage; and the
    rewards as PPO has them."""
    rollout = gather_rollout(samples)
    minibatches = to_minibatches(rollout, rollout.has_score, Layout(CONFIG, world, num_minibatches, max_tokens, seed))
    batch = Batch.cat([*chain(*minibatches)])
    batch.mask = batch.mask & (batch.tokens != REJECTED)                # as --correction.reject-over token does
    rewards = COEF * rollout.scores - torch.tensor(PENALTY, dtype=torch.float64)
    units, unit_rewards, group = to_units(batch, rollout, rewards, COEF, True)
    of_units = group_advantages(unit_rewards, group, norm_by_std=True)
    advantage = of_units[units.index][units.sequence_ids] * batch.mask
    reward = losses.on_last_token(unit_rewards.nan_to_num()[units.index], batch.mask, units.cu_seqlens)
    keys = zip(batch.number[batch.sequence_ids].tolist(), batch.sequence_positions.tolist())
    values = zip(batch.mask.tolist(), advantage.tolist(), reward.tolist())
    return {key: value for key, value in zip(keys, values) if key[0] >= 0}


def by_place(found: dict) -> dict[tuple[int, int, int], tuple[float, float]]:
    """(response, sequence, place after the prompt) -> (advantage, reward), of the tokens with mask."""
    first, places = 0, {}
    for sample in make_samples():
        for number, (prompt, response) in enumerate(sample.sequences):
            for place in range(len(response.tokens)):
                has_mask, *values = found.get((first + number, len(prompt) + place), (False,))
                if has_mask:
                    places[sample.index, number, place] = tuple(values)
        first += len(sample.sequences)
    return places


@pytest.fixture(scope="module")
def one_rank(world):
    return by_place(advantages(make_samples(), world, 1, 10_000, 0))


def test_a_turn_is_compared_with_the_same_turn_of_the_group(one_rank):
    samples = make_samples()
    want = expected(samples, PENALTY)
    tokens = {(s.index, n, place): token for s in samples for n, (_, part) in enumerate(s.sequences)
              for place, token in enumerate(part.tokens)}
    assert {s.response.num_turns for s in samples} >= {0, 1, 2, 3, 4, 6}
    assert len(one_rank) > 60 and sum(tokens[place] == REJECTED for place in want) > 1
    assert len({round(advantage, 6) for advantage, _ in one_rank.values()}) > 12
    trained = {place for place in want if tokens[place] != REJECTED and place[0] != 2}
    assert one_rank.keys() == trained
    assert all(one_rank[place][0] == pytest.approx(want[place], abs=1e-9) for place in trained)


def test_ppo_has_the_reward_on_the_last_token_of_its_turn(one_rank):
    for sample in make_samples():
        for turn, places in enumerate(tokens_of_turns(sample)):
            kept = [(sample.index, *place) for place in places if (sample.index, *place) in one_rank]
            scores = sample.extras.get("turn_scores") or [0.0] * 9
            want = COEF * scores[turn] - PENALTY[sample.index]
            rewards = [one_rank[place][1] for place in kept]
            assert rewards == ([0.0] * (len(kept) - 1) + [want] if kept else [])


def test_the_layout_decides_nothing(one_rank, world):
    for num_minibatches, max_tokens, seed in ((2, 40, 1), (3, 1, 2), (4, 25, 3)):
        assert by_place(advantages(make_samples(), world, num_minibatches, max_tokens, seed)) == one_rank


def test_ranks_decide_nothing(one_rank, tmp_path):
    launch("tests/engine/test_turns.py", tmp_path, ranks=2, warm=True)
    shares = [torch.load(tmp_path / f"turns_{rank}.pt") for rank in range(2)]
    assert all(shares) and not shares[0].keys() & shares[1].keys()
    assert by_place(shares[0] | shares[1]) == one_rank


def test_with_one_turn_each_it_is_the_usual_advantage(world):
    """Closed form: the same rewards as responses."""
    samples = make_samples()
    for sample in samples:
        sample.response = Response([9, 9], [0.0, 0.0], "stop", [True, True], end_reason="done")
        sample.score = float(sample.index % 3)
        sample.extras = {"turn_scores": [sample.score]}
    rollout = gather_rollout(samples)
    layout = Layout(CONFIG, world, num_minibatches=1, max_tokens=10_000, seed=0)
    (minibatch,) = to_minibatches(rollout, rollout.has_score, layout)
    _, rewards, group = to_units(Batch.cat([*minibatch]), rollout, rollout.scores, 1.0, True)
    for function in (group_advantages, passk_advantages):
        assert torch.equal(function(rewards, group, True), function(rollout.scores, rollout.group, True))


@pytest.mark.parametrize(("extras", "said"), [
    ({}, "turn_scores is ''"),
    ({"turn_scores": [1.0, 2.0]}, r"turn_scores is \[1.0, 2.0\]"),
    ({"turn_scores": "[1.0, nan, 2.0]"}, r"turn_scores is '\[1.0, nan, 2.0\]'"),
    ({"turn_scores": [1.0, -1e39, 2.0]}, r"turn_scores is \[1.0, -1e\+39, 2.0\]"),
])
def test_wrong_turn_scores_are_refused(extras, said, world):
    samples = make_samples()
    samples[7].extras = extras
    samples[7].response.mask = [True, False, True, False, True]
    samples[7].response.tokens, samples[7].response.logp = [9] * 5, [0.0] * 5
    rollout = gather_rollout(samples)
    batch = Batch.build([[1]], [[2]])
    rule = r"one number a turn, of at most 1e\+09 in size, here 3$"
    with pytest.raises(ValueError, match=f"row 7 of --train-data: {said}, with --advantage-per-step .* {rule}"):
        to_units(batch, rollout, rollout.scores, 1.0, True)


def test_a_role_is_compared_with_the_same_role_of_the_group(world):
    """Sequences of critics with a reward of their own, of a helper without one, and of the episodes themselves, one of
    which failed, and one of which has the helper twice."""
    samples = make_samples()
    for sample in samples:
        roles = ["critic"] if sample.index % 3 else ["critic", "helper", "helper"]
        sample.response.earlier = [Response([3, 4], [-0.5] * 2, "stop", [True] * 2, prompt=[2], conversation=n + 1,
                                            role=role) for n, role in enumerate(roles)]
        sample.score = math.nan if sample.index == 2 else float(sample.index)
        sample.extras = {} if sample.index == 5 else {"critic_score": float(sample.index**2 % 7)}
    rollout = gather_rollout(samples)
    layout = Layout(CONFIG, world, num_minibatches=1, max_tokens=10_000, seed=0)
    (minibatch,) = to_minibatches(rollout, rollout.has_score, layout)
    batch = Batch.cat(minibatch)
    rewards = COEF * rollout.scores - torch.tensor(PENALTY, dtype=torch.float64)
    units, of_units, group = to_units(batch, rollout, rewards, COEF, False, True)
    found = group_advantages(of_units, group, norm_by_std=False)[units.index][units.sequence_ids]
    all_rewards = {}
    for sample in samples:
        score = 0.0 if sample.index == 5 else sample.score
        for number, (_, part) in enumerate(sample.sequences):
            own = sample.extras.get("critic_score", score) if part.role == "critic" else score
            own = 0.0 if sample.index == 5 else own
            if part.num_sampled and not math.isnan(score):
                all_rewards[sample.index, number] = (part.role, COEF * own - PENALTY[sample.index])
    checked = 0
    first = [0, *accumulate(len(sample.sequences) for sample in samples)]
    at = {number: found[batch.sequence_ids == i] for i, number in enumerate(batch.number.tolist())}
    for (index, number), (role, reward) in all_rewards.items():
        others = [r for (i, _), (name, r) in all_rewards.items() if name == role and i // 4 == index // 4]
        expected = reward - sum(others) / len(others)
        assert at[first[index] + number].tolist() == pytest.approx([expected] * len(at[first[index] + number]))
        checked += expected != 0
    assert checked > 15 and {role for role, _ in all_rewards.values()} == {"", "critic", "helper"}


def test_a_step_without_any_turn_has_one_unit_without_a_reward(world):
    """All episodes failed before the first reply, or returned without one."""
    samples = make_samples()[:4]
    for sample in samples:
        sample.response = Response([], [], "stop", [], end_reason="done")
        sample.extras = {"turn_scores": []}
    rollout = gather_rollout(samples)
    layout = Layout(CONFIG, world, num_minibatches=1, max_tokens=10_000, seed=0)
    (minibatch,) = to_minibatches(rollout, rollout.has_score, layout)
    batch = Batch.cat([*minibatch])
    units, rewards, group = to_units(batch, rollout, rollout.scores, 1.0, True)
    assert rewards.isnan().tolist() == [True] and group_advantages(rewards, group, True).tolist() == [0]
    assert (units.to_tokens(group_advantages(rewards, group, True)) == 0).all() and len(units.index) == len(batch.index)


if __name__ == "__main__":
    joined = ranks.init()
    mine = [sample for sample in make_samples() if sample.group % 2 == joined.rank]
    torch.save(advantages(mine, joined, 2, 40, 1), f"{sys.argv[1]}/turns_{joined.rank}.pt")
    ranks.shutdown()
