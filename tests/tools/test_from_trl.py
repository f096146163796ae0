"""TRL's commands, in scripts written here in the style of its examples, as ours: every printed command parses."""

import ast
import importlib
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
import tyro

import dpo
import grpo_variants
import rloo
from tests import oracles
from tests.conftest import ROOT
from tools import from_trl
from tools.trl_options import KINDS, NEEDLESS, NO_SCRIPT, SAME, WITHOUT
from variants.losses import FUNCTIONS, Tokens

SFT = '''"""
# Full training
```
python trl/scripts/sft.py \\
    --model_name_or_path org/model \\
    --dataset_name org/Talks \\
    --learning_rate 2.0e-5 --num_train_epochs 1 --packing \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \\
    --eval_strategy steps --eval_steps 100 \\
    --output_dir out --push_to_hub --made_up 7
```
# LoRA
python trl/scripts/sft.py --model_name_or_path org/model --dataset_name org/Talks --use_peft --lora_r=32 \\
    --lora_target_modules "q_proj", "v_proj" --max_steps 12
"""
raise SystemExit("it is never run")
'''
GRPO = '''"""
  accelerate launch --config_file zero3.yaml examples/scripts/grpo.py
"""
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward

def near(completions, solution, **kwargs):
    return [0.0 for _ in completions]

trainer = GRPOTrainer(
    model="org/model",
    args=GRPOConfig(output_dir="out", learning_rate=1e-5, max_completion_length=64, gradient_accumulation_steps=2,
                    steps_per_generation=8, num_generations=4, beta=0.01, max_steps=40, loss_type="grpo", use_vllm=True,
                    vllm_mode="colocate", reward_weights=[1.0, 0.5], bf16=is_able(), scale_rewards=False),
    reward_funcs=[think_format_reward, near],
    peft_config=LoraConfig(r=8),
)
'''


def translate(command: str, gpus: int = 0) -> from_trl.Translation:
    (name, options), = from_trl.commands_of(command)
    return from_trl.translate(name, options, gpus)


@pytest.mark.parametrize(("launcher", "gpus", "started"), [
    ("accelerate launch --config_file zero3.yaml --num_processes 4 examples/scripts/dpo.py", 0, 4),
    ("accelerate launch --num-processes=4 examples/scripts/dpo.py", 0, 4),
    ("torchrun --nnodes 2 --nproc_per_node=8 examples/scripts/dpo.py", 0, 16),
    ("torchrun --nproc-per-node gpu examples/scripts/dpo.py", 0, 1),
    ("accelerate launch --num_processes 4 examples/scripts/dpo.py", 2, 2), ("python examples/scripts/dpo.py", 0, 1),
    ("trl dpo --num_processes 4", 0, 4), ("trl dpo", 0, 1)])
def test_the_batch_counts_the_processes_that_the_launcher_starts(launcher, gpus, started):
    new = translate(f"{launcher} --model_name_or_path org/model --per_device_train_batch_size 2", gpus)
    assert parsed(new).rows_per_step == 2 * started and new.unknown == []
    assert f"--nproc-per-node {started} dpo.py" in new.command()


def parsed(new: from_trl.Translation):
    """Our script's arguments, from the flags that the tool gives."""
    return tyro.cli(importlib.import_module(new.script).Args, args=new.argv(), console_outputs=False)


def test_the_commands_of_a_docstring(tmp_path):
    path = tmp_path / "sft.py"
    path.write_text(SFT)
    found, notes = from_trl.read(str(path))
    full, lora = (from_trl.translate(name, options, gpus=2) for name, options in found)
    assert notes == [] and full.script == "sft" and full.unknown == ["--made_up 7"]
    args = parsed(full)
    assert (args.model, args.run_dir, args.optim.lr, args.total_epochs) == ("org/model", "out", 2e-5, 1.0)
    assert args.rows_per_step == 2 * 8 * 2 and args.eval_every == 100 and args.optim.schedule == "linear"
    assert args.train_data == ("data/Talks/train.parquet",) and args.val_data == ("data/Talks/test.parquet",)
    assert "load_dataset('org/Talks', split='train')" in full.before[0]
    assert list(full.without) == ["--push_to_hub"] and list(full.needless) == ["--packing"]
    args = parsed(lora)
    assert (args.lora.rank, args.lora.targets, args.total_steps) == (32, ("q_proj", "v_proj"), 12)
    assert args.optim.lr == 2e-5 and args.val_data == () and args.data.max_length == 1024         # TRL's defaults


