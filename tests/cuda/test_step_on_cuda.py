"""A step on the stand-in for CUDA, on one rank and on the first of 8: numbers, shards, gathers; what kernels refuse."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import common.forward.attention  # noqa: F401  makes packed_sdpa known to transformers
from common.batch import Batch
from common.model.policy import Policy
from tests.conftest import launch
from tests.cuda.fake_cuda import WHY_NOT
from tests.cuda.step_worker import REFUSED, RESPONSES

pytestmark = [pytest.mark.sweep, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """53 rows, which 8 ranks cannot share evenly; heads of 16 numbers."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("tied", "untied"):
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(
            vocab_size=53, hidden_size=64, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, pad_token_id=0,
            tie_word_embeddings=name == "tied",
        )).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def found(models) -> dict[int, dict]:
    """Number of ranks -> what its first rank found."""
    said = {size: launch("tests/cuda/step_worker.py", models, 0, size, warm=True).stdout for size in (1, 8)}
    return {size: json.loads(text.splitlines()[-1]) for size, text in said.items()}


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_numbers_are_those_of_the_cpu(name, models, found):
    """The oracle is a policy without FSDP2, in float32 on the CPU, with sdpa for each sequence and no shared prompts.
    The device computes in bfloat16 with GPUs' kernels, with checkpointing, and shares the tied model's prompts."""
    lm = AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float32, attn_implementation="packed_sdpa")
    batch = Batch.build(*RESPONSES)
    logp, entropy = Policy(lm)(batch, 1.0)
    (logp.sum() + entropy.sum()).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in lm.parameters()])
    ours = found[1]["step"][name]
    assert torch.tensor(ours["logp"]).sub(logp.detach()).abs().mean() < 0.02 < logp.detach().std()
    assert ours["norm"] == pytest.approx(float(norm), rel=0.03)
    assert set(ours["value"]) == {0.0}


def test_logits_of_16_bit_operands_are_float32(found):
    """Rounded to bfloat16, logits of up to 30 would be wrong by up to 0.06."""
    assert found[1]["kernel_error"] < 1e-4


def test_products_of_16_bit_operands_are_float32(found):
    """In both passes: logits, and sums of gradients over the vocabulary."""
    assert found[1]["products"] == {"aten::mm": ["torch.float32"], "aten::addmm": ["torch.float32"]}


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_both_passes_read_nothing(name, size, found):
    """The host would wait for the device, and the device then for the host."""
    assert found[size]["step"][name]["reads"] == {}


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_blocks_are_not_whole_between_the_passes(name, found):
    """Of 8 ranks each has its shard again when a block's forward pass has ended. One rank has nothing to free."""
    assert found[8]["step"][name]["whole"] == [] and found[1]["step"][name]["whole"]


def test_gradients_are_added_up_in_place(found):
    """Two of the three exist at once: the sum and the one that comes next. Not three, as with any mode of torch's."""
    assert found[1]["gradients"] == pytest.approx(8, abs=0.01)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_eight_ranks_shard_step_and_gather(name, found):
    """Rows are cut into 8 equal chunks, the last ones shorter. All ranks hold the first one's chunk, so the numbers are
    another model's: they are finite, and a gathered weight has this rank's rows in their place."""
    ours = found[8]["step"][name]
    assert 0 < ours["norm"] < float("inf") and sum(ours["logp"]) < -10
    rows = {"embed_tokens": 7, "q_proj": 8, "k_proj": 4, "gate_proj": 5, "down_proj": 8, "norm": 8, "lm_head": 7}
    for key, count in ours["rows"].items():
        assert count == next((n for part, n in rows.items() if part in key), count), key
    assert ours["gathered"] and ours["num_gathered"] == (20 if name == "tied" else 21)


CONTRACTS = {
    "float32 attention": "fp16 and bf16", "mixed dtypes": "same dtype", "head_dim 20": "multiple of 8",
    "head_dim 264": "at most 256", "heads that do not divide": "multiple of kv heads", "int64 offsets": "int32",
    "offsets on the host": "on CUDA, not torch.int32 on cpu", "strided last dimension": "contiguous last dimension",
    "compute capability 7.5": "Ampere", "products of two dtypes": "same dtype", "out_dtype float64": "out_dtype",
    "out_dtype of two dtypes": "same dtype", "8 bits on compute capability 8.6": "9.0 or 8.9",
    "a tensor on the host": "cuda:0 and cpu", "numpy": "Tensor.cpu()",
    "pinned on the device": "host can be pinned",
}


@pytest.mark.parametrize("name", CONTRACTS)
def test_what_kernels_refuse_is_refused(name, found):
    assert re.search(CONTRACTS[name], found[1]["contracts"][name])


def test_what_kernels_take_is_taken(found):
    accepted = {name for name, said in found[1]["contracts"].items() if not said}
    assert accepted == {"accepted", "products accepted", "8 bits accepted"}
    assert set(REFUSED) < set(CONTRACTS)
