"""DAPO: decoupled clip and dynamic sampling policy optimisation (Yu et al. 2025, arXiv 2503.14476).

GRPO with four changes, and without KL: a higher upper clip; the mean over all tokens; groups whose rewards are all
equal are replaced by new ones (dynamic sampling); responses near the longest length lose reward (overlong penalty).

    A_i = (R_i - mean_g) / (std_g + 1e-6)                                         ratio_t = p(y_t) / p_old(y_t)
    loss = mean over tokens of  max(-A ratio_t, -A clip(ratio_t, 1 - clip_low, 1 + clip_high)) [- entropy_coef H(p)]

    torchrun --standalone --nproc-per-node 8 dapo.py --model Qwen/Qwen2.5-1.5B-Instruct \\
        --train-data data/dapo_math/train.parquet --val-data data/dapo_math/test.parquet --run-dir runs/dapo
"""

from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing import errors

from common import losses
from common.correction import importance_weights, reject_and_weight, resolve_correction
from common.engine.make import check_sizes
from common.metrics import spread
from common.rollout import Rollout, check_skipped
from common.run import Run, RunArgs
from common.segments import group_mean, group_std, is_constant
from common.tracking.console import run_script
from rewards.format import soft_overlong


@dataclass
class Args(RunArgs):
    run_dir: str = "runs/dapo"
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
    clip_low: float | None = None
    """Lower clip: the ratio counts down to 1 - clip_low. Default: of the loss's paper, printed at the start."""
    clip_high: float | None = None
    """Upper clip: the ratio counts up to 1 + clip_high. Default: of the loss's paper."""
    clip_dual: float | None = None
    """Where the advantage is negative, the loss is capped at -A * clip_dual (dual clip, arXiv 1912.09729). Default: 3
    for the losses of PPO's form, absent in the others."""
    aggregation: losses.Aggregation | None = None
    """From token losses to one number, over the global mini-batch. Default: of the loss's paper, printed at the start
    (grpo, ppo, dapo, rloo: token-mean; the GRPO paper's own is seq-mean-token-mean)."""
    max_gen_batches: int = 10
    """Dynamic sampling: at most so many rollouts of prompts_per_step prompts in one step. 1: train on what the first
    gives."""
    on_few_groups: Literal["train", "stop"] = "train"
    """Fewer groups with unequal rewards than prompts_per_step after max_gen_batches: train on those, or stop."""
    keep_surplus: bool = False
    """Keep groups beyond prompts_per_step for the next step, one policy older, instead of dropping them."""
    overlong_buffer: int = 0
    """Tokens before the longest response in which the penalty grows from 0 to overlong_factor. 0: no penalty."""
    overlong_factor: float = 1.0
    """Most that a response loses for its length."""
    mask_truncated: bool = False
    """Leave responses that were truncated out of the loss (they stay in their group's statistics)."""
    norm_by_std: bool = True
    """Divide advantages by the group's standard deviation. Dr.GRPO does not."""
    entropy_coef: float = 0.0
    """Factor of the entropy bonus."""


def check(args: Args) -> losses.LossSettings:
    """Refuse flags that cannot work, before anything heavy. Returns the loss's bounds and aggregation."""
    check_sizes(
        args.rollout.tp, args.prompts_per_step, args.samples_per_prompt, args.minibatches_per_step,
        epochs_per_step=args.epochs_per_step, total_steps=args.total_steps,
        max_tokens_per_gpu=args.max_tokens_per_gpu or 1,
        max_gen_batches=args.max_gen_batches,
    )
    if args.samples_per_prompt < 2:
        raise ValueError(f"--samples-per-prompt {args.samples_per_prompt}: a group of one has no baseline, at least 2")
    if not 0 <= args.overlong_buffer <= args.rollout.max_response_length:
        raise ValueError(
            f"--overlong-buffer {args.overlong_buffer} must be from 0 to --rollout.max-response-length "
            f"{args.rollout.max_response_length}"
        )
    return losses.resolve_loss("dapo", args.clip_low, args.clip_high, args.clip_dual, args.aggregation)


def group_advantages(rewards: Tensor, group: Tensor, norm_by_std: bool) -> Tensor:
    """Group-normalised advantages (Shao et al. 2024, sec. 4.1): rewards [S] -> [S]. NaN (no reward): 0."""
    centred = rewards - group_mean(rewards, group)                                              # [S]
    return (centred / (group_std(rewards, group) + 1e-6) if norm_by_std else centred).nan_to_num()


def groups_to_train(rewards: Tensor, group: Tensor) -> list[int]:
    """Dynamic sampling (sec. 3.2): the groups in which two rewards [S] differ; a lost one (NaN) is no difference."""
    return group[~is_constant(rewards, group)].unique().tolist()


