"""GRPO: group-relative policy optimisation (Shao et al. 2024, arXiv 2402.03300).

For every prompt sample a group of G responses, score them, and give each its reward relative to its group:

    A_i = (R_i - mean_g) / (std_g + 1e-6)                                         ratio_t = p(y_t) / p_old(y_t)
    loss = mean over tokens of  max(-A ratio_t, -A clip(ratio_t, 1 - clip_low, 1 + clip_high))
           [+ kl_loss_coef KL(p || p_ref)] [- entropy_coef H(p)]

    torchrun --standalone --nproc-per-node 8 grpo.py --model Qwen/Qwen2.5-1.5B-Instruct \\
        --train-data data/gsm8k/train.parquet --val-data data/gsm8k/test.parquet
"""

from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from torch import Tensor
from torch.distributed.elastic.multiprocessing import errors

from common import losses
from common.batch import Batch
from common.correction import importance_weights, reject_and_weight, resolve_correction
from common.engine.make import check_sizes
from common.metrics import spread
from common.rollout import check_skipped, scatter_fields, sum_per_response
from common.rollouts.turns import check_turns, to_units
from common.run import Run, RunArgs
from common.segments import group_lead, group_mean, group_std
from common.selection import SELECTED, select
from common.tracking.console import run_script


@dataclass
class Args(RunArgs):
    run_dir: str = "runs/grpo"
    """Folder for metrics, checkpoints and the trained model."""

    # batch sizes: global, over all ranks
    prompts_per_step: int = 128
    """Prompts sampled in one step, over all ranks."""
    samples_per_prompt: int = 8
    """G: responses per prompt, the group."""
    minibatches_per_step: int = 1
    """Optimizer steps per pass over the step's responses."""
    epochs_per_step: int = 1
    """Passes over the step's responses."""
    max_tokens_per_gpu: int = 0
    """Token budget of one micro-batch (one forward and backward) on one rank. No effect on the gradient. 0: the largest
    that fits in a GPU's memory, by calculation; 16384 on CPUs."""

    # the objective
    loss: losses.PolicyLoss = "grpo"
    """Loss of a token: a function in common/losses.py."""
    clip_low: float | None = None
    """Lower clip: the ratio counts down to 1 - clip_low. Default: of the loss's paper, printed at the start."""
    clip_high: float | None = None
    """Upper clip: the ratio counts up to 1 + clip_high. Default: of the loss's paper."""
    clip_dual: float | None = None
    """Where the advantage is negative, the loss is at most -A * clip_dual (arXiv 1912.09729). PPO's: 3."""
    loss_numbers: dict[str, float] = field(default_factory=dict)
    """Further numbers of the loss, NAME VALUE ..., such as tau_neg 1.05 of sapo. Default: of the loss's paper."""
    aggregation: losses.Aggregation | None = None
    """From token losses to one number, over the global mini-batch. Default: of the loss's paper."""
    advantage: Literal["group", "passk"] = "group"
    """group: reward relative to the group's mean. passk: only the best response counts, by its lead."""
    norm_by_std: bool | None = None
    """Divide advantages by the group's standard deviation. Default: True, but False for --loss dr_grpo."""
    kl_reward_coef: float = 0.0
    """Factor of KL(old policy || reference) taken off every token's reward."""
    kl_reward_estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    """Per-token estimate of the KL in the reward."""
    kl_loss_coef: float = 0.0
    """Factor of KL(policy || reference) in the loss. 0: no reference model in memory."""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k3"
    """Per-token estimate of the KL; + keeps the value and uses the unbiased gradient."""
    entropy_coef: float = 0.0
    """Factor of the entropy bonus."""
    advantage_per_step: bool = False
    """Each turn of an episode has its own reward, in `turn_scores` that the episode returns, and its own advantage."""
    run_zero_advantage: bool = False
    """Run responses whose advantage is 0 too. By default they only count in denominators, not in actor/ metrics."""


def check(args: Args) -> losses.LossSettings:
    """Refuse flags that cannot work, before anything heavy. Returns the loss's bounds and aggregation."""
    check_sizes(
        args.rollout.tp, args.prompts_per_step, args.samples_per_prompt, args.minibatches_per_step,
        epochs_per_step=args.epochs_per_step, total_steps=args.total_steps,
        max_tokens_per_gpu=args.max_tokens_per_gpu or 1,
    )
    check_turns(args.rollout, args.advantage_per_step)
    if args.samples_per_prompt < 2:
        raise ValueError(f"--samples-per-prompt {args.samples_per_prompt}: a group of one has no baseline, at least 2")
    return losses.resolve_loss(
        args.loss, args.clip_low, args.clip_high, args.clip_dual, args.aggregation, args.loss_numbers
    )


def group_advantages(rewards: Tensor, group: Tensor, norm_by_std: bool) -> Tensor:
    """Group-normalised advantages (Shao et al. 2024, sec. 4.1): rewards [S] -> [S]. NaN (no reward): 0."""
    centred = rewards - group_mean(rewards, group)                                              # [S]
    return (centred / (group_std(rewards, group) + 1e-6) if norm_by_std else centred).nan_to_num()


def passk_advantages(rewards: Tensor, group: Tensor, norm_by_std: bool) -> Tensor:
    """Pass@k objective: the best response of a group gets its lead over the second best, others 0 (tie: all 0)."""
    return group_lead(rewards, group) / (group_std(rewards, group) + 1e-6 if norm_by_std else 1.0)


ADVANTAGES = {"group": group_advantages, "passk": passk_advantages}


