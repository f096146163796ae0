"""RLOO and its relatives: REINFORCE with a baseline, no critic (Ahmadian et al. 2024, arXiv 2402.14740).

For every prompt sample G responses, score them, and subtract a baseline that does not depend on the response:

    R_i = score_i - kl_reward_coef sum_t KL(p_old || p_ref)_t         rloo: A_i = R_i - mean of the group's other R
    loss = mean over tokens of  -A_i log p(y_t)                       --baseline NAME: another one, see BASELINES
           [with --loss ppo: max(-A ratio_t, -A clip(ratio_t, ...))] [- entropy_coef H(p)]

    torchrun --standalone --nproc-per-node 8 rloo.py --model Qwen/Qwen2.5-1.5B-Instruct \\
        --train-data data/gsm8k/train.parquet --val-data data/gsm8k/test.parquet
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing import errors

from common import losses
from common.batch import Batch
from common.correction import importance_weights, reject_and_weight, resolve_correction
from common.engine.base import validation_sampling
from common.engine.make import check_sizes
from common.metrics import Meter, spread
from common.parallel.ranks import all_sum
from common.rollout import Rollout, check_skipped, scatter_fields, sum_per_response
from common.rollouts.scoring import decoupled_rewards
from common.run import Run, RunArgs
from common.segments import group_count, group_mean, group_sum, is_constant, segment_cumsum, whiten
from common.selection import SELECTED, select
from common.tracking.console import run_script


@dataclass
class Args(RunArgs):
    run_dir: str = "runs/rloo"
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
    baseline: Literal["rloo", "reinforce++", "reinforce++-baseline", "remax", "opo", "gpg", "otb", "gdpo"] = "rloo"
    """What is subtracted from a reward: a function in this file. remax samples one greedy response more a prompt."""
    reward_components: dict[str, float] = field(default_factory=dict)
    """gdpo: NAME FACTOR ... of numbers that the reward function returns beside its score, and that replace it."""
    loss: losses.PolicyLoss = "reinforce"
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
    gamma: float = 1.0
    """Discount per token. Only reinforce++, remax and otb discount."""
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
    run_zero_advantage: bool = False
    """Run responses whose advantage is 0 too. By default they only count in denominators, not in actor/ metrics."""


def check(args: Args) -> losses.LossSettings:
    """Refuse flags that cannot work, before anything heavy. Returns the loss's bounds and aggregation."""
    check_sizes(
        args.rollout.tp, args.prompts_per_step, args.samples_per_prompt, args.minibatches_per_step,
        epochs_per_step=args.epochs_per_step, total_steps=args.total_steps,
        max_tokens_per_gpu=args.max_tokens_per_gpu or 1,
    )
    least = BASELINES[args.baseline].least_samples
    if args.samples_per_prompt < least:
        raise ValueError(f"--samples-per-prompt {args.samples_per_prompt}: --baseline {args.baseline} needs {least}")
    if not 0 <= args.gamma <= 1:
        raise ValueError(f"--gamma {args.gamma} must be in [0, 1]")
    if args.baseline == "otb" and resolve_correction(args.correction, args.loss).bypass:
        raise ValueError("--baseline otb needs the old policy's probabilities: leave out --correction.bypass")
    if bool(args.reward_components) != (args.baseline == "gdpo"):
        raise ValueError(f"--reward-components {args.reward_components} go with --baseline gdpo, which needs them")
    if args.baseline == "remax" and args.rollout.in_flight > 1:
        raise ValueError(f"--rollout.in-flight {args.rollout.in_flight:g}: --baseline remax needs all of one policy")
    return losses.resolve_loss(
        args.loss, args.clip_low, args.clip_high, args.clip_dual, args.aggregation, args.loss_numbers
    )


def leave_one_out(rewards: Tensor, group: Tensor, lengths: Tensor, greedy: Tensor) -> Tensor:
    """RLOO (Ahmadian et al. 2024): R_i minus the mean of the others of its group. Group of one scored response: 0."""
    num_scored = group_count(rewards, group)                                                    # [S]
    return (rewards - group_mean(rewards, group)) * num_scored / (num_scored - 1).clamp(min=1)


