"""Liger's kernels: where they are used, and that they compute what transformers computes, in Triton's interpreter."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from common.memory.plan import Model
from common.model.loading import LIGER_FAMILIES, uses_liger
from common.model.policy import ModelConfig
from tests.conftest import launch

# Where Python does not find both packages (a GPU's packages have them): `tools/setup.sh extras` puts them here, because
# beside the others, vLLM's CPU build would find a Triton
SITE = Path(os.environ.get("LIGER", f"{sys.prefix}/liger"))
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
LLAMA, MIXTURE = AutoConfig.for_model("llama"), AutoConfig.for_model("qwen3_moe")


@pytest.fixture
def installed(monkeypatch):
    """As if liger-kernel were installed, or were not."""
    find = importlib.util.find_spec
    return lambda found: monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: found if name == "liger_kernel" else find(name))


def test_where_the_kernels_are_used(installed):
    installed(object())
    assert uses_liger(CUDA, LLAMA, ModelConfig())
    assert not uses_liger(CUDA, LLAMA, ModelConfig(liger=False))
    for is_installed, device, config in ((True, CPU, LLAMA), (True, CUDA, MIXTURE), (False, CUDA, LLAMA)):
        installed(object() if is_installed else None)
        assert not uses_liger(device, config, ModelConfig())


def test_the_plan_counts_what_they_keep(installed):
    """A norm keeps 2 bytes of 6 (two norms and 4 of them a number), an MLP 3 of 4 tensors of 2 bytes."""
    installed(None)
    without = Model(LLAMA, ModelConfig(), 1).kept_by_block(keys=0)
    installed(object())
    saved = without - Model(LLAMA, ModelConfig(), 1).kept_by_block(keys=0)
    assert saved == 2 * 4 * LLAMA.hidden_size + 2 * LLAMA.intermediate_size


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    env = {"TRITON_INTERPRET": "1"}
    if not all(map(importlib.util.find_spec, ("triton", "liger_kernel"))):
        if not (SITE / "triton").is_dir() or not (SITE / "liger_kernel").is_dir():
            pytest.skip(f"triton and liger-kernel are not in {SITE}: tools/setup.sh extras")
        env["PYTHONPATH"] = str(SITE)
    done = launch("-m", "tests.model.liger_worker", env=env)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("family", LIGER_FAMILIES)
def test_values_and_gradients_are_those_of_transformers(family, found):
    """Of packed sequences: log-probs, entropies and the gradient of every weight. In float16 they round alike."""
    ours = found[family]
    assert ours["modules"] == (11 if family == "qwen3" else 7)          # norms and MLPs of two layers, the last norm
    assert 0 < ours["float32 values"] < 1e-5 and ours["float32 gradients"] < 2e-5
    assert ours["float16 values"] <= 1.1 * ours["own values"] > 1e-3
    assert ours["float16 gradients"] <= 1.5 * ours["own gradients"] > 1e-3


def test_less_is_kept_as_calculated(found):
    assert found["kept"]["calculated"] == pytest.approx(found["kept"]["kept"], rel=0.03)