@errors.record  # torchrun prints a failed rank's traceback last
def main(args: Args) -> None:
    settings = check(args)
    correction = resolve_correction(args.correction, settings.name)
    P, G = args.prompts_per_step, args.samples_per_prompt
    num_updates = args.minibatches_per_step * args.epochs_per_step
    needs_old_logp = num_updates > 1 or settings.name in SELECTED or args.kl_reward_coef > 0
    temperature = args.rollout.temperature
    with_reference = bool(args.kl_loss_coef or args.kl_reward_coef)
    norm_by_std = args.loss != "dr_grpo" if args.norm_by_std is None else args.norm_by_std
    with Run(args, P, correction.covers_cut_sampling) as run:
        max_tokens = run.plan_memory(args.max_tokens_per_gpu, with_reference)
        engine = run.start_engine()
        policy, optimizer = run.load_policy()
        reference = run.load_reference() if with_reference else None
        run.describe(
            f"{args.advantage}, KL coef in the reward {args.kl_reward_coef:g}; "
            f"{settings.describe()}; KL coef {args.kl_loss_coef:g}, entropy coef {args.entropy_coef:g}",
            P, G, args.minibatches_per_step, args.epochs_per_step, max_tokens,
        )
        run.resume()
        for step in run.steps():
            # 1 rollout: each response is scored as it ends
            run.metrics |= engine.wake(policy)
            pending = run.sample(run.sampler.take(P), G, args.rollout, step)
            run.metrics |= engine.sleep()

            # 2 reward: then known everywhere; then each response moves to the rank that trains on it
            rollout = run.collect(pending)
            rewards = args.reward_coef * rollout.scores                                         # [S] NaN: no reward
            advantages = ADVANTAGES[args.advantage](rewards, rollout.group, norm_by_std)        # [S]
            all_run = args.run_zero_advantage or with_reference or args.entropy_coef or args.advantage_per_step
            all_run = all_run or correction.needs_old_logp() or settings.name in SELECTED
            in_update = rollout.in_loss if all_run else rollout.in_loss & (advantages != 0)     # [S]
            # the loss is on every token that was sampled: the stop token, and all of a truncated response
            minibatches = run.to_minibatches(rollout, in_update, args.minibatches_per_step, max_tokens, step)

            # 3 log-probs: the old policy's, where they are not those of the update itself, and the reference's
            if correction.needs_old_logp(needs_old_logp):
                with run.phase("old_log_prob", minibatches) as microbatches:
                    for microbatch in microbatches:
                        microbatch.old_logp = policy.score(microbatch, temperature)             # [T]
            if reference is not None:
                with run.phase("ref", minibatches) as microbatches:
                    for microbatch in microbatches:
                        microbatch.ref_logp = reference.score(microbatch, temperature)          # [T]
            rewards = reject_and_weight(minibatches, rewards, correction, run.meter)            # [S] NaN: in no group

            # 4 advantages
            with run.timer("adv"):
                batch = Batch.cat([*chain(*minibatches)]).to("cpu")
                if args.kl_reward_coef:
                    kl = losses.kl_estimate(batch.old_logp, batch.ref_logp, args.kl_reward_estimator)   # [T]
                    rewards = rewards - args.kl_reward_coef * sum_per_response(batch, kl * batch.mask, len(rollout))
                    run.metrics["actor/reward_kl_penalty"] = losses.mean_kl(kl, batch)
                batch, values, group = to_units(batch, rollout, rewards, args.reward_coef, args.advantage_per_step)
                advantages = ADVANTAGES[args.advantage](values, group, norm_by_std)
                check_skipped(advantages, in_update, rollout)
                advantage = advantages.float()[batch.index][batch.sequence_ids] * batch.mask            # [T]
                scatter_fields(minibatches, advantage=advantage)

            # 5 update
            with run.phase("update_actor", minibatches * args.epochs_per_step):
                for update, minibatch in enumerate(minibatches * args.epochs_per_step):
                    # a token's weight is 1 / count: over the mini-batch on all ranks, whatever the micro-batches
                    losses.set_token_weights(
                        minibatch.microbatches, settings.aggregation, args.rollout.max_response_length,
                        minibatch.skipped_lengths,
                    )
                    select(settings, minibatch.microbatches, policy, temperature, args.seed, step, update)
                    for microbatch in minibatch:                                                # as many on every rank
                        logp, entropy = policy(microbatch, temperature, args.entropy_coef != 0)     # [T], [T]
                        old_logp = logp.detach() if microbatch.old_logp is None else microbatch.old_logp
                        loss, stats = settings.function(
                            logp, old_logp, microbatch.advantage, microbatch.mask, microbatch.cu_seqlens,
                            **settings.arguments(microbatch),
                        )
                        loss = loss * importance_weights(microbatch, logp, correction, run.meter)
                        run.meter.total("actor/pg_loss", (loss * microbatch.weight).sum(), per=num_updates)
                        if reference is not None:
                            kl = losses.kl_estimate(logp, microbatch.ref_logp, args.kl_estimator)   # [T]
                            loss = loss + args.kl_loss_coef * kl
                            run.meter.mean("actor/kl_loss", kl, microbatch.mask)
                        if args.entropy_coef:
                            loss = loss - args.entropy_coef * entropy
                        (run.world.size * (loss * microbatch.weight).sum()).backward()          # FSDP averages: undo it
                        run.microbatch_done(microbatch, stats, logp, entropy)
                    run.optimizer_step("actor", policy, optimizer, args.optim, step)

            # 6 log, validate, save
            metrics = spread("critic/score", rollout.scores) | spread("critic/rewards", rewards)
            metrics |= spread("critic/advantages", advantages)
            run.finish(step, rollout, minibatches, rewards, metrics, args.epochs_per_step)


if __name__ == "__main__":
    run_script(main, Args, __doc__)
