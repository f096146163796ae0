"""mypy finds nothing in the scripts and in what they are made of, and finds what a fork gets wrong.

What is checked, and how strictly, is in pyproject.toml.
"""

import importlib.util
import subprocess
import sys

import pytest

from tests.conftest import ROOT

# a fork's mistakes: a name that is not there, an argument too many, a number for a tensor, a flag that grpo.py lacks
MISTAKES = """
from common import losses
from common.batch import Batch
from common.segments import group_mean
from grpo import Args, group_advantages
from torch import Tensor

def forked(batch: Batch, rewards: Tensor, args: Args) -> Tensor:
    group_mean(rewards, batch.index, 1.0, 2.0)
    group_advantages(rewards, 3, args.norm_by_std)
    losses.clip_stat(rewards, rewards, rewards)
    batch.advantages
    return args.clip_middle
"""
FOUND = ["call-arg", "arg-type", "attr-defined", "attr-defined", "attr-defined"]


@pytest.mark.skipif(not importlib.util.find_spec("mypy"), reason="mypy is not installed: tools/setup.sh extras")
def test_types(tmp_path):
    """One run for both: the errors of the whole project are those of the fork."""
    (tmp_path / "fork.py").write_text(MISTAKES)
    files = ["async_grpo.py", "dapo.py", "distill.py", "dpo.py", "evaluate.py", "grpo.py", "grpo_variants.py",
             "kto.py", "online_dpo.py", "ppo.py", "rloo.py", "rm.py", "sft.py", "common", "rewards", "envs", "variants",
             "tools"]
    command = [sys.executable, "-m", "mypy", "--cache-dir", tmp_path, *files, tmp_path / "fork.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert done.stderr == "" and [line for line in lines if "fork.py" not in line] == [], done.stdout
    assert [line.rpartition("[")[2].rstrip("]") for line in lines] == FOUND, done.stdout
