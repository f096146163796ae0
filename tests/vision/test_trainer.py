"""The trainer on packed rows with images against transformers' own forward of each row by itself."""

import re
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForImageTextToText

from common.batch import Batch
from common.dataset.images import load_processor
from common.model.loading import Weights, load_policy
from common.model.lora import LoRAConfig
from common.model.policy import ModelConfig
from envs.pictures import decode
from tests.model.families import Float64
from tests.parallel.sequence_worker import in_float64

TOLERANCE = 2e-5                        # log-probs of up to 20 in float32; reached: 5e-6
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "internvl")
GRADIENT = {"float32": 2e-5, "float64": 1e-7}
"""Of the largest entry of each tensor."""
RESPONSES = {0: [[5, 7, 2], [900, 901, 902, 903]], 1: [[8, 2]], 2: [[4098, 17, 4097, 30, 2]], 3: [[5, 7, 2]]}
"""By row. 4097 and 4098 are placeholders, which a policy may sample like any token."""


def batch_of(prompts, order: list[tuple[int, int]]) -> Batch:
    """Responses (row, number of the row's response), as `to_minibatches` makes them."""
    batch = Batch.build([prompts[row].tokens for row, _ in order], [RESPONSES[row][n] for row, n in order])
    batch.image_row = torch.tensor([row if prompts[row].images else -1 for row, _ in order])
    return batch


ORDER = [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1)]


def alone(model: str, prompts, order: list[tuple[int, int]], with_grad: bool = False,
          dtype: torch.dtype = torch.float32):
    """Log-probs of each response by transformers' own model, unpacked, with eager attention; and that model."""
    kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    lm = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32, **kinds)
    lm.eval().to(dtype)
    processor, found = load_processor(model)[0], []
    for row, number in order:
        prompt, response = prompts[row], RESPONSES[row][number]
        extra = {}
        if prompt.images:
            pictures = decode(prompt.images.files)
            parts = [{"type": "image"} if part == "<image>" else {"type": "text", "text": part}
                     for part in re.split("(<image>)", prompt.messages[0]["content"]) if part]
            text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
            made = processor(text=[text], images=pictures, return_tensors="pt")
            assert made["input_ids"][0].tolist() == prompt.tokens
            extra = {name: made[name] for name in made if "pixel" in name or "grid" in name}
        tokens = torch.tensor([prompt.tokens + response])
        placeholders = (tokens == lm.config.image_token_id) & (torch.arange(tokens.shape[1]) < len(prompt.tokens))
        embeddings = lm.get_input_embeddings()(tokens)
        # a placeholder that was sampled is a token like others, so transformers' forward must not see its id
        safe = torch.where(placeholders | (tokens != lm.config.image_token_id), tokens, 0)
        hook = lm.get_input_embeddings().register_forward_hook(lambda *_, embeddings=embeddings: embeddings)
        if "image_grid_thw" in extra:
            extra["mm_token_type_ids"] = placeholders.long()
        with torch.set_grad_enabled(with_grad):
            logits = lm(input_ids=safe, **extra).logits[0, len(prompt.tokens) - 1 : -1]
        hook.remove()
        found.append(logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)])
    return found, lm


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
@pytest.mark.parametrize("share_prompt", [False, True])
def test_packed_rows_with_images_match_each_row_alone(model, prompts, world, share_prompt):
    config = ModelConfig(compute_dtype="float32", share_prompt=share_prompt)
    policy = load_policy(model, config, world)
    policy.prompts = prompts
    order = ORDER
    batch = batch_of(prompts, order).to("cpu", share_prompt)
    logp = policy.score(batch, 1.0)
    expected, _ = alone(model, prompts, order)
    expected = torch.cat(expected)
    assert (logp[batch.mask] - expected).abs().max() < TOLERANCE
    blind = policy.score(Batch.build([prompts[0].tokens], [RESPONSES[0][0]]), 1.0)
    assert (blind[-3:] - expected[:3]).abs().max() > 0.1                # pixels matter