def test_the_configuration_in_the_code(tmp_path):
    """8 responses x 8 passes = 64 in groups of 4: 16 prompts; 8 / 2 updates a rollout, so 40 are 10 rollouts."""
    path = tmp_path / "grpo.py"
    path.write_text(GRPO)
    ((name, options),), notes = from_trl.read(str(path))
    new = from_trl.translate(name, options)
    args = parsed(new)
    assert new.script == "grpo_variants" and args.aggregation == "seq-mean-token-mean"
    assert (args.prompts_per_step, args.samples_per_prompt, args.minibatches_per_step) == (16, 4, 4)
    assert args.total_steps == 10
    assert (args.kl_loss_coef, args.kl_estimator, args.norm_by_std, args.lora.rank) == (0.01, "k3+", False, 8)
    assert args.correction.weights == "sequence" and args.correction.upper == 3 and args.correction.outside == "zero"
    assert args.reward.function == ("rewards/trl_functions.py",)
    assert args.reward.kwargs == '{"functions": ["trl.rewards:think_format_reward", "my_rewards.py:near"], ' \
                                 '"weights": [1.0, 0.5]}'
    assert new.unknown == [] and list(new.needless) == ["--vllm_mode colocate"] and notes == []
    assert any('TRL gives texts: add "conversational": false' in note for note in new.notes)


def translate_code(tmp_path, code: str, gpus: int = 1) -> from_trl.Translation:
    (tmp_path / "script.py").write_text(code)
    ((name, options),), _ = from_trl.read(str(tmp_path / "script.py"))
    return from_trl.translate(name, options, gpus)


def test_adapters_of_the_code_have_pefts_defaults_and_nothing_of_them_is_dropped(tmp_path):
    new = translate_code(tmp_path, "SFTConfig(); LoraConfig()")
    assert (parsed(new).lora.rank, parsed(new).lora.alpha) == (8, 8)
    assert new.without == {} and new.unknown == []
    new = translate_code(tmp_path, "SFTConfig(); LoraConfig(r=4, target_modules=['q_proj'], lora_dropout=0.1, "
                                   "use_rslora=True, use_dora=True, modules_to_save=['lm_head'], bias='all', "
                                   "task_type='CAUSAL_LM', target_parameters=['experts'])")
    assert (parsed(new).lora.rank, parsed(new).lora.alpha, parsed(new).lora.targets) == (4, 8, ("q_proj",))
    assert list(new.without) == ["--lora_dropout 0.1", "--use_rslora True", "--use_dora True",
                                 "--lora_modules_to_save lm_head"]
    assert new.unknown == ["--LoraConfig.bias all", "--lora_target_parameters experts"]
    assert list(new.needless) == ["--lora_task_type CAUSAL_LM"]
    args = parsed(translate("trl sft --use_peft"))                      # TRL's command line has others
    assert (args.lora.rank, args.lora.alpha) == (16, 32)


@pytest.mark.parametrize(("loss_type", "mean"), [
    ("", lambda loss, n: (loss * n).sum() / n.sum()),                   # TRL's default is dapo
    ("--loss_type grpo", lambda loss, n: loss.mean()),
    ("--loss_type dr_grpo", lambda loss, n: (loss * n).sum() / (len(n) * 20)),
])
def test_gspo_has_the_mean_of_its_loss_type(loss_type, mean):
    """TRL's loss of four responses of other lengths, each with one ratio, the mean over tokens or responses that
    GRPOTrainer._compute_loss takes. Ours is the same number, and the default of gspo is not for two of the three."""
    args = parsed(translate(f"trl grpo --importance_sampling_level sequence --epsilon 0.1 {loss_type} "
                            f"--max_completion_length 20"))
    generator = torch.Generator().manual_seed(0)
    n, advantages = torch.tensor([1, 9, 4, 6]), torch.tensor([1.0, -0.5, 0.7, -1.2], dtype=torch.float64)
    old, change = torch.randn(2, 20, generator=generator, dtype=torch.float64) * 0.3
    ratio = torch.stack([part.mean().exp() for part in change.split(n.tolist())])
    trls = mean(-torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages), n).item()
    cu, mask = torch.tensor([0, 1, 10, 14, 20], dtype=torch.int32), torch.ones(20, dtype=torch.bool)
    settings = grpo_variants.resolve_loss(args)
    tokens = Tokens(old + change, old, advantages.repeat_interleave(n), mask, cu)
    loss, _ = FUNCTIONS[settings.name](tokens, **settings.bounds)
    found = {name: oracles.aggregate(loss.tolist(), mask.tolist(), cu.tolist(), name, args.rollout.max_response_length)
             for name in ("seq-mean-token-mean", settings.aggregation)}
    assert found[settings.aggregation] == pytest.approx(trls, rel=1e-12)
    assert (abs(found["seq-mean-token-mean"] - trls) > 0.01) == (loss_type != "--loss_type grpo")


