"""verl's commands, in scripts written here in the style of its examples, as ours: every printed command parses.

The shell's own rules are checked against bash, which runs the same scripts with `python3` as a function that prints.
"""

import contextlib
import dataclasses
import importlib
import json
import math
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tyro
import yaml

from common.correction import resolve_correction
from common.tracking.logger import LogConfig
from tests.conftest import ROOT, launch
from tools import from_verl, verl_settings
from tools.verl_keys import SAME, SCRIPTS, SWITCHES
from tools.verl_settings import shell_commands

NAMES = ("grpo", "grpo_variants", "dapo", "rloo", "ppo", "async_grpo")

ARRAYS = """#!/usr/bin/env bash
# it's a comment with an apostrophe
set -xeuo pipefail
DEVICE=${DEVICE:-$(python3 -c 'import npu' 2>/dev/null && echo npu || echo gpu)}
MODEL_PATH=${MODEL_PATH:-"org/model-1B"}
rollout_n=${ROLLOUT_N:-5}
longest=$((1024 * 2 + 512))
touch /EXECUTED && echo started
case "${DEVICE}" in
    gpu)
        tp=${tp:-1}
        ;;
    npu)
        tp=4
        rollout_n=99 ;;
    *) exit 1 ;;
esac
DATA=(
    algorithm.adv_estimator=grpo
    data.train_files="['$HOME/a/train.parquet', '$HOME/b/train.parquet']"
    data.val_files="$HOME/a/test.parquet"
    data.train_batch_size=512
    data.max_prompt_length=1024
    data.max_response_length=${longest}   # two thousand and more
    data.filter_overlong_prompts=True
    data.truncation='error'
)
ACTOR=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.actor.optim.lr=2e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.01
    actor_rollout_ref.actor.kl_loss_type=low_var_kl+
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(( longest * 4 ))
    actor_rollout_ref.actor.fsdp_config.param_offload=True
)
EXTRA=()
if [ "${tp}" -gt 1 ] && [ -n "${tp}" ]; then
    EXTRA+=(actor_rollout_ref.rollout.data_parallel_size=2)
elif [[ "$tp" == 1 ]]; then
    EXTRA+=(+actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_batched_tokens=8192)
fi
python3 -m verl.trainer.main_ppo \\
    "${DATA[@]}" \\
    "${ACTOR[@]}" \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=${tp} \\
    actor_rollout_ref.rollout.n=$rollout_n \\
    actor_rollout_ref.actor.megatron.context_parallel_size=2 \\
    trainer.logger='["console","wandb"]' trainer.experiment_name=first \\
    trainer.total_training_steps=40 trainer.test_freq=5 trainer.save_freq=-1 \\
    made.up.key=7 \\
    "${EXTRA[@]}" "$@" 2>&1 | tee log
"""

PPO = """
python3 -m verl.trainer.main_ppo \\
 data.train_files=train.parquet \\
 data.val_files=test.parquet \\
 actor_rollout_ref.model.path=org/policy \\
 critic.model.path=org/critic critic.optim.lr=3e-5 critic.optim.lr_warmup_steps=2 critic.cliprange_value=0.3 \\
 algorithm.lam=0.95 algorithm.use_kl_in_reward=True algorithm.kl_penalty=mse \\
 algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.kl_coef=0.02 algorithm.kl_ctrl.target_kl=0.2 \\
 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
 trainer.critic_warmup=3 trainer.total_training_steps=10 trainer.nnodes=2 trainer.n_gpus_per_node=4
"""

DAPO = """
n=16
python3 -m recipe.dapo.main_dapo data.train_files=d.parquet actor_rollout_ref.model.path=m \\
 algorithm.adv_estimator=grpo algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc \\
 algorithm.filter_groups.max_num_gen_batches=6 data.train_batch_size=32 data.gen_batch_size=$((n * 6)) \\
 actor_rollout_ref.rollout.n=$n actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
 actor_rollout_ref.actor.clip_ratio_high=0.28 actor_rollout_ref.actor.clip_ratio_c=10.0 \\
 reward_model.reward_manager=dapo reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=64 \\
 reward_model.overlong_buffer.penalty_factor=0.5 actor_rollout_ref.rollout.val_kwargs.n=8 \\
 actor_rollout_ref.rollout.val_kwargs.temperature=0.6 actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \\
 trainer.total_training_steps=10
"""


def given(words: str) -> dict[str, str]:
    """Keys of a short verl command for GRPO with what must be given, and these further ones."""
    base = ("actor_rollout_ref.model.path=m data.train_files=d.parquet algorithm.adv_estimator=grpo "
            "actor_rollout_ref.rollout.n=4 trainer.total_training_steps=9 ")
    return dict(word.partition("=")[::2] for word in (base + words).split())


def parse(ours: from_verl.Translation, monkeypatch):
    """The script's own Args from the printed flags; wandb and its account are not here."""
    monkeypatch.setattr(LogConfig, "__post_init__", lambda self: None)
    return tyro.cli(importlib.import_module(ours.script).Args, args=ours.argv())


def read(tmp_path: Path, text: str, *overrides: str, name="run.sh") -> from_verl.Translation:
    (tmp_path / name).write_text(text)
    keys, program, _ = from_verl.read_settings(tmp_path / name, list(overrides))
    return from_verl.translate(keys, program)


# --------------------------------------------------------------------------- whole scripts

def test_a_script_with_arrays(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    ours = read(tmp_path, ARRAYS.replace("/EXECUTED", f"{tmp_path}/executed"))
    assert not (tmp_path / "executed").exists()
    args = parse(ours, monkeypatch)
    assert ours.script == "grpo" and ours.launch == ["--standalone", "--nproc-per-node", "8"]
    assert args.model == "org/model-1B"
    assert args.train_data == ("/home/me/a/train.parquet", "/home/me/b/train.parquet")
    assert args.val_data == ("/home/me/a/test.parquet",)
    assert (args.prompts_per_step, args.samples_per_prompt, args.minibatches_per_step) == (512, 5, 4)
    assert (args.data.max_prompt_length, args.rollout.max_response_length) == (1024, 2560)
    assert args.max_tokens_per_gpu == 10240
    assert (args.kl_loss_coef, args.kl_estimator, args.optim.lr) == (0.01, "k3+", 2e-6)
    assert args.rollout.tp == 1 and args.offload.params and not args.offload.optimizer
    assert args.rollout.extra == '{"max_num_batched_tokens": 8192}'
    assert args.data.on_long_prompt == "filter"
    assert (args.total_steps, args.eval_every, args.eval_n, args.save.every) == (40, 5, 0, 0)
    assert args.run_dir == "runs/first" and args.log.to == ("wandb",)
    assert ours.unknown == ["made.up.key=7"]
    assert "actor_rollout_ref.actor.megatron.context_parallel_size=2" in ours.without
    assert "actor_rollout_ref.model.use_remove_padding=True" in ours.needless


def test_variables_and_keys_can_be_given(tmp_path, monkeypatch):
    ours = read(tmp_path, ARRAYS, "DEVICE=npu", "MODEL_PATH=other", "trainer.nnodes=3", "made.up.key=8")
    args = parse(ours, monkeypatch)
    assert (args.model, args.rollout.tp, args.samples_per_prompt) == ("other", 4, 99)
    assert "actor_rollout_ref.rollout.data_parallel_size=2" in ours.without
    assert ours.launch[:2] == ["--nnodes", "3"] and ours.unknown == ["made.up.key=8"]


def test_ppo_with_a_critic_and_kl_in_the_reward(tmp_path, monkeypatch):
    ours = read(tmp_path, PPO)
    args = parse(ours, monkeypatch)
    assert ours.script == "ppo"                                         # gae is verl's default estimator
    assert ours.launch == ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "HEAD_NODE:29500",
                           "--nproc-per-node", "4"]
    assert any("SCRIPT=ppo.py sbatch --nodes 2 slurm/many_nodes.sbatch" in note for note in ours.notes)
    assert (args.critic_model, args.critic_optim.lr, args.critic_optim.warmup_steps) == ("org/critic", 3e-5, 2)
    assert (args.lam, args.gamma, args.value_clip, args.critic_warmup_steps) == (0.95, 1.0, 0.3, 3)
    assert (args.kl_reward_coef, args.kl_reward_estimator, args.kl_loss_coef) == (0.02, "k2", 0.0)
    assert (args.kl_controller, args.kl_target, args.kl_horizon) == ("adaptive", 0.2, 10000)
    assert args.max_tokens_per_gpu == 4 * (512 + 512)                   # four responses of the longest length
    assert ours.without == {} and ours.unknown == []


