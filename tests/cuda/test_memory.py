"""The simulator of memory against the memory that the same step takes on the CPU, as torch's profiler records it."""

import time
import pytest

from common.model.offload import OffloadConfig
from common.model.policy import ModelConfig
from tests.cuda.fake_cuda import WHY_NOT
from tests.cuda.memory import Case, peaks_of, simulate
from tests.cuda.shapes import dense, mixture

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

MODELS = {
    "dense": dense("Llama", 256, 1024, 3, 8, 4, 1024),
    "mixture": mixture(256, 128, 3, 8, 4, 1024, experts=8, active=2, head_dim=32),
}


def case(model: str, gpus: int, shares: bool = False, recompute: bool = True, **others) -> Case:
    policy = ModelConfig(attention="packed_varlen", gradient_checkpointing=recompute, share_prompt=shares)
    return Case(MODELS[model], gpus, tokens=2048, prompt_length=64, response_length=192, samples_per_prompt=4,
                policy=policy, **others)


CASES = {
    "dense": case("dense", 1, recompute=False),
    "mixture, shared": case("mixture", 1, shares=True, recompute=False),
    "all": case("dense", 1, offload=OffloadConfig(params=True, optimizer=True), reference=True, critic=True, entropy=True),
    "sharded": case("dense", 2),
    "sharded, shared": case("dense", 2, shares=True),
    "sharded mixture": case("mixture", 2),
    "sharded mixture, shared": case("mixture", 2, shares=True),
}


def test_x():
    cases = list(CASES.values())
    t=time.time()
    simulated = simulate(*cases, warm=True)
    print(time.time()-t)
    real = peaks_of(cases[:3], "cpu", True) 
    print(time.time()-t)
    real += peaks_of(cases[3:], "cpu", True, 2)
    print(time.time()-t)
    for key, s, r in zip(CASES, simulated, real):
        print(key)
        for name in s:
            print(f"{name:10} {s[name].allocated_gb*1024:9.2f} {r[name].allocated_gb*1024:9.2f} {s[name].allocated_gb/r[name].allocated_gb:.3f} {s[name].after_gb/r[name].after_gb:.3f}   {s[name].reserved_gb*1024:9.2f}")
