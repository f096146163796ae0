"""Rollout correction against a float64 loop, value by value: every option, every preset, every layout, 1 and 2 ranks.

The oracle is plain Python, from algorithms.md, "Rollout correction": responses are lists, no packing.
Under torchrun this file is the worker of its own two-rank test.
"""

import dataclasses
import itertools
import json
import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev, stdev

import pyarrow.parquet as pq
import pytest
import torch
import tyro

from common import correction
from common.batch import Batch
from common.correction import CorrectionConfig, resolve_correction
from common.flags.correction import PRESETS
from common.metrics import Meter
from common.parallel import ranks
from tests.common.weigh import weigh
from tests.conftest import ROOT, launch
from tests.oracles import policy_loss
from variants.losses import FUNCTIONS, LOSSES, Tokens

NUM_RESPONSES = 16
MINIBATCHES = [[0, 3, 4, 5, 8, 11, 14, 15], [1, 2, 6, 7, 9, 10, 12, 13]]
LAYOUTS = {                                     # [mini-batch][micro-batch] -> responses; none: a dummy
    "whole": [[ids] for ids in MINIBATCHES],
    "single": [[[i] for i in ids] for ids in MINIBATCHES],
    "mixed": [[ids[5:][::-1], [], ids[1:5], ids[:1]] for ids in MINIBATCHES],
}
TOLERANCE = 1e-7                                # relative; weights are float32 at the end, everything else float64


# --------------------------------------------------------------------------- the oracle

@dataclass
class Sampled:
    """One response: the prompt's length, and per response token what the policy sampled and thought."""

    prompt: int
    mask: list[bool]
    roll: list[float]
    old: list[float]


def float32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32))


def make_step(seed: int) -> list[Sampled]:
    """Ragged responses, where engine and trainer differ by 1e-4 to 2 nats a token and thrice by more than 20, with tool
    output inside; an empty one, one without sampled tokens, one of one token."""
    rng, step = random.Random(seed), []
    for i in range(NUM_RESPONSES):
        length = {0: 1, 5: 0}.get(i, rng.randint(2, 12))
        mask = [i != 9 and (t < 2 or rng.random() < 0.8) for t in range(length)]
        roll = [float32(-rng.expovariate(1.0)) for _ in mask]
        old = [float32(x + rng.gauss(0, (1e-4, 0.03, 0.3, 2.0)[i % 4])) for x in roll]
        if i == 0:
            old[0] = float32(roll[0] + 0.3)                               # one whose largest k1 is negative
        for t in {3: [0], 10: [0, 1]}.get(i, []):                         # the second one's product is over e^20, too
            old[t] = float32(roll[t] + (-1) ** i * rng.uniform(21, 30))
        step.append(Sampled(rng.randint(1, 5), mask, roll, old))
    return step


STEP = make_step(1)


CRITERION = ("reject", "reject_over", "reject_below", "reject_above")


def in_tuples(options: dict) -> dict:
    """One criterion of rejection, as a tuple of one, as flags have it; none: of none."""
    if options.get("reject") == "none":
        return options | dict.fromkeys(CRITERION, ())
    single = {name: (options[name],) for name in CRITERION if name in options and not isinstance(options[name], tuple)}
    return options | single


def make_config(**options) -> CorrectionConfig:
    return CorrectionConfig(**in_tuples(options))


def clamp(x: float, low: float, high: float) -> float:
    return low if x < low else high if x > high else x


