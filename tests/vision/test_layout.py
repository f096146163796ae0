"""The gradient of rows with images is the same on one rank and on two, of which one may have no image. Samplers of
async_grpo.py get the weights one by one."""

import base64
import types

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from common.dataset.images import load_processor
from common.dataset.store import load_prompts
from common.engine.base import EngineSetup, RolloutConfig
from common.engine.remote import RemoteEngine
from common.model.loading import load_policy
from common.model.policy import ModelConfig
from common.prompts import DataConfig
from common.sync.checksums import checksum
from envs.pictures import decode
from tests.conftest import launch
from tests.vision.tiny_models import ROWS, make_vision_model, write_rows
from tests.vision.vision_worker import responses_of, step_gradient, weight_of


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        scale = expected[name].abs().max().clamp(min=1e-3)
        assert (gradient - expected[name]).abs().max() < 2e-5 * scale, name


@pytest.mark.parametrize("with_own", [False, True])
def test_two_ranks_have_the_gradient_of_one(with_own, tmp_path, world, smollm):
    """Also where responses have none to three pictures of their own, which travel with them."""
    share_prompt = True                                                 # without, on one rank: test_trainer.py
    model = make_vision_model("qwen3_vl", tmp_path / "model")
    rows = write_rows(tmp_path / "rows.parquet", ROWS)
    expected = step_gradient(model, rows, world, share_prompt, 1000, with_own)
    out = tmp_path / "gradient.pt"
    launch("tests/vision/vision_worker.py", out, model, rows, share_prompt, with_own, ranks=2, warm=True)
    assert_close(torch.load(out), expected)
    assert max(float(g.abs().max()) for name, g in expected.items() if "visual" in name) > 0.01


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_own_pictures_have_the_gradient_of_each_response_alone(family, tmp_path, world, smollm):
    """By transformers' own forward of each sequence, with all pixels in one call of its own processor."""
    model = make_vision_model(family, tmp_path / "model")
    rows = write_rows(tmp_path / "rows.parquet", ROWS)
    found = step_gradient(model, rows, world, True, 200, with_own=True)
    prompts = load_prompts([rows], AutoTokenizer.from_pretrained(model), DataConfig())
    lm = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    processor = load_processor(model)[0]
    placeholder = lm.config.image_token_id
    for row, responses in responses_of(prompts, with_own=True).items():
        for n, response in enumerate(responses):
            prompt = prompts[row]
            files = [*(prompt.images.files if prompt.images else []), *map(base64.b64decode, response.images)]
            tokens = torch.tensor([[*prompt.tokens, *response.tokens]])
            is_sampled = torch.tensor([False] * len(prompt.tokens) + (response.mask or [True] * len(response.tokens)))
            is_image = (tokens == placeholder) & ~is_sampled
            extra = {}
            if files:
                made = processor(text=[processor.image_token * len(files)], images=decode(files), return_tensors="pt")
                extra = {name: made[name] for name in made if "pixel" in name or "grid" in name}
                assert int(is_image.sum()) == int((made["input_ids"] == placeholder).sum())
            if "image_grid_thw" in extra:
                extra["mm_token_type_ids"] = is_image.long()
            embeddings = lm.get_input_embeddings()(tokens)              # a placeholder that was sampled is a token
            safe = torch.where(is_image | (tokens != placeholder), tokens, 0)
            hook = lm.get_input_embeddings().register_forward_hook(lambda *_, embeddings=embeddings: embeddings)
            logp = lm(input_ids=safe, **extra).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
            hook.remove()
            (weight_of(2 * row + n) * logp[is_sampled[1:]].sum()).backward()
    assert_close(found, {name: p.grad for name, p in lm.named_parameters()})


def test_samplers_get_one_tensor_at_a_time(tmp_path, world, smollm):
    """They learn before which tensors will come, and in which order; the checksums come last."""
    config = ModelConfig(compute_dtype="float32")
    policy = load_policy(make_vision_model("qwen3_vl", tmp_path / "model"), config, world)
    first, sent = types.SimpleNamespace(num_samplers=1, size=1, rank=0, is_main=True, samplers_on_cpu=False), []
    done = types.SimpleNamespace(wait=lambda: None)
    engine = RemoteEngine(EngineSetup("", None, RolloutConfig(), config, first, [], [], 0, 0))
    engine.bridge = types.SimpleNamespace(
        send=sent.append, receive=lambda: (0, [], None),
        group=types.SimpleNamespace(broadcast=lambda data, rank: sent.append(data.clone()) or done),
    )
    engine.wake(policy)
    (kind, described), *parts, checksums = sent
    weights = dict(policy.full_tensors(torch.float32))
    assert kind == "weights" and [*described] == [*weights] == [*checksums] and len(parts) == len(weights) > 20
    assert all(tensor.is_meta for tensor in described.values())
    for (name, like), part in zip(described.items(), parts):
        assert torch.equal(part.view(like.dtype).view(like.shape), weights[name]), name
        assert checksums[name] == checksum(weights[name], torch.float32)
