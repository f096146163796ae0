"""The gradient noise scale against a problem whose signal and noise are known, and by hand."""

import json

import pytest

from common.tracking.health import HealthCheck
from common.tracking.noise_scale import AT_LEAST, NoiseScale
from tests.conftest import launch
from tests.tracking.noise_worker import NOISE


def observe(scale: NoiseScale, norm: float, product: float | None, max_norm: float = 1.0) -> None:
    scale.product = product
    scale.observe(norm, 0.9, max_norm)


@pytest.fixture(scope="module")
def seen(tiny_llama) -> dict[tuple, list]:
    runs = [("adamw", "0", 1), ("adamw", "1.0", 2)]
    return {run: json.loads(launch("tests/tracking/noise_worker.py", tiny_llama, *run[:2], ranks=run[2], warm=True)
                            .stdout.splitlines()[-1]) for run in runs}


def test_noise_scale_of_a_known_problem(seen):
    """Mini-batches of 8 prompts whose noise is 3 times the signal: 24 prompts. The second run clips every gradient to
    half its norm, on two ranks."""
    for (state, metrics), expected in zip(seen.values(), (1.0, 0.5)):
        assert metrics["signal/noise_scale"] == pytest.approx(8 * NOISE, rel=0.1)
        assert metrics["signal/noise_to_signal"] == pytest.approx(NOISE, rel=0.1)
        assert state["weight"] == pytest.approx(expected, abs=0.03)
    one, two = (state for state, _ in seen.values())
    assert one["norm_sq"] == pytest.approx(two["norm_sq"], rel=1e-5)    # before clipping, the same gradients
    assert one["product"] == pytest.approx(two["product"], rel=0.01)


def test_a_state_continues_and_says_nothing_too_early():
    numbers = [(2.0 + step % 3, 0.1 + step % 2 / 20) for step in range(2 * AT_LEAST)]
    whole, first = NoiseScale({}), NoiseScale({})
    for of_step in numbers:
        observe(whole, *of_step)
    for of_step in numbers[:AT_LEAST]:
        observe(first, *of_step)
    assert first.metrics(8) == {} and first.state["steps"] == AT_LEAST - 1
    resumed = NoiseScale(json.loads(json.dumps(first.state)))
    for of_step in numbers[AT_LEAST:]:
        observe(resumed, *of_step)
    assert resumed.state == whole.state and whole.metrics(8)["signal/noise_scale"] > 0
    without = NoiseScale({})                                            # an optimizer without a first moment
    observe(without, 1.0, None)
    assert without.state == NoiseScale({}).state


def test_two_steps_by_hand():
    """The first step only fills the moment, half of it clipped away; then |g|^2 is 25, and |G|^2 is 0.05 / 0.05."""
    scale = NoiseScale({})
    observe(scale, 2.0, 0.0)
    assert scale.state["weight"] == pytest.approx(0.1 * 0.5)
    observe(scale, 5.0, 0.05, max_norm=0.0)
    assert (scale.state["norm_sq"], scale.state["product"]) == (25.0, pytest.approx(1.0))
    assert scale.state["weight"] == pytest.approx(0.9 * 0.05 + 0.1)
    scale.state["steps"] = AT_LEAST
    assert scale.metrics(4) == pytest.approx({"signal/noise_scale": 4 * 24, "signal/noise_to_signal": 24})
    scale.state["product"] = -1.0
    assert scale.metrics(4) == {}


def test_much_noise_is_said():
    check = HealthCheck()
    assert check.look(1, {"signal/noise_to_signal": 29.0, "critic/rewards/mean": 0.5}) == []
    assert check.look(1, {"signal/noise_to_signal": 61.2, "train/loss": 0.5}) == []     # supervised, at its end
    (line,) = check.look(2, {"signal/noise_to_signal": 61.2, "critic/rewards/mean": 0.5})
    assert "the noise is 61 times the signal" in line and "--prompts-per-step" in line


def test_a_gradient_that_is_mostly_the_kl_is_said():
    check = HealthCheck()
    assert check.look(1, {"signal/share/kl": 0.89, "signal/share/policy": 0.99}) == []
    (line,) = check.look(2, {"signal/share/kl": 0.93})
    assert "93% of the gradient is the KL to the reference" in line and "--kl-loss-coef" in line
