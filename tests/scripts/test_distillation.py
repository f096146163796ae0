"""Distillation on the student's own samples: grpo_variants.py --teacher MODEL --reward-coef 0."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import grpo_variants
import ppo
from common.memory.plan import MemoryPlan
from common.model.loading import read_teacher
from common.model.policy import ModelConfig
from tests.conftest import STOPS, TRAIN, launch_all, make_tiny_llama
from tests.scripts.test_supervised import metrics_of
from tools import try_script


@pytest.fixture(scope="module")
def teacher(tiny_llama, tmp_path_factory) -> str:
    """The student's weights with noise: it has the same tokens."""
    folder = tmp_path_factory.mktemp("teacher")
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def runs(tiny_llama, teacher, small_train, tmp_path_factory) -> Path:
    flags = [
        "grpo_variants", "--model", tiny_llama, "--train-data", small_train,
        "--prompts-per-step", "4", "--samples-per-prompt", "4", "--total-steps", "5",
        "--rollout.engine", "hf", "--policy.compute-dtype", "float32",
        "--data.max-prompt-length", "200", "--rollout.max-response-length", "8", "--optim.lr", "1e-2",
        "--reward.function", f"{try_script.__file__}:compute_score", "--reward.num-workers", "1", *STOPS,
        "--kl-loss-coef", "1", "--kl-estimator", "k1+",
    ]
    folder = tmp_path_factory.mktemp("runs")
    launch_all(folder, {
        "distilled": [*flags, "--teacher", teacher, "--reward-coef", "0"],
        "mixed": [*flags, "--teacher", teacher, "--total-steps", "1"],
    })
    return folder


def test_the_kl_to_the_teacher_falls_without_any_reward(runs, tiny_llama, teacher):
    """KL(student || teacher) over the whole vocabulary, after each token of a few prompts, before and after."""
    before, after, wanted = (AutoModelForCausalLM.from_pretrained(path).eval()
                             for path in (tiny_llama, runs / "distilled/model", teacher))
    tokenizer, kl = AutoTokenizer.from_pretrained(tiny_llama), {before: 0.0, after: 0.0}
    with torch.no_grad():
        for row in pq.read_table(TRAIN).slice(0, 8).to_pylist():
            tokens = tokenizer.apply_chat_template(
                row["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
            aim = wanted(tokens).logits.log_softmax(-1)
            for model in kl:
                logp = model(tokens).logits.log_softmax(-1)
                kl[model] += (logp.exp() * (logp - aim)).sum(-1)[0, -20:].mean().item()
    assert 0.1 < kl[after] < 0.9 * kl[before], kl.values()
    rows = metrics_of(runs / "distilled")
    assert rows[0]["actor/kl_loss"] > 0.1
    for row in rows:
        assert row["actor/pg_loss"] == 0 and row["critic/rewards/max"] == 0
    assert max(row["critic/score/max"] for row in rows) > 0                 # scored, and not learned from


def test_rewards_may_be_mixed_in(runs):
    """The same samples and the same KL in the first step, and another gradient."""
    mixed, distilled = (metrics_of(runs / name)[0] for name in ("mixed", "distilled"))
    assert mixed["actor/kl_loss"] == distilled["actor/kl_loss"] and mixed["critic/rewards/max"] > 0
    assert mixed["actor/grad_norm"] != pytest.approx(distilled["actor/grad_norm"], rel=0.01)


def test_a_teacher_that_cannot_be_one_is_refused(tiny_llama, teacher, tmp_path):
    config = ModelConfig()
    assert read_teacher(teacher, tiny_llama, config).hidden_size == 32
    with pytest.raises(ValueError, match=r"--teacher .* has no effect without a KL: set --kl-loss-coef"):
        grpo_variants.check(grpo_variants.Args(model=tiny_llama, train_data=("x",), teacher=teacher))
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(tmp_path)
    AutoConfig.from_pretrained(tiny_llama).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must have the tokens of --model: only one has '<extra>' as 4096"):
        read_teacher(teacher, str(tmp_path), config)


def test_a_vocabulary_that_is_padded_less_than_the_policys_is_refused(tiny_llama, tmp_path):
    """The tokenizer is the same, and the policy samples the padding, too. More padding does no harm."""
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(tmp_path)
    padded = AutoConfig.from_pretrained(tiny_llama)
    padded.vocab_size += 64
    padded.save_pretrained(tmp_path)
    said = r" has a vocabulary of 4096 tokens, must have at least the 4160 of --model, padding included: choose"
    with pytest.raises(ValueError, match=f"--teacher {tiny_llama}{said}"):
        read_teacher(tiny_llama, str(tmp_path), ModelConfig())
    assert read_teacher(str(tmp_path), tiny_llama, ModelConfig()).vocab_size == 4160
    args = ppo.Args(model=str(tmp_path), train_data=("x",))
    with pytest.raises(ValueError, match=f"--critic-model {tiny_llama}{said}"):
        MemoryPlan(args, padded, 1, 64, critic=tiny_llama)
    assert len(MemoryPlan(args, AutoConfig.from_pretrained(tiny_llama), 1, 64, critic=str(tmp_path)).trained) == 2


def test_the_teachers_size_is_in_the_memory_plan(tiny_llama, tmp_path):
    """A wider teacher: its weights in two bytes each stand in the reference's place."""
    wide = make_tiny_llama(tmp_path, hidden_size=64)
    policy, theirs = (AutoConfig.from_pretrained(path) for path in (tiny_llama, wide))
    count = AutoModelForCausalLM.from_config(theirs).num_parameters()
    args = grpo_variants.Args(model=tiny_llama, train_data=("x",))
    assert MemoryPlan(args, policy, 1, 64, frozen=wide).resident()["frozen models"] * 2**30 == 2 * count
    own = MemoryPlan(args, policy, 1, 64, frozen=tiny_llama).resident()["frozen models"]
    assert 0 < own * 2**30 < 2 * count
