"""DAPO: decoupled clip and dynamic sampling policy optimisation (Yu et al. 2025, arXiv 2503.14476).

GRPO with four changes: a higher upper clip; the mean over all tokens; groups whose rewards are all
equal are replaced by new ones (dynamic sampling); responses near the longest length lose reward (overlong penalty).

    A_i = (R_i - mean_g) / (std_g + 1e-6)                                         ratio_t = p(y_t) / p_old(y_t)
    loss = mean over tokens of  max(-A ratio_t, -A clip(ratio_t, 1 - clip_low, 1 + clip_high)) [- entropy_coef H(p)]

    torchrun --standalone --nproc-per-node 8 dapo.py --model Qwen/Qwen2.5-1.5B-Instruct \\
        --train-data data/dapo_math/train.parquet --val-data data/dapo_math/test.parquet --run-dir runs/dapo
"""

from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing import errors

from common import losses
from common.batch import Batch
from common.correction import importance_weights, reject_and_weight, resolve_correction
from common.engine.make import check_sizes
from common.metrics import spread
from common.rollout import Rollout, check_skipped, scatter_fields, sum_per_response
from common.rollouts.scoring import responses_from_state, responses_to_state
from common.rollouts.turns import check_turns, to_units
from common.run import Run, RunArgs
from common.segments import group_mean, group_std, is_constant
from common.selection import SELECTED, select
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
    loss: losses.PolicyLoss = "dapo"
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


def check(args: Args) -> losses.LossSettings:
    """Refuse flags that cannot work, before anything heavy. Returns the loss's bounds and aggregation."""
    check_sizes(
        args.rollout.tp, args.prompts_per_step, args.samples_per_prompt, args.minibatches_per_step,
        epochs_per_step=args.epochs_per_step, total_steps=args.total_steps,
        max_tokens_per_gpu=args.max_tokens_per_gpu or 1,
        max_gen_batches=args.max_gen_batches,
    )
    check_turns(args.rollout, args.advantage_per_step)
    if args.samples_per_prompt < 2:
        raise ValueError(f"--samples-per-prompt {args.samples_per_prompt}: a group of one has no baseline, at least 2")
    if not 0 <= args.overlong_buffer <= args.rollout.max_response_length:
        raise ValueError(
            f"--overlong-buffer {args.overlong_buffer} must be from 0 to --rollout.max-response-length "
            f"{args.rollout.max_response_length}"
        )
    if args.keep_surplus and args.policy.router_replay == "rollout":
        raise ValueError("--keep-surplus with --policy.router-replay rollout: checkpoints do not hold the experts that "
                         "the engine chose; set it to old-logp")
    return losses.resolve_loss(
        args.loss, args.clip_low, args.clip_high, args.clip_dual, args.aggregation, args.loss_numbers
    )


def group_advantages(rewards: Tensor, group: Tensor, norm_by_std: bool) -> Tensor:
    """Group-normalised advantages (Shao et al. 2024, sec. 4.1): rewards [S] -> [S]. NaN (no reward): 0."""
    centred = rewards - group_mean(rewards, group)                                              # [S]
    return (centred / (group_std(rewards, group) + 1e-6) if norm_by_std else centred).nan_to_num()


def groups_to_train(rewards: Tensor, group: Tensor) -> list[int]:
    """Dynamic sampling (sec. 3.2): the groups in which two rewards [S] differ; a lost one (NaN) is no difference."""
    return group[~is_constant(rewards, group)].unique().tolist()


def take_groups(rollout: Rollout, groups: list[int]) -> Rollout:
    """The responses of these groups. Groups are numbered in this order, responses group by group."""
    new_group = {old: new for new, old in enumerate(groups)}
    of_group = [(rollout.group == old).nonzero()[:, 0] for old in groups]
    order = torch.cat(of_group) if of_group else torch.zeros(0, dtype=torch.int64)
    new_index = {int(old): new for new, old in enumerate(order)}
    samples = [
        replace(s, index=new_index[s.index], group=new_group[s.group]) for s in rollout.samples if s.group in new_group
    ]
    taken = {name: values[order] for name, values in rollout.tensors().items()}
    taken["group"] = torch.tensor([new_group[int(old)] for old in taken["group"]], dtype=torch.int64)
    return Rollout(samples, **taken)


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
            f"up to {args.max_gen_batches} rollouts a step; overlong penalty over {args.overlong_buffer} tokens; "
            f"KL coef in the reward {args.kl_reward_coef:g}; "
            f"{settings.describe()}; KL coef {args.kl_loss_coef:g}, entropy coef {args.entropy_coef:g}",
            P, G, args.minibatches_per_step, args.epochs_per_step, max_tokens,
        )
        run.resume()
        surplus = responses_from_state(run.script_state.get("surplus", []), run.train_set, run.world)
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
            surplus = take_groups(sampled, trainable[P:] if args.keep_surplus else [])
            rollout = take_groups(sampled, trainable[:P])
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
                advantages = group_advantages(values, group, norm_by_std)
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
            metrics |= {
                "reward/overlong_penalty": float(penalty.mean()),
                "rollout/gen_batches": num_gen_batches,
                "rollout/surplus_groups": len(trainable) - num_groups,
                "rollout/score_all_groups": float(sampled.scores.nanmean()),
            }
            run.script_state["surplus"] = responses_to_state(surplus)
            run.finish(step, rollout, minibatches, rewards, metrics, args.epochs_per_step, sampled)


if __name__ == "__main__":
    run_script(main, Args, __doc__)
