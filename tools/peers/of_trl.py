"""TRL's numbers on a recorded batch: GRPOTrainer's own _generate_and_score_completions and _compute_loss, on a trainer
without a model, for which log-probs, entropies, responses and rewards are those of the batch."""

from collections import defaultdict
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from trl import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import nanstd

from tools.peers.numbers import Numbers, Update
from tools.peers.recorded import Recorded
from tools.peers.watch import Watch

LOGPS = "_get_per_token_logps_and_entropies"  # the method that runs a model
END = 2  # the last token of a response that was not truncated


def numbers(keys: dict[str, str], recorded: Recorded, script: Numbers, own_rewards: bool) -> Numbers:
    """`keys`: options of GRPOConfig. `script`: which responses were trained, in which mini-batches. `own_rewards`: the
    script's rewards are what TRL gets, not the scores."""
    chosen = script.responses
    groups = recorded.group[chosen].unique_consecutive(return_counts=True)[1]
    if len(groups.unique()) != 1 or len(groups) != len(recorded.group[chosen].unique()):
        raise ValueError(f"TRL has groups of one size, and the script's have {sorted({*groups.tolist()})} responses")
    rewards = script.rewards if own_rewards else recorded.score[chosen]
    num_minibatches = len({tuple(update.responses.tolist()) for update in script.updates})
    config = config_of(keys, int(groups[0]), len(chosen), num_minibatches, len(script.updates) // num_minibatches)
    trainer = trainer_of(config, recorded, chosen, rewards)
    inputs = trainer._generate_and_score_completions([{"prompt": "p"} for _ in chosen])
    scored = ~rewards.isnan()
    by_group = rewards.view(-1, int(groups[0]))
    found = Numbers(
        chosen[scored], rewards[scored],
        torch.nanmean(by_group, dim=1).repeat_interleave(int(groups[0]))[scored],
        nanstd(by_group, dim=1).repeat_interleave(int(groups[0]))[scored],
    )
    place = {int(i): row for row, i in enumerate(chosen)}
    for update in script.updates:
        rows = torch.tensor([place[int(i)] for i in update.responses])
        found.updates.append(update_of(trainer, inputs, recorded, update, rows))
    return found


def config_of(keys: dict[str, str], group: int, count: int, num_minibatches: int, epochs: int) -> GRPOConfig:
    """TRL's own dataclass, with its defaults where `keys` are silent."""
    types = {field.name: str(field.type) for field in fields(GRPOConfig)}
    given: dict[str, Any] = {}
    for key, value in keys.items():
        if key not in types:
            raise ValueError(f"GRPOConfig of TRL has no option {key}")
        given[key] = value == "True" if value in ("True", "False") else value
        if any(kind in types[key] for kind in ("float", "int")) and "bool" not in types[key]:
            given[key] = float(value) if "float" in types[key] else int(value)
    per_update = count // num_minibatches
    return GRPOConfig(
        output_dir="/nonexistent", use_cpu=True, bf16=False, report_to=[], num_generations=group,
        per_device_train_batch_size=per_update, gradient_accumulation_steps=1, steps_per_generation=num_minibatches,
        num_iterations=epochs, gradient_checkpointing=False, **given,
    )


def trainer_of(config: GRPOConfig, recorded: Recorded, chosen: Tensor, rewards: Tensor) -> GRPOTrainer:
    """A trainer with what its two methods read, as its constructor sets it."""
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    same = ("beta", "loss_type", "scale_rewards", "importance_sampling_level", "num_generations", "num_iterations",
            "use_vllm", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
            "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "mask_truncated_completions",
            "multi_objective_aggregation", "off_policy_mask_threshold", "top_entropy_quantile", "entropy_coef",
            "use_adaptive_entropy", "max_completion_length", "pad_to_multiple_of")
    for name in same:
        setattr(trainer, name, getattr(config, name))
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    own: dict[str, Any] = {
        "args": config, "epsilon_low": config.epsilon, "epsilon_high": high, "ref_model": "reference",
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "accelerator": Accelerator(cpu=True), "environment_factories": None, "environments": None, "tools": None,
        "_is_vlm": False, "_tokenizer": SimpleNamespace(pad_token_id=0),
        "eos_token_ids": [END], "reward_weights": torch.ones(1, dtype=torch.float64), "reward_funcs": [None],
        "reward_func_names": ["reward"], "_metrics": {"train": defaultdict(list)},
        "_logs": defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        "_pending_extra_logs": {}, "_pending_metrics": {}, "log_multimodal": False, "aux_loss_enabled": False,
        "_entropy_bonus_enabled": config.entropy_coef != 0.0, "current_gradient_accumulation_steps": 1,
    }
    lengths = recorded.lengths[chosen].tolist()
    tokens = [[END + 1] * (n - 1) + [END + 1 if cut else END] for n, cut in zip(lengths, recorded.truncated[chosen])]
    sampled_here = [recorded.mask[i, :n].long().tolist() for i, n in zip(chosen, lengths)]
    sampled = [recorded.rollout_logp[i, :n].tolist() for i, n in zip(chosen, lengths)] if config.use_vllm else None
    tool_mask = None if all(map(all, sampled_here)) else sampled_here
    generated = ([[END + 1]] * len(lengths), tokens, tool_mask, [""] * len(lengths), sampled, {}, None, None)

    def logps(model: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None, None]:
        values = recorded.ref_logp if model == "reference" else recorded.old_logp
        return values[chosen, : max(lengths)], None, None  # TRL pads to the longest of these responses

    own |= {"_generate": lambda prompts: generated, "_calculate_rewards": lambda *_: rewards[:, None].clone(),
            LOGPS: logps}
    for name, value in own.items():
        setattr(trainer, name, value)
    return trainer


def update_of(trainer: GRPOTrainer, inputs: dict[str, Any], recorded: Recorded, update: Update, rows: Tensor) -> Update:
    """The numbers of one mini-batch. `rows`: its responses' places in `inputs`."""
    chosen = update.responses
    longest = recorded.mask.shape[1]
    part = {name: value[rows] if isinstance(value, Tensor) and value.dim() else value for name, value in inputs.items()}
    width = part["completion_mask"].shape[1]
    mask = part["completion_mask"] * part["tool_mask"] if "tool_mask" in part else part["completion_mask"]
    logp = recorded.logp[min(update.number_of_pass, len(recorded.logp) - 1)][chosen, :width].clone().requires_grad_()
    entropy = recorded.entropy[chosen, :width].clone().requires_grad_()

    def loss_of(of_entropy: Tensor) -> Tensor:
        setattr(trainer, LOGPS, lambda *_, **__: (logp, of_entropy, None))
        return trainer._compute_loss(trainer.model, part)

    def watched(beta: float) -> tuple[Tensor | None, Tensor | None]:
        """Losses of tokens and their factors, without the entropy, at another factor of the KL."""
        trainer.beta, before = beta, trainer.beta
        with Watch() as watch:
            watch.begin(tuple(logp.shape))
            loss_of(entropy.detach()).backward()
        trainer.beta = before
        logp.grad = None
        return watch.end()[0][1:]

    token_loss, weight = watched(trainer.beta)
    kl = None
    if trainer.beta and token_loss is not None:
        kl = watched(1.0)[0] - watched(0.0)[0]
    if token_loss is not None and trainer.entropy_coef:
        token_loss = token_loss - trainer.entropy_coef * entropy.detach()
    loss = loss_of(entropy)
    loss.backward()

    def wide(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.nn.functional.pad(x.double(), (0, longest - width))

    zeros = torch.zeros_like(logp)
    advantage = part["advantages"][:, None] * mask
    gradients = [zeros if x.grad is None else x.grad for x in (logp, entropy)]
    is_used, *others = [wide(x) for x in (mask, advantage, *gradients, token_loss, weight, kl)]
    return Update(chosen, update.number_of_pass, is_used > 0, *others, float(loss.detach()))  # type: ignore[arg-type,call-arg]
