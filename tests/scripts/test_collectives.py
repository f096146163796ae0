"""How often all ranks talk to each other in a step, beside FSDP2: the time of a collective grows with their number."""

import json
from collections import Counter

import pytest

from common.tracking.phase import MAX_CHECKS
from tests.conftest import launch_all
from tests.scripts.test_grpo import metrics_of
from tests.scripts.test_scripts import BASE

FLAGS = ["--run-zero-advantage", "--kl-loss-coef", "0.1", "--minibatches-per-step", "2", "--log.rollouts-every", "0"]
JOBS = {"one step": ["--total-steps", "1"], "two steps": ["--total-steps", "2"],
        "small micro-batches": ["--total-steps", "1", "--max-tokens-per-gpu", "110"]}


@pytest.fixture(scope="module")
def runs(tiny_llama, small_train, tmp_path_factory):
    folder = tmp_path_factory.mktemp("collectives")
    own = ["grpo", "--model", tiny_llama, "--train-data", small_train, *BASE, *FLAGS]
    launch_all(folder, {name: own + flags for name, flags in JOBS.items()}, ranks=2)
    return folder


def collectives(folder, name) -> Counter:
    return Counter(json.loads((folder / name / "collectives.json").read_text()))


def test_a_step_has_few_collectives(runs):
    """The objects are names, metrics, and the fields of a batch: everything that grows with responses is in tensors."""
    step = collectives(runs, "two steps") - collectives(runs, "one step")
    assert step["all_to_all_single"] == 2                               # sizes, and responses
    assert step["all_gather_object"] <= 4
    assert step["all_reduce"] <= 19
    assert step.keys() == {"all_to_all_single", "all_gather_object", "all_reduce"}


def test_small_micro_batches_add_only_bounded_looks_for_signals(runs):
    more = collectives(runs, "small micro-batches") - collectives(runs, "one step")
    assert more.keys() == {"all_reduce"}
    phases = 3                                                          # old and reference log-probs, update
    assert 3 <= more["all_reduce"] <= phases * MAX_CHECKS
    norms = [metrics_of(runs / name)[0]["actor/grad_norm"] for name in ("one step", "small micro-batches")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
