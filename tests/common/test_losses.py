"""Losses, KL, value loss, GAE, whitening, weights and token selection against the oracles, and their closed forms."""

import dataclasses
import functools
import math
import sys

import pytest
import torch

import grpo_variants
import rloo
from common.batch import Batch
from common.losses import check_group, clip_stats, gae, kl_estimate, mean_kl, on_last_token, token_weights
from common.rollout import Minibatch
from common.segments import segment_cumsum, segment_mean, segment_sum, whiten
from ppo import adapt_kl_coef, explained_variance, value_loss
from tests import oracles
from tests.common.weigh import weigh
from tests.conftest import launch
from tests.oracles import AGGREGATIONS
from variants.losses import FUNCTIONS, LOSSES, Tokens
from variants.selection import covariances, select_clip_cov, select_kl_cov

F64, F32 = torch.float64, torch.float32
TOLERANCE = {F64: 1e-10, F32: 2e-5}      # relative to max(1, |oracle|); float32 holds a log-prob of 50 to 4e-6


def on_tensors(function):
    """A loss as a function of the tensors that its `Tokens` hold."""
    def call(logp, old_logp, advantage, mask, cu_seqlens, *bounds, selected=None, **numbers):
        return function(Tokens(logp, old_logp, advantage, mask, cu_seqlens, selected), *bounds, **numbers)

    return call


POLICY_LOSSES = {name: functools.partial(on_tensors(FUNCTIONS[name]),
                                         **d.numbers | ({"beta": 0.7} if name == "dro" else {}))
                 for name, d in LOSSES.items()}
CLIPS = {name: (d.clip_low, d.clip_high) for name, d in LOSSES.items()}
CLIPS["gspo"] = (0.1, 0.1)                # its 4e-4 would clip almost every random sequence
KL_KINDS = [kind + plus for kind in ("k1", "abs", "k2", "mse", "k3", "low_var_kl") for plus in ("", "+")]


def resolve_loss(name, clip_low, clip_high, clip_dual, aggregation, numbers):
    bounds = {"clip_low": clip_low, "clip_high": clip_high, "clip_dual": clip_dual}
    args = grpo_variants.Args("", (), loss=name, **bounds, aggregation=aggregation, loss_numbers=numbers)
    return grpo_variants.resolve_loss(args)


def error(got, want) -> float:
    """Worst error, relative to the larger of 1 and the oracle."""
    got, want = torch.as_tensor(got, dtype=F64).flatten(), torch.as_tensor(want, dtype=F64).flatten()
    assert got.shape == want.shape
    assert got.isfinite().all()
    return float(((got - want).abs() / want.abs().clamp(min=1)).max())


class Inputs(Batch):
    """A batch with further inputs of the oracles, [T] each, which do not travel."""

    logp = weight = selected = old_value = token_reward = None


def ragged(seed=0, dtype=F64, extreme=True) -> Inputs:
    """Prompts and responses: of length 1, all alike in reward, fully masked, with tool output, log ratios up to 50."""
    g = torch.Generator().manual_seed(seed)
    rand = lambda *n: torch.rand(*n, generator=g, dtype=F64)                                       # noqa: E731
    prompts, responses = [2, 1, 3, 2, 1, 4, 2, 3], [1, 7, 12, 5, 1, 9, 30, 6]
    masks = [[True] * n for n in responses]
    masks[2][4:8] = [False] * 4                                            # tool output in the middle
    masks[5][0], masks[5][6:9] = False, [False] * 3                        # ... at the beginning and the end
    masks[3] = [False] * 5                                                 # fully masked
    batch = Inputs.build([[5] * n for n in prompts], [[6] * n for n in responses], masks=masks)
    T = len(batch.tokens)
    logp = -0.05 - 3 * rand(T)
    old = (logp + 0.8 * (rand(T) - 0.5)).clamp(max=-1e-3)
    if extreme:
        at = batch.mask.nonzero()[:, 0]
        for i, t in enumerate(at[2::6].tolist()):
            shift = (50.0, -50.0, 3.0, -3.0)[i % 4]
            logp[t] = -1.0 if shift > 0 else -1.0 + shift
            old[t] = logp[t] - shift
    advantage = 2 * rand(8) - 1
    advantage[torch.tensor([1, 4])] = 0.0                                  # groups with all rewards alike
    batch.advantage = torch.where(batch.mask, advantage[batch.sequence_ids] + 0.1 * (rand(T) - 0.5) *
                                  (advantage[batch.sequence_ids] != 0), 0).to(dtype)
    batch.old_logp, batch.logp = old.to(dtype), logp.to(dtype)
    batch.weight = rand(T).to(dtype)
    batch.selected = rand(T) < 0.2
    batch.value, batch.returns, batch.old_value = (rand(3, T) * 4 - 2).to(dtype)
    batch.token_reward = torch.where(batch.mask, rand(T) - 0.5, 0).to(dtype)
    return batch


def as_lists(batch):
    names = ("logp", "old_logp", "advantage", "mask", "cu_seqlens", "weight", "selected", "value", "returns",
             "old_value", "token_reward")
    return type("Lists", (), {name: vars(batch)[name].tolist() for name in names})


def keywords(name, batch):
    return {"selected": batch.selected} if name in ("clip_cov", "kl_cov") else {}


