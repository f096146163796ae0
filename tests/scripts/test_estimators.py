"""The optimal token baseline and GDPO against loops in float64."""

import itertools
import math
import random

import pytest
import torch

import grpo_variants
import rloo
from common.batch import Batch
from common.prompts import Prompt
from common.rollout import Response, Sample
from common.rollouts.gather import gather_rollout
from common.segments import segment_cumsum, whiten
from variants.optimal_baseline import optimal_token_baseline

GROUP = [0, 0, 0, 1, 1, 2, 2]
MASKS = [[True] * 4, [True, False, True, True, False], [True] * 7, [False, True], [True, True, True], [False, False],
         [True]]


def make_batch() -> Batch:
    """Groups of three and two responses, with tool output inside; one where one response has no sampled token."""
    generator = torch.Generator().manual_seed(4)
    batch = Batch.build([[1] * (1 + i % 3) for i in range(7)], [[2] * len(mask) for mask in MASKS], masks=MASKS)
    T = len(batch.tokens)
    batch.old_logp = torch.where(batch.mask, -2 * torch.rand(T, generator=generator, dtype=torch.float64), torch.nan)
    p = batch.old_logp.exp()
    others = (1 - p) ** 2 * torch.rand(T, generator=generator, dtype=torch.float64)
    batch.extra["sum_p2"] = torch.where(batch.mask, p**2 + others, torch.nan)
    batch.returns = torch.where(batch.mask, torch.randn(T, generator=generator, dtype=torch.float64), torch.nan)
    batch.rollout_weight = torch.where(batch.mask, 2 * torch.rand(T, generator=generator, dtype=torch.float64), 1)
    return batch


def make_rollout(extras=({},) * 7, scores=(0.0,) * 7):
    prompt = Prompt([1, 1], "source", "truth", {}, [])
    return gather_rollout([
        Sample(i, GROUP[i], 10 * i, prompt, Response([2] * len(mask), [0.0] * len(mask), "stop"), score=scores[i],
               extras=extras[i]) for i, mask in enumerate(MASKS)])


def token_baselines(batch: Batch) -> dict[tuple[int, int], float]:
    """(response, number of its sampled token) -> B_t, by the definition."""
    numbers = {}
    for i, (a, b) in enumerate(itertools.pairwise(batch.cu_seqlens.tolist())):
        sampled = [t for t in range(a, b) if batch.mask[t]]
        running = 0.0
        for n, t in enumerate(sampled):
            square = 1 - 2 * math.exp(batch.old_logp[t]) + float(batch.extra["sum_p2"][t])
            running += float(batch.rollout_weight[t]) ** 2 * square
            numbers[int(batch.index[i]), n] = float(batch.returns[t]), running
    found = {}
    for i, n in numbers:
        group = [numbers[j, n] for j in range(7) if GROUP[j] == GROUP[i] and (j, n) in numbers]
        found[i, n] = math.fsum(g * w for g, w in group) / (math.fsum(w for _, w in group) + 1e-8)
    return found


@pytest.mark.parametrize("order", [list(range(7)), [6, 2, 4, 0, 5, 3, 1]])
def test_the_optimal_token_baseline(order):
    batch, rollout = make_batch(), make_rollout()
    want = token_baselines(batch)
    batch = batch.select(torch.tensor(order))
    got = optimal_token_baseline(batch.returns, batch, rollout)
    assert (got[~batch.mask] == 0).all()
    of_token = [(int(batch.index[s]), int(n)) for s, n in zip(
        batch.sequence_ids[batch.mask], (segment_cumsum(batch.mask.long(), batch.cu_seqlens) - 1)[batch.mask])]
    assert len(of_token) == len(want) == 19
    assert max(abs(x - want[key]) for key, x in zip(of_token, got[batch.mask].tolist())) < 1e-10
    assert max(map(abs, want.values())) > 0.1
    alone = [key for key in want if key[0] == 2 and key[1] >= 4]          # past the ends of the others: no advantage
    for key in alone:
        own = of_token.index(key)
        assert float(got[batch.mask][own]) == pytest.approx(float(batch.returns[batch.mask][own]))


def test_the_optimal_baseline_is_optimal_for_weighted_gradients():
    """At a group's first tokens no other baseline gives a smaller sum of squared gradients by the logits, each of them
    importance weight * (return - baseline) * (one-hot - p). With --correction.weights the weights differ."""
    rng = random.Random(5)
    logits, chosen = [[rng.gauss(0, 1) for _ in range(5)] for _ in range(3)], [0, 3, 1]
    batch = Batch.build([[1]] * 3, [[2]] * 3)
    gradients, old, sum_p2 = [], [], []
    for row, word in zip(logits, chosen):
        p = [math.exp(z) / math.fsum(map(math.exp, row)) for z in row]
        gradients.append([(v == word) - p[v] for v in range(5)])
        old.append(math.log(p[word]))
        sum_p2.append(math.fsum(x * x for x in p))
    at = batch.mask.nonzero()[:, 0]
    assert len(at) == 3

    def on_tokens(values):
        return torch.full(batch.mask.shape, torch.nan, dtype=torch.float64).index_put_((at,), torch.tensor(
            values, dtype=torch.float64))

    returns, weights = [1.0, 0.0, 0.3], [0.2, 2.0, 1.1]
    batch.old_logp, batch.extra["sum_p2"], batch.rollout_weight = map(on_tokens, (old, sum_p2, weights))
    prompt = Prompt([1], "source", "truth", {}, [])
    rollout = gather_rollout([Sample(i, 0, 0, prompt, Response([2], [0.0], "stop"), score=0.0) for i in range(3)])
    (got,) = set(optimal_token_baseline(on_tokens(returns), batch, rollout)[at].tolist())

    def power(baseline):
        return math.fsum((w * (r - baseline) * x) ** 2 for w, r, row in zip(weights, returns, gradients) for x in row)

    assert all(power(got) < power(got + step) for step in (-0.1, -1e-3, 1e-3, 0.1))


