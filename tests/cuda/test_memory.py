"""The simulator of memory against the memory that the same step takes on the CPU, as torch's profiler records it."""

import pytest

from common.model.offload import OffloadConfig
from common.model.policy import ModelConfig
from tests.cuda.allocator import MIB, Allocator
from tests.cuda.fake_cuda import WHY_NOT
from tests.cuda.memory import PHASES, Case, Peak, _extrapolate, peaks_of, simulate
from tests.cuda.shapes import dense, mixture

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

MODELS = {
    "dense": dense("Llama", 256, 1024, 2, 8, 4, 1024),
    "mixture": mixture(256, 128, 2, 8, 4, 1024, experts=8, active=2, head_dim=32),
}


def case(model: str, gpus: int, shares: bool, recomputes: bool, **others) -> Case:
    policy = ModelConfig(attention="packed_varlen", gradient_checkpointing=recomputes, share_prompt=shares)
    return Case(MODELS[model], gpus, tokens=2048, prompt_length=64, response_length=192, samples_per_prompt=4,
                policy=policy, **others)


CASES = {
    "dense": case("dense", 2, shares=False, recomputes=True),
    "dense, shared prompts": case("dense", 2, shares=True, recomputes=False),
    "mixture": case("mixture", 2, shares=False, recomputes=False),
    "mixture, shared prompts": case("mixture", 2, shares=True, recomputes=True, reference=True),
}
OFFLOADED = case("dense", 1, shares=False, recomputes=True, offload=OffloadConfig(params=True, optimizer=True))


@pytest.fixture(scope="module")
def found():
    import time
    t=time.time()
    simulated = simulate(*CASES.values(), OFFLOADED, warm=True)
    print(time.time()-t)
    real = peaks_of(list(CASES.values()), "cpu", warm=True)
    print(time.time()-t)
    return simulated, real


def test_x(found):
    simulated, real = found
    for key, s, r in zip(CASES, simulated, real):
        print(key)
        for name in s:
            print(f"{name:10} {s[name].allocated_gb*1024:9.2f} {r[name].allocated_gb*1024:9.2f} {s[name].allocated_gb/r[name].allocated_gb:.3f} {s[name].after_gb/r[name].after_gb:.3f}   {s[name].reserved_gb*1024:9.2f}")
    s=simulated[-1]
    for name in s:
            print(f"{name:10} {s[name].allocated_gb*1024:9.2f} {s[name].after_gb*1024:9.2f} ")
