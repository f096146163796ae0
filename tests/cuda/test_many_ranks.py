"""Sequence parallel and copies of the model (HSDP) on 8 and 64 GPUs: one rank of them on the stand-in for CUDA runs a
step, what goes through its collectives is counted by hand, and its memory is that of the plan."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common.model.policy import ModelConfig
from tests.cuda.fake_cuda import WHY_NOT
from tests.cuda.memory import PHASES, Case, Peak, simulate
from tests.cuda.test_memory_plan import MIXTURE, UNTIED, plan_of

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def case(model: dict, gpus: int, sequence_parallel: int, copies: int, recomputes: bool = False) -> Case:
    policy = ModelConfig(gradient_checkpointing=recomputes, sequence_parallel=sequence_parallel, replicas=copies)
    return Case(model, gpus, tokens=8192, policy=policy)


CASES = {                                                               # groups of different sizes, to tell them apart
    "sequence parallel": case(UNTIED, 8, 2, 1),
    "copies": case(UNTIED, 8, 1, 2),
    "both": case(UNTIED, 64, 4, 2, recomputes=True),
    "both, a mixture": case(MIXTURE, 64, 2, 4),                         # 8 experts on 16 shards
}


@pytest.fixture(scope="module")
def simulated() -> dict[str, dict[str, Peak]]:
    return dict(zip(CASES, simulate(*CASES.values(), warm=True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_memory_is_that_of_the_plan(name, simulated):
    peaks, one = simulated[name], CASES[name]
    assert tuple(peaks) == PHASES
    peak = max(peaks[phase].allocated_gb for phase in ("forward", "backward", "optimizer"))
    assert sum(plan_of(one).update(one.tokens).values()) == pytest.approx(peak, rel=0.1)
    shards = one.gpus // one.policy.replicas
    at_rest = 12 * sum(numbers(one.model, shards)) / shards
    of_batches = 128 * one.tokens * one.num_microbatches                # at most
    assert 0 <= peaks["save"].after_gb * 2**30 - at_rest < of_batches


def numbers(model: dict, shards: int) -> tuple[int, int]:
    """Weights of the blocks and the embedding, and of the rest, in equal shards: rows are padded, and experts cut along
    a dimension that divides."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model))
    padded = {name: p.numel() if p.ndim == 3 else -(-len(p) // shards) * shards * p[0].numel()
              for name, p in lm.named_parameters()}
    rest = sum(padded[name] for name in ("lm_head.weight", "model.norm.weight"))
    return sum(padded.values()) - rest, rest


@pytest.mark.parametrize("name", CASES)
def test_what_is_moved_by_hand(name, simulated):
    """Weights are gathered in 16 bits over the shards of one copy, for each pass (head and last norm stay for the
    backward pass), and gradients reduced in 32; what is left of these is summed over the copies. The ranks of a group
    gather 16-bit keys and values of all their tokens in each layer, reduce their gradients, and sum log-probs and
    entropies in 32 bits on the way there, gradients of log-probs on the way back."""
    one, moved = CASES[name], {phase: dict(peak.moved) for phase, peak in simulated[name].items()}
    n, copies, times = one.policy.sequence_parallel, one.policy.replicas, one.num_microbatches
    shards, tokens = one.gpus // copies, n * one.tokens
    inside, rest = numbers(one.model, shards)
    keys = one.model["num_hidden_layers"] * tokens * 2 * 2 * one.model["num_key_value_heads"] * 64
    forward = {f"gather over {shards}": 2 * (inside + rest)}
    backward = {f"gather over {shards}": 2 * inside, f"reduce-scatter over {shards}": 4 * (inside + rest)}
    if copies > 1:
        backward[f"sum over {copies}"] = 4 * (inside + rest) // shards
    if n > 1:
        forward |= {f"gather over {n}": keys, f"sum over {n}": 2 * 4 * tokens}
        backward |= {f"reduce-scatter over {n}": keys, f"sum over {n}": 4 * tokens}
        if one.policy.gradient_checkpointing:                           # a layer's pass is made again
            backward[f"gather over {n}"] = keys
    assert moved["forward"] == moved["log-probs"] == {key: times * size for key, size in forward.items()}
    assert moved["backward"] == {key: times * size for key, size in backward.items()}
    assert moved["save"] == {f"gather over {shards}": 2 * (inside + rest)}
    assert moved["optimizer"].keys() == {f"sum over {shards}"}          # of squares, a number for each weight's tensor
    assert moved["optimizer"][f"sum over {shards}"] < 200