def test_flags_that_would_have_no_effect_are_left_out():
    """The scripts refuse them."""
    given = {"trainer.project_name": "mine", "actor_rollout_ref.actor.optim.min_lr_ratio": "0.1"}
    ours = from_verl.translate(given | {"trainer.logger": "console"})
    assert not {"--log.wandb-project", "--optim.min-lr-frac"} & ours.flags.keys() and set(given) <= ours.needless.keys()
    used = {"trainer.logger": "[console,wandb]", "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine"}
    ours = from_verl.translate(given | used)
    assert {"--log.wandb-project", "--optim.min-lr-frac"} <= ours.flags.keys()


def test_dapo(tmp_path, monkeypatch):
    ours = read(tmp_path, DAPO)
    args = parse(ours, monkeypatch)
    assert ours.script == "dapo" and ours.without == {} and ours.unknown == []
    assert (args.prompts_per_step, args.samples_per_prompt, args.minibatches_per_step) == (32, 16, 1)
    assert (args.clip_low, args.clip_high, args.clip_dual, args.max_gen_batches) == (0.2, 0.28, 10, 6)
    assert (args.overlong_buffer, args.overlong_factor) == (64, 0.5)
    assert (args.eval_n, args.eval_temperature, args.rollout.val_top_p) == (8, 0.6, 0.7)


def test_yaml(tmp_path, monkeypatch):
    tree = {"defaults": ["actor@x: y"], "algorithm": {"adv_estimator": "rloo", "_target_": "verl.X"},
            "data": {"train_files": ["a.parquet", "b.parquet"], "train_batch_size": 64,
                     "max_response_length": "${oc.select:x,512}"},
            "actor_rollout_ref": {"model": {"path": "m"}, "rollout": {"n": 4, "name": "???"},
                                  "actor": {"ppo_mini_batch_size": 64, "optim": {"betas": [0.9, 0.95]}}},
            "trainer": {"total_training_steps": 5, "logger": ["console"]}}
    ours = read(tmp_path, yaml.safe_dump(tree), "trainer.n_gpus_per_node=2", name="run.yaml")
    args = parse(ours, monkeypatch)
    assert ours.script == "rloo" and ours.launch[-1] == "2" and ours.unknown == []
    assert args.train_data == ("a.parquet", "b.parquet") and args.optim.betas == (0.9, 0.95)
    assert (args.baseline, args.loss, args.rollout.max_response_length) == ("rloo", "ppo", 512)


def test_a_printed_command_trains(tiny_llama, tmp_path, capsys):
    """One epoch of 9 rows, 4 a step, is two steps; the rows are plain questions and answers."""
    rows = [{"question": f"What is {i} + {i}?", "answer": f"It is #### {2 * i}"} for i in range(9)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    (tmp_path / "run.sh").write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$DATA data.prompt_key=question "
        "data.train_batch_size=4 data.max_response_length=6 data.filter_overlong_prompts=True "
        "actor_rollout_ref.model.path=$MODEL actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=2 "
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.actor.ppo_mini_batch_size=2 "
        "actor_rollout_ref.actor.use_kl_loss=True trainer.n_gpus_per_node=1 trainer.total_epochs=1 "
        f"trainer.default_local_dir={tmp_path}/run 'trainer.logger=[\"console\"]'")
    from_verl.main(from_verl.Args(
        str(tmp_path / "run.sh"), (f"MODEL={tiny_llama}", f"DATA={tmp_path}/train.parquet")))
    words = shlex.split(capsys.readouterr().out.partition("\n\n")[0].replace("\\\n", " "))
    assert words[:4] == ["torchrun", "--standalone", "--nproc-per-node", "1"]
    launch(*words[4:], "--data.ground-truth-column", "answer", "--data.data-source", "openai/gsm8k",
           "--policy.compute-dtype", "float32", "--reward.num-workers", "1", warm=True)
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [1, 2]
    assert metrics[1]["actor/kl_loss"] >= 0 and metrics[1]["reward/error_frac"] == 0
    assert metrics[0]["actor/lr"] == 1e-6


CONFIG = {  # of verl's example gsm8k_multiturn_grpo, shortened
    "hydra": {"searchpath": ["file://verl/trainer/config"]}, "defaults": ["ppo_trainer", "_self_"],
    "data": {"max_prompt_length": 1024, "max_response_length": 900, "train_batch_size": 256},
    "actor_rollout_ref": {"rollout": {"n": 2, "multi_turn": {
        "enable": True, "max_assistant_turns": 5, "tool_config_path": "tools.yaml"}}},
}


@pytest.mark.parametrize(("where", "words"), [
    ("", "--config-name=own"), ("", "--config-name own"), ("", "-cn own"), ("config", "--config-name=own.yaml"),
    ("config", "--config-path=HERE/config --config-name=own"), ("a/b", "--config-path=a/b --config-name='own'"),
    ("a/b", '--config-path="$(pwd)/a/b" --config-name=own'), ("a/b", "-cp HERE/a/b -cn own"),
])
def test_the_file_that_a_command_names_is_read(where, words, tmp_path, monkeypatch):
    """Its values stand for verl's defaults, and those of the command for both."""
    folder = tmp_path / "scripts"
    (folder / where).mkdir(parents=True)
    (folder / where / "own.yaml").write_text(yaml.safe_dump(CONFIG))
    ours = read(folder, f"python3 -m verl.trainer.main_ppo {words.replace('HERE', str(folder))} "
                "algorithm.adv_estimator=grpo data.train_files=a.parquet actor_rollout_ref.model.path=x "
                "actor_rollout_ref.rollout.n=4")
    args = parse(ours, monkeypatch)
    assert (args.prompts_per_step, args.samples_per_prompt) == (256, 4)
    assert (args.data.max_prompt_length, args.rollout.max_response_length) == (1024, 900)
    assert (args.rollout.episode, args.rollout.max_turns, args.rollout.tool_parser) == (
        "envs/verl_tools.py", 5, "hermes")
    assert any("tools.yaml names must be in TOOLS" in note for note in ours.notes) and not ours.unknown


def test_a_file_may_begin_with_another(tmp_path):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(CONFIG))
    own = {"defaults": ["base", "actor@x: y", {"group": "name"}, "_self_"], "data": {"train_batch_size": 64}}
    ours = read(tmp_path, yaml.safe_dump(own), "algorithm.adv_estimator=grpo", name="own.yaml")
    assert ours.flags["--prompts-per-step"] == ["64"] and ours.flags["--rollout.max-response-length"] == ["900"]
    (tmp_path / "base.yaml").unlink()
    with pytest.raises(ValueError, match=r"base.yaml is not here: .*own.yaml begins with it \(defaults:\)"):
        from_verl.read_settings(tmp_path / "own.yaml", [])


@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer", "dapo_trainer"])
def test_verls_own_files_need_not_be_here(name, tmp_path):
    ours = read(tmp_path, f"python3 -m verl.trainer.main_ppo --config-path=./config --config-name={name} "
                "algorithm.adv_estimator=grpo")
    assert ours.flags["--prompts-per-step"] == ["1024"]


@pytest.mark.parametrize(("tree", "said"), [
    ({"name": "verl-grpo", "resources": {"accelerators": "H100:1"}, "run": "python3 -m verl.trainer.main_ppo"},
     "is no file of verl's settings: .*; run holds a shell script"),
    ({"services": {"ray": {"image": "x"}}}, "is no file of verl's settings"),
    ({"tools": [{"class_name": "verl.tools.gsm8k_tool.Gsm8kTool"}]}, "is no file of verl's settings"),
    ({}, "is no file of verl's settings"),
])
def test_a_yaml_file_of_something_else_is_refused(tree, said, tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ValueError, match=said):
        from_verl.read_settings(tmp_path / "run.yaml", [])