def oracle(step: list[Sampled], o: dict) -> tuple[list[list[bool]], list[list[float]], dict[str, float], float]:
    """Which tokens remain, their weights, all metrics, and how near any decision was to its bound."""
    nearest, keeps, applied = math.inf, [], [[] for _ in step]
    differences = [[a - b for a, b in zip(r.old, r.roll)] for r in step]
    log_ratios = [[clamp(d, -20, 20) for d in ds] for ds in differences]

    def inside(x: float, low: float, high: float) -> bool:
        nonlocal nearest
        nearest = min(nearest, *(abs(x - bound) for bound in (low, high) if bound))         # 0: no floor
        return low <= x <= high

    for r, ls in zip(step, log_ratios):                                   # rejection
        keeps.append(list(r.mask))
        for kind, over, low, high in zip(*(in_tuples(o)[name] for name in CRITERION)):
            estimates = []
            for l in ls:
                if kind == "k1":
                    estimates.append(-l)
                elif kind == "k2":
                    estimates.append(l * l / 2)
                else:
                    estimates.append(math.exp(l) - l - 1)
            sampled = [x for x, m in zip(estimates, r.mask) if m]         # whatever another criterion rejects
            if not sampled:
                continue
            if over == "token":
                verdict = [not m or inside(x, low, high) for x, m in zip(estimates, r.mask)]
            else:
                total = math.fsum(sampled)
                x = {"sum": total, "mean": total / len(sampled), "max": max(sampled)}[over]
                verdict = [inside(x, low, high)] * len(ls)
            keeps[-1] = [k and v for k, v in zip(keeps[-1], verdict)]

    raws, of_tokens = [], []                                              # one entry a token, or a response
    for i, (ds, keep) in enumerate(zip(differences, keeps)):
        kept = [d for d, k in zip(ds, keep) if k]
        if o["weights"] in ("none", "token"):
            logs = kept
        elif not kept:
            logs = []
        elif o["weights"] == "sequence":
            logs = [math.fsum(kept)]
        else:
            logs = [math.fsum(kept) / len(kept)]
        for l in logs:
            w = math.exp(clamp(l, -20, 20))
            within = inside(w, o["lower"], o["upper"])
            raws.append(w)
            applied[i].append(w if within else 0.0 if o["outside"] == "zero" else clamp(w, o["lower"], o["upper"]))
            of_tokens.extend(applied[i][-1:] * (len(kept) // len(logs)))

    weights = []                                                          # of each response token that remains
    for ids in MINIBATCHES:
        units = [w for i in ids for w in applied[i]]
        if o["batch_normalise"] and math.fsum(units) > 0:
            for i in ids:
                applied[i] = [w / fmean(units) for w in applied[i]]
    for own, keep in zip(applied, keeps):
        if o["weights"] == "none":
            weights.append([1.0 for k in keep if k])
        else:
            weights.append(own if o["weights"] == "token" else own * sum(keep))

    rows = [[(l, a, b) for l, a, b, m in zip(ls, r.old, r.roll, r.mask) if m] for ls, r in zip(log_ratios, step)]
    rows = [row for row in rows if row]                                   # before any rejection
    tokens = [x for row in rows for x in row]
    ppl_old = [math.exp(-fmean(a for _, a, _ in row)) for row in rows]
    ppl_roll = [math.exp(-fmean(b for _, _, b in row)) for row in rows]
    diffs = [abs(math.exp(a) - math.exp(b)) for _, a, b in tokens]
    log_diffs = [math.log(a) - math.log(b) for a, b in zip(ppl_old, ppl_roll)]
    lost = [m and not k for r, keep in zip(step, keeps) for m, k in zip(r.mask, keep) if m]
    metrics = {
        "kl": fmean(b - a for _, a, b in tokens),
        "k3_kl": fmean(math.exp(l) - 1 - l for l, _, _ in tokens),
        "training_ppl": fmean(ppl_old),
        "rollout_ppl": fmean(ppl_roll),
        "log_ppl_diff": fmean(log_diffs),
        "log_ppl_abs_diff": fmean(map(abs, log_diffs)),
        "ppl_ratio": fmean(a / b for a, b in zip(ppl_old, ppl_roll)),
        "chi2_token": fmean(math.exp(l) ** 2 for l, _, _ in tokens) - 1,
        "chi2_seq": fmean(math.exp(clamp(math.fsum(a - b for _, a, b in row), -20, 20)) ** 2 for row in rows) - 1,
        "rollout_rs_masked_fraction": fmean(lost),
        "rejected_frac": fmean(any(r.mask) and not any(keep) for r, keep in zip(step, keeps) if any(r.mask)),
    }
    if raws:
        extremes = raws if o["weights"] in ("sequence", "geometric") else of_tokens
        low = o["lower"] if o["outside"] == "zero" and o["lower"] else 1 / o["upper"]
        metrics |= {
            "rollout_is_mean": fmean(of_tokens),
            "rollout_is_std": pstdev(of_tokens),
            "rollout_is_max": max(extremes),
            "rollout_is_min": min(extremes),
            "rollout_is_eff_sample_size":
                math.fsum(of_tokens) ** 2 / (math.fsum(w * w for w in of_tokens) * len(of_tokens) or 1),
            "rollout_is_ratio_fraction_high": fmean(w > o["upper"] for w in raws),
            "rollout_is_ratio_fraction_low": fmean(w < low for w in raws),
        }
    metrics = {f"rollout_corr/{name}": x for name, x in metrics.items()} | {
        "training/rollout_probs_diff_mean": fmean(diffs),
        "training/rollout_probs_diff_max": max(diffs),
        "training/rollout_probs_diff_std": stdev(diffs),
    }
    return keeps, weights, metrics, nearest


# --------------------------------------------------------------------------- the module, through the script's lines

def resolve(options: dict, loss: str) -> CorrectionConfig:
    """As in a script that computes advantages after the rejection."""
    return resolve_correction(make_config(**options), loss, groups_after_rejection=True)


def make_batch(ids: list[int]) -> Batch:
    if not ids:
        return make_batch([1]).dummy()
    return Batch.build(
        [[7] * STEP[i].prompt for i in ids], [[8] * len(STEP[i].mask) for i in ids], index=ids,
        rollout_logps=[STEP[i].roll for i in ids], masks=[STEP[i].mask for i in ids],
    )


def old_logp(batch: Batch) -> torch.Tensor:
    """[T]; NaN wherever nothing was sampled, so that reading it is noticed."""
    rows = [[math.nan] * STEP[i].prompt + STEP[i].old for i in batch.index.tolist() if i >= 0]
    logp = torch.tensor(list(itertools.chain(*rows)) or [math.nan] * 2)
    return torch.where(batch.mask, logp, math.nan)


def denominators(microbatches: list[Batch]) -> tuple[float, ...]:
    """Of the token mean and of the mean over responses, of all ranks: from one token's weight, 0 without any."""
    found = []
    for aggregation in ("token-mean", "seq-mean-token-sum"):
        weigh(microbatches, aggregation, left_out=torch.zeros(NUM_RESPONSES, dtype=torch.float64))
        largest = max(ranks.all_gather_objects(max(float(batch.extra["weight"].max()) for batch in microbatches)))
        found.append(round(1 / largest) if largest else 0)
    return tuple(found)


def correct(layout, config: CorrectionConfig, num_updates: int, size: int = 1, rank: int = 0):
    """The script's lines. {response: tokens that remain (all positions), their weights}, rejected, metrics, counts."""
    meter, found, counts = Meter(), {}, []
    minibatches = [[make_batch(ids) for ids in microbatches[rank::size]] for microbatches in layout]
    if config.needs_old_logp(num_updates > 1):
        for batch in itertools.chain(*minibatches):
            batch.old_logp = old_logp(batch)
    rewards = torch.arange(NUM_RESPONSES, dtype=torch.float64) - 2
    left = correction.reject_and_weight(minibatches, rewards, config, meter)
    rejected = left.isnan()
    assert torch.equal(left[~rejected], rewards[~rejected])
    for microbatches in minibatches:
        counts.append(denominators(microbatches))
        for batch in microbatches:
            logp = old_logp(batch).requires_grad_()
            weight = correction.importance_weights(batch, logp, config, meter)
            assert weight.dtype == torch.float32 and weight.isfinite().all() and not weight.requires_grad
            assert config.bypass == (batch.old_logp is batch.rollout_logp and batch.old_logp is not None)
            for n, i in enumerate(batch.index.tolist()):
                span = slice(int(batch.cu_seqlens[n]), int(batch.cu_seqlens[n + 1]))
                if i >= 0:
                    keep = batch.mask[span]
                    found[i] = (keep[STEP[i].prompt :].tolist(), weight[span][keep].tolist())
                    assert not keep[: STEP[i].prompt].any()
    return found, rejected.tolist(), meter.reduce(), counts


# name -> what verl's method of that name returns, typed from its source: rollout_is, threshold or IcePop bounds,
# rollout_rs and its bounds (k1: of the ratio), bypass_mode and loss_type
VERL = {
    "disabled": (None, 2.0, None, None, None),
    "decoupled-token-is": ("token", 2.0, None, None, None),
    "decoupled-seq-is": ("sequence", 2.0, None, None, None),
    "decoupled-token-icepop": ("token", (0.5, 5.0), None, None, None),
    "decoupled-seq-is-rs": ("sequence", 2.0, "seq_sum_k1", (0.5, 2.0), None),
    "decoupled-geo-rs": (None, 2.0, "seq_mean_k1", (0.999, 1.001), None),
    "decoupled-geo-rs-token-tis": ("token", 2.0, "seq_mean_k1", (0.999, 1.001), None),
    "decoupled-geo-rs-seq-tis": ("sequence", 2.0, "seq_mean_k1", (0.999, 1.001), None),
    "decoupled-k3-rs": (None, 2.0, "seq_mean_k3", 0.01, None),
    "decoupled-k3-rs-token-tis": ("token", 2.0, "seq_mean_k3", 0.01, None),
    "decoupled-k3-rs-seq-tis": ("sequence", 2.0, "seq_mean_k3", 0.01, None),
    "bypass-ppo-clip": (None, 2.0, None, None, "ppo"),
    "bypass-ppo-clip-geo-rs": (None, 2.0, "seq_mean_k1", (0.999, 1.001), "ppo"),
    "bypass-ppo-clip-k3-rs": (None, 2.0, "seq_mean_k3", 0.01, "ppo"),
    "bypass-pg-is": ("sequence", 2.0, None, None, "reinforce"),
    "bypass-pg-token-icepop": ("token", (0.5, 5.0), None, None, "reinforce"),
    "bypass-pg-geo-rs": (None, 2.0, "seq_mean_k1", (0.999, 1.001), "reinforce"),
    "bypass-pg-geo-rs-token-tis": ("token", 2.0, "seq_mean_k1", (0.999, 1.001), "reinforce"),
    "bypass-pg-geo-rs-seq-tis": ("sequence", 2.0, "seq_mean_k1", (0.999, 1.001), "reinforce"),
}


def options_of(name: str) -> dict:
    """The same in the oracle's words."""
    weights, bounds, statistic, reject_bounds, loss = VERL[name]
    icepop = isinstance(bounds, tuple)
    lower, upper = bounds if icepop else (0.0, bounds)
    found = {"weights": weights or "none", "lower": lower, "upper": upper, "outside": "zero" if icepop else "clamp",
             "batch_normalise": False, "reject": "none", "reject_over": "mean", "reject_below": -math.inf,
             "reject_above": math.inf, "bypass": loss is not None}
    if statistic:
        _, over, kind = statistic.split("_")
        low, high = map(math.log, reject_bounds) if kind == "k1" else (-math.inf, reject_bounds)
        found |= {"reject": kind, "reject_over": over, "reject_below": low, "reject_above": high}
    return found


def make_cases() -> dict[str, tuple[dict, str]]:
    """Name -> options beside the defaults, loss."""
    cases = {}
    for level, (low, high, outside), normalise in itertools.product(
        ("token", "sequence", "geometric"),
        ((0.0, 2.0, "clamp"), (0.4, 1.7, "clamp"), (0.5, 5.0, "zero"), (0.0, 1.5, "zero")), (False, True),
    ):
        name = f"{level} {outside} [{low:g}, {high:g}]{' normalised' * normalise}"
        options = {"weights": level, "lower": low, "upper": high, "outside": outside, "batch_normalise": normalise}
        cases[name] = (options, "ppo")
    cases["token zero nothing left"] = ({"weights": "token", "lower": 1e9, "upper": 1e10, "outside": "zero",
                                                 "batch_normalise": True}, "ppo")
    bounds = {"k1": {"token": (-0.8, 0.6), "mean": (-0.2, 0.3), "max": (-0.1, 0.7), "sum": (-1.0, 0.9)},
              "k2": {"token": (-math.inf, 0.3), "mean": (-math.inf, 0.2), "max": (-1.0, 0.5), "sum": (-math.inf, 1.1)},
              "k3": {"token": (-math.inf, 0.3), "mean": (-math.inf, 0.2), "max": (-1.0, 0.5), "sum": (-math.inf, 1.1)}}
    for kind, over in itertools.product(bounds, ("token", "mean", "max", "sum")):
        low, high = bounds[kind][over]
        reject = {"reject": kind, "reject_over": over, "reject_below": low, "reject_above": high}
        cases[f"reject {over} {kind}"] = (reject, "ppo")
        for weights in ("token", "sequence", "geometric"):
            cases[f"reject {over} {kind}, {weights}"] = (reject | {"weights": weights}, "reinforce")
    for over, bypass in itertools.product(("token", "sum"), (False, True)):
        more = {"bypass": True} if bypass else {"batch_normalise": True, "rejected_leave_group": True}
        cases[f"reject {over}, sequence, {more}"] = ({
            "weights": "sequence", "reject": "k1", "reject_over": over, "reject_below": -0.4, "reject_above": 0.4,
        } | more, "reinforce")
    two = {"reject": ("k3", "k1"), "reject_over": ("token", "mean"), "reject_below": (-math.inf, -0.2),
           "reject_above": (0.3, 0.3)}
    cases["two criteria"] = (two | {"weights": "token"}, "ppo")
    cases["three criteria, sequence"] = ({
        "reject": ("k2", "k1", "k1"), "reject_over": ("max", "sum", "token"), "reject_below": (-math.inf, -1.0, -0.8),
        "reject_above": (0.5, 0.9, 0.6), "weights": "sequence", "batch_normalise": True}, "ppo")
    cases["nothing remains"] = ({"weights": "geometric", "reject": "k2", "reject_over": "sum",
                                         "reject_above": 0.0}, "ppo")
    for preset in VERL:
        cases[preset] = ({"preset": preset}, VERL[preset][4] or "ppo")
    return cases


CASES = make_cases()


def all_options(options: dict) -> dict:
    found = options_of(options.get("preset", "disabled"))
    return found | {name: x for name, x in options.items() if name != "preset"}


def errors(case: str, found, rejected, metrics) -> dict[str, float]:
    """Errors of weights and metrics, relative to max(1, |oracle|); masks and rejections are exact."""
    options, _ = CASES[case]
    keeps, weights, want, nearest = oracle(STEP, all_options(options))
    assert nearest > 1e-6 or case == "nothing remains", "a decision that rounding could turn shows nothing"
    assert sorted(found) == list(range(NUM_RESPONSES))
    for i, keep in enumerate(keeps):
        assert found[i][0] == keep, f"{case}: response {i}"
        assert len(found[i][1]) == len(weights[i]) == sum(keep)
    gone = [any(r.mask) and not any(keep) for r, keep in zip(STEP, keeps)]
    assert rejected == [x and options.get("rejected_leave_group", False) for x in gone]
    assert metrics.keys() == want.keys(), case
    pairs = {f"weight of {i}": zip(found[i][1], weights[i]) for i in found} | {k: [(metrics[k], want[k])] for k in want}
    return {name: max((abs(a - b) / max(1, abs(b)) for a, b in row), default=0.0) for name, row in pairs.items()}


def case_errors(case: str) -> dict[str, float]:
    """The worst of each over all layouts, old known before the update and not."""
    options, loss = CASES[case]
    config, worst, weights = resolve(options, loss), {}, []
    for layout, num_updates in itertools.product(LAYOUTS.values(), (1, 4)):
        found, rejected, metrics, counts = correct(layout, config, num_updates)
        remaining = [[sum(found[i][0]) for i in ids] for ids in MINIBATCHES]
        assert counts == [(sum(row), sum(map(bool, row))) for row in remaining]         # denominators
        weights.append({i: weight for i, (_, weight) in found.items()})
        for name, error in errors(case, found, rejected, metrics).items():
            worst[name] = max(error, worst.get(name, 0.0))
    assert all(other == weights[0] for other in weights) or config.batch_normalise      # bit by bit
    return worst


@pytest.mark.parametrize("case", CASES)
def test_every_option_and_preset_is_the_loop(case):
    found = case_errors(case)
    assert max(found.values()) < TOLERANCE, max(found, key=found.get)


def test_the_cases_are_hard_ones():
    """Guard: every option changes something, and rejections take some but not all."""
    results = {case: oracle(STEP, all_options(options)) for case, (options, _) in CASES.items()}
    for case, (_, weights, metrics, _) in results.items():
        options, share = all_options(CASES[case][0]), metrics["rollout_corr/rollout_rs_masked_fraction"]
        if options["reject"] != "none" and case != "nothing remains":
            assert 0.1 < share < 0.9, case
        if options["weights"] != "none" and case not in ("nothing remains", "token zero nothing left"):
            assert len({w for row in weights for w in row} - {0.0, 1.0}) > 1, case
    several = [json.dumps(results[case][1]) for case in CASES if case.startswith(("token", "sequence", "geometric"))]
    assert len(set(several)) == len(several) == 25
    log_ratios = [a - b for r in STEP for a, b, m in zip(r.old, r.roll, r.mask) if m]
    assert min(log_ratios) < -20 and max(log_ratios) > 20 and len(log_ratios) > 60
    assert any(True in r.mask[r.mask.index(False):] for r in STEP if False in r.mask)   # tool output inside
    assert any(r.mask and not any(r.mask) for r in STEP) and any(not r.mask for r in STEP)


def test_by_hand():
    """Two responses: ratios 2 and 1/4, tool output between them; one ratio 3/2."""
    log = math.log
    batch = Batch.build([[1], [1, 1]], [[5, 6, 7], [5]], masks=[[True, False, True], [True]],
                        rollout_logps=[[log(0.2), 0, log(0.8)], [log(0.5)]])
    logp = torch.tensor([9, log(0.4), 9, log(0.2), 9, 9, log(0.75)], requires_grad=True)

    def apply(**flags):
        meter, config = Meter(), resolve_correction(make_config(**flags), "ppo")
        correction.reject_and_weight([[batch]], torch.zeros(2), config, meter)
        return correction.importance_weights(batch, logp, config, meter)[batch.mask].tolist(), meter.reduce()

    assert apply(weights="token", upper=9.0)[0] == pytest.approx([2, 0.25, 1.5])
    assert apply(weights="token", lower=0.5, upper=1.8)[0] == pytest.approx([1.8, 0.5, 1.5])
    assert apply(weights="sequence")[0] == pytest.approx([0.5, 0.5, 1.5])
    assert apply(weights="geometric")[0] == pytest.approx([0.5**0.5, 0.5**0.5, 1.5])
    weights, metrics = apply(preset="decoupled-token-icepop")
    assert weights == pytest.approx([2, 0, 1.5])
    metrics = {name.removeprefix("rollout_corr/"): x for name, x in metrics.items()}

    def expect(**want):
        assert {name: metrics[name] for name in want} == pytest.approx(want)

    expect(kl=log(4 / 3) / 3, chi2_token=(4 + 1 / 16 + 9 / 4) / 3 - 1, chi2_seq=(1 / 4 + 9 / 4) / 2 - 1)
    expect(training_ppl=((0.4 * 0.2) ** -0.5 + 4 / 3) / 2)
    expect(**{"training/rollout_probs_diff_mean": 0.35, "training/rollout_probs_diff_max": 0.6,
              "training/rollout_probs_diff_std": ((0.15**2 + 0.25**2 + 0.1**2) / 2) ** 0.5})      # unbiased
    expect(rollout_is_mean=3.5 / 3, rollout_is_max=2, rollout_is_min=0)    # of token weights after truncation
    expect(rollout_is_eff_sample_size=3.5**2 / (4 + 9 / 4) / 3)
    expect(rollout_is_ratio_fraction_high=0, rollout_is_ratio_fraction_low=1 / 3)                   # 1/4 < lower
    metrics = {name.removeprefix("rollout_corr/"): x for name, x in apply(weights="sequence", upper=1.4)[1].items()}
    expect(rollout_is_mean=(0.5 + 0.5 + 1.4) / 3, rollout_is_max=1.5, rollout_is_min=0.5)           # over tokens
    expect(rollout_is_std=2**0.5 / 3 * 0.9, rollout_is_eff_sample_size=2.4**2 / (0.5 + 1.4**2) / 3)
    expect(rollout_is_ratio_fraction_high=0.5, rollout_is_ratio_fraction_low=0.5)                   # over responses


def test_log_ratios_are_summed_before_they_are_clamped():
    """30 nats up and 29 down are 1 nat: the response's weight is e, its mean ratio e^0.5."""
    batch = Batch.build([[1]], [[5, 6]], masks=[[True, True]], rollout_logps=[[-31.0, -1.0]])
    logp = torch.tensor([9.0, -1.0, -30.0])
    for weights, want in (("sequence", math.e), ("geometric", math.e**0.5)):
        config, meter = resolve_correction(CorrectionConfig(weights=weights, upper=9.0), "ppo"), Meter()
        weight = correction.importance_weights(batch, logp, config, meter)
        assert weight[batch.mask].tolist() == pytest.approx([want, want])
        assert meter.reduce()["rollout_corr/chi2_seq"] == pytest.approx(math.e**2 - 1)


def test_an_episode_leaves_its_group_with_its_last_sequence():
    """Of its sequences, wherever they are: one is lost and one is not; both are; one never had tokens and the other
    stays, or is lost; one loses a part. Only what lost all of its tokens has no reward."""
    near, far = 0.0, 3.0                                                  # nats between engine and trainer
    sequences = [(0, [far]), (0, [near, near]), (1, [far, far]), (1, [far]), (2, []), (2, [near]), (3, []), (3, [far]),
                 (4, [near, far]), (5, [])]
    config = resolve({"reject": "k2", "reject_over": "token", "reject_above": 1.0, "rejected_leave_group": True}, "ppo")
    rewards = torch.arange(6, dtype=torch.float64)
    for cuts in ([range(10)], [[0, 3, 4, 7, 9], [1, 2, 5, 6, 8]], [[i] for i in range(10)]):
        microbatches = []
        for numbers in cuts:
            index, gaps = zip(*(sequences[n] for n in numbers))
            batch = Batch.build([[7]] * len(gaps), [[8] * len(row) for row in gaps], index=[*index],
                                number=[*numbers], rollout_logps=[[-1.0 - gap for gap in row] for row in gaps])
            batch.old_logp = torch.where(batch.mask, -1.0, 0.0)
            microbatches.append(batch)
        microbatches.append(microbatches[0].dummy())                      # it is no sequence of response 0
        left = correction.reject_and_weight([microbatches[:1], microbatches[1:]], rewards, config, Meter())
        assert left.isnan().tolist() == [False, True, False, True, False, False]
        assert torch.equal(left[~left.isnan()], rewards[~left.isnan()])


# --------------------------------------------------------------------------- losses and gradients

def gradient_errors(loss: str, options: dict) -> tuple[float, float]:
    """Worst errors of weight * loss and of its gradient where logp has moved on from old; token-mean."""
    config, meter = resolve(options, loss), Meter()
    rng = torch.Generator().manual_seed(3)
    batch = make_batch(list(range(NUM_RESPONSES)))
    old, drift = old_logp(batch), 0.2 * torch.randn(len(batch.mask), generator=rng)
    if config.needs_old_logp(True):
        batch.old_logp = old
    correction.reject_and_weight([[batch]], torch.zeros(NUM_RESPONSES), config, meter)
    weigh([batch], "token-mean")
    advantage = torch.randn(NUM_RESPONSES, generator=rng)[batch.sequence_ids] * batch.mask
    logp = (old + drift).requires_grad_()
    tokens = Tokens(logp, batch.old_logp, advantage, batch.mask, batch.cu_seqlens)
    out, _ = FUNCTIONS[loss](tokens, 0.2, 0.2)
    out = out * correction.importance_weights(batch, logp, config, meter)
    (out * batch.extra["weight"]).sum().backward()

    after = (old + drift).tolist()                                        # bypass: weights of the current policy
    moved = [dataclasses.replace(r, old=after[int(a) + r.prompt : int(b)])
             for r, a, b in zip(STEP, batch.cu_seqlens, batch.cu_seqlens[1:])]
    keeps, weights, _, _ = oracle(STEP, all_options(options))
    if config.bypass:
        masks = [dataclasses.replace(r, mask=keep) for r, keep in zip(moved, keeps)]
        _, weights, _, _ = oracle(masks, all_options(options) | {"reject": "none"})
    mask = [m for r, keep in zip(STEP, keeps) for m in [False] * r.prompt + keep]
    anchor = [x for r in STEP for x in [0.0] * r.prompt + (r.roll if config.bypass else r.old)]
    flat, count = iter([w for row in weights for w in row]), sum(mask)
    scale = [next(flat) if m else 0.0 for m in mask]
    want, _ = policy_loss(loss, after, anchor, advantage.tolist(), mask, batch.cu_seqlens.tolist(), 0.2, 0.2,
                          weight=[1.0] * len(mask))
    _, grad = policy_loss(loss, after, anchor, advantage.tolist(), mask, batch.cu_seqlens.tolist(), 0.2, 0.2,
                          weight=[s / count for s in scale])
    want = [s * x for s, x in zip(scale, want)]
    assert any(g != 0 for g in grad) and count > 10
    return tuple(max(abs(a - b) / max(1, abs(b)) for a, b in zip(got.tolist(), oracle_))
                 for got, oracle_ in ((out, want), (logp.grad, grad)))


@pytest.mark.parametrize(("loss", "options"), [
    ("ppo", {"preset": "decoupled-token-is"}),
    ("ppo", {"preset": "decoupled-seq-is", "lower": 0.3}),
    ("reinforce", {"preset": "decoupled-token-icepop"}),
    ("ppo", {"preset": "bypass-ppo-clip"}),
    ("ppo", {"preset": "bypass-ppo-clip-k3-rs", "reject_above": 0.3}),
    ("reinforce", {"preset": "bypass-pg-is"}),
    ("reinforce", {"preset": "bypass-pg-geo-rs-seq-tis", "reject_below": -0.2, "reject_above": 0.3}),
    ("reinforce", {"weights": "geometric", "bypass": True, "reject": "k2", "reject_over": "token",
                   "reject_above": 0.3}),
], ids=lambda x: x if isinstance(x, str) else " ".join(map(str, x.values())))
def test_corrected_losses_and_their_gradients(loss, options):
    """ppo on p / p_old or p / p_rollout, reinforce with weights; the weights pass no gradient."""
    value, gradient = gradient_errors(loss, options)
    assert max(value, gradient) < 1e-6


# --------------------------------------------------------------------------- ranks

def test_two_ranks_are_the_loop(tmp_path):
    """Every case on two gloo ranks, one of which has dummies: same masks, weights, rejections and metrics on both."""
    launch("tests/common/test_correction.py", tmp_path, ranks=2, warm=True)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert first.keys() == second.keys() and len(first) == len(CASES) * 2
    for (case, layout), (found, rejected, metrics, counts) in first.items():
        others = second[case, layout]
        assert (rejected, metrics, counts) == others[1:], (case, layout)
        assert not found.keys() & others[0].keys()
        worst = errors(case, found | others[0], rejected, metrics)
        assert max(worst.values()) < TOLERANCE, (case, layout, max(worst, key=worst.get))
    assert sum(bool(first[case, "whole"][0]) != bool(second[case, "whole"][0]) for case in CASES) == len(CASES)


def work(folder: Path) -> None:
    world = ranks.init()
    results = {}
    for (case, (options, loss)), layout in itertools.product(CASES.items(), ("whole", "mixed")):
        config = resolve(options, loss)
        layouts = [mb + [[]] * (len(mb) % 2) for mb in LAYOUTS[layout]]
        results[case, layout] = correct(layouts, config, 4, world.size, world.rank)
    torch.save(results, folder / f"{world.rank}.pt")
    ranks.shutdown()


# --------------------------------------------------------------------------- grpo_variants.py

def test_the_script_rejects_and_normalises(tiny_llama, small_train, tmp_path):
    """bfloat16, so that engine and trainer differ a little; two ranks, two mini-batches, a response a micro-batch."""
    first, second = run(tiny_llama, small_train, tmp_path, "--correction.preset", "decoupled-geo-rs-token-tis",
                        "--correction.batch-normalise", "--correction.rejected-leave-group",
                        "--max-tokens-per-gpu", "8", "--minibatches-per-step", "2", "--samples-per-prompt", "6",
                        ranks=2)
    for row in (first, second):
        assert 0 < row["rollout_corr/rejected_frac"] < 1 and row["timing_s/old_log_prob"] > 0
        assert 0 < row["rollout_corr/rollout_rs_masked_fraction"] < 1
        assert 0 < row["rollout_corr/log_ppl_abs_diff"] < 0.01             # of all, not of those that remain
        assert 0.9 < row["rollout_corr/rollout_is_min"] < 1 < row["rollout_corr/rollout_is_max"] < 1.1
        assert 0 < row["actor/grad_norm"] < 100 and row["actor/skipped_steps"] == 0


def test_a_component_is_normalised_by_what_the_rejection_leaves(tiny_llama, small_train, tmp_path):
    """GDPO, one component: the mean and the standard deviation of a group are those of its responses that remain."""
    run(tiny_llama, small_train, tmp_path, "--correction.preset", "decoupled-geo-rs", "--samples-per-prompt", "6",
        "--correction.rejected-leave-group", "--total-steps", "1", "--log.rollouts-every", "1", "--advantage", "gdpo",
        "--reward-components", "length", "2",
        "--reward.function", f"{ROOT / 'tests/scripts/reward_parts.py'}:compute_score")
    rows, changed = pq.read_table(tmp_path / "rollouts/step_000001.parquet").to_pylist(), 0
    assert len(rows) == 24
    for group in range(4):
        members = [row for row in rows if row["group"] == group]
        lengths = [json.loads(row["reward_parts"])["length"] for row in members]
        kept = [x for x, row in zip(lengths, members) if any(row["trained"])]
        for x, row in zip(lengths, members):
            spread = stdev(kept) if len(kept) > 1 else 0.0
            want = 2 * (x - fmean(kept)) / (spread + 1e-6) if any(row["trained"]) else math.nan
            assert row["reward"] == pytest.approx(want, rel=1e-5, abs=1e-5, nan_ok=True)
        changed += 1 < len(kept) < 6 and abs(stdev(kept) - stdev(lengths)) > 0.01
    assert changed


def test_the_script_bypasses(tiny_llama, small_train, tmp_path):
    """Two updates a step without a forward pass for old log-probs; the second one's ratio is to the engine's."""
    first, second = run(tiny_llama, small_train, tmp_path, "--correction.preset", "bypass-ppo-clip",
                        "--minibatches-per-step", "2")
    for row in (first, second):
        assert "timing_s/old_log_prob" not in row
        assert row["rollout_corr/kl"] == pytest.approx(row["actor/ppo_kl"], rel=1e-4) != 0
        assert row["rollout_corr/rejected_frac"] == 0 < row["actor/grad_norm"] < 100
        assert row["rollout_corr/k3_kl"] > 0.001                           # half of the tokens saw a moved policy


def run(model: str, data: str, folder: Path, *flags: str, ranks: int = 0) -> list[dict]:
    launch("grpo_variants.py", "--model", model, "--train-data", data, "--run-dir", folder,
           "--data.max-prompt-length", "200",
           "--rollout.engine", "hf", "--policy.compute-dtype", "bfloat16", "--reward.num-workers", "1",
           "--save.hf", "never", "--prompts-per-step", "4", "--samples-per-prompt", "3", "--total-steps", "2",
           "--reward.function", "tests/scripts/reward_by_length.py:compute_score", "--rollout.max-response-length", "6",
           "--optim.lr", "0.01", *flags, ranks=ranks, warm=True)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# --------------------------------------------------------------------------- flags

def test_presets_are_verls():
    assert list(PRESETS) == list(VERL)
    for name, (*_, loss) in VERL.items():
        config = resolve_correction(CorrectionConfig(preset=name), loss or "ppo")
        want = in_tuples(options_of(name)) | {"preset": name, "rejected_leave_group": False}
        assert dataclasses.asdict(config) == want


def test_who_needs_old_log_probs():
    def needs(num_updates, **flags):
        loss = "reinforce" if "pg" in flags.get("preset", "") else "ppo"
        return resolve_correction(make_config(**flags), loss).needs_old_logp(num_updates > 1)

    assert not needs(1) and needs(2) and not needs(1, preset="decoupled-seq-is")
    assert not needs(8, preset="bypass-ppo-clip") and not needs(8, preset="bypass-pg-is")
    assert needs(1, preset="decoupled-geo-rs") and needs(1, preset="bypass-pg-geo-rs")
    assert needs(1, weights="token", batch_normalise=True)


def test_flags_override_the_preset():
    args = ["--preset", "decoupled-geo-rs-token-tis", "--upper", "3", "--reject-above", "0.5"]
    config = resolve_correction(tyro.cli(CorrectionConfig, args=args), "ppo")
    assert (config.weights, config.upper, config.reject_above) == ("token", 3.0, (0.5,))
    assert config.reject_below == pytest.approx((-0.001,), rel=1e-3)
    args = ["--reject", "k1", "k3", "--reject-below", "-1", "-inf", "--reject-above", "0.5", "2"]
    config = resolve_correction(tyro.cli(CorrectionConfig, args=args), "ppo")
    assert (config.reject, config.reject_over, config.reject_below) == (("k1", "k3"), ("mean", "mean"), (-1, -math.inf))
    args = ["--preset", "decoupled-geo-rs-token-tis"]
    config = resolve_correction(tyro.cli(CorrectionConfig, args=[*args[:2], "--reject", "none"]), "ppo")
    assert config.reject == () == config.reject_above and config.weights == "token"
    config = tyro.cli(CorrectionConfig, args=["--preset", "bypass-ppo-clip", "--bypass", "False"])
    config = resolve_correction(config, "ppo")
    assert not config.bypass
    config = resolve_correction(CorrectionConfig(preset="decoupled-token-icepop", lower=0.0, outside="clamp"), "ppo")
    assert (config.lower, config.upper, config.outside) == (0.0, 5.0, "clamp")


@pytest.mark.parametrize(("flags", "loss", "said"), [
    ({"upper": 0.0}, "ppo", "--correction.lower 0 must be at least 0 and below --correction.upper 0"),
    ({"lower": 3.0}, "ppo", "--correction.lower 3 .* below --correction.upper 2"),
    ({"lower": -1.0}, "ppo", "--correction.lower -1 must be at least 0"),
    ({"reject_above": 0.1}, "ppo", "--correction.reject-above does nothing without --correction.reject"),
    ({"rejected_leave_group": True}, "ppo", "--correction.rejected-leave-group does nothing"),
    ({"reject": "k3"}, "ppo", "--correction.reject-above inf must keep k3 = 0, .* and reject something"),
    ({"reject": "k2", "reject_below": -1.0}, "ppo", "--correction.reject-below -1 --correction.reject-above inf"),
    ({"reject": "k1", "reject_below": 0.1}, "ppo", "--correction.reject-below 0.1 .* must keep k1 = 0"),
    ({"reject": ("k1", "k3"), "reject_above": (0.1,)}, "ppo", r"--correction.reject-above \(0.1,\) must have 2"),
    ({"reject": ("k1", "k3"), "reject_below": (-1.0, -1.0)}, "ppo", "--correction.reject-above inf must keep k3 = 0"),
    ({"reject": "k1", "reject_above": math.nan}, "ppo", "--correction.reject-above nan"),
    ({"preset": "decoupled-geo-rs", "reject": "k3"}, "ppo", "--correction.reject-above inf"),      # preset's: k1's
    ({"preset": "decoupled-geo-rs", "reject_over": "sum"}, "ppo", "--correction.reject-above inf"),
    ({"batch_normalise": True}, "ppo", "--correction.batch-normalise needs --correction.weights"),
    ({"preset": "bypass-pg-is", "batch_normalise": True}, "reinforce", "without --correction.bypass"),
    ({"preset": "bypass-pg-is"}, "ppo", "--correction.preset bypass-pg-is does not go with the loss ppo"),
    ({"preset": "bypass-ppo-clip"}, "reinforce", "--correction.preset bypass-ppo-clip does not go"),
    ({"bypass": True, "weights": "token"}, "gspo", "--correction.weights token would count p / p_rollout twice"),
])
def test_what_is_refused(flags, loss, said):
    with pytest.raises(ValueError, match=said):
        resolve(flags, loss)


@pytest.mark.parametrize("loss", [*LOSSES, "clipped"])
def test_what_makes_up_for_sampling_that_is_cut(loss):
    """Weights do; with --correction.bypass the loss itself does if it has the ratio to the engine, so that its gradient
    by log p changes with what the engine said."""
    gradients = []
    for rollout_logp in (-1.0, -1.1):
        logp = torch.tensor([-1.02, -0.98], requires_grad=True)
        tokens = Tokens(logp, torch.full((2,), rollout_logp), torch.ones(2), torch.ones(2, dtype=bool),
                        torch.tensor([0, 2], dtype=torch.int32), torch.zeros(2, dtype=bool))
        if loss != "clipped":                                             # the other scripts' loss is ppo
            default = LOSSES[loss]
            numbers = default.numbers | ({"beta": 1e-9} if loss == "dro" else {})     # its distance is no ratio
            out, _ = FUNCTIONS[loss](tokens, **default.bounds, **numbers)
            gradients.append(torch.autograd.grad(out.sum(), logp)[0])
    has_ratio = loss == "clipped" or not torch.allclose(*gradients)
    assert has_ratio == (loss not in ("reinforce", "dro"))
    assert resolve({"bypass": True}, loss).covers_cut_sampling == has_ratio
    assert resolve({"weights": "token"}, loss).covers_cut_sampling
    assert not resolve({}, loss).covers_cut_sampling
    if not has_ratio:                                                     # the weights do not count it twice then
        assert resolve({"weights": "token", "bypass": True}, loss).covers_cut_sampling


@pytest.mark.parametrize(("preset", "covers"), [
    ("bypass-pg-geo-rs", False), ("bypass-pg-is", True), ("bypass-ppo-clip", True), ("decoupled-geo-rs", False)])
def test_presets_that_make_up_for_sampling_that_is_cut(preset, covers):
    assert resolve({"preset": preset}, "reinforce" if "pg" in preset else "ppo").covers_cut_sampling == covers


def test_groups_are_left_only_where_their_advantages_follow():
    """Elsewhere the flag would do nothing."""
    config = make_config(reject="k1", reject_above=1.0, rejected_leave_group=True)
    with pytest.raises(ValueError, match=r"--correction.rejected-leave-group: this script .* grpo_variants.py and rl"):
        resolve_correction(config)
    assert resolve_correction(config, groups_after_rejection=True).rejected_leave_group


if __name__ == "__main__":
    work(Path(sys.argv[1]))
