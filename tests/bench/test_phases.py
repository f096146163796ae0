"""The calculated table of phases, by hand where that is short."""

import pytest

from tests.bench import phases
from tools.plan import SHAPES


def test_seven_billion_on_eight():
    work = phases.WORKLOADS[1]
    found = phases.seconds(work)
    share, _, _ = phases.recomputed(work)
    assert 0 < share < 1 and set(found) == {"rollout", "rollout, in flight 1.5", "sync", "update", "adamw-bf16"}
    assert all(after < before for before, after in found.values())
    before, after = found["update"]
    assert 1 < before / after < 4 / 3  # a layer is computed four times, not three
    weights = 7.616e9 / 8
    before, after = found["adamw-bf16"]
    assert before == pytest.approx(weights * 7.8e-3 / 4096**2, rel=1e-3)
    assert after == pytest.approx(weights * 14 / 0.7 / 3.35e12, rel=1e-3)
    tensors = 3 + 28 * 12                                               # the head is not tied
    before, after = found["sync"]
    assert before - after == pytest.approx(tensors * (0.43e-3 - 0.09e-3 - 20e-6), rel=1e-6)


def test_every_workload_is_a_public_shape():
    assert all(work.model in SHAPES and work.prompts * work.tp % work.gpus == 0 for work in phases.WORKLOADS)