ASYNC = """
python3 -m verl.experimental.fully_async_policy.fully_async_main data.train_files=d.parquet data.train_batch_size=0 \\
 data.gen_batch_size=1 actor_rollout_ref.model.path=m algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=16 \\
 actor_rollout_ref.actor.ppo_mini_batch_size=32 rollout.nnodes=1 rollout.n_gpus_per_node=2 trainer.nnodes=1 \\
 trainer.n_gpus_per_node=6 rollout.total_rollout_steps=12800 async_training.staleness_threshold=0.5 \\
 async_training.trigger_parameter_sync_step=4 async_training.require_batches=1
"""


def test_asynchronous_training(tmp_path, monkeypatch):
    ours = read(tmp_path, ASYNC)
    args = parse(ours, monkeypatch)
    assert ours.script == "async_grpo" and ours.launch == ["--standalone", "--nproc-per-node", "8"]
    assert (args.samplers, args.max_staleness, args.prompts_per_step, args.minibatches_per_step) == (2, 1, 128, 4)
    assert (args.samples_per_prompt, args.total_steps) == (16, 100) and ours.unknown == []
    tree = {"async_training": {"staleness_threshold": 0}, "algorithm": {"adv_estimator": "grpo"},
            "actor_rollout_ref": {"rollout": {"n": 4}}}
    again = read(tmp_path, yaml.safe_dump(tree), "rollout.n_gpus_per_node=4", "trainer.n_gpus_per_node=4",
                 name="fully_async.yaml")
    assert again.script == "async_grpo" and again.flags["--max-staleness"] == ["0"]
    assert again.flags["--samplers"] == ["4"]


SFT_OF_TODAY = """
torchrun --nnodes=1 --nproc_per_node=8 -m verl.trainer.sft_trainer data.train_files=a.parquet \\
 data.val_files=b.parquet \\
 data.messages_key=messages data.max_length=4096 data.truncation=right data.max_token_len_per_gpu=8192 \\
 data.train_batch_size=96 data.pad_mode=no_padding model.path=org/m model.lora_rank=8 optim.lr=2e-5 \\
 optim.clip_grad=0.5 optim.lr_scheduler_type=cosine optim.min_lr_ratio=0.1 optim.lr_warmup_steps=5 \\
 engine.strategy=fsdp2 \\
 trainer.total_training_steps=50 trainer.test_freq=10 trainer.save_freq=-1 trainer.n_gpus_per_node=4 \\
 trainer.default_local_dir=out trainer.logger='["console","wandb"]' trainer.project_name=p
"""
SFT_OF_OLD = """
torchrun --standalone -m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet data.prompt_key=extra_info \\
 data.response_key=extra_info data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] \\
 data.micro_batch_size_per_gpu=4 model.partial_pretrain=org/m trainer.total_epochs=3 optim.lr=1e-4
"""


def test_supervised_fine_tuning(tmp_path, monkeypatch):
    ours = read(tmp_path, SFT_OF_TODAY)
    args = parse(ours, monkeypatch)
    assert ours.script == "sft" and ours.launch[-1] == "4" and ours.unknown == []
    assert (args.model, args.train_data, args.val_data) == ("org/m", ("a.parquet",), ("b.parquet",))
    assert (args.rows_per_step, args.max_tokens_per_gpu, args.data.max_length) == (96, 8192, 4096)
    assert (args.data.on_long_row, args.total_steps, args.eval_every, args.save.every) == ("truncate", 50, 10, 0)
    assert (args.optim.lr, args.optim.max_grad_norm, args.optim.schedule, args.optim.warmup_steps) == (
        2e-5, 0.5, "cosine", 5)
    assert (args.lora.rank, args.optim.weight_decay, args.seed, args.log.wandb_project) == (8, 0.01, 1, "p")
    asked = 'if [ "$#" -lt 2 ]; then exit 1; fi\nout=$2\nshift 2\n' + SFT_OF_OLD.replace(
        "--standalone", "--nnodes=1 --nproc_per_node=6").rstrip() + " trainer.default_local_dir=$out $@"
    with_arguments = read(tmp_path, asked)
    assert with_arguments.launch[-1] == "6" and with_arguments.flags["--run-dir"] == ["ARGUMENT_2"]
    old = read(tmp_path, SFT_OF_OLD)
    args = parse(old, monkeypatch)
    assert (args.rows_per_step, args.data.max_length, args.total_epochs) == (256, 1024, 3)
    assert len([key for key in old.without if "dict_keys" in key]) == 2 and old.unknown == []


def test_a_model_that_writes_its_judgement_is_no_classifier(monkeypatch):
    """Its own reward function asks it; a classifier has none."""
    words = "reward_model.enable=True reward_model.model.path=org/genrm "
    own = from_verl.translate(given(words + "custom_reward_function.path=f.py"))
    args = parse(own, monkeypatch)
    assert args.reward.function == ("f.py:compute_score",) and args.reward_model.path == ""
    assert "rewards/judge.py" in own.without["reward.reward_model.model_path=org/genrm"]
    assert parse(from_verl.translate(given(words)), monkeypatch).reward_model.path == "org/genrm"


# --------------------------------------------------------------------------- single conversions

def test_verls_defaults_are_written_out(monkeypatch):
    """Of verl 0.9.1's configuration, as numbers: where the command is silent, ours must do the same."""
    args = parse(from_verl.translate(given("")), monkeypatch)
    assert (args.prompts_per_step, args.minibatches_per_step, args.epochs_per_step) == (1024, 4, 1)
    assert (args.data.max_prompt_length, args.rollout.max_response_length) == (512, 512)
    assert (args.optim.lr, args.optim.weight_decay, args.optim.betas) == (1e-6, 0.01, (0.9, 0.999))
    assert (args.optim.max_grad_norm, args.optim.warmup_steps, args.optim.schedule) == (1.0, 0, "constant")
    assert (args.clip_low, args.clip_high, args.clip_dual, args.norm_by_std) == (0.2, 0.2, 3.0, True)
    assert (args.kl_loss_coef, args.entropy_coef) == (0, 0)
    assert (args.rollout.temperature, args.rollout.top_p, args.rollout.top_k) == (1.0, 1.0, 0)
    assert (args.rollout.tp, args.rollout.max_num_seqs, args.max_tokens_per_gpu) == (2, 0, 16384)
    assert (args.eval_n, args.eval_every, args.save.every, args.correction.preset) == (0, 0, 0, "disabled")
    assert args.eval_prompts == 0                                       # all of them
    assert args.data.on_long_prompt == "error" and args.seed == 0
    critic = parse(from_verl.translate(given("algorithm.adv_estimator=gae")), monkeypatch)
    assert (critic.critic_optim.lr, critic.critic_optim.weight_decay, critic.value_clip) == (1e-5, 0.01, 0.5)
    assert (critic.gamma, critic.lam, critic.kl_controller, critic.critic_warmup_steps) == (1, 1, "fixed", 0)


