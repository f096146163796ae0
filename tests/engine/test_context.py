"""YaRN from the config reaches trainer and engine alike: at positions beyond 32k both agree with transformers."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from common.batch import Batch
from common.engine.base import EngineSetup, RolloutConfig, SamplingConfig
from common.engine.make import check_rollout, make_engine
from common.model.loading import load_policy, read_config
from common.model.policy import ModelConfig
from tests.generate import generate

LENGTH = 33_000                                                         # tokens of the prompt
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16384}
FLOAT32 = ModelConfig(compute_dtype="float32")


def save(folder, rope: dict | None) -> str:
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=65536, rope_parameters=rope, bos_token_id=1,
        eos_token_id=2, tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return str(folder)


def test_positions_beyond_32k_agree(world, tmp_path):
    folder = save(tmp_path / "yarn", YARN)
    hf_config = read_config(folder, FLOAT32)
    prompt = torch.randint(3, 64, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    rollout = RolloutConfig(max_response_length=8, max_num_seqs=4, kv_cache_gb=0.1)
    rollout.extra = '{"skip_tokenizer_init": true}'
    longest = check_rollout(rollout, hf_config, world, LENGTH)
    setup = EngineSetup(folder, hf_config, rollout, FLOAT32, world, [prompt[:5], prompt[5:9]], [2], longest, 0)
    engine = make_engine(setup)
    policy = load_policy(folder, FLOAT32, world)
    engine.wake(policy)
    (response,) = generate(engine, [prompt], [1], SamplingConfig(1.0, 8))
    engine.sleep()
    engine.close()
    ours = policy.score(batch := Batch.build([prompt], [response.tokens]), 1.0)[batch.mask]
    want, unscaled = (by_transformers(path, prompt, response.tokens)
                      for path in (folder, save(tmp_path / "plain", {"rope_type": "default", "rope_theta": 10000.0})))
    assert (want - unscaled).abs().max() > 0.05                         # what would be seen without YaRN
    assert (ours - want).abs().max() < 1e-4
    assert (torch.tensor(response.logp) - want).abs().max() < 1e-3


@torch.no_grad()
def by_transformers(folder: str, prompt: list[int], response: list[int]) -> torch.Tensor:
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    logits = lm(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
