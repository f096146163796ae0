"""The simulator of memory against the memory that the same step takes on the CPU, and its allocator against numbers
worked by hand."""

import dataclasses

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common.model.policy import ModelConfig
from tests.cuda import memory, shapes
from tests.cuda.allocator import MIB, Allocator
from tests.cuda.fake_cuda import WHY_NOT
from tests.cuda.memory import PHASES, Case, Peak, peaks_of, simulate
from tests.cuda.shapes import dense, mixture

pytestmark = [pytest.mark.sweep, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

MODELS = {
    "dense": dense("Llama", 256, 1024, 2, 8, 4, 1024),
    "mixture": mixture(256, 128, 2, 8, 4, 1024, experts=8, active=2, head_dim=32),
}


def case(model: str, shares: bool, recomputes: bool, **others) -> Case:
    policy = ModelConfig(gradient_checkpointing=recomputes, share_prompt=shares)
    return Case(MODELS[model], gpus=2, tokens=1024, prompt_length=64, response_length=192, samples_per_prompt=4,
                policy=policy, **others)


MODELS_OF_NOTE = {name: shapes.MODELS[name] for name in ("Qwen2.5-7B", "Qwen3-30B-A3B")}
CASES = {
    "dense": case("dense", shares=False, recomputes=True),
    "dense, shared prompts": case("dense", shares=True, recomputes=False),
    "mixture": case("mixture", shares=False, recomputes=False),
    "mixture, shared prompts": case("mixture", shares=True, recomputes=True, reference=True),
}


@pytest.fixture(scope="module")
def peaks() -> dict[str, tuple[dict[str, Peak], dict[str, Peak]]]:
    """Case -> phase -> what was simulated, what was measured."""
    cases = list(CASES.values())
    return dict(zip(CASES, zip(simulate(*cases, warm=True), peaks_of(cases, "cpu", warm=True), strict=True)))


@pytest.mark.parametrize("name", CASES)
def test_peaks_are_those_of_the_cpu(name, peaks):
    """What is allowed is 10%, what is seen 4.1%: the CPU multiplies 16-bit logits in float32 copies. At rest there is
    nothing to differ but the rounding to 512 bytes."""
    simulated, measured = peaks[name]
    assert tuple(simulated) == tuple(measured) == PHASES
    for phase in PHASES:
        assert simulated[phase].allocated_gb == pytest.approx(measured[phase].allocated_gb, rel=0.05), phase
        assert simulated[phase].after_gb == pytest.approx(measured[phase].after_gb, rel=0.004), phase
        assert simulated[phase].reserved_gb >= simulated[phase].allocated_gb
    assert simulated["backward"].allocated_gb > 2 * simulated["save"].after_gb                 # activations count


# Real shapes, of two layers: with 8 and with 64 ranks, whatever divides.

SHARDED = {
    (name, gpus): Case(MODELS_OF_NOTE[name] | {"num_hidden_layers": 2}, gpus, tokens=512, prompt_length=128,
                       response_length=128, num_microbatches=1)
    for name in MODELS_OF_NOTE for gpus in (8, 64)
}


@pytest.fixture(scope="module")
def sharded() -> dict[tuple[str, int], dict[str, Peak]]:
    return dict(zip(SHARDED, simulate(*SHARDED.values(), warm=True), strict=True))


def bytes_of_a_shard(case: Case, each: int) -> int:
    """`each` bytes for every number of the first rank's shards: FSDP2 cuts rows into equal chunks, the last one
    shorter. The allocator rounds up to 512."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**case.model))
    sizes = (-(-p.shape[0] // case.gpus) * p[0].numel() * each for p in model.parameters())
    return sum(-(-size // 512) * 512 for size in sizes)


@pytest.mark.parametrize(("name", "gpus"), SHARDED)
def test_a_step_of_real_shapes_on_many_ranks(name, gpus, sharded):
    """At rest a rank holds its shards of weights and two moments, in float32; after the backward pass gradients, too,
    and numbers of the batch. A layer is whole while it runs: the peak is above that by at least one in 16 bits."""
    case, peaks = SHARDED[name, gpus], sharded[name, gpus]
    rest, gradients = bytes_of_a_shard(case, 12), bytes_of_a_shard(case, 4)
    at_rest = peaks["save"].after_gb * 2**30
    assert at_rest == pytest.approx(rest, abs=2**16)
    assert peaks["backward"].after_gb * 2**30 - at_rest == pytest.approx(gradients, abs=2**16)
    layer = bytes_of_a_shard(dataclasses.replace(case, gpus=1), 2) - bytes_of_a_shard(
        dataclasses.replace(case, gpus=1, model=case.model | {"num_hidden_layers": 1}), 2)
    assert peaks["forward"].allocated_gb * 2**30 > at_rest + layer
    assert peaks["backward"].allocated_gb < peaks["backward"].reserved_gb < 80


def test_a_deep_model_lies_on_the_line_through_two_depths():
    low, high = ({"save": Peak(allocated, allocated + 1, 1.0)} for allocated in (3.0, 5.0))
    assert memory._extrapolate({4: low, 8: high}, 28) == {"save": Peak(15.0, 16.0, 1.0)}
    assert memory._extrapolate({2: low}, 2) == low


def test_a_microbatch_keeps_to_its_budget():
    """1,024 tokens hold 4 times 64 + 192, or with a prompt for 4 responses 64 + 4 x 192, and another 192 does not fit
    with its prompt."""
    plain, shared = (memory.microbatch(CASES[name]) for name in ("dense", "dense, shared prompts"))
    assert len(plain) == 4 and len(plain.tokens) == 1024
    assert len(shared) == 4 and len(set(shared.tokens.view(4, -1)[:, 0].tolist())) == 1


# What CUDACachingAllocator.cpp does: small requests from segments of 2 MiB, those below 10 MiB from segments of 20 MiB,
# others from their own, in steps of 2 MiB; what is left of a block is split off if it is at least 512 bytes, or of a
# large one more than 1 MiB.

def test_sizes_of_segments():
    for size, allocated, reserved in (
        (1, 512, 2 * MIB), (513, 1024, 2 * MIB), (MIB, MIB, 2 * MIB), (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB), (31 * MIB, 32 * MIB, 32 * MIB), (33 * MIB - 1, 34 * MIB, 34 * MIB),
    ):
        allocator = Allocator()
        allocator.take(size)
        assert (allocator.allocated, allocator.reserved) == (allocated, reserved), size


def test_blocks_are_split_reused_and_merged():
    allocator = Allocator()
    first, second, third = (allocator.take(6 * MIB) for _ in range(3))                         # of one segment
    assert allocator.reserved == 20 * MIB and [block.address // MIB for block in (first, second, third)] == [0, 6, 12]
    allocator.give_back(first)
    allocator.give_back(third)                                                                 # merges with the end
    assert allocator.take(5 * MIB).address == 0 and allocator.take(7 * MIB).address == 12 * MIB
    assert allocator.reserved == 20 * MIB
    allocator.take(MIB)                                                                        # small: its own pool
    assert allocator.reserved == 22 * MIB
    allocator.take(6 * MIB, stream=1)                                                          # so has a stream
    assert allocator.reserved == 42 * MIB


def test_whole_free_segments_go_back():
    allocator = Allocator()
    kept, gone = allocator.take(6 * MIB), allocator.take(30 * MIB)
    allocator.give_back(gone)
    assert (allocator.allocated, allocator.reserved) == (6 * MIB, 50 * MIB)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.peak_reserved, allocator.peak_allocated) == (20 * MIB, 50 * MIB, 36 * MIB)
    allocator.give_back(kept)
    allocator.empty_cache()
    allocator.reset_peaks()
    assert (allocator.allocated, allocator.reserved, allocator.peak_reserved) == (0, 0, 0)