@pytest.mark.parametrize(("words", "script", "expected"), [
    ("algorithm.adv_estimator=reinforce_plus_plus", "rloo", {"baseline": "reinforce++", "loss": "ppo"}),
    ("algorithm.adv_estimator=reinforce_plus_plus_baseline", "rloo", {"baseline": "reinforce++-baseline"}),
    ("algorithm.adv_estimator=remax algorithm.use_kl_in_reward=True", "rloo",
     {"baseline": "remax", "kl_reward_coef": 0.001, "kl_reward_estimator": "k1"}),
    ("algorithm.adv_estimator=opo", "rloo", {"baseline": "opo"}),
    ("algorithm.adv_estimator=gpg actor_rollout_ref.actor.policy_loss.loss_mode=gpg", "rloo",
     {"baseline": "gpg", "loss": "reinforce"}),
    ("algorithm.adv_estimator=grpo_passk", "grpo_variants", {"advantage": "passk", "loss": "grpo"}),
    # verl's compute_policy_loss_gspo, _sapo and _geo_mean do not read loss_agg_mode (core_algos.py of 1dda039b)
    ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo actor_rollout_ref.actor.loss_agg_mode=token-mean",
     "grpo_variants", {"loss": "gspo", "clip_low": 0.2, "clip_high": 0.2, "clip_dual": None, "aggregation": None}),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean", "grpo_variants",
     {"loss": "gmpo", "clip_low": 0.2, "aggregation": None}),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=cispo actor_rollout_ref.actor.clip_ratio_low=10",
     "grpo_variants",     {"loss": "cispo", "clip_low": 1, "clip_high": 0.2}),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=sapo", "grpo_variants", {"loss": "sapo", "clip_low": None}),
    ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm algorithm.norm_adv_by_std_in_grpo=False",
     "grpo_variants", {"loss": "grpo", "aggregation": "seq-mean-token-sum-norm", "norm_by_std": False}),
    ("algorithm.filter_groups.enable=True", "dapo", {"max_gen_batches": 10}),
    ("algorithm.filter_groups.enable=True actor_rollout_ref.actor.use_kl_loss=True "
     "actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "dapo", {"kl_loss_coef": 0.001, "clip_dual": 3.0}),
    ("algorithm.adv_estimator=optimal_token_baseline actor_rollout_ref.actor.calculate_sum_pi_squared=True "
     "algorithm.gamma=0.9", "rloo", {"baseline": "otb", "loss": "ppo", "gamma": 1.0}),
    ("algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=['accuracy','form'] "
     "algorithm.gdpo_reward_weights=[1,0.5]", "grpo_variants",
     {"advantage": "gdpo", "loss": "grpo", "clip_low": 0.2, "clip_high": 0.2, "clip_dual": 3.0,
      "aggregation": "token-mean", "norm_by_std": None, "reward_components": {"accuracy": 1.0, "form": 0.5}}),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=dro actor_rollout_ref.actor.policy_loss.dro_beta=0.5",
     "grpo_variants",     {"loss": "dro", "loss_numbers": {"beta": 0.5}}),
    ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01", "grpo_variants", {"kl_reward_coef": 0.01}),
    ("algorithm.adv_estimator=rloo actor_rollout_ref.actor.use_kl_loss=True "
     "actor_rollout_ref.actor.policy_loss.loss_mode=cispo", "rloo", {"kl_loss_coef": 0.001, "loss": "ppo"}),
    ("algorithm.adv_estimator=gae actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov", "ppo", {"clip_high": 0.2}),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov", "grpo_variants",
     {"loss": "kl_cov", "loss_numbers": {"fraction": 2e-4, "cov_kl_coef": 0.1}}),                # verl's default
    ("algorithm.norm_adv_by_std_in_grpo=False", "grpo", {"norm_by_std": False}),
    ("algorithm.norm_adv_by_std_in_grpo=False algorithm.filter_groups.enable=True "
     "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", "dapo",
     {"norm_by_std": False, "aggregation": "seq-mean-token-mean"}),
    ("algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=['a'] actor_rollout_ref.actor.use_kl_loss=True "
     "algorithm.use_kl_in_reward=True actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "grpo_variants",
     {"loss": "gspo", "kl_loss_coef": 0.001, "kl_reward_coef": 0.001, "reward_components": {"a": 1.0}}),
    ("algorithm.rollout_correction.bypass_mode=True algorithm.rollout_correction.loss_type=reinforce", "grpo_variants",
     {"loss": "reinforce", "clip_low": None}),
    ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0", "grpo", {}),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov actor_rollout_ref.actor.policy_loss.clip_cov_ub=9",
     "grpo_variants",     {"loss_numbers": {"fraction": 2e-4, "cov_low": 1, "cov_high": 9}}),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=dppo_kl", "grpo_variants", {"loss_numbers": {"max_ratio": 3.0}}),
    ("data.train_batch_size=100 actor_rollout_ref.actor.ppo_mini_batch_size=30", "grpo", {"minibatches_per_step": 2}),
    ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.25", "grpo", {}),
])
def test_objectives(words, script, expected, monkeypatch):
    ours = from_verl.translate(given(words))
    args = parse(ours, monkeypatch)
    assert ours.script == script and ours.unknown == []
    assert {name: getattr(args, name) for name in expected} == expected
    assert args.optim.warmup_steps == (2 if "warmup" in words else 0)   # a quarter of 9
    if script != "ppo":                                                 # which reads the critic's config
        importlib.import_module(script).check(args)                     # the script accepts bounds and sizes, too


@pytest.mark.parametrize(("kind", "words"), [
    ("adamw-bf16", "{}.optim.override_optimizer_config.bf16_stochastic_round=True"),
    ("adamw-8bit", "{0}.optim.optimizer=AdamW8bit {0}.optim.optimizer_impl=torchao.optim"),
    ("muon", "{0}.optim.optimizer=muon {0}.optim.muon_momentum=0.95 {0}.optim.muon_split_qkv=True"),
    ("muon", "{0}.optim.optimizer=Muon {0}.optim.optimizer_impl=torch.optim"),
    ("adamw", "{0}.optim.optimizer=_AdamW {0}.optim.optimizer_impl=torchao.optim"),
])
def test_kinds_of_optimizers_of_policy_and_critic(kind, words, monkeypatch):
    for key, kinds in (("actor_rollout_ref.actor", (kind, "adamw")), ("critic", ("adamw", kind))):
        ours = from_verl.translate(given(f"algorithm.adv_estimator=gae {words.format(key)}"))
        args = parse(ours, monkeypatch)
        assert (args.optim.kind, args.critic_optim.kind) == kinds
        assert len([shown for shown in ours.without if "optimizer" in shown]) == (2 if kind == "adamw" else 0)
        of_muon = [why for shown, why in ours.without.items() if "muon_" in shown]
        assert len(of_muon) == words.count("muon_") and all("momentum 0.95" in why for why in of_muon)


@pytest.mark.parametrize(("words", "reason"), [
    ("algorithm.adv_estimator=other", "no such advantage"),
    ("actor_rollout_ref.rollout.name=sglang", "vLLM is the only fast engine"),
    ("actor_rollout_ref.actor.strategy=megatron", "FSDP2 is the only training backend"),
    ("actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.model.exclude_modules='.*visual.*'", "are named: --lora"),
    ("data.truncation=right", "a prompt loses its start, never"),
    ("data.truncation=middle", "a prompt loses its start, never"),
    ("data.shuffle=False", "shuffled anew"),
    ("data.image_key=pictures", "are read from the column images"),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=other", "no such loss"),
    ("actor_rollout_ref.actor.loss_scale_factor=2", "scale the learning rate"),
    ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive",
     "grpo_variants.py has no such flag; ppo.py has it"),
    ("algorithm.filter_groups.enable=True algorithm.adv_estimator=rloo", "dapo.py alone"),
    ("algorithm.filter_groups.enable=True algorithm.use_kl_in_reward=True",
     "dapo.py has no such flag; ppo.py, rloo.py and grpo_variants.py have it"),
    ("algorithm.filter_groups.enable=True actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
     "dapo.py clips the ratio; grpo_variants.py has this loss"),
    ("reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=64 "
     "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean", "grpo_variants.py has no such flag; dapo.py has it"),
    ("algorithm.adv_estimator=gae actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
     "ppo.py takes the mean over all tokens; dapo.py and grpo_variants.py have it"),
    ("algorithm.adv_estimator=gae actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov "
     "actor_rollout_ref.actor.policy_loss.kl_cov_ratio=0.1", "ppo.py clips the ratio; grpo_variants.py has"),
    ("algorithm.adv_estimator=rloo actor_rollout_ref.actor.policy_loss.loss_mode=cispo", "rloo.py clips the ratio"),
    ("algorithm.adv_estimator=rloo actor_rollout_ref.actor.loss_agg_mode=token-sum", "rloo.py takes the mean over"),
    ("algorithm.adv_estimator=gdpo algorithm.norm_adv_by_std_in_grpo=False", "rloo.py --baseline reinforce++-baseline"),
    ("actor_rollout_ref.rollout.n=1", "a group of one"),
    ("trainer.logger=['console','swanlab']", "metrics go to"),
    ("reward_model.use_reward_loop=True reward_model.rollout.name=vllm reward_model.num_workers=8",     # of verl 0.7
     "a classifier that runs in the trainer"),
    ("distillation.enabled=True distillation.teacher_key=ability", "rows have the teacher of their data_source"),
    ("distillation.enabled=True distillation.distillation_loss.loss_max_clamp=10", "needs no bounds"),
    ("distillation.enabled=True actor_rollout_ref.actor.use_kl_loss=True",
     "distill.py has no such flag; grpo.py, ppo.py, dapo.py, rloo.py, grpo_variants.py and async_grpo.py have it"),
])
def test_what_has_no_equivalent_is_named_with_a_reason(words, reason, monkeypatch):
    ours = from_verl.translate(given(words))
    parse(ours, monkeypatch)
    assert ours.unknown == []
    assert [why for why in ours.without.values() if reason in why], ours.without
    assert reason in from_verl.report(ours, [])


