"""grpo.py on a random mixture of experts with two mini-batches a step: what router replay does to the second update."""

import json

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
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, max_position_embeddings=1024,
        initializer_range=0.1, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def test_replay_holds_the_experts_of_later_updates(mixture, small_train, tmp_path):
    """Where the first update moves the weights, the second one's ratios are nearer to 1 with the experts of before it;
    where it leaves them as they are, replay changes nothing; where there is no second one, nothing is replayed."""
    base = ["grpo", "--model", mixture, "--train-data", small_train, *TINY, *FORK]
    moving, still = [*base, "--optim.lr", "2e-2"], [*base, "--optim.lr", "1e-30"]
    replay = ["--policy.router-replay", "old-logp"]
    launch_all(tmp_path, {
        "free": moving, "held": [*moving, *replay], "free, still": still, "held, still": [*still, *replay],
        "one update": [*moving, *replay, "--minibatches-per-step", "1"],
    })
    found = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("*/metrics.jsonl")}
    free, held = found["free"], found["held"]
    print({name: (free[name], held[name]) for name in free if name.startswith("actor/")}, held["actor/router_changed"])
    assert 0.1 < held["actor/router_changed"] < 0.5                     # nothing in the first of two updates
    assert 0.01 < held["actor/ppo_kl"] < free["actor/ppo_kl"]
    assert 0 < held["actor/pg_clipfrac"] < free["actor/pg_clipfrac"]
    assert found["held, still"].pop("actor/router_changed") == 0
    of_actor = [{name: x for name, x in found[run].items() if name.startswith("actor/")}
                for run in ("free, still", "held, still")]
    assert of_actor[0] == of_actor[1] and of_actor[0]["actor/grad_norm"] > 0
    assert not any("actor/router_changed" in found[name] for name in ("free", "free, still", "one update"))
