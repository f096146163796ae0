"""Both engines on prompts with images of several sizes, packed with text, against the trainer."""

import pytest
import torch
from transformers import AutoTokenizer

from common.batch import Batch
from common.dataset.store import load_prompts
from common.engine.base import EngineSetup, Request, RolloutConfig, SamplingConfig
from common.engine.make import make_engine
from common.model.loading import load_policy, read_config
from common.model.policy import ModelConfig
from common.prompts import DataConfig
from common.rollout import Response
from tests.engine.engine_models import perturb
from tests.vision.stand_in import without_torchvision
from tests.vision.tiny_models import ROWS, make_vision_model, write_rows

TOLERANCE = 2e-5                        # as tests/engine: log-probs of up to 20 in float32
FLOAT32 = ModelConfig(compute_dtype="float32")


def sample(engine, prompts, policy, begun: list[int] | None = None) -> float:
    """Sample every row twice, and score it with the trainer in one packed row: the largest difference of log-probs.
    `begun`: each response is continued that has these tokens; they are not compared."""
    rows = [row for row in range(len(prompts)) for _ in range(2)]
    begun = begun or []
    requests = [Request(prompts[row], seed, Response(begun, [0.0] * len(begun), "")) for seed, row in enumerate(rows)]
    responses = engine.complete(requests, SamplingConfig(1.0, 12 + len(begun)))
    batch = Batch.build([prompts[row].tokens for row in rows], [response.tokens for response in responses],
                        rollout_logps=[response.logp for response in responses],
                        masks=[[n >= len(begun) for n in range(len(response.tokens))] for response in responses])
    batch.image_row = torch.tensor([row if prompts[row].images else -1 for row in rows])
    logp = policy.score(batch.to("cpu", policy.share_prompt), 1.0)
    assert batch.mask.sum() > 60
    return float((logp - batch.rollout_logp)[batch.mask].abs().max())


@pytest.mark.parametrize("kind", ["vllm", "hf"])
def test_engine_and_trainer_agree_before_and_after_a_sync(model, prompts, world, kind):
    if kind == "vllm":
        without_torchvision()
    config = RolloutConfig(engine=kind, max_response_length=24, max_num_seqs=16, kv_cache_gb=0.1)
    engine = make_engine(EngineSetup(
        model, read_config(model, FLOAT32), config, FLOAT32, world, [prompt.tokens for prompt in prompts], [2], 512, 0))
    engine.probe_every = 1
    policy = load_policy(model, FLOAT32, world)
    policy.prompts = prompts
    metrics = engine.wake(policy)
    assert sample(engine, prompts, policy) < TOLERANCE
    assert metrics["sync/num_checksums"] > 0.7 * len(list(policy.lm.parameters()))
    metrics = engine.sleep()
    assert metrics["sync/probe_logp_diff"] < TOLERANCE                  # placeholders as text, on both sides
    perturb(policy, 0.3)                                                # the tower too: its outputs must not be cached
    engine.wake(policy)
    assert sample(engine, prompts, policy) < TOLERANCE
    if kind == "vllm":                                                  # as --rollout.in-flight continues responses
        placeholder = policy.lm.config.image_token_id                   # which a policy may have sampled
        assert sample(engine, prompts, policy, [900, placeholder, 901, placeholder, placeholder, 17]) < TOLERANCE
    engine.sleep()
    engine.close()


@pytest.mark.sweep
def test_engine_and_trainer_agree_on_a_mixture(world, tmp_path):
    """Its experts are published in another form than transformers holds them, and vLLM reads that form."""
    model = make_vision_model("qwen3_vl_moe", tmp_path / "model")
    rows = [write_rows(tmp_path / "rows.parquet", ROWS)]
    prompts = load_prompts(rows, AutoTokenizer.from_pretrained(model), DataConfig())
    test_engine_and_trainer_agree_before_and_after_a_sync(model, prompts, world, "vllm")


@pytest.mark.sweep
def test_no_draft_changes_a_response_to_an_image(model, prompts, world):
    """Where vLLM's prompt is longer than the one that was asked for. The second time the responses are the history."""
    without_torchvision()
    policy = load_policy(model, FLOAT32, world)
    policy.prompts = prompts
    engines = []
    found = []
    for drafts in (0, 4):
        config = RolloutConfig(engine="vllm", max_response_length=24, max_num_seqs=16, kv_cache_gb=0.1, drafts=drafts)
        engine = make_engine(EngineSetup(
            model, read_config(model, FLOAT32), config, FLOAT32, world, [p.tokens for p in prompts], [2], 512, 0))
        engines.append(engine)
        engine.wake(policy)
        for _ in range(2):
            requests = [Request(prompts[n % len(prompts)], n) for n in range(4 * len(prompts))]
            found.append(engine.complete(requests, SamplingConfig(0.5, 20)))
    assert found[0] == found[1] == found[2] == found[3]
    assert engine.drafts.metrics()["rollout/spec_accept_length"] > 1.2
    for engine in engines:
        engine.close()