DISTIL, TEACHER = "distillation.enabled=True", "distillation.teacher_models"
LOSS = "distillation.distillation_loss"


@pytest.mark.parametrize(("words", "want"), [
    (f"{DISTIL} {TEACHER}.teacher_model.model_path=Q/32B {LOSS}.loss_mode=k1 {LOSS}.use_task_rewards=False",
     {"teacher": ("Q/32B",), "divergence": "reverse-kl", "top_k": 0, "reward_coef": 0, "samples_per_prompt": 4}),
    (f"{DISTIL} {TEACHER}.teacher_model.model_path=Q/32B {LOSS}.loss_mode=forward_kl_topk {LOSS}.topk=64 "
     f"{LOSS}.distillation_loss_coef=0.5 distillation.nnodes=1 {LOSS}.log_prob_min_clamp=null "
     "distillation.teacher_models.teacher_model.inference.name=vllm",
     {"teacher": ("Q/32B",), "divergence": "forward-kl", "top_k": 64, "reward_coef": 2}),
    (f"{DISTIL} {TEACHER}.a.key=openai/gsm8k {TEACHER}.a.model_path=Q/A {TEACHER}.b.key=geo3k "
     f"{TEACHER}.b.model_path=Q/B {TEACHER}.b.num_replicas=2 {LOSS}.loss_mode=forward_kl_topk",
     {"teacher": ("openai/gsm8k=Q/A", "geo3k=Q/B"), "top_k": 128}),
])
def test_distillation(words, want, monkeypatch):
    ours = from_verl.translate(given(words))
    args = parse(ours, monkeypatch)
    assert ours.script == "distill" and ours.unknown == [] and ours.without == {}
    assert {name: getattr(args, name) for name in want} == want


def test_a_teacher_that_is_missing_is_said():
    for words in (DISTIL, f"{DISTIL} {TEACHER}.a.model_path=x {TEACHER}.b.model_path=y"):
        assert any("--teacher MODEL must be given" in note for note in from_verl.translate(given(words)).notes)


@pytest.mark.parametrize(("names", "want"), [
    ("['console','tensorboard']", ("tensorboard",)),
    ("['tensorboard','wandb','file']", ("tensorboard", "wandb")),
    ("['console']", ()),
])
def test_loggers_that_both_have(names, want, monkeypatch):
    ours = from_verl.translate(given(f"trainer.logger={names}"))
    assert parse(ours, monkeypatch).log.to == want and ours.without == {}


def test_adapters_and_sequence_parallel(monkeypatch):
    model, actor = "actor_rollout_ref.model", "actor_rollout_ref.actor"
    words = f"{model}.lora_rank=32 {model}.target_modules=[q_proj,v_proj] {actor}.ulysses_sequence_parallel_size=2"
    ours = from_verl.translate(given(f"{words} actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size=2"))
    args = parse(ours, monkeypatch)
    assert (args.lora.rank, args.lora.alpha, args.lora.targets) == (32, 16, ("q_proj", "v_proj"))   # 16: verl's default
    assert args.policy.sequence_parallel == 2 and ours.without == {} and ours.unknown == []
    words = f"{model}.lora_rank=8 {model}.lora_alpha=64 {model}.target_modules=all-linear"
    args = parse(from_verl.translate(given(words)), monkeypatch)
    assert (args.lora.rank, args.lora.alpha, args.lora.targets) == (8, 64, ())


def test_what_is_off_needs_nothing():
    ours = from_verl.translate(given("actor_rollout_ref.model.lora_rank=0 distillation.enabled=False "
                                     "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1 data.shuffle=True "
                                     "data.image_key=images"))
    assert ours.without == {} and ours.unknown == []
    assert list(from_verl.translate(given("data.train_max_samples=1")).without) == ["data.train_max_samples=1"]


def test_every_key_is_mapped_or_named():
    keys = given("data.shuffle=False made.up=1 reward_model.enable=False trainer.balance_batch=True "
                 "actor_rollout_ref.actor.megatron.x=3 critic.optim.lr=1e-5 algorithm.lam=0.9 +x.y=2")
    ours = from_verl.translate({key.lstrip("+"): value for key, value in keys.items()})
    assert ours.unknown == ["made.up=1", "x.y=2"]
    named = {shown.partition("=")[0] for shown in (*ours.needless, *ours.without, *ours.unknown)} | {*ours.mapped}
    assert {key.lstrip("+").replace("reward_model.", "reward.reward_model.") for key in keys} <= named


def test_router_replay(monkeypatch):
    mode = "actor_rollout_ref.actor.router_replay.mode"
    told = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
    for value, switch, ours in (("R2", "False", "old-logp"), ("R3", "True", "rollout"), ("disabled", "False", "none")):
        translation = from_verl.translate(given(f"{mode}={value} {told}={switch}"))
        assert parse(translation, monkeypatch).policy.router_replay == ours
        assert not [shown for shown in (*translation.without, *translation.unknown) if "repl" in shown]
        assert (mode in translation.mapped) == (ours != "none")
        assert any("needs --rollout.tp 1" in note for note in translation.notes) == (value == "R3")


def test_rollout_correction(monkeypatch):
    """Bounds of a ratio r = p_old / p_rollout become bounds of k1 = -log r as verl compares them: lower and upper."""
    prefix = "algorithm.rollout_correction"
    ours = from_verl.translate(given(
        f"{prefix}.rollout_is=token {prefix}.rollout_is_threshold=0.5_5.0 {prefix}.rollout_rs=seq_mean_k1,token_k3 "
        f"{prefix}.rollout_rs_threshold=0.999_1.002,0.01 {prefix}.rollout_is_batch_normalize=true"))
    found = resolve_correction(parse(ours, monkeypatch).correction, "grpo")
    assert (found.weights, found.lower, found.upper, found.outside) == ("token", 0.5, 5.0, "zero")
    assert (found.reject, found.reject_over, found.batch_normalise) == (("k1", "k3"), ("mean", "token"), True)
    assert found.reject_below == pytest.approx((math.log(0.999), -math.inf), abs=1e-6)
    assert found.reject_above == pytest.approx((math.log(1.002), 0.01), abs=1e-6)
    assert ours.without == {}
    one_bound = from_verl.translate(given(f"{prefix}.rollout_rs=seq_sum_k1 {prefix}.rollout_rs_threshold=2.0"))
    found = resolve_correction(parse(one_bound, monkeypatch).correction, "grpo")
    assert (found.reject_over, found.reject_above) == (("sum",), pytest.approx((0.693147,)))
    assert found.reject_below == pytest.approx((-0.693147,))               # verl: 1 / upper
    bypassed = from_verl.translate(given(f"{prefix}.bypass_mode=true {prefix}.rollout_is=token"))
    found = resolve_correction(parse(bypassed, monkeypatch).correction, "grpo")
    assert found.bypass and found.weights == "none"


