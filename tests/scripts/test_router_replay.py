"""grpo.py on a random mixture of experts with two mini-batches a step: what router replay does to the second update."""

import json

import pytest
import torch

from tests.conftest import ROOT, VOCAB, launch_all, save_tokenizer
from tests.scripts.test_grpo import REWARD, TINY

FORK = ("--total-steps", "1", "--minibatches-per-step", "2", "--optim.lr", "5e-3", "--reward.function",
        f"{REWARD}:compute_score")

TURNS = ("--rollout.episode", f"{ROOT}/tests/engine/episodes_of_tests.py:three_turns", "--rollout.max-response-length",
         "80")


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


@pytest.mark.sweep
def test_replay_holds_the_experts_of_later_updates(mixture, small_train, tmp_path):
    """The first update moves the weights, and routers would choose otherwise in the second one, whose ratios are others
    with and without replay. Where it leaves the weights as they are, the experts are the same, and all ratios are 1."""
    base = ["grpo", "--model", mixture, "--train-data", small_train, *TINY, *FORK]
    replay = ["--policy.router-replay", "old-logp"]
    still, told = ["--optim.lr", "1e-30"], ["--policy.router-replay", "rollout"]
    launch_all(tmp_path, {"free": base, "held": [*base, *replay], "still": [*base, *replay, *still],
                          "told": [*base, *told], "turns": [*base, *told, *still, *TURNS]})
    found = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("*/metrics.jsonl")}
    for name, row in found.items():                                     # pytest -s shows them
        print(name, {key: x for key, x in row.items() if key.startswith("actor/")})
    free, held, still, told, turns = (found[name] for name in ("free", "held", "still", "told", "turns"))
    assert "actor/router_changed" not in free
    assert 0.05 < held["actor/router_changed"] < 0.5                    # nothing in the first of two updates
    assert held["actor/ppo_kl"] != free["actor/ppo_kl"] and 0 < held["actor/pg_clipfrac"] < 0.5
    assert still["actor/grad_norm"] > 0.1
    for row in (still, turns):
        assert (row["actor/router_changed"], row["actor/ppo_kl"], row["actor/ratio"]) == (0, 0, 1)
    assert turns["num_turns/min"] == 3
    for name in ("actor/router_changed", "actor/ppo_kl", "actor/grad_norm"):    # engine and trainer choose alike
        assert told[name] == pytest.approx(held[name], rel=1e-4), name
