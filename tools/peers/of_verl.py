"""verl's numbers on a recorded batch, by its own functions: compute_advantage, apply_kl_penalty, the correction's
compute_rollout_correction_and_add_to_batch, and ppo_loss, which calls the policy loss, kl_penalty and agg_loss."""

from typing import Any

import numpy as np
import torch
import verl.trainer.ppo.core_algos as core_algos
import verl.workers.utils.losses as verl_losses
from tensordict import TensorDict
from torch import Tensor
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, PolicyLossConfig

from tools.from_verl import ACTOR, CORRECTION
from tools.peers.numbers import Numbers, Update
from tools.peers.recorded import Recorded
from tools.verl_settings import Settings

PER_TOKEN = ("reinforce_plus_plus", "remax")  # estimators that keep a KL in the rewards on its token
NO_GROUPS = ("reinforce_plus_plus", "remax", "opo")  # estimators without a group's mean


def numbers(keys: dict[str, str], recorded: Recorded, script: Numbers, own_rewards: bool) -> Numbers:
    """`keys`: verl's settings. `script`: which responses were trained, in which mini-batches. `own_rewards`: the
    script's rewards are what verl gets, not the scores."""
    settings = Settings(keys)
    estimator = settings.get("algorithm.adv_estimator", "grpo")
    chosen = script.responses[~script.rewards.isnan()]
    scores = script.rewards[~script.rewards.isnan()] if own_rewards else recorded.score[chosen]
    batch = batch_of(settings, recorded, script, chosen, scores)
    rewards = batch.batch["token_level_rewards"].sum(-1)
    if estimator in PER_TOKEN:
        rewards = scores.clone()
    group_mean = group_std = None
    if estimator not in NO_GROUPS:
        groups = [rewards[recorded.group[chosen] == g] for g in recorded.group[chosen]]
        group_mean = torch.stack([torch.mean(group) for group in groups])       # as its estimators compute them
        group_std = torch.stack([torch.std(group) for group in groups])
    config = AlgoConfig(
        adv_estimator=estimator, gamma=settings.number("algorithm.gamma", 1.0),
        norm_adv_by_std_in_grpo=settings.is_on("algorithm.norm_adv_by_std_in_grpo", True),
    )
    batch = compute_advantage(batch, estimator, gamma=config.gamma, config=config,
                              norm_adv_by_std_in_grpo=config.norm_adv_by_std_in_grpo)
    advantages = torch.zeros(recorded.mask.shape, dtype=torch.float64)
    advantages[chosen] = batch.batch["advantages"].double()
    place = {int(i): row for row, i in enumerate(chosen)}
    found = Numbers(chosen, rewards, group_mean, group_std)
    for update in script.updates:
        rows = torch.tensor([place[int(i)] for i in update.responses])
        found.updates.append(update_of(settings, recorded, update, batch.batch, rows, advantages))
    found.unread = [settings.names[key] for key in settings.given if key not in settings.read]
    return found


def batch_of(settings: Settings, recorded: Recorded, script: Numbers, chosen: Tensor, scores: Tensor) -> DataProto:
    """The step's batch as verl's trainer has it before the advantages."""
    mask = recorded.mask[chosen]
    last = mask.long().cumsum(1).argmax(1)
    token_scores = torch.zeros(mask.shape, dtype=torch.float64)
    token_scores[torch.arange(len(chosen)), last] = scores
    old_logp = recorded.old_logp[chosen].clone()
    for update in script.updates:                                       # of the only update: the policy is the old one
        if not update.has_old_logp and len(script.updates) == 1:
            is_updated = torch.isin(chosen, update.responses)
            old_logp[is_updated] = recorded.logp[0][chosen[is_updated]]
    tensors = {
        "response_mask": mask.long(), "token_level_scores": token_scores, "token_level_rewards": token_scores.clone(),
        "old_log_probs": old_logp, "rollout_log_probs": recorded.rollout_logp[chosen],
        "ref_log_prob": recorded.ref_logp[chosen], "reward_baselines": recorded.greedy[recorded.group[chosen]],
    }
    uid = np.array([str(int(g)) for g in recorded.group[chosen]], dtype=object)
    batch = DataProto.from_dict(tensors=tensors, non_tensors={"uid": uid})
    if settings.is_on("algorithm.use_kl_in_reward"):
        controller = core_algos.FixedKLController(settings.number("algorithm.kl_ctrl.kl_coef", 0.001))
        batch, _ = apply_kl_penalty(batch, controller, settings.get("algorithm.kl_penalty", "kl"))
    if settings.is_on(f"{CORRECTION}.bypass_mode"):
        batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    elif settings.get(f"{CORRECTION}.rollout_is") or settings.get(f"{CORRECTION}.rollout_rs"):
        batch, _ = compute_rollout_correction_and_add_to_batch(batch, correction_of(settings))
    return batch


