"""What the policy's gradient is made of: against backward passes of transformers' model in float64, one a term."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import grpo
from common.batch import Batch
from common.flags.record import LogConfig
from common.metrics import Meter
from common.rollout import Rollout, Sample
from common.rollouts.gather import gather_rollout
from common.tracking.gradient_terms import GradientTerms, measure_strength
from common.tracking.phase import Phase
from common.tracking.reward_parts import shares_of_parts
from envs.runtime.response import Response
from tests.conftest import ROOT, launch, launch_all
from tests.tracking.terms_worker import ENTROPY, KL, LENGTH, PROMPT, numbers

BUDGETS = ("1", "3", "8")


@pytest.fixture(scope="module")
def found(tiny_llama, tmp_path_factory) -> dict[tuple[int, str], dict[str, float]]:
    """(ranks, responses in a micro-batch) -> metrics."""
    folder = tmp_path_factory.mktemp("terms")
    for ranks in (1, 2):
        launch("tests/tracking/terms_worker.py", tiny_llama, folder, ranks=ranks, warm=True)
    return {(ranks, size): json.loads((folder / f"found_{ranks}.json").read_text())[size]
            for ranks in (1, 2) for size in BUDGETS}


@pytest.fixture(scope="module")
def want(tiny_llama) -> dict[str, float]:
    """Each response by itself through transformers' model, in float64."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)
    known = numbers()
    losses = dict.fromkeys(("policy", "kl", "entropy", "other", "style", "right"), 0.0)
    strength = []
    count = int(known["lengths"].sum())
    for i, length in enumerate(known["lengths"].tolist()):
        tokens = torch.tensor(PROMPT + known["tokens"][i, :length].tolist())
        log_p = model(tokens[None]).logits[0, 2:-1].log_softmax(-1)
        logp = log_p.gather(1, tokens[3:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(1)
        ref = known["ref"][i, 3 : 3 + length].double()
        advantage = known["advantage"][i]
        losses["policy"] -= advantage * logp.sum() / count
        for part in ("style", "right"):
            losses[part] -= advantage * known[part][i] * logp.sum() / count
        losses["kl"] += KL * ((logp - ref) ** 2).sum() / 2 / count
        losses["entropy"] -= ENTROPY * entropy.sum() / count
        losses["other"] += LENGTH * logp.square().sum() / count
        strength.append(((KL * (logp - ref) - advantage + 2 * LENGTH * logp).abs() + ENTROPY).detach())
    gradients = {}
    for name, loss in losses.items():
        parts = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
        gradients[name] = torch.cat([part.flatten() for part in parts])
    terms = ("policy", "kl", "entropy", "other")
    whole = sum(gradients[name] for name in terms)
    metrics = {}
    for prefix, names, total in (("signal/share", terms, whole),
                                 ("signal/reward_share", ("style", "right"), gradients["policy"])):
        norms = sum(gradients[name].norm() for name in names)
        for name in names:
            metrics[f"{prefix}/{name}"] = float(gradients[name].norm() / norms)
            metrics[f"{prefix}/{name}_cosine"] = float(torch.cosine_similarity(gradients[name], total, dim=0))
    for kind, sizes in (("tokens", torch.cat(strength)), ("sequences", torch.stack([s.sum() for s in strength]))):
        metrics[f"signal/{kind}_frac"] = 1.0
        metrics[f"signal/effective_{kind}_frac"] = float(sizes.sum() ** 2 / sizes.square().sum() / len(sizes))
    return metrics


def test_shares_are_those_of_backward_passes_by_hand(found, want):
    """On one rank and two, with 1, 3 and 8 responses in a micro-batch."""
    assert all(0.05 < want[f"signal/share/{name}"] < 0.7 for name in ("policy", "kl", "entropy", "other"))
    assert want["signal/share/kl_cosine"] < 0.9 and want["signal/effective_sequences_frac"] < 0.95
    for metrics in found.values():
        seen = {name: x for name, x in metrics.items() if name.startswith("signal/")}
        assert seen == pytest.approx(want, rel=1e-4)


def test_the_update_is_the_same_to_the_bit(found):
    assert all(metrics["same"] and metrics["num"] > 10 for metrics in found.values())


# --------------------------------------------------------------------------- by hand

def test_tokens_and_sequences_that_have_a_gradient():
    """Two responses of 2 and 3 tokens after prompts of one, and one of a token that was left out."""
    batch = Batch.build([[1], [1]], [[2, 3], [4, 5, 6]])
    meter = Meter()
    measure_strength(torch.tensor([9.0, 1.0, 3.0, 9.0, 0.0, 0.0, 2.0]), batch, meter)
    meter.total("_signal/tokens_all", 1.0)
    meter.total("_signal/sequences_all", 1.0)
    assert meter.reduce() == pytest.approx({
        "signal/tokens_frac": 3 / 6, "signal/effective_tokens_frac": 6**2 / 14 / 6,
        "signal/sequences_frac": 2 / 3, "signal/effective_sequences_frac": 6**2 / 20 / 3,
    })
    meter = Meter()
    measure_strength(torch.zeros(2), Batch.build([[1]], [[2]]).dummy(), meter)
    assert set(meter.reduce().values()) == {0.0}


def opened(outputs: torch.Tensor) -> GradientTerms:
    """In a measured mini-batch, after a forward pass."""
    terms = GradientTerms(LogConfig(signal=2))
    terms.parameters = []
    terms.begin(4)
    terms._after_forward(None, (), (outputs,))
    return terms


def nested(terms: GradientTerms, x: torch.Tensor) -> torch.Tensor:
    return terms.term("b", 2 * terms.term("a", x * x))


def beside(terms: GradientTerms, x: torch.Tensor) -> torch.Tensor:
    terms.term("a", 2 * x)
    return x * x


@pytest.mark.parametrize(("error", "mistake"), [
    (r"term\('a'\) is a part of update.term\('b'\): name parts", nested),
    ("'a'. does not depend on what the policy returned", lambda terms, x: terms.term("a", ELSEWHERE * 2) + x),
    ("'other'.: this is the name of what no name", lambda terms, x: terms.term("other", x)),
    ("'a'. is not in the loss of this micro-batch", beside),
    ("names no term of its loss; write loss = loss", lambda terms, x: x * x),
    ("no output of the policy has a gradient yet, and update.done", lambda terms, x: ELSEWHERE * 2),
])
def test_a_careless_term_stops_in_a_line(error, mistake):
    def update() -> None:
        terms = opened(torch.nn.Linear(3, 1).weight[0] * 2)
        mistake(terms, terms.passes[0][1]).sum().backward()
        terms.after_backward(Batch.build([[1]], [[2, 3]]), Meter())
        terms.close()

    with pytest.raises((ValueError, RuntimeError), match=error) as found:
        update()
    assert "\n" not in str(found.value)


ELSEWHERE = torch.ones(3, requires_grad=True)


def test_a_term_is_what_was_given_where_nothing_is_measured():
    terms = GradientTerms(LogConfig(signal=2))
    terms.begin(3)
    values = torch.ones(2, requires_grad=True)
    assert terms.term("a", values) is values and terms.close() == {}
    assert Phase(None, "update_rival", []).term("policy", values) is values             # of a fork's second policy


def rollout_of(scores: list[float], **parts: list[float]) -> Rollout:
    """Groups of three responses."""
    samples = []
    for i, score in enumerate(scores):
        extras = {name: values[i] for name, values in parts.items()}
        prompt = SimpleNamespace(tokens=[1], images=None)
        samples.append(Sample(i, i // 3, 7, prompt, Response([2, 3], [-1.0, -1.0], "stop"), score=score, extras=extras))
    return gather_rollout(samples)


def test_shares_of_an_advantage_by_hand():
    """Scores a + b / 2 + c; the second group has one score, and one response of the third has none."""
    a = [0.0, 3.0, 0.0] + [1.0] * 3 + [2.0, 0.0, 5.0]
    b = [2.0, 2.0, 8.0, 4.0, 0.0, 2.0, 0.0, 0.0, 9.0]
    c = [1.0, 0.0, 0.0, 0.0, 2.0, 1.0, 0.0, 1.0, 0.0]
    scores = [x + y / 2 + z for x, y, z in zip(a, b, c)]
    scores[8] = float("nan")
    rollout = rollout_of(scores, a=a, b=b)
    advantages = grpo.group_advantages(rollout.scores, rollout.group, True)
    rollout.batch.advantage = rollout.to_tokens(advantages)
    shares = shares_of_parts(rollout, ["a", "b=0.5"])
    centred = [2 - 10 / 3, 4 - 10 / 3, 4 - 10 / 3]
    assert shares["a"].tolist() == pytest.approx([-1 / centred[0], 2 / centred[1], -1 / centred[2], 0, 0, 0, 2, 2, 0])
    assert shares["b"].tolist() == pytest.approx([-1 / centred[0], -1 / centred[1], 2 / centred[2], *[0] * 6])
    whole = shares["a"] + shares["b"] + shares["rest"]
    assert whole[advantages != 0].tolist() == pytest.approx([1.0] * 5) and whole.count_nonzero() == 5
    alone = rollout_of(a[:3], a=a[:3])
    alone.batch.advantage = alone.to_tokens(alone.scores - 1)
    assert shares_of_parts(alone, ["a"]).keys() == {"a"}


@pytest.mark.parametrize(("parts", "advantage", "error"), [
    (["b"], lambda r: r.scores - 1, "row 7 of --train-data: the reward function returned b = None, must be a number"),
    (["a"], lambda r: r.scores, "advantages are not the scores less their group's mean, times one factor for each"),
    (["a"], lambda r: 1 - r.scores, "advantages are not the scores less their group's mean"),
    (["a"], None, "advantages are not the scores less .* before run.to_minibatches"),
])
def test_parts_that_have_no_share_are_refused(parts, advantage, error):
    rollout = rollout_of([0.0, 1.0, 2.0], a=[0.0, 1.0, 2.0])
    if advantage is not None:
        rollout.batch.advantage = rollout.to_tokens(advantage(rollout))
    with pytest.raises(ValueError, match=error):
        shares_of_parts(rollout, parts)


@pytest.mark.parametrize("part", ["", "a=", "a=x", "a=nan", "rest", "=2"])
def test_what_is_no_name_of_a_part_is_refused(part):
    with pytest.raises(ValueError, match="must be NAME or NAME=FACTOR, and not rest"):
        LogConfig(signal=1, signal_rewards=(part,))


# --------------------------------------------------------------------------- in a script

@pytest.fixture(scope="module")
def runs(tiny_llama, small_train, tmp_path_factory) -> dict[str, list[dict[str, float]]]:
    folder = tmp_path_factory.mktemp("runs")
    flags = ["--model", tiny_llama, "--train-data", small_train, "--data.max-prompt-length", "200", "--rollout.engine",
             "hf", "--policy.compute-dtype", "float32", "--prompts-per-step", "4", "--samples-per-prompt", "4",
             "--rollout.max-response-length", "6", "--optim.lr", "1e-3", "--reward.num-workers", "1", "--total-steps",
             "3", "--minibatches-per-step", "2", "--save.hf", "never", "--reward.function",
             f"{ROOT}/tests/tracking/reward_of_parts.py:compute_score"]
    terms = ["--kl-loss-coef", "0.2", "--entropy-coef", "0.01"]
    parts = ["--log.signal", "2", "--log.signal-rewards", "odd", "vowels=0.1"]
    launch_all(folder, {
        "plain": ["grpo", *flags, *terms],
        "measured": ["grpo", *flags, *terms, *parts],
        "small": ["grpo", *flags, *terms, *parts, "--max-tokens-per-gpu", "250", "--policy.share-prompt"],
        "policy": ["grpo", *flags, *parts, "--policy.gradient-checkpointing", "True"],
    })
    return {name: [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
            for name in ("plain", "measured", "small", "policy")}


def without_signal(row: dict[str, float]) -> dict[str, float]:
    return {name: x for name, x in row.items() if not name.startswith((
        "signal/share", "signal/reward_share", "timing", "perf/", "rollout/tokens_per_s"))}


def test_a_run_is_the_same_with_and_without(runs):
    """All its numbers, to the bit; every second step is measured."""
    assert [*map(without_signal, runs["measured"])] == [*map(without_signal, runs["plain"])]
    measured = [any("signal/share" in name for name in row) for row in runs["measured"]]
    assert measured == [True, False, True] and runs["plain"][0]["signal/tokens_frac"] > 0


def test_shares_do_not_depend_on_the_budget_and_add_up(runs):
    """The policy is the reference in the first step, so its KL has no gradient, and nothing was left without a name."""
    for name in ("share", "reward_share"):
        for row, small in zip(runs["measured"], runs["small"]):
            shares = {key: x for key, x in row.items() if key.startswith(f"signal/{name}/")}
            shares.pop("signal/share/other_cosine", None)               # of rounding errors
            assert shares == pytest.approx({key: small[key] for key in shares}, rel=1e-3, abs=1e-4)
            if shares:
                assert sum(x for key, x in shares.items() if not key.endswith("_cosine")) == pytest.approx(1)
                assert row["signal/share/other"] < 1e-4
    first, _, third = runs["measured"]
    assert first.get("signal/share/kl", 0.0) == 0.0 and third["signal/share/kl"] > 0.01
    assert {f"signal/reward_share/{part}" for part in ("odd", "vowels", "rest")} <= first.keys()
    assert runs["policy"][0]["signal/share/policy"] == pytest.approx(1, abs=1e-4)
