"""Episodes whose tools and users show pictures, also beside those of the row: both engines against the trainer, tokens
against the model's own processor, transport between ranks, in flight."""

import base64
import io
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from common.dataset.images import load_processor
from common.dataset.store import load_prompts
from common.engine.base import EngineSetup, RolloutConfig
from common.engine.make import make_engine
from common.model.loading import load_policy, read_config
from common.model.policy import ModelConfig
from common.prompts import DataConfig
from common.rollout import gather_rollout
from tests.engine.episode_runs import Runs, runs_of, with_tools
from tests.vision.stand_in import without_torchvision
from tests.vision.tiny_models import ROWS, write_rows

FILE = Path(__file__).parent / "episodes_with_pictures.py"
FLOAT32 = ModelConfig(compute_dtype="float32")
TOLERANCE = 2e-5                        # as test_engines.py


def load(model: str, path: Path, rows=None):
    rows = rows or [row | {"extra_info": {"split": "tools"}} for row in ROWS]
    return load_prompts([write_rows(path / "rows.parquet", rows)], AutoTokenizer.from_pretrained(model), DataConfig(),
                        all_columns=True)


@pytest.fixture(scope="module", params=["vllm", "hf"])
def engine(request, model, world):
    if request.param == "vllm":
        without_torchvision()
    config = RolloutConfig(engine=request.param, max_response_length=256, max_num_seqs=16, kv_cache_gb=0.1)
    engine = make_engine(EngineSetup(model, read_config(model, FLOAT32), config, FLOAT32, world, [[1, 2]], [2], 900, 0))
    engine.policy = load_policy(model, FLOAT32, world)
    engine.wake(engine.policy)
    yield engine
    engine.sleep()
    engine.close()


@pytest.fixture
def play(engine, model, world, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    runs = Runs(engine, tokenizer, world, [2], max_length=900)
    flags = {"tool_parser": "hermes", "template": with_tools(tokenizer, tmp_path)}
    return lambda name, prompts, **more: runs(f"{FILE}:{name}", prompts, **flags | more)


def score(engine, data, samples) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the sampled tokens by the engine and by the trainer, in one packed row."""
    rollout = gather_rollout(samples)
    batch = rollout.batch
    data.take_images(rollout, [[batch]])
    engine.policy.prompts = data
    logp = engine.policy.score(batch.to("cpu", engine.policy.share_prompt), 1.0)
    return batch.rollout_logp[batch.mask], logp[batch.mask]


def test_engine_and_trainer_agree(engine, play, model, tmp_path):
    data = load(model, tmp_path)
    samples = play("looks", data, num_samples=2)
    assert [sample.response.end_reason for sample in samples] == ["done"] * 8
    of_engine, of_trainer = score(engine, data, samples)
    assert len(of_engine) > 8 * 12
    assert (of_engine - of_trainer).abs().max() < TOLERANCE
    # pixels matter, of each response its own
    first, second = list(data.own_images)[:2]
    data.own_images[first], data.own_images[second] = data.own_images[second], data.own_images[first]
    assert len(set(map(tuple, data.own_images.values()))) > 4
