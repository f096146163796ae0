"""An engine whose ranks have whole experts (`enable_expert_parallel`): what a sync writes; where it is refused."""

import json

import pytest

from common.engine.extra import check_extra
from tests.conftest import VLLM, launch
from tests.engine.engine_models import make_model

GIVEN = '{"enable_expert_parallel": true}'


@pytest.mark.engine
@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("glm4_moe", marks=pytest.mark.sweep)])
def test_each_rank_has_its_experts_as_the_trainer_has_them(family, tmp_path):
    """Two ranks, two of four experts each. A change of an expert of the second rank is seen by both."""
    launch("tests/engine/expert_worker.py", tmp_path, make_model(family, False, tmp_path), ranks=2, warm=VLLM)
    for rank in range(2):
        first, second, error = json.loads((tmp_path / f"{rank}.json").read_text())
        assert first["num_checksums"] == second["num_checksums"] > 20
        assert len(first["experts"]) >= 2 and all(first["experts"]) and all(second["experts"])
        assert "checksums differ" in error and "gate_up_proj" in error and "in 1 tensors" in error


def test_on_cpus_it_is_refused():
    """vLLM's kernel for CPUs takes every rank's experts for all of them, and reads memory that is none of its own."""
    with pytest.raises(ValueError, match="enable_expert_parallel True cannot be set, because on a CPU"):
        check_extra(GIVEN, "cpu")
    check_extra(GIVEN, "cuda")
    with pytest.raises(ValueError, match="enable_eplb True cannot be set, because it moves experts"):
        check_extra('{"enable_eplb": true}', "cuda")