def test_the_baseline_of_tokens_that_are_almost_certain_is_no_larger_than_the_returns():
    """Their squared gradients are smaller than what float32 loses of them: some come out below 0."""
    batch, rollout = make_batch(), make_rollout()
    gap = 3e-5 * torch.rand(len(batch.tokens), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batch.old_logp = torch.where(batch.mask, torch.log1p(-gap).float(), torch.nan)
    batch.extra["sum_p2"] = torch.where(batch.mask, ((1 - gap) ** 2 + gap**2).float(), torch.nan)
    squares = (1 - 2 * batch.old_logp.double().exp() + batch.extra["sum_p2"].double())[batch.mask]
    assert (squares < 0).any() and (squares > 0).any()
    batch.returns = torch.where(batch.mask, (batch.index % 2).double()[batch.sequence_ids], torch.nan)
    got = optimal_token_baseline(batch.returns, batch, rollout)[batch.mask]
    assert got.min() >= 0 and 0.01 < got.max() <= 1


def test_a_dummy_changes_no_token_baseline():
    batch, rollout = make_batch(), make_rollout()
    joined = Batch.cat([batch, batch.dummy()])
    got = optimal_token_baseline(joined.returns, joined, rollout)
    assert torch.equal(got[:-2], optimal_token_baseline(batch.returns, batch, rollout)) and (got[-2:] == 0).all()


def test_gdpo():
    """Each component normalised in its group, their sum with factors, that whitened over all tokens. Lost responses are
    in no group, those of a group whose component does not vary have 0 of it."""
    rng = random.Random(2)
    scores = [1.0, 0.0, math.nan, 1.0, 2.0, 0.0, 0.5]
    parts = {"accuracy": [rng.random() for _ in GROUP], "form": [rng.random() * 9 for _ in GROUP]}
    parts["form"][3] = parts["form"][4]
    factors = {"form": 0.25, "accuracy": 2.0}
    extras = [{name: values[i] for name, values in parts.items()} | {"text": "x"} for i in range(7)]
    extras[2] = {}                                                        # its reward function failed
    rollout = make_rollout(extras, scores)
    rewards = grpo_variants.decoupled_rewards(rollout, rollout.scores, factors)
    assert rewards.isnan().tolist() == [i == 2 for i in range(7)]
    got = grpo_variants.ADVANTAGES["gdpo"](rewards, rollout.group, True)
    want = []
    for i in range(7):
        members = [j for j in range(7) if GROUP[j] == GROUP[i] and not math.isnan(scores[j])]
        total = 0.0
        for name, factor in factors.items():
            values = [parts[name][j] for j in members]
            mean = math.fsum(values) / len(values)
            std = math.sqrt(math.fsum((x - mean) ** 2 for x in values) / max(len(values) - 1, 1))
            total += factor * (parts[name][i] - mean) / (std + 1e-6)
        want.append(0.0 if i == 2 else total)
    assert got.tolist() == pytest.approx(want, abs=1e-10) and max(map(abs, want)) > 0.3
    batch = make_batch()
    per_token = got[batch.index][batch.sequence_ids] * batch.mask
    white = whiten(per_token, batch.mask)
    sampled = [x for x, m in zip(per_token.tolist(), batch.mask.tolist()) if m]
    mean = math.fsum(sampled) / len(sampled)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in sampled) / (len(sampled) - 1) + 1e-8)
    assert white[batch.mask].tolist() == pytest.approx([(x - mean) / std for x in sampled], abs=1e-10)


def test_a_component_that_is_missing_is_named():
    extras = [{"form": 1.0}] * 7
    extras[4] = {"form": "much"}
    with pytest.raises(ValueError, match="row 40 of --train-data: the reward function returned form = 'much'"):
        grpo_variants.decoupled_rewards(make_rollout(extras), torch.zeros(7), {"form": 1.0})
    with pytest.raises(ValueError, match=r"row 0 of .* returned accuracy = None, must be a number"):
        grpo_variants.decoupled_rewards(make_rollout(extras), torch.zeros(7), {"accuracy": 1.0})


@pytest.mark.parametrize(("advantage", "components"), [("gdpo", {}), ("group", {"form": 1.0})])
def test_gdpo_needs_components_and_nothing_else_has_them(advantage, components):
    args = grpo_variants.Args(model="m", train_data=("x",), advantage=advantage, reward_components=components)
    with pytest.raises(ValueError, match=r"--reward-components .* go with --advantage gdpo, which needs them"):
        grpo_variants.check(args)


def test_remax_needs_responses_of_one_policy():
    args = rloo.Args(model="m", train_data=("x",), baseline="remax")
    rloo.check(args)
    args.rollout.in_flight = 1.5
    with pytest.raises(ValueError, match=r"--rollout.in-flight 1.5: --baseline remax needs all of one policy"):
        rloo.check(args)
