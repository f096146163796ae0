"""Expert parallel: ranks that have other experts each give the gradient, the norm and the step of one rank, in float64.

The oracle is one rank that has all experts. The ranks run tests/parallel/expert_worker.py."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from common.memory.plan import MemoryPlan
from common.model.loading import Weights, load_policy
from common.model.policy import ModelConfig
from common.parallel.ranks import num_shards
from common.run import RunArgs
from tests.conftest import launch
from tests.parallel import DIVIDES_EXPERTS
from tests.parallel.expert_worker import OPTIM, SAVED, Case, in_float64, run
from tests.parallel.test_sequence_parallel import MODELS, make_step, relative_error

pytestmark = pytest.mark.skipif(not DIVIDES_EXPERTS, reason="transformers is below 5.19")
EIGHT = copy.deepcopy(MODELS["mixture"])
EIGHT.num_experts = 8
RANKS = 4
ADAPTED = [Case(2, lora=True), Case(1, lora=True), Case(4, model="eight", lora=True, recompute=True)]
BALANCED = [Case(1, aux=30.0), Case(2, 2, 2, recompute=True, share_prompt=True, aux=30.0), Case(2, lora=True, aux=30.0)]
CASES = [Case(2), Case(4, model="eight"), Case(2, 4, 2, recompute=True, share_prompt=True),
         Case(4, model="eight", undivided=True), *ADAPTED, *BALANCED]
TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("expert_parallel")


@pytest.fixture(scope="module")
def models(folder) -> dict[str, str]:
    for name, config in {"mixture": MODELS["mixture"], "eight": EIGHT}.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    return {name: str(folder / name) for name in ("mixture", "eight")}


@pytest.fixture(scope="module")
def expected(models, world) -> dict[Case, dict]:
    """Of one rank."""
    with in_float64():
        whole = {case._replace(expert_parallel=1, sequence_parallel=1, replicas=1, recompute=False, share_prompt=False,
                               undivided=False) for case in CASES}
        return {case: run(case, models[case.model], make_step(), world) for case in whole}


@pytest.fixture(scope="module")
def found(models, folder) -> list[dict]:
    """What each rank found."""
    torch.save({"models": models, "step": make_step(), "cases": CASES}, folder / "todo.pt")
    launch("tests/parallel/expert_worker.py", folder, ranks=RANKS, warm=True)
    return [torch.load(folder / f"found_{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_one_rank(case, found, expected):
    """Gradient, its norm over both meshes, weights after a clipped step (what the engine is sent) and moments."""
    want = expected[Case(1, model=case.model, lora=case.lora, aux=case.aux)]
    assert want["norm"] > 2 * OPTIM.max_grad_norm
    assert case.lora == all("lora" in name for name in want["trained"])
    for ours in (of_rank[case] for of_rank in found):
        for whole in (ours["loaded"], ours["by_block"]):
            assert whole.keys() == want["loaded"].keys()
            assert all(torch.equal(whole[name], x) for name, x in want["loaded"].items())
        error, of_norm = relative_error(ours["gradient"], want["gradient"]), abs(ours["norm"] / want["norm"] - 1)
        if case.undivided:                                              # it is seen
            assert error > 0.1 and of_norm > 1e-3
            continue
        assert error < TOLERANCE and of_norm < TOLERANCE, (error, of_norm)
        assert relative_error(ours["stepped"], want["stepped"]) < TOLERANCE
        moments = [{name: x.double() for name, x in side["state"].items()} for side in (ours, want)]
        assert relative_error(*moments) < TOLERANCE
        assert relative_error(want["stepped"], want["loaded"]) > 1e-3


def test_ranks_have_whole_experts_or_a_part_of_their_rows(found):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    for case, shape in ((Case(4, model="eight"), (2, 16, 24)), (Case(2), (3, 8, 24))):
        assert found[0][case]["local"][name] == shape
    for case, shape in ((ADAPTED[0], (3, 2, 24)), (ADAPTED[2], (2, 4, 24))):
        assert found[0][case]["local"][f"{name}_lora_A"] == shape


@pytest.mark.parametrize("case", SAVED)
def test_a_checkpoint_fits_models_whose_experts_are_divided_or_not(case, found):
    for ours in (of_rank[case] for of_rank in found):
        assert len(ours["restored"]) == 2
        for restored in ours["restored"]:
            assert restored.keys() == ours["state"].keys()
            assert all(torch.equal(restored[name], x) for name, x in ours["state"].items())


def test_the_plan_of_memory_has_a_ranks_experts():
    """Shards are of all ranks as without; what is gathered for a block are a fourth of its experts."""
    def plan(n: int) -> MemoryPlan:
        args = RunArgs(model="", train_data=(), policy=ModelConfig(expert_parallel=n))
        return MemoryPlan(args, EIGHT, 8, longest=100)

    experts = 8 * 3 * 24 * 8                                            # gate, up and down
    assert plan(4).policy.trained_shard == plan(1).policy.trained_shard
    assert plan(1).policy.block - plan(4).policy.block == experts * 3 // 4


def test_what_cannot_be_divided_is_refused(tiny_llama, world):
    here = replace(world, experts=init_device_mesh("cpu", (1, 1), mesh_dim_names=("shard", "expert")))
    with pytest.raises(ValueError, match=r"--policy\.expert-parallel 1: transformers cannot divide the experts of"):
        load_policy(tiny_llama, ModelConfig(), here)
    load_policy(tiny_llama, ModelConfig(), here, Weights(frozen=True))  # a teacher
    with pytest.raises(ValueError, match=r"--policy\.expert-parallel 3 must be at least 1 and divide the 8 ranks"):
        num_shards(8, 1, 1, 3)
