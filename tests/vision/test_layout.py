"""The gradient of rows with images is the same on one rank and on two, of which one may have no image. Samplers of
async_grpo.py get the weights block by block."""

import types
from collections import defaultdict

import torch

from common.engine.base import EngineSetup, RolloutConfig
from common.engine.remote import RemoteEngine
from common.model.loading import load_policy
from common.model.policy import ModelConfig
from tests.conftest import launch
from tests.vision.tiny_models import ROWS, make_vision_model, write_rows
from tests.vision.vision_worker import step_gradient


def test_two_ranks_have_the_gradient_of_one(tmp_path, world, smollm):
    share_prompt = True                                                 # without, on one rank: test_trainer.py
    model = make_vision_model("qwen3_vl", tmp_path / "model")
    rows = write_rows(tmp_path / "rows.parquet", ROWS)
    expected = step_gradient(model, rows, world, share_prompt, max_tokens=1000)
    out = tmp_path / "gradient.pt"
    launch("tests/vision/vision_worker.py", out, model, rows, share_prompt, ranks=2, warm=True)
    found = torch.load(out)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        scale = expected[name].abs().max().clamp(min=1e-3)
        assert (gradient - expected[name]).abs().max() < 1e-4 * scale, name
    assert max(float(g.abs().max()) for name, g in expected.items() if "visual" in name) > 0.01


def test_samplers_get_no_more_than_a_block_at_a_time(tmp_path, world, smollm):
    """The names of a vision-language model's weights have a part more than those of a text model."""
    config = ModelConfig(compute_dtype="float32")
    policy = load_policy(make_vision_model("qwen3_vl", tmp_path / "model"), config, world)
    second = types.SimpleNamespace(num_samplers=1, size=3, rank=1, is_main=False)           # it sends no data
    engine, sent = RemoteEngine(EngineSetup("", None, RolloutConfig(), config, second, [], [], 0, 0)), []
    engine.bridge = types.SimpleNamespace(send=sent.append, receive=lambda: (0, [], None))
    engine._load(policy.full_tensors(None), defaultdict(int))           # checksums
    begin, *buckets, end = sent
    assert begin == ("weights",) and end == []
    names = [[name for name, *_ in bucket] for bucket in buckets]
    assert [name for bucket in names for name in bucket] == [name for name, _ in policy.full_tensors(None)]
    for part in ("language_model.layers", "visual.blocks"):
        blocks = [bucket for bucket in names if part in bucket[0]]
        assert [{name.split(part)[1][:3] for name in bucket} for bucket in blocks] == [{".0."}, {".1."}]
