"""grpo.py on a random mixture of experts with two mini-batches a step: what router replay does to the second update."""

import json
from pathlib import Path

import pytest
import torch

from tests.conftest import VOCAB, launch_all, save_tokenizer
from tests.scripts.test_grpo import FORK, TINY


@pytest.fixture(scope="module")
def mixture(tmp_path_factory, smollm) -> str:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    folder = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True, max_position_embeddings=1024,
        initializer_range=0.1, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def test_replay_holds_the_experts_of_later_updates(mixture, small_train, tmp_path):
    flags = ["grpo", "--model", mixture, "--train-data", small_train, *TINY, *FORK, "--optim.lr", "2e-2"]
    launch_all(tmp_path, {"free": flags, "held": [*flags, "--policy.router-replay", "old-logp"]})
    free, held = (json.loads((tmp_path / name / "metrics.jsonl").read_text()) for name in ("free", "held"))
    assert "actor/router_changed" not in free
    print({name: (free[name], held[name]) for name in free if name.startswith("actor/")}, held["actor/router_changed"])