@pytest.mark.parametrize("loss_type", ["cispo --epsilon_high 5", "sapo"])
def test_no_loss_of_ours_has_the_ratio_of_a_response_and_another_clip(loss_type):
    with pytest.raises(ValueError, match=r"with --importance_sampling_level sequence has no equivalent"):
        translate(f"trl grpo --importance_sampling_level sequence --loss_type {loss_type}")


def test_the_gradient_of_rloo_is_smaller_by_the_mean_length():
    """At the first update, where nothing is clipped: TRL's -A exp(sum of log-ratios), the mean over responses, and
    ours, the mean over tokens. The note says by how much they differ."""
    n, advantages = torch.tensor([2, 9, 4]), torch.tensor([1.0, -0.5, 0.7], dtype=torch.float64)
    old = torch.randn(15, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logp = old.clone().requires_grad_()
    change = torch.stack([part.sum() for part in (logp - old).split(n.tolist())])
    (trls,) = torch.autograd.grad((-advantages * change.exp()).mean(), logp)
    args = parsed(translate("trl rloo"))
    loss, _ = rloo.LOSSES[args.loss](logp, old, advantages.repeat_interleave(n), args)
    (ours,) = torch.autograd.grad(loss.mean(), logp)
    assert torch.allclose(ours * n.double().mean(), trls, rtol=1e-12)
    assert any("smaller here by the mean length" in note for note in translate("trl rloo").notes)


@pytest.mark.parametrize("beta", [0.01, 0.1, 0.5])
def test_ipo_with_means_is_that_with_sums_and_another_beta(beta):
    """What the note says of a pair of answers with 7 tokens: the loss of TRL's trainer, by its means over tokens, is
    ours with beta / 7, divided by 49."""
    torch.manual_seed(0)
    chosen, rejected = torch.randn(2, 7, dtype=torch.float64)
    trls = (chosen.mean() - rejected.mean() - 1 / (2 * beta)) ** 2
    ours = dpo.ipo_loss(torch.stack([chosen.sum(), rejected.sum()]), beta / 7, 0.0)
    assert (ours / 49).item() == pytest.approx(trls.item(), rel=1e-12)
    assert any("--beta / N" in note for note in translate("trl dpo --loss_type ipo").notes)
    assert not any("ipo" in note for note in translate("trl dpo").notes)


@pytest.mark.parametrize(("command", "expected"), [
    ("trl dpo --beta 0.3 --loss_type ipo", {"script": "dpo", "beta": 0.3, "loss": "ipo", "rows_per_step": 8}),
    ("trl kto --beta 0.2 --desirable_weight 0.8 --undesirable_weight 1.5 --gradient_accumulation_steps 2", {
        "script": "kto", "beta": 0.2, "desirable_weight": 0.8, "undesirable_weight": 1.5, "rows_per_step": 16}),
    ("trl reward --max_length 99", {"script": "rm", "centre_coef": 0.0, "rows_per_step": 8}),
    ("python gkd.py --lmbda 0.25 --per_device_train_batch_size 16", {
        "script": "distill", "divergence": "jsd", "beta": 0.5, "prompts_per_step": 4, "answers_per_step": 12}),
    ("python distillation.py --beta 0", {"script": "distill", "divergence": "forward-kl"}),
    ("python online_dpo.py --reward_model_path r", {"script": "online_dpo", "samples_per_prompt": 2, "beta": 0.1}),
    ("python ppo.py --total_episodes 800 --reward_model_path r --num_mini_batches 2", {
        "script": "ppo", "prompts_per_step": 16, "total_steps": 50, "critic_model": "r", "epochs_per_step": 4}),
    ("trl rloo --beta 0.1 --num_generations 4", {
        "script": "rloo", "prompts_per_step": 2, "kl_reward_coef": 0.1, "loss": "ppo", "clip_dual": 10000.0}),
    ("trl grpo", {"script": "grpo", "prompts_per_step": 1, "kl_loss_coef": 0.0, "clip_high": 0.2}),
    ("trl grpo --importance_sampling_level sequence --epsilon 3e-4 --epsilon_high 4e-4", {
        "script": "grpo_variants", "loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}),
    ("trl grpo --loss_type cispo --epsilon_high 5", {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0}),
    ("trl grpo --loss_type cispo", {"loss": "cispo"}), ("trl grpo --loss_type sapo", {"loss": "sapo"}),
    ("trl grpo --loss_type dr_grpo", {"loss": "dr_grpo", "norm_by_std": True}),
    ("trl grpo --scale_rewards none", {"script": "grpo", "norm_by_std": False}),
    ("trl grpo --loss_type dapo --scale_rewards False", {"norm_by_std": False}),
    ("trl grpo --loss_type grpo --scale_rewards none", {"script": "grpo_variants", "norm_by_std": False}),
    ("trl grpo --num_iterations 2 --max_steps 20", {"epochs_per_step": 2, "total_steps": 10}),
    ("trl sft --max_steps 50 --warmup_steps 0.1", {"script": "sft", "total_steps": 50}),
])
def test_each_kind_of_command(command, expected):
    new = translate(command)
    args = parsed(new)
    assert {name: new.script if name == "script" else getattr(args, name) for name in expected} == expected
    assert not new.unknown


def test_a_script_with_the_trainer_of_kto(tmp_path):
    """Its configuration and the arguments by place; what the reference does ahead in TRL, and another loss, are named,
    and so is which rows the KL is of."""
    new = translate_code(tmp_path, """
from trl import KTOConfig, KTOTrainer
trainer = KTOTrainer("org/model", None, KTOConfig(output_dir="out", beta=0.3, desirable_weight=1.33, max_steps=20,
                     per_device_train_batch_size=4, loss_type="apo_zero_unpaired", precompute_ref_log_probs=True,
                     train_sampling_strategy="sequential"), train_dataset=load_dataset("org/Thumbs"))
""", gpus=2)
    args = parsed(new)
    assert (new.script, args.model, args.run_dir, args.beta, args.desirable_weight) == (
        "kto", "org/model", "out", 0.3, 1.33)
    assert (args.rows_per_step, args.total_steps, args.optim.lr, args.data.max_length) == (8, 20, 1e-6, 1024)
    assert args.data.on_long_row == "truncate" and args.train_data == ("data/Thumbs/train.parquet",)
    assert list(new.without) == ["--loss_type apo_zero_unpaired", "--precompute_ref_log_probs"]
    assert list(new.needless) == ["--train_sampling_strategy sequential"] and new.unknown == []
    assert any("estimated over these 8 rows" in note for note in new.notes)
    assert not any("--beta" in note for note in translate("trl kto").notes)


def test_a_share_of_the_steps_as_warm_up():
    assert parsed(translate("trl sft --max_steps 50 --warmup_ratio 0.1")).optim.warmup_steps == 5
    new = translate("trl sft --warmup_ratio 0.1")
    assert parsed(new).optim.warmup_steps == 0 and any("a warm-up of 0.1" in note for note in new.notes)


@pytest.mark.parametrize(("warmup", "expected"), [(12, 3), (1, 1), (0, 0)])
def test_a_warm_up_in_optimizer_steps_becomes_one_in_rollouts(warmup, expected):
    """2 updates a pass, 2 passes: 4 optimizer steps a rollout."""
    new = translate(f"trl grpo --steps_per_generation 2 --num_iterations 2 --max_steps 40 --warmup_steps {warmup}")
    args = parsed(new)
    assert (args.optim.warmup_steps, args.total_steps) == (expected, 10)
    note = f"--optim.warmup-steps: {warmup} optimizer steps, 4 a rollout"
    assert (note in new.notes) == (warmup > 0)
    assert parsed(translate("trl sft --warmup_steps 12")).optim.warmup_steps == 12


@pytest.mark.parametrize(("code", "expected", "noted"), [
    ("SFTConfig(max_length=None, save_total_limit=None, eval_steps=None)", {}, "--data.max-length 1024: "),
    ("GRPOConfig(top_k=None, delta=None, epsilon_high=None, reward_weights=None)",
     {"clip_high": 0.2, "clip_dual": 10000.0}, ""),
    ("GRPOConfig(max_completion_length=None)", {}, "--rollout.max-response-length 512: "),
])
def test_none_is_as_if_not_given(tmp_path, code, expected, noted):
    new = translate_code(tmp_path, code)
    args = parsed(new)
    assert {name: getattr(args, name) for name in expected} == expected
    assert "None" not in new.argv() and new.unknown == [] and new.without == {}
    assert [note[: len(noted)] for note in new.notes if "is None" in note] == ([noted] if noted else [])


@pytest.mark.parametrize(("value", "expected"), [
    ("", True), ("true", True), ("TRUE", True), ("1", True), ("false", False), ("False", False), ("no", False)])
def test_truth_values_are_written_as_ours_are_read(value, expected):
    new = translate(f"trl sft --gradient_checkpointing {value}")
    assert parsed(new).policy.gradient_checkpointing is expected


def test_intervals_may_be_a_share_of_the_steps():
    options = "--eval_strategy steps --save_steps 0.1 --eval_steps 0.25"
    args = parsed(translate(f"trl sft --max_steps 40 {options}"))
    assert (args.save.every, args.eval_every) == (4, 10)
    args = parsed(translate(f"trl grpo --num_iterations 2 --max_steps 8 {options}"))                # 4 rollouts
    assert (args.save.every, args.eval_every) == (1, 1)
    new = translate(f"trl sft {options}")
    assert "--save.every" not in new.flags and parsed(new).eval_every == 10 and not new.unknown
    assert [note.split(" of the")[0] for note in new.notes if "of the steps" in note] == [
        "--eval-every: TRL's is 0.25", "--save.every: TRL's is 0.1"]
    assert parsed(translate("trl sft --save_steps 100")).save.every == 100


def test_what_the_tables_name_exists():
    """TRL's options are fields of the classes that are installed."""
    fields = set()
    trl, transformers = (find_spec(name).submodule_search_locations[0] for name in ("trl", "transformers"))
    for path in (*from_trl.Path(trl).rglob("*config.py"), from_trl.Path(trl, "scripts/utils.py"),
                 *from_trl.Path(trl, "scripts").glob("*.py"), from_trl.Path(transformers, "training_args.py")):
        fields |= {node.target.id for node in ast.walk(ast.parse(path.read_text()))
                   if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    old = {"torch_dtype", "no_remove_unused_columns", "overwrite_output_dir", "stop_token", "max_new_tokens",
           "whiten_rewards", "local_rollout_forward_batch_size", "response_length"}     # of earlier versions
    assert {*SAME, *NEEDLESS, *WITHOUT} - fields <= old
    assert not set(KINDS) & set(NO_SCRIPT)


AGENT = '''"""
python examples/scripts/grpo_agent.py --model_name_or_path org/model --dataset_name org/Names --max_steps 400
"""
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser

script_args, training_args, model_args = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()
trainer = GRPOTrainer(model=model_args.model_name_or_path, train_dataset=load_dataset("org/Rows", "main"), ARGUMENTS)
'''


@pytest.mark.parametrize(("arguments", "name"), [
    ("tools=[query_database], reward_funcs=[right]", "tools"),
    ("environment_factory=EchoToolEnv", "environment_factory"),
    ("rollout_func=rollout_once", "rollout_func"), ("callbacks=[SyncCallback()]", "callbacks"),
    ("reward_processing_classes=[tokenizer]", "reward_processing_classes"),
    ("optimizers=(optimizer, scheduler)", "optimizers"), ("data_collator=Collator(tokenizer)", "data_collator"),
    ("compute_metrics=accuracy", "compute_metrics"), ("formatting_func=lambda row: row", "formatting_func"),
    ("made_up=1", ""),
])
def test_each_argument_of_a_trainer_is_named(arguments, name, tmp_path):
    """They decide what is trained as much as its configuration does. The command of a script of another name is read,
    as the script's own, and so is the data set that it loads."""
    path = tmp_path / "grpo_agent.py"
    path.write_text(AGENT.replace("ARGUMENTS", arguments))
    ((kind, options),), _ = from_trl.read(str(path))
    new = from_trl.translate(kind, options)
    assert new.script == "grpo" and new.flags["--total-steps"] == ["400"] and new.flags["--model"] == ["org/model"]
    if name:
        (said,) = [why for key, why in new.without.items() if key.startswith(f"GRPOTrainer.{name}=")]
        assert said == from_trl.ARGUMENTS[name] and not new.unknown
    else:
        assert new.unknown == ["GRPOTrainer.made_up=1"]
    assert "data/Names" in new.flags["--train-data"][0]
    path.write_text(AGENT.replace("ARGUMENTS", arguments).replace(" --dataset_name org/Names", ""))
    ((kind, options),), _ = from_trl.read(str(path))
    assert options["dataset_name"] == ["org/Rows"] and options["dataset_config"] == ["main"]


def test_arguments_by_place_are_read(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text('GRPOTrainer("org/model", [near], GRPOConfig(max_steps=3, **more), train_dataset=rows)\n')
    ((_, options),), notes = from_trl.read(str(path))
    assert options["model_name_or_path"] == ["org/model"] and options["reward_funcs"] == ["near"]
    assert notes == ["GRPOConfig(**...): what it holds is not read"]


@pytest.mark.parametrize(("name", "said"), [
    ("async_grpo", "async_grpo.py trains so, with samplers"), ("mpo_vlm", "dpo.py trains on preference pairs"),
])
def test_what_is_nearest_is_named(name, said, tmp_path):
    config = "AsyncGRPOConfig" if name == "async_grpo" else "DPOConfig"
    path = tmp_path / f"{name}.py"
    path.write_text(f'"""python {name}.py --max_steps 3"""\nTrlParser((ScriptArguments, {config}))\n')
    (kind, options), = from_trl.read(str(path))[0]
    with pytest.raises(ValueError, match=said):
        from_trl.translate(kind, options)


@pytest.mark.parametrize(("source", "message"), [
    ("absent.py", "absent.py is neither a file nor a command"),
    ("ls -la", "neither a file nor a command"),
    ("python orpo.py --model_name_or_path m", "orpo: this tool translates none of its commands; docs/forks.md has"),
    ("trl grpo --loss_type vespo", "--loss_type vespo has no equivalent"),
    ("trl grpo --num_generations 3", "must be whole groups of --num_generations 3"),
    ("trl sft --learning_rate 1e-5 --per_device_train_batch_size many", "--per_device_train_batch_size many must be"),
])
def test_what_cannot_be_translated_is_one_line(source, message):
    done = subprocess.run([sys.executable, "-m", "tools.from_trl", source], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1


def test_a_hostile_script_prints_and_runs_nothing(tmp_path, capsys, monkeypatch):
    path = tmp_path / "run.sh"
    path.write_text("trl sft --model_name_or_path '\x1b[31m$(touch HERE)' --dataset_name `touch HERE`\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["from_trl", str(path)])
    from_trl.main()
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["org/b\necho INJECTED; #", "org/x$(touch HERE)", 'org/x"; touch HERE; "',
                                  "x`touch HERE`", "it's\\a \"!\x1b]0;title\x07", "org/Talks"])
def test_a_hostile_name_of_a_data_set_stays_a_name(tmp_path, name):
    """bash, and the Python that it starts, get the name as it was; all other lines stay comments."""
    (tmp_path / "script.py").write_text(f"SFTConfig(dataset_name={name!r}, dataset_config={name!r})")
    ((kind, options),), notes = from_trl.read(str(tmp_path / "script.py"))
    new = from_trl.translate(kind, options)
    printed = from_trl.report(new, notes)
    assert printed.replace("\n", "").isprintable()
    first, command, comments = printed.split("\n\n", 2)
    assert first.splitlines() == ["# first, the data as files:", f"# {new.before[0]}"]
    assert all(not line or line.startswith("#") for line in comments.splitlines())
    assert command.splitlines()[0].startswith("torchrun ") and "INJECTED" not in command.splitlines()[0]
    line = first.splitlines()[1].removeprefix("# ")
    shown = subprocess.run(["bash", "-c", f"python() {{ printf '%s' \"$2\"; }}\n{line}"], cwd=tmp_path,
                           capture_output=True, text=True, env={"LC_ALL": "C.UTF-8"}).stdout
    call = ast.parse(shown).body[1].value                               # load_dataset(...).to_parquet(...)
    assert [ast.literal_eval(word) for word in call.func.value.args] == [name, name]
    file = f"data/{name.rpartition('/')[2]}/train.parquet"
    assert ast.literal_eval(call.args[0]) == file and new.flags["--train-data"] == [file]
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]