def gradients(policy, batches: list[Batch], weights: dict[tuple[int, int], float]) -> dict[str, torch.Tensor]:
    """The gradient of the sum of log-probs, each response with its own weight, over micro-batches of (batch, order)."""
    for batch, order in batches:
        logp, _ = policy(batch, 1.0)
        weight = torch.tensor([weights[pair] for pair in order])[batch.sequence_ids]
        (logp * weight * batch.mask).sum().backward()
    found = {name: p.grad.full_tensor().clone() for name, p in policy.lm.named_parameters() if p.grad is not None}
    policy.zero_grad()
    return found


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradient_is_that_of_rows_alone_in_any_layout(dtype, model, prompts, world):
    """In float64 everything is, so that what remains of float32's difference would be a fault."""
    is_wide = dtype == "float64"
    with in_float64(with_norms=False) if is_wide else nullcontext():
        policy = load_policy(model, ModelConfig(compute_dtype="float32"), world)
    policy.prompts = prompts
    weights = {pair: 0.5 - 0.3 * i for i, pair in enumerate(ORDER)}
    layouts = [[ORDER], [ORDER[::-1]], [[pair] for pair in ORDER], [ORDER[1:2], ORDER[:1] + ORDER[2:]]]
    with Float64() if is_wide else nullcontext():
        logps, lm = alone(model, prompts, ORDER, with_grad=True, dtype=getattr(torch, dtype))
        theirs = dict(lm.named_buffers())
        for name, buffer in policy.lm.named_buffers():
            if is_wide:                                                 # frequencies that were rounded otherwise
                buffer.copy_(theirs[name])
        sum(weights[pair] * logp.sum() for pair, logp in zip(ORDER, logps)).backward()
        expected = {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}
        for share_prompt in (False, True):
            policy.share_prompt = share_prompt
            for layout in layouts:
                batches = [(batch_of(prompts, order).to("cpu", share_prompt), order) for order in layout]
                found = gradients(policy, batches, weights)
                assert found.keys() == expected.keys()
                for name, gradient in found.items():
                    assert gradient.dtype == expected[name].dtype == getattr(torch, dtype)
                    scale = expected[name].abs().max().clamp(min=1e-3)
                    assert (gradient - expected[name]).abs().max() < GRADIENT[dtype] * scale, name
    towers = [name for name in expected if "visual" in name or "vision" in name]
    assert towers and max(float(expected[name].abs().max()) for name in towers) > 0.01


def test_frozen_tower_has_no_gradient(model, prompts, world):
    policy = load_policy(model, ModelConfig(compute_dtype="float32", freeze_vision=True), world)
    policy.prompts = prompts
    found = gradients(policy, [(batch_of(prompts, ORDER), ORDER)], dict.fromkeys(ORDER, 1.0))
    assert found and all("language_model" in name or name == "lm_head.weight" for name in found)


def test_a_row_without_images_gives_the_tower_a_gradient_of_zeros(model, prompts, world):
    """So all ranks reduce the same tensors, whoever has the images."""
    policy = load_policy(model, ModelConfig(compute_dtype="float32"), world)
    policy.prompts = prompts
    found = gradients(policy, [(batch_of(prompts, [(1, 0)]), [(1, 0)])], {(1, 0): 1.0})
    unused = {name for name, p in policy.lm.named_parameters()} - found.keys()
    assert not unused
    tower = [gradient for name, gradient in found.items() if "language_model" not in name and "lm_head" not in name]
    assert tower and not any(gradient.any() for gradient in tower)


def test_adapters_are_in_the_language_model_alone(model, prompts, world):
    policy = load_policy(model, ModelConfig(compute_dtype="float32"), world, Weights(lora=LoRAConfig(rank=2)))
    policy.prompts = prompts
    batch = batch_of(prompts, ORDER)
    expected, _ = alone(model, prompts, ORDER)
    assert (policy.score(batch, 1.0)[batch.mask] - torch.cat(expected)).abs().max() < TOLERANCE
    found = gradients(policy, [(batch, ORDER)], dict.fromkeys(ORDER, 1.0))
    assert found and all("language_model" in name and "lora" in name for name in found)