@pytest.mark.parametrize(("sampling", "is_said"), [("True", True), ("False", False)])
def test_epochs_of_dynamic_sampling_are_more_passes_than_verls(sampling, is_said):
    """verl's DAPO ends when it has read the data so often; dapo.py counts prompts_per_step rows a step."""
    keys = given(f"algorithm.filter_groups.enable={sampling} trainer.total_epochs=3")
    del keys["trainer.total_training_steps"]
    ours = from_verl.translate(keys)
    assert ours.flags["--total-epochs"] == ["3"]
    assert any("--total-steps sets the steps" in note for note in ours.notes) == is_said


def test_a_share_of_the_steps_becomes_steps_where_rows_can_be_counted(tmp_path):
    for name, rows in (("a", 70), ("b", 35)):
        pq.write_table(pa.table({"x": list(range(rows))}), tmp_path / f"{name}.parquet")
    keys = given(f"data.train_files=['{tmp_path}/a.parquet','{tmp_path}/b.parquet'] data.train_batch_size=50 "
                 "trainer.total_epochs=3 actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.5")
    del keys["trainer.total_training_steps"]
    ours = from_verl.translate(keys)
    assert ours.flags["--total-epochs"] == ["3"] and ours.flags["--optim.warmup-steps"] == ["3"]   # of 105 * 3 // 50
    ours = from_verl.translate(keys | {"data.train_files": "elsewhere.parquet"})
    assert ours.flags["--total-epochs"] == ["3"] and "--optim.warmup-steps" not in ours.flags
    assert [note for note in ours.notes if "0.5 of the steps" in note and "--rows N" in note]
    ours = from_verl.translate(keys | {"data.train_files": "x.parquet"}, rows=149)
    assert ours.flags["--optim.warmup-steps"] == ["4"]                                             # of 149 * 3 // 50


@pytest.mark.parametrize(("words", "resume"), [
    ("", "auto"), ("trainer.resume_mode=disable", "none"),
    ("trainer.resume_mode=resume_path trainer.resume_from_path=old/step_3", "old/step_3")])
def test_resume(words, resume, monkeypatch):
    ours = from_verl.translate(given(words))
    assert parse(ours, monkeypatch).save.resume == resume and ours.unknown == []
    assert len([note for note in ours.notes if "only exported weights" in note]) == (resume == "old/step_3")


@pytest.mark.parametrize(("words", "noted"), [
    ("actor_rollout_ref.rollout.top_p=0.9", True), ("actor_rollout_ref.rollout.top_k=50", True),
    ("actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k=-1", False),
    ("actor_rollout_ref.rollout.top_p=0.9 algorithm.rollout_correction.rollout_is=token", False)])
def test_a_cut_distribution_needs_the_correction(words, noted):
    notes = from_verl.translate(given(words)).notes
    assert len([note for note in notes if "need the engine correction" in note]) == noted


def test_rewards_and_data(tmp_path, monkeypatch):
    ours = from_verl.translate(given(
        "custom_reward_function.path=my/reward.py custom_reward_function.name=score "
        "custom_reward_function.reward_kwargs.scale=2.5 data.prompt_key=question data.reward_fn_key=source "
        "data.apply_chat_template_kwargs.enable_thinking=False sandbox_fusion.url=http://box data.truncation=left"))
    args = parse(ours, monkeypatch)
    assert args.reward.function == ("my/reward.py:score",)
    assert args.reward.kwargs == '{"scale": 2.5, "sandbox_fusion_url": "http://box"}'
    assert (args.data.prompt_column, args.data.data_source_column) == ("question", "source")
    assert args.data.chat_template_kwargs == '{"enable_thinking": false}'
    assert args.data.on_long_prompt == "truncate-left" and ours.unknown == []


@pytest.mark.parametrize(("word", "value"), [
    ("1e-3", 0.001), ("1e5", 100000.0), ("-2E+3", -2000.0), ("[1e-3,2]", [0.001, 2]), ("1.5", 1.5), (".5", 0.5),
    ("7", 7), ("off", "off"), ("no", "no"), ("yes", "yes"), ("On", "On"), ("y", "y"), ("[on,True]", ["on", True]),
    ("TRUE", True), ("tRuE", True), ("false", False), ("1e", "1e"), ("e3", "e3"), ("1-3", "1-3"),
    ("2026-01-02", "2026-01-02"), ("010", "010"), ("1:30", "1:30"), ("0", 0), ("-12", -12), ("0x10", "0x10"),
])
def test_values_are_read_as_hydra_reads_them(word, value):
    """The values are those of hydra 1.3.2's parser of the command line."""
    ours = from_verl.translate(given(f"custom_reward_function.reward_kwargs.length_penalty={word}"))
    assert ours.flags["--reward.kwargs"] == [json.dumps({"length_penalty": value})]


def test_a_number_of_a_script_reaches_the_reward_function_as_one(tmp_path):
    ours = read(tmp_path, "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
                          "trainer.total_training_steps=1 +custom_reward_function.reward_kwargs.length_penalty=1e-3")
    assert "--reward.kwargs '{\"length_penalty\": 0.001}'" in ours.command()


def test_values_of_a_yaml_file_are_read_as_omegaconf_reads_them():
    assert verl_settings.read_yaml("{a: 1e-3, b: off, c: yes, d: 1.0e-3, e: 'no'}", "a") == {
        "a": 0.001, "b": False, "c": True, "d": 0.001, "e": "no"}


# --------------------------------------------------------------------------- the tables, the program, the page

def flags_of(cls, prefix="--") -> set[str]:
    """All flags of a dataclass and those nested in it, as tyro names them."""
    found = set()
    for field in dataclasses.fields(cls):
        name = field.name.rstrip("_").replace("_", "-")
        if dataclasses.is_dataclass(field.type):
            found |= flags_of(field.type, f"{prefix}{name}.")
        else:
            found |= {f"{prefix}{name}"} | ({f"{prefix}no-{name}"} if field.type is bool else set())
    return found


@pytest.mark.parametrize("script", NAMES)
def test_the_tables_name_flags_that_the_scripts_have(script):
    flags = flags_of(importlib.import_module(script).Args)
    assert "--optim.lr" in flags and "--save.async" in flags
    for flag in {*SAME.values(), *SWITCHES.values(), *SCRIPTS}:
        assert (flag in flags) == (script in SCRIPTS.get(flag, NAMES)), flag


def test_the_program_prints_a_command_and_its_reasons(tmp_path, capsys):
    (tmp_path / "run.sh").write_text(ARRAYS)
    from_verl.main(from_verl.Args(str(tmp_path / "run.sh"), ("MODEL_PATH=my model",)))
    printed = capsys.readouterr().out
    assert printed.startswith("torchrun --standalone --nproc-per-node 8 grpo.py \\\n    --model 'my model' \\\n")
    assert "# Unknown to this tool, not used:\n#   made.up.key=7\n" in printed
    assert re.search(r"not run: .*; \$\(PROGRAM\) counts as empty, or as what follows \|\| in it", printed)


def test_a_command_is_there_without_waiting_for_torch():
    code = "import sys, tools.from_verl, tools.from_trl; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(("text", "rule"), [
    ("echo hello", "starts main_ppo, main_dapo, fully_async_main or sft_trainer 0 times"),
    ("python3 -m recipe.entropy.main_entropy a.b=1", "it starts recipe.entropy.main_entropy, which has no counterpart"),
    ("python3 recipe/prime/main_prime.py a.b=1", "it starts recipe/prime/main_prime.py, which has no counterpart"),
    ("python3 -m verl.trainer.main_ppo --config-name=own a.b=1", "own.yaml is not here: .*would have verl's defaults"),
    ("python3 -m verl.experimental.fully_async_policy.fully_async_main algorithm.adv_estimator=gae",
     "adv_estimator=gae, loss grpo: async_grpo.py has samplers on GPUs of their own"),
    ("python3 -m verl.trainer.main_ppo a.b=1\npython3 -m verl.trainer.main_ppo a.b=2", "2 times; it must be once"),
    ("python3 -m verl.trainer.main_ppo data.train_batch_size=$SIZE[x", "must be a number"),
])
def test_what_cannot_be_read_is_refused(tmp_path, text, rule):
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(ValueError, match=rule):
        from_verl.main(from_verl.Args(str(tmp_path / "run.sh")))
    with pytest.raises(ValueError, match="does not exist"):
        from_verl.main(from_verl.Args(str(tmp_path / "absent.sh")))


