"""An engine that quantises its weights itself (--rollout.extra '{"quantization": ...}'): every sync quantises the
trainer's weights anew. vLLM's CPU build has `fp8_per_channel` alone; `fp8`, one scale a matrix, needs a GPU."""

import contextlib
import json

import pytest
import torch

from common.engine.base import EngineSetup, RolloutConfig, SamplingConfig
from common.engine.make import make_engine
from common.model.loading import load_policy, read_config
from common.model.policy import ModelConfig
from common.sync import weights
from tests.engine.engine_models import PROMPTS, SEEDS, make_model, perturb
from tests.generate import generate

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("frozen_imports")]


def quantized_by_hand(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, columns] -> codes and one scale a row: the largest element becomes 448, the largest number of float8."""
    scales = weight.float().abs().amax(dim=1) / 448
    return (weight.float() / scales[:, None]).to(torch.float8_e4m3fn), scales


@pytest.fixture(scope="module")
def started(world, tmp_path_factory):
    model, model_config = make_model("llama", True, tmp_path_factory.mktemp("model")), ModelConfig()
    extra = json.dumps({"skip_tokenizer_init": True, "quantization": "fp8_per_channel"})
    config = RolloutConfig(max_response_length=24, max_num_seqs=16, kv_cache_gb=0.1, extra=extra, max_probe_diff=0.1)
    hf_config = read_config(model, model_config)
    engine = make_engine(EngineSetup(model, hf_config, config, model_config, world, PROMPTS[:2], [2], 256, 0))
    engine.probe_every = 1
    yield engine, load_policy(model, model_config, world)
    engine.close()


def held_and_expected(engine, policy) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each quantised matrix: the numbers that the engine computes with, and those of the trainer's, by hand."""
    mine = {name: tensor.bfloat16() for name, tensor in policy.full_tensors(None)}
    found = []
    for name, layer in engine.model.named_modules():
        if layer in engine.weights.quantized:
            path, _, own = name.rpartition(".")
            parts = engine.model.packed_modules_mapping.get(own, [own])
            codes, scales = quantized_by_hand(torch.cat([mine[f"{path}.{part}.weight"] for part in parts]))
            assert layer.weight.dtype == torch.float8_e4m3fn
            held = layer.weight.t().float() * layer.weight_scale.float()
            found.append((held, codes.float() * scales[:, None]))
    return found


def test_every_sync_quantises_the_trainers_weights(started):
    engine, policy = started
    assert len(engine.weights.quantized) == 8        # qkv, o, gate and up, down of two layers
    sampled = []
    for _ in range(3):
        metrics = engine.wake(policy)
        pairs = held_and_expected(engine, policy)
        assert len(pairs) == 8
        for held, expected in pairs:
            assert torch.equal(held, expected) and expected.abs().max() > 0.1
        # compared: the embedding and five norms; not compared: seven matrices in each of two layers
        assert metrics["sync/num_checksums"] == 6 and metrics["sync/num_not_compared"] == 14
        sampled.append([r.tokens for r in generate(engine, PROMPTS, SEEDS, SamplingConfig(1.0, 12))])
        metrics = engine.sleep()
        assert 1e-5 < metrics["sync/probe_prob_diff"] < 0.05
        perturb(policy, 0.3)
    assert sampled[0] != sampled[1] != sampled[2]


def test_what_is_not_quantised_is_still_compared(started, monkeypatch):
    engine, policy = started
    load = engine.model.load_weights
    policy.version += 1

    def load_and_spoil(tensors):
        loaded = load(tensors)
        engine.model.model.norm.weight.data.add_(1)
        return loaded

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "load_weights", load_and_spoil)
        with pytest.raises(RuntimeError, match=r"checksums differ.* in 1 tensors: model\.norm\.weight"):
            engine.wake(policy)
    with monkeypatch.context() as patch:
        name = "model.layers.1.mlp.down_proj.weight"
        send = policy.full_tensors
        patch.setattr(policy, "full_tensors", lambda *args: ((n, t) for n, t in send(*args) if n != name))
        with pytest.raises(RuntimeError, match=rf"nothing that the trainer sends goes into 1 weights .*\({name}\)"):
            engine.wake(policy)
    engine.wake(policy)
    engine.sleep()


def test_without_a_reload_nothing_is_quantised(started, monkeypatch):
    """Why the engine does more than to load: vLLM's loader cannot write into the quantised weights."""
    engine, policy = started
    policy.version += 1
    with monkeypatch.context() as patch:
        patch.setattr(weights, "quantize_on_load", lambda *_: contextlib.nullcontext())
        with pytest.raises((RuntimeError, AttributeError, AssertionError)):
            engine.wake(policy)