@errors.record  # torchrun prints a failed rank's traceback last
def main(args: Args) -> None:
    settings = check(args)
    loss_fn = losses.POLICY_LOSSES["dapo"]
    correction = resolve_correction(args.correction, "dapo")
    P, G = args.prompts_per_step, args.samples_per_prompt
    num_updates = args.minibatches_per_step * args.epochs_per_step
    temperature = args.rollout.temperature
    with Run(args, P, correction.covers_cut_sampling) as run:
        max_tokens = run.plan_memory(args.max_tokens_per_gpu)
        engine = run.start_engine()
        policy, optimizer = run.load_policy()
        run.describe(
            f"dapo, {settings.describe()}; up to {args.max_gen_batches} rollouts a step; overlong penalty over the "
            f"last {args.overlong_buffer} tokens, entropy coef {args.entropy_coef:g}",
            P, G, args.minibatches_per_step, args.epochs_per_step, max_tokens,
        )
        run.resume()
        surplus = Rollout.from_state(run.script_state.get("surplus", []), run.train_set, run.world)
        for step in run.steps():
            # 1 rollout: until P groups have unequal rewards, or max_gen_batches are spent
            run.metrics |= engine.wake(policy)
            sampled = surplus
            for num_gen_batches in range(1, args.max_gen_batches + 1):
                pending = run.sample(run.sampler.take(P), G, args.rollout, step, num_gen_batches)
                sampled = sampled.cat(run.collect(pending))
                trainable = groups_to_train(sampled.scores, sampled.group)
                if len(trainable) >= P:
                    break
            run.metrics |= engine.sleep()

            # 2 reward: take P groups, add the overlong penalty; then each response moves to the rank that trains on it
            surplus = sampled.take_groups(trainable[P:] if args.keep_surplus else [])
            rollout = sampled.take_groups(trainable[:P])
            num_groups = min(len(trainable), P)
            if len(rollout) < args.minibatches_per_step or (num_groups < P and args.on_few_groups == "stop"):
                raise RuntimeError(
                    f"step {step + 1}: {num_groups} of {len(sampled.group.unique())} groups have unequal rewards after "
                    f"--max-gen-batches {args.max_gen_batches}, --prompts-per-step asks for {P}: take easier or harder "
                    f"prompts, raise --samples-per-prompt or --max-gen-batches"
                )
            limits = (args.rollout.max_response_length, args.overlong_buffer, args.overlong_factor)
            penalty = torch.tensor([soft_overlong(n, *limits) for n in rollout.response_lengths.tolist()])  # [S]
            rewards = args.reward_coef * rollout.scores + penalty                               # [S] NaN: no reward
            if args.mask_truncated:
                rollout.in_loss &= ~rollout.truncated
            in_update = rollout.in_loss                                                         # [S]
            # the loss is on every token that was sampled: the stop token, and all of a truncated response
            minibatches = run.to_minibatches(rollout, in_update, args.minibatches_per_step, max_tokens, step)

            # 3 log-probs: with one update per rollout, old is the detached current one and costs no forward
            if correction.needs_old_logp(num_updates > 1):
                with run.phase("old_log_prob", minibatches) as microbatches:
                    for microbatch in microbatches:
                        microbatch.old_logp = policy.score(microbatch, temperature)             # [T]
            rejected = reject_and_weight(minibatches, len(rollout), correction, run.meter)      # [S] leave their group

            # 4 advantages
            rewards = torch.where(rejected, torch.nan, rewards)
            advantages = group_advantages(rewards, rollout.group, args.norm_by_std)   # [S]
            check_skipped(advantages, in_update, rollout)
            for microbatch in chain(*minibatches):
                per_response = advantages.float().to(run.world.device)[microbatch.index]
                microbatch.advantage = per_response[microbatch.sequence_ids] * microbatch.mask  # [T]

            # 5 update
            with run.phase("update_actor", minibatches * args.epochs_per_step):
                for minibatch in minibatches * args.epochs_per_step:
                    # a token's weight is 1 / count: over the mini-batch on all ranks, whatever the micro-batches
                    losses.set_token_weights(
                        minibatch.microbatches, settings.aggregation, args.rollout.max_response_length,
                        minibatch.skipped_lengths,
                    )
                    for microbatch in minibatch:                                                # as many on every rank
                        logp, entropy = policy(microbatch, temperature, args.entropy_coef != 0)     # [T], [T]
                        losses.check_finite("logp", logp.detach(), microbatch)
                        old_logp = logp.detach() if microbatch.old_logp is None else microbatch.old_logp
                        loss, stats = loss_fn(
                            logp, old_logp, microbatch.advantage, microbatch.mask, microbatch.cu_seqlens,
                            **settings.bounds,
                        )
                        loss = loss * importance_weights(microbatch, logp, correction, run.meter)
                        run.meter.total("actor/pg_loss", (loss * microbatch.weight).sum(), per=num_updates)
                        if args.entropy_coef:
                            loss = loss - args.entropy_coef * entropy
                        (run.world.size * (loss * microbatch.weight).sum()).backward()          # FSDP averages: undo it
                        run.microbatch_done(microbatch, stats, logp, entropy)
                    run.optimizer_step("actor", policy, optimizer, args.optim, step)

            # 6 log, validate, save
            metrics = spread("critic/score", rollout.scores) | spread("critic/rewards", rewards)
            metrics |= spread("critic/advantages", advantages)
            metrics |= {
                "reward/overlong_penalty": float(penalty.mean()),
                "rollout/gen_batches": num_gen_batches,
                "rollout/surplus_groups": len(trainable) - num_groups,
                "rollout/score_all_groups": float(sampled.scores.nanmean()),
            }
            run.script_state["surplus"] = surplus.state_dict()
            run.finish(step, rollout, minibatches, rewards, metrics, args.epochs_per_step, sampled)


if __name__ == "__main__":
    run_script(main, Args, __doc__)
