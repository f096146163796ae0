"""RLOO and its relatives: REINFORCE with a baseline, no critic (Ahmadian et al. 2024, arXiv 2402.14740).

For every prompt sample G responses, score them, and subtract a baseline that does not depend on the response:

    R_i = score_i - kl_reward_coef sum_t KL(p_old || p_ref)_t         rloo: A_i = R_i - mean of the group's other R
    loss = mean over tokens of  -A_i log p(y_t)                       --baseline NAME: another one, see BASELINES
           [--loss ppo: the clipped loss of grpo.py] [+ kl_loss_coef KL(p || p_ref)] [- entropy_coef H(p)]

    torchrun --standalone --nproc-per-node 8 rloo.py --model Qwen/Qwen2.5-1.5B-Instruct \\
        --train-data data/gsm8k/train.parquet --val-data data/gsm8k/test.parquet
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

from common.flags import RunArgs, resolve_correction, rules
from tools.command_line import check_command, run_script


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
    baseline: Literal["rloo", "reinforce++", "reinforce++-baseline", "remax", "opo", "gpg", "otb"] = "rloo"
    """What is subtracted from a reward: a function in this file. remax samples one greedy response more per prompt."""
    loss: Literal["reinforce", "ppo"] = "reinforce"
    """Loss of a token: a function in this file. ppo clips, for several updates per rollout (REINFORCE++)."""
    clip_low: float = 0.2
    """Lower clip: the ratio counts down to 1 - clip_low. Needs --loss ppo."""
    clip_high: float = 0.2
    """Upper clip: the ratio counts up to 1 + clip_high. Needs --loss ppo."""
    clip_dual: float = 3.0
    """Where the advantage is negative, the loss is at most -A * clip_dual (arXiv 1912.09729). 1e9: no limit. Needs
    --loss ppo."""
    gamma: float = 1.0
    """Discount per token. Only reinforce++, remax and otb discount."""
    kl_reward_coef: float = 0.0
    """Factor of KL(old policy || reference) taken off every token's reward."""
    kl_reward_estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    """Per-token estimate of the KL in the reward. Needs --kl-reward-coef."""
    kl_loss_coef: float = 0.0
    """Factor of KL(policy || reference) in the loss. 0: the loss needs no reference model."""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k3"
    """Per-token estimate of the KL; + keeps the value and uses the unbiased gradient. Needs --kl-loss-coef."""
    entropy_coef: float = 0.0
    """Factor of the entropy bonus."""


def check(args: Args) -> None:
    """Refuse flags that cannot work, before anything heavy."""
    rules.check_sizes(
        args.rollout.tp, args.prompts_per_step, args.samples_per_prompt, args.minibatches_per_step,
        epochs_per_step=args.epochs_per_step, total_steps=args.total_steps,
        max_tokens_per_gpu=args.max_tokens_per_gpu or 1,
    )
    rules.check_clip(args.clip_low, args.clip_high, args.clip_dual)
    rules.check_group(args.samples_per_prompt, 1 if args.baseline in ("reinforce++", "remax") else 2)
    rules.check_shares({"--gamma": args.gamma})
    if args.baseline == "otb" and resolve_correction(args.correction, args.loss, groups_after_rejection=True).bypass:
        raise ValueError("--baseline otb needs the old policy's probabilities: leave out --correction.bypass")
    if args.baseline == "remax" and args.rollout.in_flight > 1:
        raise ValueError(f"--rollout.in-flight {args.rollout.in_flight:g}: --baseline remax needs all of one policy")


if __name__ == "__main__":
    check_command(Args, check, __doc__)  # a mistyped command ends here, before the slow imports

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing import errors

from common import losses
from common.batch import Batch
from common.correction import importance_weights, reject_and_weight
from common.engine.base import validation_sampling
from common.metrics import Meter, spread
from common.rollout import Rollout, scatter_fields, sum_per_response
from common.run import Run
from common.segments import group_count, group_mean, is_constant, whiten
from variants.optimal_baseline import optimal_token_baseline