def policy_errors(name, dtype, seed, extreme=True):
    batch = ragged(seed, dtype, extreme)
    x, (lo, hi) = as_lists(batch), CLIPS[name]
    logp = batch.logp.clone().requires_grad_()
    loss, stats = POLICY_LOSSES[name](logp, batch.old_logp, batch.advantage, batch.mask, batch.cu_seqlens, lo, hi,
                                      **keywords(name, batch))
    (grad,) = torch.autograd.grad((loss * batch.weight).sum(), logp)
    want, want_grad = oracles.policy_loss(name, x.logp, x.old_logp, x.advantage, x.mask, x.cu_seqlens, lo, hi,
                                          selected=x.selected, weight=x.weight, beta=0.7)
    assert sum(abs(w) > 1e-3 for w in want) > 20                           # the oracle is not trivially zero
    assert sum(abs(w) > 1e-3 for w in want_grad) > 5
    assert (loss[~batch.mask] == 0).all()
    assert (grad[~batch.mask] == 0).all()
    assert all((s[~batch.mask] == 0).all() and not s.requires_grad and s.isfinite().all() for s in stats.values())
    return error(loss.detach(), want), error(grad, want_grad)


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_loss_matches_the_oracle(name, dtype):
    for seed in range(3):
        for extreme in (False, True):
            assert max(policy_errors(name, dtype, seed, extreme)) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_loss_gradcheck(name):
    """Numerical derivatives. Where the loss detaches a factor they must differ, and the loss itself says its gradient:
    linear in logp (cispo, dppo), or equal to it where not clipped (gspo)."""
    batch = ragged(1, F64, extreme=False)
    logp = batch.logp.clone().requires_grad_()

    def f(logp):
        return POLICY_LOSSES[name](logp, batch.old_logp, batch.advantage, batch.mask, batch.cu_seqlens, *CLIPS[name],
                                   **keywords(name, batch))[0]

    if name not in ("cispo", "gspo", "dppo_tv", "dppo_kl"):
        assert torch.autograd.gradcheck(f, logp)
        return
    assert not torch.autograd.gradcheck(f, logp, raise_exception=False)
    loss = f(logp)
    (grad,) = torch.autograd.grad(loss.sum(), logp)
    assert (grad != 0).sum() > 5
    want = loss if name == "gspo" else loss / logp
    assert error(grad[grad != 0], want[grad != 0].detach()) < 1e-12


@pytest.mark.parametrize("name", [name for name, (low, _) in CLIPS.items() if low is not None])
def test_clip_bounds_may_differ_from_token_to_token(name):
    """A tensor of bounds: each token as with its own bound as a number, for losses whose tokens do not meet."""
    low, high = CLIPS[name]
    batch = ragged()
    is_wide = torch.arange(len(batch.tokens)) % 2 == 0
    batch.advantage = torch.arange(len(batch.tokens)).double().sin() * batch.mask
    more = {"selected": torch.zeros_like(batch.mask)} if name == "clip_cov" else {}

    def loss(clip_low, clip_high):
        inputs = (batch.logp, batch.old_logp, batch.advantage, batch.mask, batch.cu_seqlens)
        return POLICY_LOSSES[name](*inputs, clip_low, clip_high, **more)[0]

    narrow, wide_loss = high / 100, loss(low, 2 * high)
    if name == "gmpo":                                                  # a product over the response: one bound for all
        assert torch.equal(loss(torch.full_like(batch.logp, low), torch.full_like(batch.logp, high)), loss(low, high))
        return
    mixed = loss(low, torch.where(is_wide, torch.tensor(2 * high, dtype=F64), torch.tensor(narrow, dtype=F64)))
    assert torch.equal(mixed[is_wide], wide_loss[is_wide])
    assert torch.equal(mixed[~is_wide], loss(low, narrow)[~is_wide])
    assert not torch.equal(mixed, wide_loss) and not torch.equal(mixed, loss(low, narrow))


def test_policy_losses_never_read_what_is_masked():
    for name, function in POLICY_LOSSES.items():
        batch = ragged(2)
        results = []
        for junk in (0.0, math.nan):
            values = [torch.where(batch.mask, x, junk) for x in (batch.logp, batch.old_logp, batch.advantage)]
            values[0].requires_grad_()
            loss, _ = function(*values, batch.mask, batch.cu_seqlens, *CLIPS[name], **keywords(name, batch))
            results.append(torch.autograd.grad(loss.sum(), values[0])[0])
        assert torch.equal(*results), name


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_the_ratio_is_one_and_the_gradient_is_reinforce(name):
    """With logp = old_logp every loss of the table has REINFORCE's gradient, clips nothing and has KL 0."""
    batch = ragged(3)
    logp = batch.old_logp.clone().requires_grad_()
    none = torch.zeros_like(batch.mask)
    kw = {"selected": none} if keywords(name, batch) else {}
    loss, stats = POLICY_LOSSES[name](logp, batch.old_logp, batch.advantage, batch.mask, batch.cu_seqlens,
                                      *CLIPS[name], **kw)
    weigh([batch], "seq-mean-token-mean")
    weight = batch.extra["weight"]
    (grad,) = torch.autograd.grad((loss * weight).sum(), logp)
    advantage = batch.advantage
    if name == "gmpo":                                                     # one advantage a sequence
        advantage = segment_mean(advantage, batch.mask, batch.cu_seqlens)[batch.sequence_ids]
    want = torch.where(batch.mask, -advantage * weight, 0)
    assert want.abs().max() > 1e-3
    assert error(grad, want) < 1e-12
    assert (stats["actor/ratio"][batch.mask] == 1).all()
    for stat in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl"):
        assert (stats[stat] == 0).all()


