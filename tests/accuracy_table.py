"""The worst errors against the oracles, as a markdown table:

    python -m tests.accuracy_table

Errors are relative to max(1, |oracle|), over three ragged batches with and without log ratios of 50; float64 / float32.
Packed attention: relative to the largest number, in tiny real models, float32 alone.
"""

import distill
from tests.common import test_correction as correction
from tests.common import test_kernels as kernels
from tests.common import test_losses as losses
from tests.model import test_attention as attention

SEEDS = range(3)


def worst(errors) -> tuple[float, ...]:
    return tuple(max(column) for column in zip(*errors))


def both(f) -> list[tuple[float, ...]]:
    """f(dtype, seed) -> (value error, gradient error), the worst over seeds, in float64 and float32."""
    return [worst(f(dtype, seed) for seed in SEEDS) for dtype in (losses.F64, losses.F32)]


def rows():
    for name, settings in kernels.SETTINGS.items():
        yield f"linear_logp, {name}", "loop over tokens and words", both(
            lambda dtype, seed, s=settings: worst(kernels.kernel_errors(dtype, seed, s, e) for e in (False, True)))
    for kind in distill.DIVERGENCES:
        yield f"linear_divergence, {kind}", "loop over tokens and words", both(
            lambda *x, k=kind: worst(kernels.divergence_errors(k, *x, s) for s in kernels.SETTINGS.values()))
    for name in losses.POLICY_LOSSES:
        if name in ("grpo", "dr_grpo"):                                   # ppo's function and clip bounds
            continue
        yield f"policy loss {name}", "loop, case by case", both(
            lambda dtype, seed, n=name: worst(losses.policy_errors(n, dtype, seed, e) for e in (False, True)))
    for kind in ("k1", "abs", "k2", "k3", "k1+", "k3+"):
        yield f"kl_estimate {kind}", "loop, case by case", both(lambda *x, k=kind: losses.kl_errors(k, *x))
    yield "value_loss", "loop, case by case", both(losses.value_errors)
    yield "gae", "the sum of discounted deltas", both(lambda dtype, seed: (losses.gae_error(dtype, seed),))
    yield "whiten", "two passes of fsum", both(lambda dtype, seed: (losses.whiten_error(dtype, seed),))
    for aggregation in losses.AGGREGATIONS:
        yield f"token_weights {aggregation}", "means of lists", [(), (losses.aggregation_errors(aggregation),)]
    for level in ("token", "sequence", "geometric"):
        cases = [correction.case_errors(case) for case in correction.CASES if case.startswith(level)]
        found = max(error for case in cases for name, error in case.items() if name.startswith("weight"))
        yield f"rollout correction, {level} weights", "loop over responses", [(), (found,)]
    found = [error for case in correction.CASES for name, error in correction.case_errors(case).items() if "/" in name]
    yield "rollout correction, metrics", "sums over responses", [(), (max(found),)]
    for loss, preset in (("ppo", "decoupled-seq-is"), ("ppo", "bypass-ppo-clip"), ("reinforce", "bypass-pg-is")):
        yield f"{loss} with {preset}", "loop, case by case", [(), correction.gradient_errors(loss, {"preset": preset})]
    for name in attention.CONFIGS:
        want = attention.one_by_one(attention.model(name, "eager"))
        got = attention.packed(attention.model(name, "packed_sdpa"))
        yield f"packed_sdpa, {name}", "eager attention, one by one", [(), tuple(map(attention.relative, got, want))]


def main() -> None:
    print("| function | oracle | worst error in value | worst error in gradient |\n| --- | --- | --- | --- |")
    for name, oracle, errors in rows():
        cells = [" / ".join(f"{e[i]:.0e}" for e in errors if len(e) > i) or "none" for i in range(2)]
        print(f"| {name} | {oracle} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()