@pytest.mark.parametrize(("content", "name", "rule"), [
    (b"python3 -m verl.trainer.main_ppo a.b=\xff", "run.sh", "run.sh must be UTF-8: .* byte 0xff in position 37"),
    (b"python3 -m verl.trainer.main_ppo a.b=\0", "run.sh", "has a NUL byte, at 37"),
    (b"a: &a [x,x,x,x,x,x,x,x,x,x]\n" + b"".join(b"%c: &%c [%s]\n" % (i, i, b",".join([b"*%c" % (i - 1)] * 10))
                                                  for i in b"bcdefgh"), "run.yaml", "more than 100,000 values once"),
    (b"a: &a {x: 1, y: 2}\n" + b"".join(b"%c: &%c {<<: [%s]}\n" % (i, i, b",".join([b"*%c" % (i - 1)] * 10))
                                        for i in b"bcdefgh"), "run.yaml", "more than 100,000 values once"),
    (b"a: &a\n  b: *a\n", "run.yaml", "or one that holds itself"),
    (b"a: " + b"[" * 1000, "run.yaml", "nested too deep"),
    (b"a: !!python/object/apply:os.system ['exit']", "run.yaml", "is no YAML that this tool reads: .*os.system"),
    (b"a: b: c", "run.yaml", "mapping values are not allowed here"),
    (b"- a\n- b", "run.yaml", "must be a mapping of keys to values, and is list"),
    (b"data: {train_batch_size: .nan}", "run.yaml", "train_batch_size=nan must be a number"),
    (b"data: {train_batch_size: 0}", "run.yaml", "train_batch_size=0 must be a whole number from 1"),
    (b"data: {train_batch_size: 999999999}", "run.yaml", "must be a whole number from 1 to 10,000,000"),
    (b"trainer: {nnodes: 0.5}", "run.yaml", "nnodes=0.5 must be a whole number"),
])
def test_hostile_files_are_refused_in_one_line(tmp_path, content, name, rule):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rule) as error:
        from_verl.main(from_verl.Args(str(tmp_path / name)))
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_byte_order_marks_and_windows_line_ends_are_read(tmp_path):
    text = "\ufeff" + PPO.replace("\n", "\r\n")
    (tmp_path / "run.sh").write_bytes(text.encode())
    keys, _, notes = from_verl.read_settings(tmp_path / "run.sh", [])
    assert keys["trainer.n_gpus_per_node"] == "4" and notes == []


def test_what_is_printed_is_safe_in_a_terminal_and_in_a_shell(tmp_path, capsys):
    """A value with line ends, control sequences and marks of writing direction: bash reads the command's words as they
    were, and all other lines stay comments."""
    name = "a\nrm -rf x; '\\ \x1b]0;title\x07\u202e é"
    written = "$'a\\nrm -rf x; \\'\\\\ \\e]0;title\\a\\u202e é'"
    (tmp_path / "run.sh").write_text(f"python3 -m verl.trainer.main_ppo trainer.experiment_name={written} "
                                     f"algorithm.adv_estimator=grpo made.up={written}\n")
    from_verl.main(from_verl.Args(str(tmp_path / "run.sh")))
    printed = capsys.readouterr().out
    assert printed.replace("\n", "").isprintable()
    command, _, comments = printed.partition("\n\n")
    assert all(not line or line.startswith("#") for line in comments.splitlines())
    words = subprocess.run(["bash", "-c", f"torchrun() {{ printf '%s\\0' \"$@\"; }}\n{command}"], capture_output=True,
                           text=True, env={"LC_ALL": "C.UTF-8"}).stdout.split("\0")
    assert words[words.index("--run-dir") + 1] == f"runs/{name}"


@pytest.mark.parametrize(("words", "rule"), [
    ("actor_rollout_ref.rollout.engine_kwargs.vllm.a=1 actor_rollout_ref.rollout.engine_kwargs.vllm.a.b=2",
     "engine_kwargs.vllm.a is given as a value, and b of it"),
    ("algorithm.rollout_correction.rollout_rs=token_k1 algorithm.rollout_correction.rollout_rs_threshold=0",
     "rollout_rs_threshold=0 must be a number above 0"),
    ("algorithm.rollout_correction.rollout_rs=token_k3 algorithm.rollout_correction.rollout_rs_threshold=a",
     "rollout_rs_threshold=a must be a number above 0"),
    ("algorithm.rollout_correction.rollout_rs=token_k3", "one for each of the 1 criteria of rollout_rs; it has 0"),
    ("custom_reward_function.path=a custom_reward_function.reward_kwargs.x={a:[", "reward_kwargs.x is no YAML"),
])
def test_values_that_are_none_are_refused(words, rule):
    with pytest.raises(ValueError, match=re.escape(rule)):
        from_verl.translate(given(words))


def test_one_threshold_is_that_of_all_criteria(monkeypatch):
    prefix = "algorithm.rollout_correction"
    ours = from_verl.translate(given(f"{prefix}.rollout_rs=token_k2,seq_mean_k3 {prefix}.rollout_rs_threshold=0.5"))
    found = resolve_correction(parse(ours, monkeypatch).correction, "grpo")
    assert (found.reject, found.reject_above) == (("k2", "k3"), (0.5, 0.5))


def test_training_files_that_are_none(tmp_path):
    (tmp_path / "a.parquet").write_text("no parquet")
    keys = given(f"data.train_files={tmp_path}/a.parquet")
    del keys["trainer.total_training_steps"]
    with pytest.raises(ValueError, match=r"rows of .*/a.parquet cannot be counted: .*; --rows N counts for them"):
        from_verl.translate(keys)
    assert from_verl.translate(keys, rows=5).flags["--total-epochs"] == ["30"]


def test_arguments_are_checked(tmp_path):
    (tmp_path / "run.sh").write_text(PPO)
    with pytest.raises(ValueError, match="FOO must be NAME=VALUE"):
        from_verl.main(from_verl.Args(str(tmp_path / "run.sh"), ("FOO",)))
    with pytest.raises(ValueError, match="--rows -5 must not be negative"):
        from_verl.main(from_verl.Args(str(tmp_path / "run.sh"), rows=-5))


# --------------------------------------------------------------------------- the shell