def test_clip_statistics_count_the_clipped_tokens():
    """Six tokens by hand: clip 0.2 / 0.28, dual clip 3. The first has an advantage between 0 and 1."""
    ratio = torch.tensor([1.5, 1.2, 0.5, 0.5, 1.5, 4.0], dtype=F64)
    advantage = torch.tensor([0.5, 1.0, 1.0, -1.0, -1.0, -1.0], dtype=F64)
    mask, cu = torch.ones(6, dtype=torch.bool), torch.tensor([0, 6])
    loss, stats = POLICY_LOSSES["dapo"](ratio.log(), torch.zeros(6, dtype=F64), advantage, mask, cu, 0.2, 0.28)
    assert loss.tolist() == pytest.approx([-0.64, -1.2, -0.5, 0.8, 1.5, 3.0])
    assert stats["actor/pg_clipfrac_high"].tolist() == [1, 0, 0, 0, 0, 0]
    assert stats["actor/pg_clipfrac_low"].tolist() == [0, 0, 0, 1, 0, 0]
    assert stats["actor/pg_clipfrac_lower"].tolist() == [0, 0, 0, 0, 0, 1]
    clipped = torch.tensor([1, 0, 0, 1, 0, 0], dtype=torch.bool)
    of_scripts = clip_stats(advantage, clipped, stats["actor/pg_clipfrac_lower"])
    assert all(of_scripts[name].tolist() == stats[name].tolist() for name in ("actor/pg_clipfrac_high",
                                                                             "actor/pg_clipfrac_low"))
    assert stats["actor/ratio"].tolist() == pytest.approx(ratio.tolist())


def test_clip_statistics_of_cispo_do_not_ask_for_the_advantages_sign():
    ratio = torch.tensor([1.5, 1.2, 0.85, 0.5], dtype=F64)
    mask, cu = torch.ones(4, dtype=torch.bool), torch.tensor([0, 4])
    for sign in (1, -1):
        advantage = torch.full((4,), sign, dtype=F64)
        _, stats = POLICY_LOSSES["cispo"](ratio.log(), torch.zeros(4, dtype=F64), advantage, mask, cu, 0.2, 0.28)
        assert stats["actor/pg_clipfrac"].tolist() == [1, 0, 0, 1]


def test_a_group_of_one_has_no_baseline():
    check_group(2)
    check_group(1, least=1)
    with pytest.raises(ValueError, match="--samples-per-prompt 1 must be at least 2: a group of one has no baseline"):
        check_group(1)


# --------------------------------------------------------------------------- KL

def kl_errors(kind, dtype, seed):
    batch = ragged(seed, dtype)
    logp = batch.logp.clone().requires_grad_()
    got = kl_estimate(logp, batch.old_logp, kind)
    (grad,) = torch.autograd.grad((got * batch.weight).sum(), logp)
    pairs = [oracles.kl(kind, a, b) for a, b in zip(batch.logp.tolist(), batch.old_logp.tolist())]
    return error(got.detach(), [p[0] for p in pairs]), error(
        grad, [p[1] * w for p, w in zip(pairs, batch.weight.tolist())])


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("kind", KL_KINDS)
def test_kl_estimate_matches_the_oracle(kind, dtype):
    assert max(max(kl_errors(kind, dtype, seed)) for seed in range(3)) < TOLERANCE[dtype]


def test_kl_estimators_closed_forms():
    """k3 >= 0; over a whole distribution k1 and k3 average to KL, and k1+'s gradient averages to the gradient of KL."""
    logits = torch.randn(50, dtype=F64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ref = torch.randn(50, dtype=F64, generator=torch.Generator().manual_seed(1)).log_softmax(0)
    logp = logits.log_softmax(0)
    p = logp.detach().exp()
    exact = (logp.exp() * (logp - ref)).sum()
    (exact_grad,) = torch.autograd.grad(exact, logits, retain_graph=True)
    assert (kl_estimate(logp, ref, "k3") >= 0).all()
    for kind in ("k1", "k3", "k1+", "k3+", "k2"):
        estimate = (p * kl_estimate(logp, ref, kind)).sum()
        (grad,) = torch.autograd.grad(estimate, logits, retain_graph=True)
        assert (kind == "k2") or estimate.item() == pytest.approx(exact.item(), abs=1e-12)
        unbiased = torch.allclose(grad, exact_grad, atol=1e-12)
        assert unbiased == (kind in ("k1+", "k3+", "k2")), kind


def test_the_adaptive_kl_coefficient():
    coef = 0.1
    for kl, n, want in ((2.2, 100, 0.1 * 1.01), (50.0, 100, 0.101 * 1.02), (0.0, 500, 0.10302 * 0.9)):
        coef = adapt_kl_coef(coef, kl, 2.0, 1000, n)
        assert coef == pytest.approx(want, rel=1e-12)


def test_the_kl_in_the_reward_is_a_mean_over_responses():
    """Responses whose KL is 1 and 5 (9 is a tool's token), and 2; one without a sampled token."""
    batch = Batch.build([[1], [1, 1], [1]], [[6, 6, 6], [6], [6]],
                        masks=[[True, False, True], [True], [False]])
    kl = torch.tensor([7, 1, 9, 5, 7, 7, 2, 7, 7], dtype=F64)
    assert mean_kl(kl, batch) == 2.5                                      # not 8 / 3, the mean over tokens
    assert mean_kl(torch.tensor([7.0, 7.0], dtype=F64), batch.dummy()) == 0


# --------------------------------------------------------------------------- critic, advantages

def test_gpg_scales_by_the_responses_of_unequal_groups():
    """Seven scored responses, three of them in a group of equal rewards: alpha = 7 / 4. Lost ones count nowhere."""
    lost = math.nan
    rewards = torch.tensor([1, 0, lost, 1, 1, 1, lost, lost, lost, 0, 2, lost], dtype=F64)
    group = torch.arange(4).repeat_interleave(3)
    unused = torch.zeros(12)
    advantages = rloo.scaled_baseline(rewards, group, unused, unused)
    want = [0.875, -0.875, lost, 0, 0, 0, lost, lost, lost, -1.75, 1.75, lost]
    assert advantages.tolist() == pytest.approx(want, nan_ok=True)
    alone = rloo.scaled_baseline(rewards[:3], group[:3] + torch.tensor([0, 1, 1]), unused, unused)
    assert alone.tolist() == pytest.approx([0, 0, lost], nan_ok=True)       # groups of one scored response are equal
    whole = rloo.scaled_baseline(rewards[:2], group[:2], unused, unused)
    assert whole.tolist() == [0.5, -0.5]                                    # no equal group: alpha = 1


def value_errors(dtype, seed):
    batch = ragged(seed, dtype)
    x, value = as_lists(batch), batch.value.clone().requires_grad_()
    loss, stats = value_loss(value, batch.old_value, batch.returns, batch.mask, 0.5)
    (grad,) = torch.autograd.grad((loss * batch.weight).sum(), value)
    want = oracles.value_loss(x.value, x.old_value, x.returns, x.mask, 0.5, x.weight)
    clipped = sum(w == 0 and m for w, m in zip(want[1], x.mask))
    assert 0 < clipped < 40
    assert stats["critic/vf_clipfrac"].sum() == clipped
    return error(loss.detach(), want[0]), error(grad, want[1])


@pytest.mark.parametrize("dtype", [F64, F32])
def test_value_loss_matches_the_oracle(dtype):
    assert max(max(value_errors(dtype, seed)) for seed in range(3)) < TOLERANCE[dtype]


def test_value_loss_gradcheck():
    b = ragged(1)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, b.old_value, b.returns, b.mask)[0],
                                    b.value.clone().requires_grad_())


