"""What comes before what on the stand-in for CUDA: streams, memory that is freed, copies that the host does not wait
for; and the order in which engine and trainer take turns with the memory."""

import json
import os
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.conftest import launch
from tests.cuda.fake_cuda import WHY_NOT
from tests.cuda.order_worker import BATCH, KINDS

pytestmark = [pytest.mark.sweep, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("order")
    LlamaForCausalLM(LlamaConfig(
        vocab_size=53, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, pad_token_id=0,
        tie_word_embeddings=False,
    )).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def found(model) -> dict:
    """CUDA_PARTS in the environment: parts of it, for tests that look at these alone."""
    if "CUDA_PARTS" in os.environ:
        said = launch("-m", "tests.cuda.order_worker", model)
    else:
        said = launch("tests/cuda/order_worker.py", model, warm=True)
    return json.loads(said.stdout.splitlines()[-1])


REFUSED = {
    "used before it is made": "mul.* does not wait for aten.ones", "used before it is changed": "does not wait for",
    "freed": "freed without record_stream or a wait", "read before it arrives": "before a copy from the device",
    "changed before it leaves": "while a copy from it was under way",
    "a generator of the host": "'cuda' device type for generator",
}
TAKEN = {
    "both waits": [3.0] * 4, "freed after record_stream": [3.0] * 4, "freed after a wait": [3.0] * 4,
    "read when it has arrived": [3.0] * 4, "changed when it has left": [3.0] * 4, "changed, not pinned": [3.0] * 4,
    "a generator of the device": [True] * 4,
}


def test_what_a_gpu_may_do_too_early_is_refused(found):
    assert found["rules"].keys() == REFUSED.keys() | TAKEN.keys()
    for name, rule in REFUSED.items():
        assert isinstance(found["rules"][name], str), f"{name}: accepted"
        assert re.search(rule, found["rules"][name]), name


@pytest.mark.parametrize("name", TAKEN)
def test_what_waits_is_taken(name, found):
    assert found["rules"][name] == TAKEN[name]


def test_offloaded_tensors_are_away_when_the_engine_takes_memory(model, found):
    """Bytes by hand, of float32 weights w: two moments are twice that. Moments leave before the engine's weights come,
    weights before its cache comes, and they are back after it sleeps. What else is there is the batch."""
    ours = found["rollouts"]
    weights = 4 * LlamaForCausalLM.from_pretrained(model).num_parameters()
    assert ours["bytes"] == weights
    stays = {"wake weights": weights, "wake cache": 0, "sleep": 0, "end": weights}
    assert [name for name, _ in ours["moments"]] == [*stays] * 2
    for name, size in ours["moments"]:
        assert stays[name] <= size < stays[name] + weights / 10, name
    assert ours["same"]


def test_offloaded_tensors_are_in_pinned_memory(found):
    """From other memory a copy waits for the host, piece by piece."""
    pinned = found["rollouts"]["pinned"]
    assert len(pinned) == 3 * 21 and all(pinned)


def test_the_host_waits_for_what_it_reads(found):
    ours = found["reports"]
    tokens = [token for parts in zip(*BATCH) for part in parts for token in part]
    assert ours["batch"] == {"tokens": tokens, "cu_seqlens": [0, 5, 9]}


def test_seconds_of_a_phase_have_its_kernels(found):
    assert found["reports"]["waited"] == 1


def test_a_meter_reads_nothing_before_the_end_of_a_step(found):
    assert found["reports"]["reads"] == {}
    assert found["reports"]["meter"] == {"x/mean": 2.5, "x/max": 3.0, "x/min": 2.0}


def test_sums_over_ranks_are_made_on_the_host(found):
    """Else a rank whose numbers are on its GPU would call NCCL, and one whose numbers are lists would call gloo."""
    assert found["reports"]["summed"] == ["cpu", [0.0, 1.0, 2.0, 3.0]]


def test_the_most_memory_is_reported(found):
    """A tensor of 64 MiB was there, and is gone. 16 MiB are said to be the engine's, asleep."""
    ours = found["reports"]
    for peak in ours["peaks"].values():
        assert 2**26 <= peak * 2**30 + 2**24 < 2**26 + 2**23
    assert ours["left"] < 2**20


def test_a_checkpoint_in_the_background_has_what_was_there_when_it_began(found):
    """Training writes into the same tensors meanwhile. The second save uses the first one's host memory."""
    assert found["saves"]["loaded"][:2] == [True, True]


def test_a_save_waits_for_moments_that_come_back(found):
    """They are copied in the stream that vLLM gives to the main thread with --rollout.tp. The thread that writes reads
    them in another one, and no stream waits for the other."""
    assert found["saves"]["said"] == "" and found["saves"]["loaded"][2]


def test_an_export_has_what_was_gathered(found):
    assert len(found["saves"]["exported"]) == 21 and all(found["saves"]["exported"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_takes_no_memory_of_all_weights(kind, model, found):
    """AdamW runs in one kernel, the others a piece of a weight at a time: float32 copies and random numbers, some 10
    times 4 bytes a value of the largest weight."""
    largest = max(p.numel() for p in LlamaForCausalLM.from_pretrained(model).parameters())
    assert found["optimizers"][kind] <= (0 if kind == "adamw" else 10 * 4 * largest)
    assert found["optimizers"][f"{kind}, 16 million"] <= (0 if kind == "adamw" else 15 * 4 * 2**22)