def leave_one_out(rewards: Tensor, group: Tensor, lengths: Tensor, greedy: Tensor) -> Tensor:
    """RLOO (Ahmadian et al. 2024): R_i minus the mean of the others of its group. Group of one scored response: 0."""
    num_scored = group_count(rewards, group)                                                    # [S]
    return (rewards - group_mean(rewards, group)) * num_scored / (num_scored - 1).clamp(min=1)


def no_baseline(rewards: Tensor, group: Tensor, lengths: Tensor, greedy: Tensor) -> Tensor:
    """REINFORCE++ (Hu 2025, arXiv 2501.03262): the reward itself; whitening over all tokens is the baseline."""
    return rewards


def group_mean_baseline(rewards: Tensor, group: Tensor, lengths: Tensor, greedy: Tensor) -> Tensor:
    """REINFORCE++-baseline (the same paper): R_i minus the group's mean, whitened over all tokens."""
    return rewards - group_mean(rewards, group)


def greedy_baseline(rewards: Tensor, group: Tensor, lengths: Tensor, greedy: Tensor) -> Tensor:
    """ReMax (Li et al. 2023, arXiv 2310.10505): R_i minus the score of the greedy response [P]."""
    return rewards - greedy[group]


def length_weighted_baseline(rewards: Tensor, group: Tensor, lengths: Tensor, greedy: Tensor) -> Tensor:
    """OPO (Hao et al. 2025, arXiv 2505.23585): R_i minus the group's mean weighted by response length."""
    return rewards - group_mean(rewards, group, weights=lengths)


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
    per_token: bool = False  # the return-to-go of each token, not one number a response
    optimal: bool = False  # minus the optimal token baseline
    whiten: bool = False  # over all tokens of the step
    greedy: bool = False  # needs the greedy response

    def advantages(self, rewards: Tensor, rollout: Rollout, greedy: Tensor) -> Tensor:
        """Advantages [S] of these rewards [S]. A response without a reward (NaN) gets 0."""
        return self.function(rewards, rollout.group, rollout.response_lengths, greedy).nan_to_num()

BASELINES = {
    "rloo": Baseline(leave_one_out),
    "reinforce++": Baseline(no_baseline, per_token=True, whiten=True),
    "reinforce++-baseline": Baseline(group_mean_baseline, whiten=True),
    "remax": Baseline(greedy_baseline, per_token=True, greedy=True),
    "opo": Baseline(length_weighted_baseline),
    "gpg": Baseline(scaled_baseline),
    "otb": Baseline(no_baseline, per_token=True, optimal=True),
}