def no_baseline(rewards: Tensor, group: Tensor, lengths: Tensor, greedy: Tensor) -> Tensor:
    """REINFORCE++ (Hu 2025, arXiv 2501.03262): the reward itself; whitening over all tokens is the baseline."""
    return rewards


def group_mean_baseline(rewards: Tensor, group: Tensor, lengths: Tensor, greedy: Tensor) -> Tensor:
    """REINFORCE++-baseline (the same, sec. 3): R_i minus the group's mean, whitened over all tokens."""
    return rewards - group_mean(rewards, group)


def greedy_baseline(rewards: Tensor, group: Tensor, lengths: Tensor, greedy: Tensor) -> Tensor:
    """ReMax (Li et al. 2023, arXiv 2310.10505): R_i minus the score of the greedy response [P]."""
    return rewards - greedy[group]


def length_weighted_baseline(rewards: Tensor, group: Tensor, lengths: Tensor, greedy: Tensor) -> Tensor:
    """OPO (Hao et al. 2025, arXiv 2505.23585): R_i minus the group's mean weighted by response length."""
    weights = lengths * rewards.isfinite()                                                      # [S]
    return rewards - group_sum(rewards * weights, group) / group_sum(weights, group).clamp(min=1)


def scaled_baseline(rewards: Tensor, group: Tensor, lengths: Tensor, greedy: Tensor) -> Tensor:
    """GPG (Chu et al. 2025, arXiv 2504.02546): alpha (R_i - group mean). alpha is the number of scored responses over
    the number of those whose group has unequal rewards."""
    is_scored = rewards.isfinite()                                                              # [S]
    num_unequal = (is_scored & ~is_constant(rewards, group)).sum().clamp(min=1)
    return is_scored.sum() / num_unequal * (rewards - group_mean(rewards, group))


class Baseline(NamedTuple):
    """How `--baseline NAME` turns rewards, groups and response lengths [S] and the greedy response's rewards [P] into
    advantages [S]; NaN: no reward."""

    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    least_samples: int = 2
    per_token: bool = False  # the return-to-go of each token, not one number a response
    optimal: bool = False  # minus the optimal token baseline
    whiten: bool = False  # over all tokens of the step
    greedy: bool = False  # needs the greedy response


BASELINES = {
    "rloo": Baseline(leave_one_out),
    "reinforce++": Baseline(no_baseline, least_samples=1, per_token=True, whiten=True),
    "reinforce++-baseline": Baseline(group_mean_baseline, whiten=True),
    "remax": Baseline(greedy_baseline, least_samples=1, per_token=True, greedy=True),
    "opo": Baseline(length_weighted_baseline),
    "gpg": Baseline(scaled_baseline),
    "otb": Baseline(no_baseline, per_token=True, optimal=True),
    "gdpo": Baseline(group_mean_baseline, whiten=True),
}


def optimal_token_baseline(returns: Tensor, batch: Batch, rollout: Rollout) -> Tensor:
    """The optimal token baseline: B_t = sum_g G_t W_t / sum_g W_t over a group's responses that have a t-th token. G_t
    are the returns [T]; W_t adds up 1 - 2 p + sum_v p_v^2, the squared gradient by the logits, until token t."""
    squares = 1 - 2 * batch.old_logp.double().exp() + batch.sum_p2.double()                     # [T]
    weight = segment_cumsum(torch.where(batch.mask, squares, 0), batch.cu_seqlens)[batch.mask]  # [N]
    number = segment_cumsum(batch.mask.long(), batch.cu_seqlens)                                # [T] from 1
    longest = int(rollout.response_lengths.max()) + 1
    cell = (rollout.group[batch.index][batch.sequence_ids] * longest + number)[batch.mask]      # [N]
    sums = torch.zeros(2, (int(rollout.group.max()) + 1) * longest, dtype=torch.float64)
    sums.index_add_(1, cell, torch.stack([returns[batch.mask] * weight, weight]))
    numerator, denominator = all_sum(sums)[:, cell]
    return torch.zeros_like(squares).masked_scatter(batch.mask, numerator / (denominator + 1e-8))