def correction_of(settings: Settings) -> RolloutCorrectionConfig:
    bypass = settings.is_on(f"{CORRECTION}.bypass_mode")
    return RolloutCorrectionConfig(
        rollout_is=settings.get(f"{CORRECTION}.rollout_is") or None,
        rollout_is_threshold=settings.get(f"{CORRECTION}.rollout_is_threshold", "2.0"),
        rollout_is_batch_normalize=settings.is_on(f"{CORRECTION}.rollout_is_batch_normalize"),
        rollout_rs=settings.get(f"{CORRECTION}.rollout_rs") or None,
        rollout_rs_threshold=settings.get(f"{CORRECTION}.rollout_rs_threshold") or None,
        bypass_mode=bypass, loss_type=settings.get(f"{CORRECTION}.loss_type", "ppo_clip"),
    )


def actor_config(settings: Settings) -> ActorConfig:
    """verl's own dataclass, with its defaults where `settings` are silent."""
    def given(prefix: str, kind: type) -> dict[str, Any]:
        found = {}
        for key, value in settings.given.items():
            name = key.removeprefix(f"{prefix}.")
            if key.startswith(f"{prefix}.") and name in kind.__dataclass_fields__:  # type: ignore[attr-defined]
                found[name] = value_of(value)
                settings.read.add(key)
        return found

    loss = given(f"{ACTOR}.policy_loss", PolicyLossConfig)
    if settings.is_on(f"{CORRECTION}.bypass_mode"):
        loss |= {"loss_mode": "bypass_mode", "rollout_correction": correction_of(settings)}
    return ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, policy_loss=PolicyLossConfig(**loss),
                       **given(ACTOR, ActorConfig))


def value_of(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() and "." not in text and "e" not in text else number


def update_of(settings: Settings, recorded: Recorded, update: Update, batch: Any, rows: Tensor,
              advantages: Tensor) -> Update:
    """The numbers of one mini-batch. `rows`: its responses' places in `batch`."""
    chosen, config = update.responses, actor_config(settings)
    count, longest = recorded.mask[chosen].shape
    logp = recorded.logp[min(update.number_of_pass, len(recorded.logp) - 1)][chosen].clone().requires_grad_()
    entropy = recorded.entropy[chosen].clone().requires_grad_()
    response_mask = batch["response_mask"][rows]
    fields = {
        "prompts": torch.ones(count, 1, dtype=torch.long), "responses": torch.ones(count, longest, dtype=torch.long),
        "attention_mask": torch.ones(count, 1 + longest, dtype=torch.long), "response_mask": response_mask,
        "old_log_probs": batch["old_log_probs"][rows], "advantages": advantages[chosen],
    }
    if batch.get("rollout_is_weights") is not None:
        fields["rollout_is_weights"] = batch["rollout_is_weights"][rows]
    if config.use_kl_loss:
        fields["ref_log_prob"] = batch["ref_log_prob"][rows]
    data = TensorDict(fields, batch_size=[count])
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(response_mask.sum()), global_batch_size=count)
    outputs = {"log_probs": shifted(logp)}
    if config.entropy_coeff:
        outputs["entropy"] = shifted(entropy)
    matrices: list[Tensor] = []                                         # of the policy's loss, the entropy, the KL

    def noting(real: Any) -> Any:
        def agg_loss(loss_mat: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not loss_mat.is_leaf:
                loss_mat.retain_grad()
            matrices.append(loss_mat)
            return real(loss_mat, *args, **kwargs)

        return agg_loss

    real = core_algos.agg_loss
    core_algos.agg_loss = verl_losses.agg_loss = noting(real)
    try:
        loss, _ = verl_losses.ppo_loss(config, outputs, data)
    finally:
        core_algos.agg_loss = verl_losses.agg_loss = real
    loss.backward()
    kl = matrices[-1].detach() if config.use_kl_loss else None
    token_loss = weight = None
    if len(matrices) == 1 + bool(config.entropy_coeff) + config.use_kl_loss:        # geo_mean aggregates by itself
        weight = matrices[0].grad
        token_loss = matrices[0].detach().clone()
        if config.entropy_coeff:
            token_loss = token_loss - config.entropy_coeff * matrices[1].detach()
        if kl is not None:
            token_loss = token_loss + config.kl_loss_coef * kl
    zeros = torch.zeros_like(logp)
    return Update(chosen, update.number_of_pass, response_mask.bool(), advantages[chosen],
                  zeros if logp.grad is None else logp.grad, zeros if entropy.grad is None else entropy.grad,
                  token_loss, weight, kl, float(loss.detach()))


def shifted(values: Tensor) -> Tensor:
    """[n, L] of responses -> the flat output of a model on sequences of one prompt token and L others: each number
    stands one token before its own."""
    return torch.cat([values, torch.zeros_like(values[:, :1])], dim=1).flatten()
