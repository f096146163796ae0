"""Sequence parallel, copies of the model (HSDP) and expert parallel on 8 and 64 GPUs: one rank of them on the stand-in
for CUDA runs a step, what goes through its collectives is counted by hand, and its memory is that of the plan."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common.model.policy import ModelConfig
from tests.cuda.fake_cuda import WHY_NOT
from tests.cuda.memory import PHASES, Case, Peak, simulate
from tests.cuda.test_memory_plan import MIXTURE, UNTIED, plan_of

pytestmark = [pytest.mark.sweep, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


def case(model: dict, gpus: int, sequence_parallel: int, copies: int, recomputes: bool = False,
         expert_parallel: int = 1) -> Case:
    policy = ModelConfig(gradient_checkpointing=recomputes, sequence_parallel=sequence_parallel, replicas=copies,
                         expert_parallel=expert_parallel)
    return Case(model, gpus, tokens=8192, policy=policy)


CASES = {                                                               # groups of different sizes, to tell them apart
    "sequence parallel": case(UNTIED, 8, 2, 1),
    "copies": case(UNTIED, 8, 1, 2),
    "copies, bfloat16 weights": replace(case(UNTIED, 8, 1, 2), kind="adamw-bf16"),
    "both": case(UNTIED, 64, 4, 2, recomputes=True),
    "both, a mixture": case(MIXTURE, 64, 2, 4),                         # 8 experts on 16 shards
    "experts": case(MIXTURE, 64, 1, 2, recomputes=True, expert_parallel=4),     # 16 ranks have the same two
}


@pytest.fixture(scope="module")
def simulated() -> dict[str, dict[str, Peak]]:
    return dict(zip(CASES, simulate(*CASES.values(), warm=True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_memory_is_that_of_the_plan(name, simulated):
    peaks, one = simulated[name], CASES[name]
    assert tuple(peaks) == PHASES
    peak = max(peaks[phase].allocated_gb for phase in ("forward", "backward", "optimizer"))
    assert peak <= sum(plan_of(one).update(one.tokens).values()) <= 1.15 * peak + 0.35
    shards = one.gpus // one.policy.replicas
    *others, experts = numbers(one.model, shards)
    each = 6 if one.kind == "adamw-bf16" else 12
    at_rest = each * (sum(others) / shards + experts / (one.gpus if one.policy.expert_parallel > 1 else shards))
    of_batches = 128 * one.tokens * one.num_microbatches                # at most
    assert 0 <= peaks["save"].after_gb * 2**30 - at_rest < of_batches


def numbers(model: dict, shards: int) -> tuple[int, int, int]:
    """Weights of the blocks and the embedding, of the rest, and of experts, in equal shards: rows are padded, and
    experts cut along a dimension that divides."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model))
    padded = {name: p.numel() if p.ndim == 3 else -(-len(p) // shards) * shards * p[0].numel()
              for name, p in lm.named_parameters()}
    rest = sum(padded[name] for name in ("lm_head.weight", "model.norm.weight"))
    experts = sum(size for name, size in padded.items() if ".experts." in name)
    return sum(padded.values()) - rest - experts, rest, experts


@pytest.mark.parametrize("name", CASES)
def test_what_is_moved_by_hand(name, simulated):
    """Weights are gathered in 16 bits over the shards of one copy, for each pass (head and last norm stay for the
    backward pass), and gradients reduced in 32; what is left of these is summed over the copies once a mini-batch. The
    ranks of a group gather 16-bit keys and values of all their tokens in each layer, reduce their gradients, and sum
    log-probs and entropies in 32 bits on the way there, gradients of log-probs on the way back."""
    one, moved = CASES[name], {phase: dict(peak.moved) for phase, peak in simulated[name].items()}
    n, copies, times = one.policy.sequence_parallel, one.policy.replicas, one.num_microbatches
    shards, tokens = one.gpus // copies, n * one.tokens
    inside, rest, experts = numbers(one.model, shards)
    e, same = one.policy.expert_parallel, one.gpus // one.policy.expert_parallel
    inside += experts if e == 1 else 0
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
    if e > 1:                                               # counts of tokens, then 16-bit tokens, and their outputs
        sent = one.model["num_experts_per_tok"] * one.tokens * one.model["hidden_size"] * 2
        there_and_back, sizes = (one.model["num_hidden_layers"] * x for x in (2 * sent, 8 * one.model["num_experts"]))
        forward |= {f"gather over {same}": 2 * experts // e, f"exchange over {e}": there_and_back + sizes}
        backward |= {f"gather over {same}": 2 * experts // e, f"reduce-scatter over {same}": 4 * experts // e}
        backward[f"exchange over {e}"] = 2 * there_and_back + sizes     # a layer's pass is made again
    assert moved["log-probs"] == {key: times * size for key, size in forward.items()}
    if n > 1 and "num_experts" in one.model:
        forward[f"sum over {n}"] += 4 * tokens                          # the routers' entropies, for their metric
    assert moved["forward"] == {key: times * size for key, size in forward.items()}
    of_copies = f"sum over {copies}"                                    # once, whatever the number of micro-batches
    assert times > 1
    assert moved["backward"] == {key: size if key == of_copies else times * size for key, size in backward.items()}
    saved, norms = {f"gather over {shards}": 2 * (inside + rest)}, {f"sum over {shards}"}
    if e > 1:
        # the own experts as in a pass, then those of the ranks beside, which are on the same machine
        saved |= {f"gather over {e}": 2 * experts, f"gather over {same}": 2 * experts // e}
        norms |= {f"sum over {e}", f"sum over {same}"}
    assert moved["save"] == saved
    assert moved["optimizer"].keys() == norms and max(moved["optimizer"].values()) < 200    # a number for each weight