@errors.record  # torchrun prints a failed rank's traceback last
def main(args: Args) -> None:
    settings = check(args)
    baseline = BASELINES[args.baseline]
    correction = resolve_correction(args.correction, settings.name)
    P, G = args.prompts_per_step, args.samples_per_prompt
    num_updates = args.minibatches_per_step * args.epochs_per_step
    needs_old_logp = num_updates > 1 or settings.name in SELECTED or args.kl_reward_coef > 0 or baseline.optimal
    temperature = args.rollout.temperature
    with_reference = bool(args.kl_loss_coef or args.kl_reward_coef)
    with Run(args, P, correction.covers_cut_sampling) as run:
        max_tokens = run.plan_memory(args.max_tokens_per_gpu, with_reference)
        engine = run.start_engine()
        policy, optimizer = run.load_policy()
        reference = run.load_reference() if with_reference else None
        policy.keeps_sum_p2 = baseline.optimal
        run.describe(
            f"{args.baseline}, KL coef in the reward {args.kl_reward_coef:g}; "
            f"{settings.describe()}; KL coef {args.kl_loss_coef:g}, entropy coef {args.entropy_coef:g}",
            P, G, args.minibatches_per_step, args.epochs_per_step, max_tokens,
        )
        run.resume()
        for step in run.steps():
            # 1 rollout: each response is scored as it ends
            run.metrics |= engine.wake(policy)
            rows = run.sampler.take(P)
            greedy = torch.zeros(P)                                                             # [P] their scores
            if baseline.greedy:
                pending = run.sample(rows, 1, validation_sampling(args.rollout, temperature=0.0), step)
                greedy = run.collect(pending, Meter()).scores
            pending = run.sample(rows, G, args.rollout, step)
            run.metrics |= engine.sleep()

            # 2 reward: then known everywhere; then each response moves to the rank that trains on it
            rollout = run.collect(pending)
            rewards = args.reward_coef * rollout.scores                                         # [S] NaN: no reward
            if args.reward_components:
                rewards = args.reward_coef * decoupled_rewards(rollout, args.reward_components)
            advantages = baseline.function(rewards, rollout.group, rollout.response_lengths, greedy).nan_to_num()
            all_run = args.run_zero_advantage or with_reference or args.entropy_coef
            all_run = all_run or correction.needs_old_logp() or settings.name in SELECTED
            all_run = all_run or baseline.whiten or baseline.optimal
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
                penalty = torch.zeros(len(batch.tokens))                                        # [T]
                if args.kl_reward_coef:
                    kl = losses.kl_estimate(batch.old_logp, batch.ref_logp, args.kl_reward_estimator)   # [T]
                    penalty = -args.kl_reward_coef * kl * batch.mask
                    run.metrics["actor/reward_kl_penalty"] = losses.mean_kl(kl, batch)
                if not baseline.per_token:                              # then it is a part of the response's reward
                    rewards = rewards + sum_per_response(batch, penalty, len(rollout))          # [S]
                    penalty = torch.zeros_like(penalty)
                advantages = baseline.function(rewards, rollout.group, rollout.response_lengths, greedy).nan_to_num()
                check_skipped(advantages, in_update, rollout)
                reward = losses.on_last_token(advantages.float()[batch.index], batch.mask, batch.cu_seqlens) + penalty
                gamma = args.gamma if baseline.per_token else 1.0
                advantage, _ = losses.gae(reward, torch.zeros_like(reward), batch.mask, batch.cu_seqlens, gamma, 1.0)
                if baseline.optimal:
                    advantage = (advantage - optimal_token_baseline(advantage, batch, rollout)).float()
                if baseline.whiten:
                    advantage = whiten(advantage, batch.mask)
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