def test_explained_variance_matches_the_oracle():
    batch = ragged(4)
    x = as_lists(batch)
    got = explained_variance(batch.value, batch.returns, batch.mask)
    assert got == pytest.approx(oracles.explained_variance(x.value, x.returns, x.mask), abs=1e-12)
    assert explained_variance(batch.returns, batch.returns, batch.mask) == 1.0
    assert explained_variance(batch.value, torch.ones_like(batch.value), batch.mask) == 0.0


GAE_SETTINGS = ((1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.97, 0.0))


def gae_error(dtype, seed):
    batch, worst = ragged(seed, dtype), 0.0
    x = as_lists(batch)
    for gamma, lam in GAE_SETTINGS:
        want = oracles.gae(x.token_reward, x.value, x.mask, x.cu_seqlens, gamma, lam)
        assert max(map(abs, want[0])) > 0.5
        got = gae(batch.token_reward, batch.value, batch.mask, batch.cu_seqlens, gamma, lam)
        worst = max(worst, *(error(*pair) for pair in zip(got, want)))
    return worst


@pytest.mark.parametrize("dtype", [F64, F32])
def test_gae_matches_the_definition(dtype):
    assert max(gae_error(dtype, seed) for seed in range(3)) < TOLERANCE[dtype]


def test_reward_goes_to_the_last_token_that_was_sampled():
    """A tool's token, the prompt alone, and a response without a sampled token get nothing."""
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 0, 0, 1, 0, 0], dtype=torch.bool)
    cu_seqlens = torch.tensor([0, 3, 7, 9, 11], dtype=torch.int32)
    got = on_last_token(torch.tensor([2.0, 3.0, 5.0, 7.0]), mask, cu_seqlens)
    assert got.tolist() == [0, 0, 2, 0, 3, 0, 0, 0, 5, 0, 0]


