"""PPO: proximal policy optimisation with a critic (Schulman et al. 2017, arXiv 1707.06347; for language models
Ziegler et al. 2019, arXiv 1909.08593).

A critic estimates the value V_t of the tokens so far; generalised advantage estimation (arXiv 1506.02438) turns the
rewards r_t (the score on the last token, minus kl_reward_coef KL(p_old || p_ref) on every token) into

    delta_t = r_t + gamma V_t+1 - V_t,    A_t = delta_t + gamma lam A_t+1 (then whitened),    returns_t = A_t + V_t
    loss = mean over tokens of  max(-A_t ratio_t, -A_t clip(ratio_t, 1 - clip_low, 1 + clip_high)), at most
           -A_t clip_dual where A_t < 0  [+ kl_loss_coef KL(p || p_ref)] [- entropy_coef H(p)]
                                                                                 ratio_t = p(y_t) / p_old(y_t)
    critic = mean over tokens of  max((V_t - returns_t)^2, (clip(V_t, V_old +- value_clip) - returns_t)^2) / 2

    torchrun --standalone --nproc-per-node 8 ppo.py --model Qwen/Qwen2.5-1.5B-Instruct \\
        --train-data data/gsm8k/train.parquet --val-data data/gsm8k/test.parquet
"""

from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Literal

from common.flags import RunArgs, resolve_correction, rules
from common.flags.model import OptimConfig
from tools.command_line import check_command, run_script


@dataclass
class Args(RunArgs):
    run_dir: str = "runs/ppo"
    """Folder for metrics, checkpoints and the trained model."""

    # batch sizes: global, over all ranks
    prompts_per_step: int = 128
    """Prompts sampled in one step, over all ranks."""
    samples_per_prompt: int = 1
    """G: responses per prompt, the group."""
    minibatches_per_step: int = 4
    """Optimizer steps per pass over the step's responses."""
    epochs_per_step: int = 1
    """Passes over the step's responses."""
    max_tokens_per_gpu: int = 0
    """Token budget of one micro-batch (one forward and backward) on one rank. No effect on the gradient. 0: the largest
    that fits in a GPU's memory, by calculation; 16384 on CPUs."""

    # the objective
    clip_low: float = 0.2
    """Lower clip: the ratio counts down to 1 - clip_low."""
    clip_high: float = 0.2
    """Upper clip: the ratio counts up to 1 + clip_high."""
    clip_dual: float = 3.0
    """Where the advantage is negative, the loss is at most -A * clip_dual (arXiv 1912.09729). 1e9: no limit."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 1.0
    """Lambda of GAE: 1 trusts the rewards (no bias), 0 the critic (least variance)."""
    critic_model: str = ""
    """Hugging Face folder or hub name of the critic's backbone, or of a reward model. Default: --model."""
    critic_warmup_steps: int = 0
    """First steps that train only the critic."""
    value_clip: float = 0.5
    """A value may move this far from the old one before its error is clipped."""
    kl_reward_coef: float = 0.0
    """Factor of KL(old policy || reference) taken off every token's reward."""
    kl_reward_estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    """Per-token estimate of the KL in the reward. Needs --kl-reward-coef."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: kl_reward_coef moves so that the KL stays near --kl-target (Ziegler et al. 2019, sec. 2.2). Needs
    --kl-reward-coef."""
    kl_target: float = 0.1
    """KL that the adaptive controller aims at: nats per token, averaged over each response, then over responses. Needs
    --kl-controller adaptive."""
    kl_horizon: float = 10000.0
    """Responses over which the adaptive controller corrects a relative error of 1. Needs --kl-controller adaptive."""
    kl_loss_coef: float = 0.0
    """Factor of KL(policy || reference) in the loss. 0: the loss needs no reference model."""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k3"
    """Per-token estimate of the KL; + keeps the value and uses the unbiased gradient. Needs --kl-loss-coef."""
    entropy_coef: float = 0.0
    """Factor of the entropy bonus."""
    advantage_per_step: bool = False
    """Each turn of an episode has its own reward, in `turn_scores` that the episode returns, and its own advantage."""

    critic_optim: OptimConfig = field(default_factory=partial(OptimConfig, lr=1e-5))


