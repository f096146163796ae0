"""Ranks that share a GPU, on gloo; on an H100 they ran with NCCL (tests/evidence/h100.md)."""

import argparse

import pytest

from tests.gpu import several_ranks
from tests.gpu.several_ranks import APART, RUNS, Wrong, apart, main


def test_every_comparison_is_with_one_rank_and_the_same_script():
    for run in RUNS.values():
        assert not run.like or (RUNS[run.like].ranks, RUNS[run.like].like) == (1, "")
    scripts = {run.script for run in RUNS.values() if run.like}
    assert scripts == {"grpo.py", "async_grpo.py", "ppo.py", "dapo.py", "sft.py", "dpo.py"}


def test_apart():
    right = [{"train/loss": 0.5, "actor/grad_norm": 2.0, "timing_s/step": 1.0}] * 2
    assert apart([right[0] | {"timing_s/step": 9.0}, right[1]], right) == 0
    assert apart([right[0], right[1] | {"actor/grad_norm": 2.0 * (1 + 3 * APART)}], right) > APART
    assert apart(right[:1], right) == float("inf")
    with pytest.raises(KeyError):
        apart([{"train/loss": 0.5}] * 2, right)


@pytest.mark.slow
def test_another_gradient_is_found(tmp_path, monkeypatch):
    """Runs of two ranks: of the same step, and of one with another learning rate."""
    runs = {name: RUNS[name] for name in ("grpo", "grpo, 2 ranks")}
    other = runs["grpo, 2 ranks"]
    runs["other"] = other._replace(flags=[*other.flags, "--optim.lr", "2e-3"])
    monkeypatch.setattr(several_ranks, "RUNS", runs)
    with pytest.raises(Wrong, match=r"^wrong: other$"):
        main(argparse.Namespace(work=tmp_path, jobs=2, runs=[]))
