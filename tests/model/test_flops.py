"""FLOPs of a micro-batch as it runs, against torch's own counter of the operations of the policy's forward."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen3MoeConfig

import common.forward.attention  # noqa: F401 - transformers knows packed_sdpa then
from common.batch import Batch
from common.model.flops import microbatch_flops, sequence_cost
from common.model.policy import Policy
from tests.model.families import config_of

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0}
CONFIGS = {
    "llama": (LlamaConfig(**SIZES), [None, None]),
    "mistral, window 4": (MistralConfig(**SIZES, sliding_window=4), [4, 4]),
    "gemma3, a window in one layer": (Gemma3TextConfig(
        **SIZES, sliding_window=4, layer_types=["sliding_attention", "full_attention"]), [4, None]),
}
LONG, SHORT = [5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22]
RESPONSES = [[1, 2, 3, 4], [5], [6, 7, 8, 9, 10, 11], [], [12, 13]]
MASKS = [[True] * 4, [True], [True, False, False, True, True, True], [], [True, True]]


def make_batch() -> Batch:
    """Two prompts, of three responses and of two, one of them without tokens; one with tool output."""
    return Batch.build([LONG, LONG, LONG, SHORT, SHORT], RESPONSES, masks=MASKS)


def pairs_outside(num_before: int, num_new: int, window: int | None) -> int:
    """Pairs that sdpa multiplies, as it knows no mask, and that the mask then drops: by a loop."""
    seen = sum(1 for query in range(num_before, num_before + num_new) for key in range(query + 1)
               if window is None or query - key < window)
    return num_new * (num_before + num_new) - seen


@pytest.mark.parametrize("share_prompt", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_microbatch_costs_what_torch_counts(name, share_prompt):
    config, windows = CONFIGS[name]
    policy = Policy(AutoModelForCausalLM.from_config(config, attn_implementation="packed_sdpa").float())
    policy.share_prompt = share_prompt
    batch = make_batch()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        policy(batch, 1.0)
    segments = [(0, len(p) + len(r)) for p, r in zip([LONG] * 3 + [SHORT] * 2, RESPONSES)]
    if share_prompt:
        segments = [(0, 13), (9, 1), (9, 6), (0, 3), (3, 2)]                            # (keys before, new tokens)
    outside = sum(pairs_outside(*segment, window) for segment in segments for window in windows)
    got = microbatch_flops(batch, config, share_prompt)
    counts = counter.get_flop_counts().items()                          # rotary angles are a product before 5.19
    rotary = sum(sum(of.values()) for name, of in counts if name.endswith("rotary_emb"))
    assert got == counter.get_total_flops() - rotary - 4 * 4 * 8 * outside              # 4 FLOPs, heads, head_dim
    assert got > 1e5


@pytest.mark.parametrize(("family", "num_layers", "width", "state"), [
    ("llama", 2, 32 + 32, 0), ("qwen3_moe", 2, 32 + 32, 0), ("deepseek_v3", 2, 24 + 16, 0),
    ("qwen3_next", 1, 32 + 32, 6 * 4 * 16 * 16), ("qwen3_5_text", 1, 32 + 32, 6 * 4 * 16 * 16),
    ("lfm2", 1, 16 + 16, 0), ("nemotron_h", 1, 32 + 32, 4 * 8 * 16 * 16),
])
def test_the_layers_of_a_family_cost_what_torch_counts(family, num_layers, width, state):
    """Of matrices, experts, routers and convolutions. `num_layers` have attention, with keys and values of `width`.
    `state`: by hand, products of each token with the states of heads [16, 16], three or two of 2 FLOPs a number. What a
    convolution multiplies before the first token does not depend on the length: two lengths are compared."""
    config = config_of(family)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    inner = {f"{type(model).__name__}.{name}" for name, module in model.named_modules() if "rotary" not in name and (
        not any(module.children()) or type(module).__name__.endswith("Experts"))}

    def count(length: int) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=torch.arange(length)[None], use_cache=False)
        counts = counter.get_flop_counts()
        convolved = sum(of for operation, of in counts["Global"].items() if "conv" in str(operation))
        return convolved + sum(sum(of.values()) for name, of in counts.items() if name in inner)

    attention = 2 * 4 * width * num_layers * (25 * 26 - 9 * 10) // 2                    # heads, pairs
    costs = sequence_cost([9, 25], config)
    assert costs[1] - costs[0] == count(25) - count(9) + attention + state * (25 - 9)
    assert count(25) > 2 * count(9) > 1e5


def test_a_shared_prompt_is_counted_once():
    """By hand: 60 responses of 2 tokens to a prompt of 100 run 100 + 120 tokens, not 60 x 102."""
    config = LlamaConfig(**SIZES)
    batch = Batch.build([list(range(1, 51)) * 2] * 60, [[n, 4] for n in range(60)])
    layers = 2 * (2 * 32 * 8 * (2 * 4 + 2 * 2) + 6 * 32 * 48)                           # a token
    head = 2 * 32 * 61 * 120                                                            # where a token was sampled
    pair = 2 * 4 * 4 * 8                                                                # layers, FLOPs, heads, head_dim
    pairs = 100 * 101 // 2 + 60 * (101 + 102)
    assert microbatch_flops(batch, config, share_prompt=True) == layers * 220 + head + pair * pairs
    apart = microbatch_flops(batch, config, share_prompt=False)
    assert apart == layers * 60 * 102 + head + pair * 60 * 102 * 103 // 2
    assert apart > 20 * microbatch_flops(batch, config, share_prompt=True)


def test_without_sharing_it_is_the_cost_of_the_sequences_with_a_smaller_head():
    """Of a mixture too, whose experts torch's counter does not see."""
    config = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    batch = make_batch()
    not_sampled = int((~batch.mask).sum())
    want = sequence_cost(batch.sequence_lengths.numpy(), config).sum() - not_sampled * 2 * 32 * 61
    assert microbatch_flops(batch, config, share_prompt=False) == want


def test_no_more_is_counted_than_torch_counts():
    """So MFU stays below 1: with a shared prompt, the count is below that of the operations that ran."""
    config = LlamaConfig(**SIZES)
    policy = Policy(AutoModelForCausalLM.from_config(config, attn_implementation="packed_sdpa").float())
    batch = Batch.build([list(range(1, 31))] * 16, [[n, 4] for n in range(16)])
    policy.share_prompt = True
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        policy(batch, 1.0)
    assert 0.5 < microbatch_flops(batch, config, share_prompt=True) / counter.get_total_flops() < 1
