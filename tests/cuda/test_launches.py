"""What an update asks of a GPU: kernels of a layer, FLOPs, the order of gathers, CUDA graphs (launches.py)."""

import numpy as np
import pytest
from transformers import AutoConfig

from common.engine.base import RolloutConfig
from common.model.flops import sequence_cost
from common.model.policy import ModelConfig
from tests.cuda.fake_cuda import WHY_NOT
from tests.cuda.launches import DEPTHS, SITE, count, layer_and_rest, of_depth
from tests.cuda.memory import Case
from tests.cuda.shapes import MODELS

pytestmark = [pytest.mark.sweep, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

LENGTH, RESPONSES = 512, 8
CASE = Case(MODELS["Qwen3-0.6B"] | {"vocab_size": 4096}, 8, LENGTH * RESPONSES, LENGTH // 4, 3 * LENGTH // 4,
            num_microbatches=1, policy=ModelConfig(gradient_checkpointing=False))
MOST = {False: (60, 105), True: (20, 36)}               # with and without Liger: kernels of a layer beside its products
NEEDS_LIGER = pytest.mark.skipif(not (SITE / "liger_kernel").is_dir(), reason=f"liger-kernel is not in {SITE}")


@pytest.fixture(scope="module")
def asked():
    """Of Liger's kernels on and off: what the two depths ask for, and a layer and the rest of each pass."""
    found = {}

    def ask(liger: bool):
        if liger not in found:
            low, high = count([of_depth(CASE, depth) for depth in DEPTHS], liger)
            found[liger] = low, high, {name: layer_and_rest(low[name], high[name]) for name in low}
        return found[liger]

    return ask


@pytest.mark.parametrize("liger", [False, pytest.param(True, marks=NEEDS_LIGER)])
def test_kernels_of_a_layer(liger, asked):
    """q, k, v, o, gate, up and down are a product each, and two in the backward pass."""
    _, _, parts = asked(liger)
    (forward, _), (backward, _) = parts["forward"], parts["backward"]
    assert (forward.kernels["products"], backward.kernels["products"]) == (7, 14)
    assert (forward.kernels["attention"], backward.kernels["attention"]) == (1, 1)
    assert (forward.kernels["gathers"], backward.kernels["gathers"], backward.kernels["reductions"]) == (1, 1, 1)
    for asked_for, most in zip((forward, backward), MOST[liger]):
        assert 10 < asked_for.kernels["others"] <= most


def test_products_and_attention_are_the_flops_of_the_plan(asked):
    """The oracle is the formula from the config. The head runs on responses alone, and its backward pass makes its
    logits a second time; attention's makes the scores again, 2.5 times the forward pass."""
    low, _, _ = asked(False)
    config = AutoConfig.for_model(**CASE.model | {"num_hidden_layers": DEPTHS[0]})
    whole = sequence_cost(np.full(RESPONSES, LENGTH), config).sum()
    head = 2 * LENGTH * RESPONSES * config.hidden_size * config.vocab_size
    forward, backward = low["forward"], low["backward"]
    products = whole - head - forward.attention_flops
    assert forward.product_flops == pytest.approx(products + 0.75 * head, rel=1e-9)
    assert backward.product_flops == pytest.approx(2 * products + 0.75 * 3 * head, rel=1e-9)
    assert backward.attention_flops == 2.5 * forward.attention_flops > 0


def test_a_block_is_gathered_before_the_one_before_it_is_done(asked):
    """In the forward pass the host asks for a block's gather when it has asked for all of the block before, and does
    not wait for it. In the backward pass FSDP2 asks for the last block's weights before the products of the head, and
    for those of each next block before the products of this one."""
    low, high, _ = asked(False)
    for num_layers, found in zip(DEPTHS, (low, high)):
        blocks = found["forward"].order.lstrip("G").split("G")
        assert [len(block) for block in blocks[: num_layers - 1]] == [7] * (num_layers - 1)
        order = found["backward"].order
        before = [order[:i].count("G") for i, letter in enumerate(order) if letter == "P"]
        of_head, of_blocks = before[:3], before[3:]
        assert set(of_head) == {1}
        assert of_blocks[::14] == [min(2 + n, num_layers) for n in range(num_layers)]


def test_cuda_graphs_are_on():
    assert not RolloutConfig().enforce_eager