def check(args: Args) -> None:
    """Refuse flags that cannot work, before anything heavy."""
    rules.check_sizes(
        args.rollout.tp, args.prompts_per_step, args.samples_per_prompt, args.minibatches_per_step,
        epochs_per_step=args.epochs_per_step, total_steps=args.total_steps,
        max_tokens_per_gpu=args.max_tokens_per_gpu or 1,
    )
    rules.check_clip(args.clip_low, args.clip_high, args.clip_dual)
    rules.check_turns(args.rollout, args.advantage_per_step)
    rules.check_shares({"--gamma": args.gamma, "--lam": args.lam})
    for name in ("value_clip", "kl_target", "kl_horizon"):
        if getattr(args, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be above 0")


if __name__ == "__main__":
    check_command(Args, check, __doc__)  # a mistyped command ends here, before the slow imports

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing import errors

from common import losses
from common.batch import Batch
from common.correction import importance_weights, reject_and_weight
from common.episodes.turns import to_units
from common.metrics import spread
from common.model.loading import CAUSAL_LM, SCORED, read_config
from common.rollout import scatter_fields
from common.run import Run
from common.segments import moments, whiten


def clipped_loss(logp: Tensor, old_logp: Tensor, advantage: Tensor, args: Args) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token [T] and numbers to report of each. Outside the mask the three inputs are 0."""
    log_ratio = (logp - old_logp).clamp(-20, 20)                    # its exponential must stay finite
    ratio = log_ratio.exp()
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(min=1 - args.clip_low).clamp(max=1 + args.clip_high)
    ceiling = torch.where(advantage < 0, -advantage * args.clip_dual, torch.inf)
    loss = torch.maximum(plain, clipped)
    stats = losses.clip_stats(advantage, clipped > plain, loss > ceiling) | losses.ratio_stats(log_ratio)
    return torch.minimum(loss, ceiling), stats


def value_loss(value: Tensor, old_value: Tensor, returns: Tensor, mask: Tensor,
               clip: float = 0.5) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the larger of the squared errors of the value and of the value clipped around the old one: [T]."""
    value, old_value, returns = (torch.where(mask, x, 0) for x in (value, old_value, returns))
    clipped = torch.minimum(torch.maximum(value, old_value - clip), old_value + clip)
    plain_error = (value - returns).square()
    clipped_error = (clipped - returns).square()
    stats = {"critic/vf_clipfrac": (clipped_error > plain_error).to(value.dtype), "critic/vpred_mean": value.detach()}
    return torch.maximum(plain_error, clipped_error) / 2, stats


def explained_variance(value: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - var(returns - value) / var(returns) over all tokens with mask on all ranks; 0 where returns do not vary."""
    total, left = (moments(x[mask].double())[2] for x in (returns, returns - value))
    return 1 - left / total if total > 0 else 0.0


def adapt_kl_coef(coef: float, kl: float, target: float, horizon: float, num_responses: int) -> float:
    """The next coefficient of the KL in the reward, moved so that the KL stays near `target` (Ziegler 2019)."""
    return coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * num_responses / horizon)


@errors.record  # torchrun prints a failed rank's traceback last
def main(args: Args) -> None:
    check(args)
    correction = resolve_correction(args.correction)
    P, G = args.prompts_per_step, args.samples_per_prompt
    num_updates = args.minibatches_per_step * args.epochs_per_step
    temperature = args.rollout.temperature
    reference_path = args.model if args.kl_loss_coef or args.kl_reward_coef else ""
    critic_path = args.critic_model or args.model
    read_config(critic_path, args.policy, "--critic-model", CAUSAL_LM + SCORED)  # refuses what is no model
    with Run(args, P, correction) as run:
        if not 0 <= args.critic_warmup_steps < run.total_steps:
            raise ValueError(f"--critic-warmup-steps {args.critic_warmup_steps} must be from 0 to below the "
                             f"{run.total_steps} steps of the run (--total-steps, --total-epochs)")
        engine, max_tokens = run.start_engine(args.max_tokens_per_gpu, reference_path, critic_path)
        policy, optimizer = run.load_policy("policy", args.model, args.optim)
        critic, critic_optimizer = run.load_critic("critic", critic_path, args.critic_optim)
        reference = run.load_frozen("reference", reference_path) if reference_path else None
        run.describe(
            f"GAE gamma {args.gamma:g}, lambda {args.lam:g}; critic lr {args.critic_optim.lr:g}; KL coef in the reward "
            f"{args.kl_reward_coef:g} ({args.kl_controller}); "
            f"clip {args.clip_low:g} {args.clip_high:g} {args.clip_dual:g}; "
            f"KL coef {args.kl_loss_coef:g}, entropy coef {args.entropy_coef:g}",
            P, G, args.minibatches_per_step, args.epochs_per_step,
        )
        # the controller's coefficient continues from a checkpoint; a fixed one is the flag's
        is_adaptive = args.kl_controller == "adaptive" and args.kl_reward_coef > 0
        kl_coef = (is_adaptive and run.resume().get("kl_coef")) or args.kl_reward_coef
        for step in run.steps():
            # 1 rollout: the engine takes the policy's weights; each response is scored as it ends
            run.metrics |= engine.wake(policy)
            pending = run.sample(run.next_rows(P), G, args.rollout, step)
            run.metrics |= engine.sleep()

            # 2 rewards: numbers per response, the same on every rank
            rollout = run.collect(pending)
            rewards = rollout.scores                                                            # [S] NaN: no reward

            # 3 mini-batches: each response moves to the rank that trains on it
            # the loss is on every token that was sampled: the stop token, and all of a truncated response
            minibatches = run.to_minibatches(rollout, rollout.has_score, args.minibatches_per_step, max_tokens, step)

            # 4 log-probs: the old policy's, where it is not the current one, and the reference's; values, advantages
            if correction.needs_old_logp(num_updates > 1 or args.kl_reward_coef > 0):
                with run.phase("old_log_prob", minibatches) as microbatches:
                    for microbatch in microbatches:
                        microbatch.old_logp = policy.score(microbatch, temperature)             # [T]
            if reference is not None:
                with run.phase("ref", minibatches) as microbatches:
                    for microbatch in microbatches:
                        microbatch.ref_logp = reference.score(microbatch, temperature)          # [T]
            reject_and_weight(minibatches, rewards, correction, run.meter)
            with run.phase("values", minibatches) as microbatches:
                for microbatch in microbatches:
                    microbatch.value = critic.score(microbatch)                                 # [T]
            with run.timer("adv"):
                # on the CPU, because GAE walks from token to token
                batch = Batch.cat([*chain(*minibatches)]).to("cpu")
                # a unit has a reward: a response, or each turn of an episode
                units, values, _ = to_units(batch, rollout, rewards, 1.0, args.advantage_per_step)
                score = values.nan_to_num().float()[units.index]                                # [U] of this rank
                reward = losses.on_last_token(score, batch.mask, units.cu_seqlens)              # [T]
                if args.kl_reward_coef:
                    kl = losses.kl_estimate(batch.old_logp, batch.ref_logp, args.kl_reward_estimator)   # [T]
                    reward = reward - kl_coef * kl
                    mean_kl = losses.mean_kl(kl, batch)
                    run.metrics["actor/reward_kl_penalty"] = mean_kl
                advantage, returns = losses.gae(reward, batch.value, batch.mask, batch.cu_seqlens, args.gamma, args.lam)
                explained = explained_variance(batch.value, returns, batch.mask)
                advantage = whiten(advantage, batch.mask)
                scatter_fields(minibatches, advantage=advantage, returns=returns)
                for name, values in {"values": batch.value, "returns": returns, "advantages": advantage}.items():
                    run.meter.spread(f"critic/{name}", values, batch.mask)

            # 5 update
            with run.phase("update_critic", minibatches * args.epochs_per_step) as update:
                for minibatch in update.minibatches:
                    weights = losses.token_weights(minibatch, "token-mean")
                    for microbatch, weight in zip(minibatch, weights):                          # as many on every rank
                        value = critic(microbatch)                                              # [T]
                        loss, stats = value_loss(
                            value, microbatch.value, microbatch.returns, microbatch.mask, args.value_clip
                        )
                        run.meter.total("critic/vf_loss", (loss * weight).sum(), per=num_updates)
                        (run.world.size * (loss * weight).sum()).backward()                     # FSDP averages: undo it
                        update.done(microbatch, value, stats=stats)
                    update.optimizer_step(critic, critic_optimizer, args.critic_optim, step)
            actor_epochs = args.epochs_per_step if step >= args.critic_warmup_steps else 0
            with run.phase("update_actor", minibatches * actor_epochs) as update:
                for minibatch in update.minibatches:
                    # a token's weight is 1 / count over the mini-batch on all ranks, however it was cut
                    weights = losses.token_weights(minibatch, "token-mean")
                    for microbatch, weight in zip(minibatch, weights):                          # as many on every rank
                        logp, entropy = policy(microbatch, temperature)                             # [T], [T]
                        old_logp = logp.detach() if microbatch.old_logp is None else microbatch.old_logp
                        loss, stats = clipped_loss(logp, old_logp, microbatch.advantage, args)
                        # 1 without --correction.weights: then it only measures how far the engine is from the trainer
                        loss = update.term("policy", loss * importance_weights(microbatch, logp, correction, run.meter))
                        run.meter.total("actor/pg_loss", (loss * weight).sum(), per=num_updates)
                        if reference is not None:
                            kl = losses.kl_estimate(logp, microbatch.ref_logp, args.kl_estimator)   # [T]
                            loss = loss + update.term("kl", args.kl_loss_coef * kl)
                            run.meter.mean("actor/kl_loss", kl, microbatch.mask)
                        if args.entropy_coef:
                            loss = loss - update.term("entropy", args.entropy_coef * entropy)
                        (run.world.size * (loss * weight).sum()).backward()                     # FSDP averages: undo it
                        update.done(microbatch, logp, entropy, stats)
                    update.optimizer_step(policy, optimizer, args.optim, step, args.critic_warmup_steps)

            # 6 log, validate, save
            metrics = spread("critic/score", rollout.scores) | spread("critic/rewards", rewards)
            metrics |= {"critic/vf_explained_var": explained, "actor/reward_kl_penalty_coeff": kl_coef}
            if is_adaptive:
                num_scored = int(rollout.has_score.sum())
                kl_coef = adapt_kl_coef(kl_coef, mean_kl, args.kl_target, args.kl_horizon, num_scored)
                run.script_state["kl_coef"] = kl_coef
            run.finish(step, rollout, minibatches, rewards, metrics)


if __name__ == "__main__":
    run_script(main, Args, __doc__)
