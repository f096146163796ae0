"""What verl's other programs say with keys of their own: fully_async_main and the trainers of supervised fine-tuning.

The other keys are those of main_ppo, which tools/from_verl.py translates."""

import math
from typing import Any

from tools.verl_settings import Settings

ROLLOUT = "actor_rollout_ref.rollout"


# --------------------------------------------------------------------------- verl.experimental.fully_async_policy

def set_async_sizes(verl: Settings, ours: Any) -> None:
    """Between two updates of the samplers' weights verl trains on mini-batches of `ppo_mini_batch_size` prompts,
    `require_batches` of them at once, `trigger_parameter_sync_step` times: that is one step here."""
    minibatch = verl.count("actor_rollout_ref.actor.ppo_mini_batch_size", 256)
    verl.get("data.train_batch_size")  # 0: this program does not read it
    required = verl.count("async_training.require_batches", 1)
    updates = verl.count("async_training.trigger_parameter_sync_step", 4)
    prompts, stale = minibatch * required * updates, verl.number("async_training.staleness_threshold", 0.1)
    ours.add("--prompts-per-step", prompts)
    ours.add("--samples-per-prompt", verl.count(f"{ROLLOUT}.n", 1))
    ours.add("--minibatches-per-step", required * updates)
    ours.add("--max-staleness", min(math.ceil(stale), 1))
    ours.notes.append(f"--prompts-per-step {prompts}: {minibatch} prompts x {required} x {updates} until the samplers "
                      f"get new weights; here they get them once a step")
    ours.notes.append("--max-staleness counts rollouts; in verl staleness_threshold is a share of a rollout")
    if rollouts := verl.number("rollout.total_rollout_steps", 0):
        ours.add("--total-steps", max(1, round(rollouts / prompts)))
    if verl.is_on("async_training.partial_rollout", True):
        ours.without["async_training.partial_rollout"] = (
            "a rollout is whole; the other scripts continue responses in later steps: --rollout.in-flight")


def set_async_launch(verl: Settings, ours: Any) -> None:
    """Samplers are the last ranks of the job."""
    trainers = verl.count("trainer.nnodes", 1) * verl.count("trainer.n_gpus_per_node", 8)
    nodes, on_each = verl.count("rollout.nnodes", 1), verl.count("rollout.n_gpus_per_node", 8)
    samplers = nodes * on_each
    ours.add("--samplers", samplers)
    if nodes == 1 and verl.count("trainer.nnodes", 1) == 1 and trainers + samplers <= 8:
        ours.launch = ["--standalone", "--nproc-per-node", str(trainers + samplers)]
    else:
        ours.launch = ["--nnodes", "NODES", "--rdzv-backend", "c10d", "--rdzv-endpoint", "HEAD_NODE:29500",
                       "--nproc-per-node", "GPUS_OF_A_NODE"]
        ours.notes.append(f"NODES x GPUS_OF_A_NODE must be {trainers} GPUs that train and {samplers} that sample; "
                          f"run the command on each node, with the first one's name for HEAD_NODE")


# --------------------------------------------------------------------------- sft_trainer, fsdp_sft_trainer

SFT = {  # key -> flag, where value and unit are the same
    "optim.lr": "--optim.lr", "optim.betas": "--optim.betas", "optim.weight_decay": "--optim.weight-decay",
    "optim.clip_grad": "--optim.max-grad-norm", "optim.lr_scheduler_type": "--optim.schedule",
    "optim.lr_scheduler": "--optim.schedule", "optim.min_lr_ratio": "--optim.min-lr-frac",
    "data.messages_key": "--data.messages-column", "data.multiturn.messages_key": "--data.messages-column",
    "data.prompt_key": "--data.prompt-column", "data.response_key": "--data.response-column",
    "data.max_token_len_per_gpu": "--max-tokens-per-gpu", "trainer.seed": "--seed",
    "trainer.max_ckpt_to_keep": "--save.keep", "trainer.project_name": "--log.wandb-project",
    "model.trust_remote_code": "--policy.trust-remote-code",
}
SFT_DEFAULTS = {"optim.weight_decay": "0.01", "trainer.seed": "1"}  # of verl, where ours are others


def set_sft(verl: Settings, ours: Any) -> None:
    """sft.py for a trainer of supervised fine-tuning, of today or of verl before 0.6."""
    model = verl.get("model.path") or verl.get("model.partial_pretrain")
    if model:
        ours.add("--model", model)
    for key, flag in (("data.train_files", "--train-data"), ("data.val_files", "--val-data")):
        if files := verl.items(key):
            ours.add(flag, *files)
    for key, flag in SFT.items():
        if flag == "--policy.trust-remote-code":
            if verl.is_on(key):
                ours.add(flag)
        elif value := verl.get(key, SFT_DEFAULTS.get(key, "")):
            ours.add(flag, *(verl.items(key) if "[" in value else [value]))
    ours.add("--rows-per-step", verl.count("data.train_batch_size", 256))
    ours.add("--data.max-length", verl.count("data.max_length", 1024))
    cut = verl.get("data.truncation", "error")
    if cut == "right":
        ours.add("--data.on-long-row", "truncate")
    else:
        ours.notes.append(f"rows longer than --data.max-length are left out and counted; verl's truncation={cut} "
                          f"{'cuts their start' if cut == 'left' else 'ends the run'}")
    for name in ("prompt_dict_keys", "response_dict_keys"):
        if keys := verl.items(f"data.{name}"):
            column = verl.get(f"data.{name.removesuffix('_dict_keys')}_key")
            ours.without[f"data.{name}={keys}"] = (
                f"a column is read whole: write {column}.{keys[0]} into a column of its own first, and name that")
    if (size := verl.number("engine.ulysses_sequence_parallel_size",
                            verl.number("ulysses_sequence_parallel_size", 1))) > 1:
        ours.add("--policy.sequence-parallel", size)
    if (rank := verl.number("model.lora_rank", 0)) > 0:
        ours.add("--lora.rank", rank)
        ours.add("--lora.alpha", verl.number("model.lora_alpha", 16))
        targets = verl.items("model.target_modules")
        if targets and targets not in (["all-linear"], ["all_linear"]):
            ours.add("--lora.targets", *targets)
    set_sft_steps(verl, ours)


def set_sft_steps(verl: Settings, ours: Any) -> None:
    """Steps, warm-up and intervals. A share of the steps stays a note: the rows are not counted here."""
    if steps := verl.number("trainer.total_training_steps", 0):
        ours.add("--total-steps", steps)
    else:
        ours.add("--total-epochs", verl.number("trainer.total_epochs", 4))
    warmup = verl.number("optim.lr_warmup_steps", -1)
    share = verl.number("optim.lr_warmup_steps_ratio", verl.number("optim.warmup_steps_ratio", 0.0))
    if warmup < 0 < share and steps:
        warmup = int(share * steps)
    elif warmup < 0 < share:
        ours.notes.append(f"--optim.warmup-steps must be given: {share:g} of the steps, which the first lines of a run "
                          f"tell")
    if warmup > 0:
        ours.add("--optim.warmup-steps", warmup)
    every = verl.get("trainer.save_freq", "-1")
    ours.add("--save.every", int(every) if every.isdigit() else 0)
    if not every.lstrip("-").isdigit():
        ours.notes.append(f"--save.every must be given, in steps: save_freq={every}")
    every = verl.get("trainer.test_freq", "-1")
    ours.add("--eval-every", int(every) if every.isdigit() else 0)
