"""The arithmetic of common/memory/plan.py against a simulation of the same step with the project's own code."""

import pytest

from common.memory.offload import OffloadConfig
from common.model.lora import LoRAConfig
from common.model.policy import ModelConfig
from tests.cuda.fake_cuda import WHY_NOT
from tests.cuda.memory import Case, Peak, plan_of, simulate
from tests.cuda.shapes import MODELS, dense, mixture

pytestmark = [pytest.mark.sweep, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

KEEP, RECOMPUTE = ModelConfig(gradient_checkpointing=False), ModelConfig(gradient_checkpointing=True)
HALF, MOST = ModelConfig(gradient_checkpointing=0.5), ModelConfig(gradient_checkpointing=0.75)
FLOAT32 = ModelConfig(gradient_checkpointing=True, compute_dtype="float32")
SHARE = ModelConfig(gradient_checkpointing=False, share_prompt=True)
SIZES = {"hidden": 512, "layers": 2, "heads": 8, "kv_heads": 4, "vocab": 32000}
UNTIED, TIED = (dense("Llama", width=1376, is_tied=is_tied, **SIZES) for is_tied in (False, True))
MIXTURE = mixture(width=384, experts=8, active=2, head_dim=64, **SIZES)
FOUR_LAYERS = UNTIED | {"num_hidden_layers": 4}
# more words than weights in blocks
VOCABULARY, TIED_VOCABULARY = (
    dense("Llama", 2560, width=8192, layers=2, heads=16, kv_heads=8, vocab=262144, is_tied=is_tied)
    for is_tied in (False, True)
)
BLOCKS = dense("Llama", 8192, width=28672, layers=3, heads=64, kv_heads=8, vocab=32000)
EXPERTS = mixture(2048, width=768, layers=3, heads=32, kv_heads=4, vocab=32000, experts=128, active=8)
CASES = {
    "untied": Case(UNTIED, gpus=8, tokens=8192, policy=KEEP),
    "untied, one rank, recomputed": Case(UNTIED, gpus=1, tokens=8192, policy=RECOMPUTE),
    "half recomputed": Case(FOUR_LAYERS, gpus=8, tokens=8192, policy=HALF),
    "three of four recomputed": Case(FOUR_LAYERS, gpus=1, tokens=8192, policy=MOST),
    "mixture, one of two recomputed": Case(MIXTURE, gpus=8, tokens=8192, policy=HALF),
    "adapters": Case(UNTIED, gpus=8, tokens=8192, policy=KEEP, lora=LoRAConfig(rank=16)),
    "moments offloaded": Case(UNTIED, gpus=8, tokens=8192, policy=KEEP, offload=OffloadConfig(optimizer=True)),
    "bfloat16 weights": Case(UNTIED, gpus=8, tokens=8192, policy=KEEP, kind="adamw-bf16"),
    "moments of 8 bits": Case(UNTIED, gpus=8, tokens=8192, policy=KEEP, kind="adamw-8bit"),
    "muon": Case(UNTIED, gpus=8, tokens=8192, policy=KEEP, kind="muon"),
    "tied": Case(TIED, gpus=8, tokens=8192, policy=RECOMPUTE),
    "mixture": Case(MIXTURE, gpus=8, tokens=8192, policy=KEEP),
    "shared prompts": Case(UNTIED, gpus=8, tokens=8192, prompt_length=768, response_length=256, policy=SHARE),
    "vocabulary, tied, 64 ranks": Case(TIED_VOCABULARY, gpus=64, tokens=1024, policy=RECOMPUTE),
    "many experts, few tokens": Case(EXPERTS, gpus=64, tokens=1024, policy=RECOMPUTE),
}
MORE_CASES = {
    "moments offloaded, few tokens": Case(UNTIED, gpus=1, tokens=1024, policy=RECOMPUTE,
                                          offload=OffloadConfig(optimizer=True)),
    "muon, few tokens": Case(UNTIED, gpus=1, tokens=1024, policy=RECOMPUTE, kind="muon"),
    "muon, experts": Case(EXPERTS, gpus=64, tokens=1024, policy=RECOMPUTE, kind="muon"),
    "vocabulary": Case(VOCABULARY, gpus=8, tokens=1024, policy=RECOMPUTE),
    "vocabulary, adapters": Case(VOCABULARY, gpus=8, tokens=1024, policy=RECOMPUTE, lora=LoRAConfig(rank=8)),
    "vocabulary, tied": Case(TIED_VOCABULARY, gpus=8, tokens=1024, policy=RECOMPUTE),
    "large blocks, float32": Case(BLOCKS, gpus=8, tokens=1024, policy=FLOAT32),
    "large blocks, adapters": Case(BLOCKS, gpus=8, tokens=1024, policy=RECOMPUTE, lora=LoRAConfig(rank=8)),
    "three of four recomputed, tied": Case(TIED | {"num_hidden_layers": 4}, gpus=8, tokens=8192, policy=MOST),
    "7B": Case(MODELS["Qwen2.5-7B"], gpus=8, tokens=16384),                         # from 4 and from 8 layers
}


def peaks_of_all(cases: dict[str, Case]) -> dict[str, dict[str, Peak]]:
    return dict(zip(cases, simulate(*cases.values(), warm=True), strict=True))


@pytest.fixture(scope="module")
def simulated() -> dict[str, dict[str, Peak]]:
    return peaks_of_all(CASES)


@pytest.fixture(scope="module")
def more_simulated() -> dict[str, dict[str, Peak]]:
    return peaks_of_all(MORE_CASES)


def is_as_planned(case: Case, peaks: dict[str, Peak]) -> None:
    """Never more, and at most a tenth too much. Beside weights, moments and gradients a step of Muon takes some copies
    of a matrix, and no stack of experts that ranks divide."""
    peak = max(peaks[phase].allocated_gb for phase in ("forward", "backward", "optimizer"))
    assert peak <= sum(plan_of(case).update(case.tokens).values()) <= 1.1 * peak
    assert peak > 1.2 * peaks["optimizer"].after_gb                                     # passes are most of it
    if case.kind == "muon":
        policy, step = plan_of(case).policy, peaks["optimizer"]
        stays = step.after_gb + policy.trained_bytes / 2**30
        assert stays < step.allocated_gb < stays + policy.step_bytes / 2**30


@pytest.mark.parametrize("name", CASES)
def test_the_update_takes_at_most_what_is_planned(name, simulated):
    is_as_planned(CASES[name], simulated[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_CASES)
def test_more_updates_take_at_most_what_is_planned(name, more_simulated):
    is_as_planned(MORE_CASES[name], more_simulated[name])


def test_moments_take_what_is_planned(simulated):
    """What is left after the optimizer step, of 16 and of 8 bits, differs by the moments alone."""
    kinds = "bfloat16 weights", "moments of 8 bits"
    left = [simulated[name]["optimizer"].after_gb for name in kinds]
    planned = [plan_of(CASES[name]).resident()["moments"] for name in kinds]
    assert left[0] - left[1] == pytest.approx(planned[0] - planned[1], rel=0.01)
    assert planned[0] > 1.8 * planned[1]
