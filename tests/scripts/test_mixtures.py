"""grpo.py and sft.py on a tiny random mixture, with adapters on its experts, the load balancing loss and routers in
float32: engine and trainer compared, resumed, on two ranks that divide the experts."""



import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.checkpoint.run_folder import FINISHED
from tests.conftest import TRAIN, VOCAB, launch, launch_all, save_tokenizer
from tests.parallel import DIVIDES_EXPERTS
from tests.scripts.test_grpo import REWARD, TINY, metrics_of

ALL = ("--lora.rank", "4", "--lora.alpha", "8", "--lora.targets", "q_proj", "o_proj", "experts",
       "--policy.router-aux-coef", "0.05", "--policy.router-float32", "--policy.gradient-checkpointing", "True",
       "--optim.lr", "0.02", "--reward.function", f"{REWARD}:compute_score")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory, smollm) -> str:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    folder = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, max_position_embeddings=1024,
        initializer_range=0.1, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model/model.safetensors")


@pytest.mark.engine
def test_engine_and_trainer_agree(mixture, tmp_path):
    """Two steps with vLLM, in bfloat16: the engine takes the merged experts, and computes its routers as the trainer
    does. Where only the trainer had float32 routers, the two would differ more."""
    launch(
        "grpo.py", "--model", mixture, "--train-data", str(TRAIN), "--run-dir", str(tmp_path),
        "--data.max-prompt-length", "200", "--prompts-per-step", "4", "--samples-per-prompt", "4", "--total-steps", "2",
        "--rollout.max-response-length", "24", "--rollout.max-num-seqs", "16", "--rollout.kv-cache-gb", "0.25",
        "--reward.num-workers", "1", "--max-tokens-per-gpu", "2048", *ALL,
        warm=True,
    )
    rows = metrics_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        print({key: row[key] for key in row if key.startswith(("actor/expert", "actor/router", "training/rollout"))})
        assert 2 < row["actor/router_aux_loss"] < 3 and 1 < row["actor/router_entropy"] < 2.0795  # of 8 experts: log 8
        assert 1 < row["actor/expert_load_max"] < 4                     # one of two choices at most: 8 / 2
        assert row["training/rollout_probs_diff_mean"] < 3e-5           # of probabilities of 5e-4
    before = load_file(Path(mixture) / "model.safetensors")
    moved = set()
    for name, tensor in weights_of(tmp_path).items():
        if not torch.equal(before[name].to(tensor.dtype), tensor):
            moved.add(name.split(".", 3)[-1])
    assert "self_attn.q_proj.weight" in moved and "mlp.experts.7.up_proj.weight" in moved
    assert not any("gate.weight" in name or "norm" in name for name in moved)


@pytest.fixture(scope="module")
def one_rank(mixture, small_train, tmp_path_factory) -> tuple[list[str], Path]:
    """A command, and the folder in which it ran on one rank: two mini-batches a step."""
    folder = tmp_path_factory.mktemp("one_rank")
    command = ["grpo", "--model", mixture, "--train-data", small_train, *TINY, *ALL, "--minibatches-per-step", "2",
               "--save.every", "1", "--save.keep", "2"]
    launch_all(folder, {"run": command})
    return command, folder / "run"


def test_a_run_continues_byte_for_byte(one_rank, tmp_path):
    command, run = one_rank
    again = tmp_path / "run"
    shutil.copytree(run, again)
    for name in ("checkpoints/step_000002", "model", FINISHED):
        shutil.rmtree(again / name)
    launch_all(tmp_path, {"run": command})
    assert (again / "model/model.safetensors").read_bytes() == (run / "model/model.safetensors").read_bytes()
    ours, theirs = metrics_of(again), metrics_of(run)
    names = ("actor/router_aux_loss", "actor/expert_load_max", "actor/router_entropy", "actor/grad_norm")
    assert len(ours) == 2 and all(ours[1][name] == theirs[1][name] for name in names)


@pytest.mark.skipif(not DIVIDES_EXPERTS, reason="transformers is below 5.19")
def test_two_ranks_that_divide_the_experts_train_the_same_model(one_rank, mixture, tmp_path):
    command, run = one_rank
    launch_all(tmp_path, {"run": [*command, "--policy.expert-parallel", "2", "--max-tokens-per-gpu", "300"]}, ranks=2)
    want, found = weights_of(run), weights_of(tmp_path / "run")
    before = load_file(Path(mixture) / "model.safetensors")
    moved = [name for name, x in want.items() if not torch.equal(x, before[name])]
    assert any("experts" in name for name in moved)
    for name in moved:
        assert (found[name] - want[name]).norm() < 1e-3 * (want[name] - before[name]).norm(), name
    for ours, theirs in zip(metrics_of(tmp_path / "run"), metrics_of(run), strict=True):
        for name in ("actor/router_aux_loss", "actor/expert_load_max", "actor/router_entropy", "actor/grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name


def test_sft_has_the_loss_too(mixture, tmp_path):
    """Beside all weights: with a large factor the routers spread the tokens, and without, they do not."""
    rows = []
    for i in range(8):
        answer = {"role": "assistant", "content": f"{2 * i}"}
        rows.append({"messages": [{"role": "user", "content": f"What is {i} + {i}?"}, answer]})
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["sft", "--model", mixture, "--train-data", str(data), "--rows-per-step", "8", "--total-steps", "12",
               "--optim.lr", "3e-3", "--policy.compute-dtype", "float32", "--save.hf", "never",
               "--data.max-length", "100"]
    launch_all(tmp_path, {"without": command, "with": [*command, "--policy.router-aux-coef", "1"]})
    last = {name: metrics_of(tmp_path / name)[-1] for name in ("without", "with")}
    print(*({key: row[key] for key in row if "router" in key or "expert" in key} for row in last.values()), sep="\n")
    assert "actor/router_aux_loss" not in last["without"]
    assert last["with"]["actor/expert_load_max"] < 0.9 * last["without"]["actor/expert_load_max"]