@pytest.mark.parametrize("script", [
    "a=1; b=$a$a; c=\"x $b\" d='$a'; python3 $a \"$c\" '$a' $d \"$d\" pre\"$a\"post \\$a",
    "a=; b=${a:-empty} c=${a-unset} d=${e-unset} f=${e:=set} g=${a:+no} h=${b:+yes}; python3 \"$b$c$d$f$g$h$e\"",
    "n=7; python3 $((n * 3 + 2)) $(( (n - 1) / 4 )) $(( $n % 4 )) $((${n} - 10)) a$((1))b",
    "x=(a 'b c' \"d $HOME\"); x+=(e); x+=( # comment, it's one\n f=1 ); python3 \"${x[@]}\" ${x[@]:-} end",
    "x=(); python3 \"${x[@]}\" one",
    "w='a b  c'; python3 $w \"$w\" k=\"$w\"q",
    "case abc in a|b) python3 1;; a*|z) python3 2 ;; *) python3 3;; esac",
    "case x in x) case y in y) python3 in;; *) python3 out;; esac; python3 after ;; esac",
    "a=3; if [ $a -gt 2 ]; then python3 big; elif [ $a = 3 ]; then python3 three; else python3 other; fi",
    "a=; if [ -z \"$a\" ] && [ \"$a\" != b ]; then python3 yes; fi; if [[ -n \"$a\" || 1 == 1 ]]; then python3 or; fi",
    "if [ ! -n x ]; then python3 no; else if (( 2 * 2 >= 4 )); then python3 four; fi; fi",
    "[ a = a ] && python3 and; [ a = b ] && python3 never; [ a = b ] || python3 or",
    "if true; then\n python3 one \\\n   two \\\n three # four\nfi",
    "export A=1 B=$HOME; readonly C=\"2 3\"; python3 \"$A$B$C\"",
    "python3 a=\"['$HOME/x', '$HOME/y']\" b='[\"c\",\"d\"]' c=\\'q\\' d=[1,2] 2>/dev/null",
    "s=\"one \\\n two \\\"q\\\" \\$HOME\"; python3 \"$s\" $s",
    "f() {\n  python3 inside\n}\nfor i in 1 2; do x=$i; done; python3 outside",
    "a=\"${b:-\"${c:-deep}\"}\"; python3 \"$a\" ${b:-${HOME}/d}",
    "{ a=5; python3 $a; } | cat",
    "[ a = b ]; true && python3 and; [ a = b ]; true || python3 never",
    "n=2; if (( n > 4 )); then python3 big; else python3 small $(( n > 1 ? n : 1 )); fi",
    "a=b; [[ $a > c ]] && python3 after; for ((i = 5; i > 3; i--)); do python3 $i; done",
    "python3 name='a > b' \"c >d\" e=\">f\" \\> g 2> /dev/null",
    "x=1 # it's > a comment\n{ :; } &> /dev/null; python3 $x 2> \"/dev/null\"",
    "exec 2> >(cat) 3>&1\npython3 after",
    "python3 one $'\\n' two \"\"; python3 three",
    "STARTED=1 GIVE=2 TAKE=3 SCRIPT=run.py; python3 $STARTED$GIVE$TAKE $SCRIPT",
    "python3 $'\\u00e9\\u202e' ${#HOME}",
])
def test_the_reader_agrees_with_bash(script):
    shown = subprocess.run(
        ["bash", "-c", 'python3() { printf "%s\\0" "$@"; printf "END\\0"; }\n' + script],
        capture_output=True, text=True, check=False,
        env={"HOME": "/home/me", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}).stdout
    expected = [part.split("\0")[:-1] if part else [] for part in shown.split("END\0")[:-1]]
    found, _ = shell_commands(script, {"HOME": "/home/me"})
    commands = [words[1:] for words in found if words[0] == "python3"]
    assert expected and commands == expected


def test_programs_of_a_pipe_do_not_mix():
    """Both sides of a pipe run at once, and bash writes a word with line ends in pieces."""
    word = "line\n" * 2000
    commands, _ = shell_commands(f"python3 '{word}' | cat '{word}'", {})
    assert sorted(commands) == [["cat", word], ["python3", word]]


def test_a_script_can_do_nothing(tmp_path, monkeypatch):
    """No program, no file, no connection, no way out of the restricted mode; what that leaves open is said."""
    monkeypatch.chdir(tmp_path)
    evil = f"{tmp_path}/evil"
    script = (
        f"set -euo pipefail\na=$(touch {evil} || echo later)\n/bin/touch {evil}\nexport PATH=/bin:/usr/bin\n"
        f"PATH=/bin:/usr/bin\ntouch {evil}\necho hi > {evil}\necho hi >| {evil}\ncommand -p touch {evil}\n"
        f"exec touch {evil}\nenable kill\nkill -9 $$\nsource {evil}\nset +r\nunset PATH\ntouch {evil}\n"
        f"HISTFILE={evil}\nhistory -s a\nhistory -w\nhistory -w {Path(evil).name}\nread x </dev/tcp/127.0.0.1/9\n"
        "python3 \"$a\" $UNSET ${GIVEN:-1}\n"
    )
    commands, notes = shell_commands(script, {})
    assert list(tmp_path.iterdir()) == []
    assert [words for words in commands if words[0] == "python3"] == [["python3", "later", "1"]]
    for part in ("$UNSET is not set", "PATH: readonly variable", "not run: ", "/bin/touch: restricted",
                 "/dev/tcp/127.0.0.1/9: restricted"):
        assert [note for note in notes if part in note], (part, notes)


@pytest.mark.parametrize(("script", "said"), [
    ("while :; do :; done &\npython3 one", "in the background was ended after"),
    ("trap '' TERM HUP\nset -m\nbuiltin set -m\nshopt -so monitor\n(while :; do :; done) & disown\npython3 one",
     "in the background was ended after"),
    ("python3 one\nwhile :; do :; done\npython3 two", "comes after it in the script is not read"),
    ("python3 one\nsuspend -f\npython3 two", "comes after it in the script is not read"),
    ("trap 'while :; do :; done' EXIT\npython3 one", "comes after it in the script is not read"),
    ("python3 one\nread x < <(while :; do :; done)", "comes after it in the script is not read"),
])
def test_loops_without_end_are_ended(script, said, monkeypatch):
    """In the background, at the end, stopped or in sight: nothing of them is left, and what was read stands."""
    monkeypatch.setattr(verl_settings, "TIME_LIMIT_S", 1.5)
    monkeypatch.setattr(verl_settings, "BACKGROUND_S", 0.1)
    commands, notes = shell_commands(script, {"MARK": "of this test"})
    assert commands == [["python3", "one"]]
    assert [note for note in notes if "ended" in note and said in note] == notes[-1:]
    for _ in range(100):                                                # the kernel takes a moment to end one
        if not (left := running("MARK=of this test")):
            return
        time.sleep(0.05)
    raise AssertionError(left)


def test_a_command_in_the_background_is_read():
    """After `&` the script ends before its program starts."""
    commands, notes = shell_commands("{ for ((j = 0; j < 20000; j++)); do :; done; python3 one; } &\nexit 0", {})
    assert commands == [["python3", "one"]] and len(notes) == 1


@pytest.mark.parametrize("script", [
    "srun --nodes=2 bash -c '{}'", "ssh host \"cd x && {}\" &", "bash -c \"bash -c '{}' > log\"",
])
def test_a_command_in_a_word_of_another_one_is_read(script, tmp_path):
    (tmp_path / "run.sh").write_text(script.format("python3 -m verl.trainer.main_ppo data.train_batch_size=64 a.b=$X"))
    keys, program, _ = from_verl.read_settings(tmp_path / "run.sh", ["X=5"])
    assert (keys, program) == ({"data.train_batch_size": "64", "a.b": "5"}, "main_ppo")


def running(variable: str) -> list[str]:
    """Processes with this in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if variable.encode() in (folder / "environ").read_bytes():
                found.append(folder.name)
    return found


def test_what_a_script_takes_is_bounded():
    """Its time, its memory, what it writes to the file of its programs, the complaints that are shown."""
    ((_, limits),), _ = shell_commands('python3 "$(</proc/self/limits)"', {})
    found = {line[:26].strip(): line.split()[-3:-1] for line in limits.splitlines()}
    for name, value in (("Max cpu time", 20), ("Max file size", 2**26), ("Max core file size", 0),
                        ("Max address space", 2**30)):
        assert found[name] == [str(value)] * 2
    _, notes = shell_commands("for ((j = 0; j < 90; j++)); do /bin/x$((j)); done", {})
    assert len(notes) == 21 and notes[-1] == "bash said 70 other things"


def test_a_script_of_10_mb_is_read():
    text = "".join(f"a{i}={i}\n" for i in range(20_000)) + "# " + 9_800_000 * "x" + "\npython3 $a19999"
    assert shell_commands(text, {})[0] == [["python3", "19999"]]


@pytest.mark.parametrize("key", [*SAME, *SWITCHES])
def test_the_page_has_every_mapped_key(key):
    page = (ROOT / "docs" / "from_verl.md").read_text()
    flag = (SAME | SWITCHES)[key]
    lines = [line for line in page.splitlines() if f"`{key.replace('actor_rollout_ref.', '')}`" in line]
    assert [line for line in lines if flag in line], f"{key} -> {flag}"


@pytest.mark.parametrize("page", ["from_verl.md", "from_trl.md"])
def test_the_pages_name_flags_that_exist(page):
    scripts = (*NAMES, "rm", "distill", "sft")
    known = set().union(*(flags_of(importlib.import_module(script).Args) for script in scripts))
    known |= {"--rows", "--gpus", "--total-epochs", "--nnodes", "--nproc-per-node", "--correction.*"}
    named = set(re.findall(r"--[a-z][a-z.*-]*", re.sub(r"\|[ -]+\|.*", "", (ROOT / "docs" / page).read_text())))
    assert len(named) > 40 and named - known == set()