def test_defaults_are_the_papers_and_wrong_bounds_are_refused():
    """The defaults are those of papers, or of their authors' scripts (docs/from_verl.md): low, high, dual, aggregation.
    """
    assert {name: tuple(loss[:4]) for name, loss in LOSSES.items()} == {
        "ppo": (0.2, 0.2, 3.0, "token-mean"),
        "grpo": (0.2, 0.2, 3.0, "token-mean"),
        "dapo": (0.2, 0.28, 3.0, "token-mean"),
        "dr_grpo": (0.2, 0.2, 3.0, "seq-mean-token-sum-norm"),
        "gspo": (3e-4, 4e-4, None, "seq-mean-token-mean"),
        "gmpo": (0.4, 0.4, None, "seq-mean-token-mean"),
        "cispo": (1.0, 0.28, None, "token-mean"),
        "sapo": (None, None, None, "seq-mean-token-mean"),
        "clip_cov": (1.0, 1.0, None, "token-mean"),
        "kl_cov": (None, None, None, "token-mean"),
        "dppo_tv": (0.15, 0.15, None, "token-mean"),
        "dppo_kl": (0.05, 0.05, None, "token-mean"),
        "dro": (None, None, None, "token-mean"),
        "reinforce": (None, None, None, "token-mean"),
    }
    assert {name: loss.numbers for name, loss in LOSSES.items() if loss.numbers} == {
        "sapo": {"tau_pos": 1.0, "tau_neg": 1.05}, "clip_cov": {"fraction": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
        "kl_cov": {"fraction": 2e-4, "cov_kl_coef": 1.0}, "dppo_tv": {"max_ratio": 20.0},
        "dppo_kl": {"max_ratio": 20.0}, "dro": {"beta": 0.0},
    }
    assert resolve_loss("dapo", None, None, None, None, {})[:4] == (0.2, 0.28, 3.0, "token-mean")
    assert resolve_loss("gspo", None, 1e-3, None, None, {})[:4] == (3e-4, 1e-3, None, "seq-mean-token-mean")
    assert resolve_loss("cispo", None, None, None, "token-sum", {})[:4] == (1.0, 0.28, None, "token-sum")
    assert resolve_loss("sapo", None, None, None, None, {"tau_neg": 2.0}).numbers == {"tau_pos": 1.0, "tau_neg": 2.0}
    assert LOSSES["sapo"].numbers["tau_neg"] == 1.05                       # the table itself stays
    given = resolve_loss("dr_grpo", 0.1, None, None, None, {})
    assert given.describe() == "dr_grpo, clip_low 0.1, clip_high 0.2, clip_dual 3, seq-mean-token-sum-norm"
    with pytest.raises(ValueError, match=r"--clip-high 0.1: the loss kl_cov has no such bound"):
        resolve_loss("kl_cov", None, 0.1, None, None, {})
    for name, numbers, message in (
        ("dro", {}, "--loss-numbers beta 0: must be above 0, and --loss dro has only these: beta"),
        ("grpo", {"beta": 0.1}, "--loss-numbers beta 0.1: .* --loss grpo has only these: none"),
        ("clip_cov", {"cov_high": -1.0}, "--loss-numbers cov_high -1: .* only these: fraction, cov_low, cov_high"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve_loss(name, None, None, None, None, numbers)


def test_running_sums_restart_with_each_sequence():
    batch = ragged(0)
    got = segment_cumsum(batch.value, batch.cu_seqlens)
    for span in oracles.spans(batch.cu_seqlens.tolist()):
        assert error(got[span], [math.fsum(batch.value[span.start : t + 1].tolist()) for t in span]) < 1e-12


@pytest.mark.parametrize(("name", "numbers"), [
    ("sapo", {"tau_pos": 0.5, "tau_neg": 3.0}), ("kl_cov", {"coef": 0.2}), ("dppo_tv", {"cap": 1.5}),
    ("dppo_kl", {"cap": 1.5}), ("dro", {"beta": 2.0})])
def test_numbers_of_a_loss_are_used(name, numbers):
    batch = ragged(1)
    x, (lo, hi) = as_lists(batch), (0.9, 0.9) if name.startswith("dppo") else CLIPS[name]
    ours = {"coef": "cov_kl_coef", "cap": "max_ratio"}
    logp = batch.logp.clone().requires_grad_()
    arguments = {ours.get(number, number): value for number, value in numbers.items()} | keywords(name, batch)
    inputs = (batch.old_logp, batch.advantage, batch.mask, batch.cu_seqlens)
    loss, _ = on_tensors(FUNCTIONS[name])(logp, *inputs, lo, hi, **arguments)
    (grad,) = torch.autograd.grad((loss * batch.weight).sum(), logp)
    (want, want_grad), (usual, _) = (
        oracles.policy_loss(name, x.logp, x.old_logp, x.advantage, x.mask, x.cu_seqlens, lo, hi, selected=x.selected,
                            weight=x.weight, **({"beta": 0.7} | more)) for more in (numbers, {}))
    assert max(error(loss.detach(), want), error(grad, want_grad)) < 1e-10
    assert max(abs(a - b) for a, b in zip(want, usual)) > 0.01             # the number matters


def test_gae_closed_forms():
    """gamma = lambda = 1: return minus value. One reward at the end, value 0: gamma ** distance, holes not counted."""
    batch = ragged(5)
    reward_sum = segment_sum(batch.token_reward, batch.cu_seqlens)
    reward = torch.zeros_like(batch.value)
    for s in range(len(batch)):
        kept = [t for t in range(batch.cu_seqlens[s], batch.cu_seqlens[s + 1]) if batch.mask[t]]
        if kept:
            reward[kept[-1]] = reward_sum[s]
    advantage, returns = gae(reward, batch.value, batch.mask, batch.cu_seqlens, 1.0, 1.0)
    want = torch.where(batch.mask, reward_sum[batch.sequence_ids] - batch.value, 0)
    assert error(advantage, want) < 1e-12
    assert error(returns, torch.where(batch.mask, reward_sum[batch.sequence_ids], 0)) < 1e-12
    ones, zero = torch.ones(5, dtype=F64), torch.zeros(5, dtype=F64)
    mask = torch.tensor([False, True, False, True, True])
    got, _ = gae(ones * torch.tensor([0, 0, 0, 0, 1]), zero, mask, torch.tensor([0, 5]), 0.5, 1.0)
    assert got.tolist() == [0, 0.25, 0, 0.5, 1.0]
    empty = gae(zero[:0], zero[:0], mask[:0], torch.tensor([0]), 1.0, 1.0)
    assert [x.shape for x in empty] == [(0,), (0,)]


def whiten_error(dtype, seed):
    batch = ragged(seed, dtype)
    return error(whiten(batch.value, batch.mask), oracles.whiten(batch.value.tolist(), batch.mask.tolist()))


@pytest.mark.parametrize("dtype", [F64, F32])
def test_whiten_matches_the_oracle(dtype):
    assert max(whiten_error(dtype, seed) for seed in range(3)) < TOLERANCE[dtype]


def test_whiten_edges():
    x, mask = torch.tensor([3.0, 7.0, 7.0]), torch.tensor([False, True, True])
    assert whiten(x, mask).tolist() == [0, 0, 0]                           # no variance: 0, not NaN
    assert whiten(x, torch.tensor([True, False, False])).tolist() == [0, 0, 0]     # a single token
    assert whiten(x, torch.zeros(3, dtype=torch.bool)).tolist() == [0, 0, 0]


# --------------------------------------------------------------------------- aggregation

def pieces(batch, cuts) -> list[Batch]:
    """The batch, cut into micro-batches at the given response numbers."""
    plain = Batch(**{f.name: vars(batch)[f.name] for f in dataclasses.fields(Batch)})
    return [plain.select(torch.tensor(cut)) for cut in cuts]


CUTS = ([range(8)], [[6, 1], [3], [0, 2, 7, 4], [5]], [[i] for i in range(8)])


def aggregation_errors(aggregation):
    batch = ragged(6)
    loss = batch.logp * batch.advantage + 1
    norm = 40.0 if aggregation.endswith("norm") else None
    want = oracles.aggregate(loss.tolist(), batch.mask.tolist(), batch.cu_seqlens.tolist(), aggregation, norm)
    batch.value = loss                                                     # travels with the tokens
    totals = []
    for cuts in CUTS:
        microbatches = pieces(batch, [list(c) for c in cuts])
        weigh(microbatches, aggregation, norm)
        totals.append(sum((b.value.double() * b.extra["weight"].double()).sum().item() for b in microbatches))
    return max(abs(total - want) / abs(want) for total in totals)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_weights_give_the_aggregate_for_any_cut(aggregation):
    assert aggregation_errors(aggregation) < 1e-6                          # weights are float32


def test_dr_grpo_is_grpo_without_the_length():
    """seq-mean-token-sum-norm over L is a token sum over S L, so every token weighs the same."""
    batch = ragged(6)
    weigh([batch], "seq-mean-token-sum-norm", 100.0)
    assert batch.extra["weight"][batch.mask].unique().tolist() == pytest.approx([1 / 700])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_responses_that_were_left_out_count_in_the_denominators(aggregation):
    """Responses that need no forward, left out but named by length, leave the others' weights as they were."""
    batch = ragged(6)
    some, rest = pieces(batch, [[6, 1, 3, 0], [2, 7, 4, 5]])
    weigh([some, rest], aggregation, 40.0)
    whole, left_out = some.extra.pop("weight"), torch.zeros(8, dtype=torch.float64)
    lengths = left_out.index_copy(0, rest.index, segment_sum(rest.mask.double(), rest.cu_seqlens))
    weigh([some], aggregation, 40.0, lengths)
    assert torch.equal(some.extra["weight"], whole)
    assert (whole > 0).equal(some.mask)
    weigh([some], aggregation, 40.0)
    assert torch.equal(some.extra["weight"], whole) == (aggregation == "token-sum")


def test_nothing_to_train_on_has_the_weight_0():
    batch = ragged(6)
    batch.mask = torch.zeros_like(batch.mask)
    for aggregation in AGGREGATIONS:
        weigh([batch], aggregation, 9.0)
        assert (batch.extra["weight"] == 0).all()


# --------------------------------------------------------------------------- weights against a loop

NORM = 40.0


def slow_weights(responses, aggregation, left_out=()):
    """The weight of each token, from the sentences of the papers. `responses`: name -> list of bool, all tokens of the
    response (of an episode: of all its sequences). `left_out`: lengths of responses that no rank holds."""
    lengths = [sum(mask) for mask in responses.values()] + [int(n) for n in left_out]
    tokens, counted = sum(lengths), sum(n > 0 for n in lengths)
    weights = {}
    for name, mask in responses.items():
        weights[name] = []
        for is_used in mask:
            weight = 0.0
            if is_used:
                if aggregation == "token-mean":
                    weight = 1 / tokens
                elif aggregation == "token-sum":
                    weight = 1.0
                elif aggregation == "seq-mean-token-sum":
                    weight = 1 / counted
                elif aggregation == "seq-mean-token-sum-norm":
                    weight = 1 / counted / NORM
                else:
                    weight = 1 / counted / sum(mask)
            weights[name].append(weight)
    return weights


def episodes(seed=6) -> Batch:
    """Eight sequences of six responses: 2 and 5 are episodes of two sequences each, in two places."""
    batch = pieces(ragged(seed), [list(range(8))])[0]
    batch.index = torch.tensor([0, 1, 2, 3, 4, 5, 2, 5])
    return batch


def by_response(batches, values) -> dict[int, list]:
    """[T] of each micro-batch -> response -> the values of all its tokens, sequence by sequence."""
    rows = {}
    for batch, x in zip(batches, values, strict=True):
        for number, index, span in zip(batch.number.tolist(), batch.index.tolist(), oracles.spans(
                batch.cu_seqlens.tolist())):
            if index >= 0:                                                 # not a dummy
                rows[index, number] = [x[t].item() for t in span]
    return {index: [x for (of, _), row in sorted(rows.items()) if of == index for x in row]
            for index in sorted({of for of, _ in rows})}


def own_masks(batches, seed=0) -> list[torch.Tensor]:
    """A term on some of the sampled tokens: about half of them, and none of response 4."""
    found = []
    for batch in batches:
        numbers = 31 * batch.number[batch.sequence_ids] + batch.sequence_positions + seed
        found.append(batch.mask & (numbers % 2 == 0) & (batch.index[batch.sequence_ids] != 4))
    return found


EPISODE_CUTS = ([range(8)], [[6, 1], [3], [0, 2, 7, 4], [5]], [[i] for i in range(8)])
LEFT_OUT = {"none": (), "two": (5, 11)}


def left_out_lengths(lengths) -> torch.Tensor:
    """Responses 6, 7 ... that no rank runs."""
    return torch.tensor([0.0] * 6 + list(lengths), dtype=F64)


@pytest.mark.parametrize(("with_masks", "left_out"), [(False, "none"), (False, "two"), (True, "none")])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_token_weights_match_a_loop(aggregation, with_masks, left_out):
    """With left-out responses or masks of its own, for any cut, with a dummy among the micro-batches."""
    batch = episodes()
    values, sums = torch.arange(len(batch.tokens)).double().sin(), []
    batch.value = values
    (used,) = own_masks([batch]) if with_masks else [batch.mask]
    assert 0 < int(used.sum()) <= int(batch.mask.sum())
    want = slow_weights(by_response([batch], [used]), aggregation, LEFT_OUT[left_out])
    for cuts in EPISODE_CUTS:
        microbatches = [*pieces(batch, [list(cut) for cut in cuts]), batch.dummy()]
        minibatch = Minibatch(microbatches, left_out_lengths(LEFT_OUT[left_out]))
        arguments = {"norm_length": NORM} if aggregation.endswith("norm") else {}
        if with_masks:
            arguments |= {"masks": own_masks(microbatches)}
        weights = token_weights(minibatch, aggregation, **arguments)
        assert {weight.dtype for weight in weights} == {F32}
        assert not weights[-1].any()                                       # the dummy's
        got = by_response(microbatches, weights)
        assert got.keys() == want.keys()
        assert max(abs(a - b) / max(b, 1e-9) for i in want for a, b in zip(got[i], want[i], strict=True)) < 1e-6
        sums.append(sum((b.value * w.double()).sum().item() for b, w in zip(microbatches, weights)))
    assert sums == pytest.approx([sums[0]] * len(sums), rel=1e-12)


def test_masks_and_leaving_out_exclude_each_other():
    """What was left out cannot be asked for its mask: also where the mask is the default one."""
    batch = episodes()
    for masks in ([batch.mask], own_masks([batch])):
        with pytest.raises(ValueError, match=r"2 responses .*left out.*give skip_zero_advantage=False"):
            token_weights(Minibatch([batch], left_out_lengths((5, 11))), "token-mean", masks)
    every_ran = Minibatch([batch], left_out_lengths(()))
    assert torch.equal(token_weights(every_ran, "token-mean", [batch.mask])[0],
                       token_weights(every_ran, "token-mean")[0])


def test_a_mask_on_tokens_that_were_not_sampled_is_refused():
    """On one token of the prompt, in the second of two micro-batches."""
    first, second = pieces(episodes(), [[0, 1, 2, 3], [4, 5, 6, 7]])
    masks = [first.mask.clone(), second.mask.clone()]
    masks[1][0] = True
    with pytest.raises(ValueError, match=r"that the policy did not sample.*combine it with microbatch.mask"):
        token_weights(Minibatch([first, second], left_out_lengths(())), "token-mean", masks)
    masks[1][0] = False
    token_weights(Minibatch([first, second], left_out_lengths(())), "token-mean", masks)


@pytest.mark.parametrize("aggregation", ["mean", "token_mean", "seq-mean", ""])
def test_an_unknown_aggregation_is_refused(aggregation):
    """Before, it was the mean over responses."""
    with pytest.raises(ValueError, match=rf"^token_weights: '{aggregation}' must be one of {', '.join(AGGREGATIONS)}$"):
        token_weights(Minibatch([episodes()], left_out_lengths(())), aggregation)


@pytest.mark.parametrize("norm_length", [None, 0, -1])
def test_a_constant_to_divide_by_must_be_given(norm_length):
    with pytest.raises(ValueError, match=rf"norm_length is {norm_length}: seq-mean-token-sum-norm divides by this"):
        token_weights(Minibatch([episodes()], left_out_lengths(())), "seq-mean-token-sum-norm", norm_length=norm_length)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_term_without_tokens_has_the_weight_0(aggregation):
    microbatches = pieces(episodes(), [[0, 1, 2, 3], [4, 5, 6, 7]])
    none = [torch.zeros_like(batch.mask) for batch in microbatches]
    weights = token_weights(Minibatch(microbatches, left_out_lengths(())), aggregation, none, norm_length=NORM)
    assert [len(weight) for weight in weights] == [len(batch.tokens) for batch in microbatches]
    assert not any(weight.any() for weight in weights)


def test_segment_helpers():
    batch = ragged(0)
    rows = oracles.spans(batch.cu_seqlens.tolist())
    x, m = batch.value.tolist(), batch.mask.tolist()
    assert error(segment_sum(batch.value, batch.cu_seqlens), [math.fsum(x[t] for t in r) for r in rows]) < 1e-12
    means = [math.fsum(x[t] for t in r if m[t]) / max(1, sum(m[t] for t in r)) for r in rows]
    assert error(segment_mean(batch.value, batch.mask, batch.cu_seqlens), means) < 1e-12
    assert segment_sum(torch.zeros(0), torch.tensor([0, 0, 0])).tolist() == [0, 0]
    assert torch.autograd.gradcheck(lambda v: segment_mean(v, batch.mask, batch.cu_seqlens),
                                    batch.value.clone().requires_grad_())


def test_check_finite_names_the_sample():
    batch = ragged(0, F32)
    batch.index = batch.index + 100
    batch.check_finite("old_logp", batch.old_logp)
    bad = batch.old_logp.clone()
    bad[int(batch.cu_seqlens[2]) + 4] = math.inf
    with pytest.raises(ValueError, match=r"old_logp is inf for response 102 at its token 4: "):
        batch.check_finite("old_logp", bad)


# --------------------------------------------------------------------------- token selection

def select(name, batches, seed=7):
    logps = [b.value for b in batches]
    return {"kl_cov": select_kl_cov, "clip_cov": select_clip_cov}[name](batches, logps, seed, settings_of(name))


def settings_of(name, **numbers):
    bounds = {"clip_low": 0.2, "clip_high": 0.2} if name == "clip_cov" else {}
    return LOSSES[name]._replace(**bounds, numbers={"fraction": 0.1, "cov_low": 0.01, "cov_high": 0.5} | numbers)


def selection_batch(seed=9):
    batch = ragged(seed, F64, extreme=False)
    batch.value = batch.logp                                               # travels with the tokens
    return batch


def chosen(batches, selected):
    return {(int(b.index[b.sequence_ids[t]]), int(b.sequence_positions[t])) for b, s in zip(batches, selected)
            for t in s.nonzero()[:, 0]}


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_selection_is_independent_of_the_layout(name):
    batch = selection_batch()
    results = []
    for cuts in CUTS:
        batches = pieces(batch, [list(c) for c in cuts])
        results.append(chosen(batches, select(name, batches)))
    assert results[0] == results[1] == results[2]
    assert len(results[0]) == int(0.1 * batch.mask.sum()) > 3
    if name == "clip_cov":
        assert results[0] != chosen([batch], select(name, pieces(batch, [list(range(8))]), seed=8))


def test_kl_cov_takes_the_largest_covariances():
    batch = selection_batch()
    x = as_lists(batch)
    cov = oracles.covariance(x.advantage, x.logp, x.mask)
    assert error(covariances([batch], [batch.logp])[0], cov) < 1e-12
    order = sorted((t for t in range(len(cov)) if x.mask[t]), key=lambda t: -cov[t])
    want = set(order[:int(0.1 * sum(x.mask))])
    assert set(select("kl_cov", [batch])[0].nonzero()[:, 0].tolist()) == want


def test_clip_cov_draws_among_the_unclipped_tokens_within_the_bounds():
    batch = selection_batch()
    x = as_lists(batch)
    cov = oracles.covariance(x.advantage, x.logp, x.mask)
    candidates = set()
    for t, m in enumerate(x.mask):
        q, a = math.exp(x.logp[t] - x.old_logp[t]), x.advantage[t]
        clipped = (a > 0 and q > 1.2) or (a < 0 and q < 0.8)
        if m and 0.01 < cov[t] < 0.5 and not clipped:
            candidates.add(t)
    drawn = [frozenset(select("clip_cov", [batch], seed)[0].nonzero()[:, 0].tolist()) for seed in range(300)]
    assert all(d <= candidates for d in drawn)
    assert len(set(drawn)) > 50
    counts = [sum(t in d for d in drawn) for t in candidates]              # every candidate has the same chance
    mean = 300 * len(drawn[0]) / len(candidates)
    assert all(abs(c - mean) < 5 * math.sqrt(mean) for c in counts)
    everything = select_clip_cov([batch], [batch.logp], 0, settings_of("clip_cov", fraction=1.0))[0]
    assert set(everything.nonzero()[:, 0].tolist()) == candidates


def test_selection_breaks_ties_and_survives_no_candidate():
    batch = selection_batch()
    batch.value = torch.zeros_like(batch.value)                            # all cov equal: 0
    selected = [select("kl_cov", [batch], seed)[0] for seed in (1, 2)]
    assert [int(s.sum()) for s in selected] == [int(0.1 * batch.mask.sum())] * 2
    assert not torch.equal(*selected)
    assert not select("clip_cov", [batch])[0].any()                        # no cov within the bounds
    assert int(select_kl_cov([batch], [batch.value], 0, LOSSES["kl_cov"])[0].sum()) == 1     # at least one token


# --------------------------------------------------------------------------- two ranks

def _on_rank(folder):
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    batch = selection_batch()
    batch.returns = batch.returns.double()
    mine = pieces(batch, [[6, 1], [3, 7]] if rank == 0 else [[0, 2], [4, 5]])
    local = Batch.cat(mine)
    out = {"index": local.index, "whiten": whiten(local.value, local.mask),
           "explained": explained_variance(local.value, local.returns, local.mask)}
    for name in ("clip_cov", "kl_cov"):
        out[name] = chosen(mine, select(name, mine))
    for aggregation in AGGREGATIONS:
        weigh(mine, aggregation, 9.0, torch.zeros(8, dtype=F64))
        out[aggregation] = torch.cat([b.extra["weight"] for b in mine])
    torch.save(out, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_agree_with_one(tmp_path):
    """Whitening, explained variance, selection and every denominator, with the batch spread unevenly over two ranks."""
    launch("tests/common/test_losses.py", tmp_path, ranks=2, warm=True)
    ranks = [torch.load(tmp_path / f"{r}.pt", weights_only=False) for r in range(2)]
    batch = selection_batch()
    whole = pieces(batch, [torch.cat([r["index"] for r in ranks]).tolist()])
    assert error(torch.cat([r["whiten"] for r in ranks]), whiten(whole[0].value, whole[0].mask)) < 1e-12
    for r in ranks:
        assert r["explained"] == pytest.approx(explained_variance(batch.value, batch.returns, batch.mask), abs=1e-12)
    for name in ("clip_cov", "kl_cov"):
        assert ranks[0][name] | ranks[1][name] == chosen(whole, select(name, whole))
        assert ranks[0][name]
        assert ranks[1][name]
    for aggregation in AGGREGATIONS:
        weigh(whole, aggregation, 9.0)
        assert error(torch.cat([r[aggregation] for r in ranks]), whole[0].extra["weight"]) < 1e-7


if __name__ == "__main__":
    _on_rank(sys.argv[1])