def reinforce_loss(logp: Tensor, old_logp: Tensor, advantage: Tensor, args: Args) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE (Williams 1992): -A log p for each token [T], and numbers to report of each."""
    return -advantage * logp, losses.ratio_stats(logp - old_logp)


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


LOSSES = {"reinforce": reinforce_loss, "ppo": clipped_loss}


@errors.record  # torchrun prints a failed rank's traceback last
def main(args: Args) -> None:
    check(args)
    baseline = BASELINES[args.baseline]
    correction = resolve_correction(args.correction, args.loss, groups_after_rejection=True)
    P, G = args.prompts_per_step, args.samples_per_prompt
    num_updates = args.minibatches_per_step * args.epochs_per_step
    temperature = args.rollout.temperature
    reference_path = args.model if args.kl_loss_coef or args.kl_reward_coef else ""
    with Run(args, P, correction) as run:
        engine, max_tokens = run.start_engine(args.max_tokens_per_gpu, reference_path)
        policy, optimizer = run.load_policy("policy", args.model, args.optim)
        reference = run.load_frozen("reference", reference_path) if reference_path else None
        policy.keeps_sum_p2 = baseline.optimal
        run.describe(
            f"{args.baseline}, {args.loss}, KL coef in the reward {args.kl_reward_coef:g}; "
            f"KL coef {args.kl_loss_coef:g}, entropy coef {args.entropy_coef:g}",
            P, G, args.minibatches_per_step, args.epochs_per_step,
        )
        for step in run.steps():
            # 1 rollout: the engine takes the policy's weights; each response is scored as it ends
            run.metrics |= engine.wake(policy)
            rows = run.next_rows(P)
            greedy = torch.zeros(P)                                                             # [P] their scores
            if baseline.greedy:
                pending = run.sample(rows, 1, validation_sampling(args.rollout, temperature=0.0), step)
                greedy = run.collect(pending, Meter()).scores
                run.metrics["reward/greedy_error_frac"] = float(greedy.isnan().double().mean())
            pending = run.sample(rows, G, args.rollout, step)
            run.metrics |= engine.sleep()

            # 2 rewards: numbers per response, the same on every rank
            rollout = run.collect(pending)
            rewards = rollout.scores                                                            # [S] NaN: no reward

            # 3 mini-batches: each response moves to the rank that trains on it
            # a response with advantage 0 need not run where no other term of the loss has a gradient on it
            rollout.batch.advantage = rollout.to_tokens(baseline.advantages(rewards, rollout, greedy))      # [T]
            skip_zero_advantage = reference is None and not args.entropy_coef and not correction.needs_old_logp()
            if baseline.whiten or baseline.optimal:                     # they move all advantages
                skip_zero_advantage = False
            # the loss is on every token that was sampled: the stop token, and all of a truncated response
            minibatches = run.to_minibatches(
                rollout, rollout.has_score, args.minibatches_per_step, max_tokens, step, skip_zero_advantage
            )

            # 4 log-probs: the old policy's, where it is not the current one, and the reference's; advantages
            if correction.needs_old_logp(num_updates > 1 or args.kl_reward_coef > 0 or baseline.optimal):
                with run.phase("old_log_prob", minibatches) as microbatches:
                    for microbatch in microbatches:
                        microbatch.old_logp = policy.score(microbatch, temperature)             # [T]
            if reference is not None:
                with run.phase("ref", minibatches) as microbatches:
                    for microbatch in microbatches:
                        microbatch.ref_logp = reference.score(microbatch, temperature)          # [T]
            rewards = reject_and_weight(minibatches, rewards, correction, run.meter)            # [S] NaN: in no group
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
                advantages = baseline.advantages(rewards, rollout, greedy)                      # [S]
                reward = losses.on_last_token(advantages.float()[batch.index], batch.mask, batch.cu_seqlens) + penalty
                gamma = args.gamma if baseline.per_token else 1.0
                advantage, _ = losses.gae(reward, torch.zeros_like(reward), batch.mask, batch.cu_seqlens, gamma, 1.0)
                if baseline.optimal:
                    advantage = (advantage - optimal_token_baseline(advantage, batch, rollout)).float()
                if baseline.whiten:
                    advantage = whiten(advantage, batch.mask)
                scatter_fields(minibatches, advantages, advantage=advantage)

            # 5 update
            with run.phase("update_actor", minibatches * args.epochs_per_step) as update:
                for minibatch in update.minibatches:
                    # a token's weight is 1 / count over the mini-batch on all ranks, however it was cut
                    weights = losses.token_weights(minibatch, "token-mean")
                    for microbatch, weight in zip(minibatch, weights):                          # as many on every rank
                        logp, entropy = policy(microbatch, temperature)                             # [T], [T]
                        old_logp = logp.detach() if microbatch.old_logp is None else microbatch.old_logp
                        loss, stats = LOSSES[args.loss](logp, old_logp, microbatch.advantage, args)
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
                    update.optimizer_step(policy, optimizer, args.optim, step)

            # 6 log, validate, save
            metrics = spread("critic/score", rollout.scores) | spread("critic/rewards", rewards)
            metrics |= spread("critic/advantages", advantages)
            run.finish(step, rollout, minibatches, rewards, metrics)


if __name__ == "__main__":
    run_script(main, Args, __doc__)
