"""DAPO: decoupled clip and dynamic sampling policy optimisation (Yu et al. 2025, arXiv 2503.14476).

GRPO with four changes: a higher upper clip; the mean over all tokens; groups whose rewards are all
equal are replaced by new ones (dynamic sampling); responses near the longest length lose reward (overlong penalty).

    A_i = (R_i - mean_g) / (std_g + 1e-6)                                         ratio_t = p(y_t) / p_old(y_t)
    loss = mean over tokens of  max(-A ratio_t, -A clip(ratio_t, 1 - clip_low, 1 + clip_high)), at most -A clip_dual
           where A < 0  [+ kl_loss_coef KL(p || p_ref)] [- entropy_coef H(p)]

    torchrun --standalone --nproc-per-node 8 dapo.py --model Qwen/Qwen2.5-1.5B-Instruct \\
        --train-data data/dapo_math/train.parquet --val-data data/dapo_math/test.parquet --run-dir runs/dapo
"""

from dataclasses import dataclass
from typing import Literal

from common.flags import RunArgs, resolve_correction, rules
from tools.command_line import check_command, run_script


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
    clip_low: float = 0.2
    """Lower clip: the ratio counts down to 1 - clip_low."""
    clip_high: float = 0.28
    """Upper clip: the ratio counts up to 1 + clip_high."""
    clip_dual: float = 3.0
    """Where the advantage is negative, the loss is at most -A * clip_dual (arXiv 1912.09729). 1e9: no limit."""
    aggregation: rules.Aggregation = "token-mean"
    """From token losses to one number, over the global mini-batch."""
    max_gen_batches: int = 10
    """Dynamic sampling: the most rollouts of prompts_per_step prompts in one step. 1: train on what the first gives."""
    on_few_groups: Literal["train", "stop"] = "train"
    """Fewer groups with unequal rewards than prompts_per_step after max_gen_batches: train on those, or stop."""
    keep_surplus: bool = False
    """Keep groups beyond prompts_per_step for the next step, one policy older, instead of dropping them. Needs
    --max-gen-batches above 1."""
    overlong_buffer: int = 0
    """Tokens before the longest response in which the penalty grows from 0 to overlong_factor. 0: no penalty."""
    overlong_factor: float = 1.0
    """The most that a response loses for its length. Needs --overlong-buffer."""
    mask_truncated: bool = False
    """Leave responses that were truncated out of the loss (they stay in their group's statistics)."""
    norm_by_std: bool = True
    """Divide advantages by the group's standard deviation."""
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
        max_gen_batches=args.max_gen_batches,
    )
    rules.check_clip(args.clip_low, args.clip_high, args.clip_dual)
    rules.check_group(args.samples_per_prompt)
    if not 0 <= args.overlong_buffer <= args.rollout.max_response_length:
        raise ValueError(
            f"--overlong-buffer {args.overlong_buffer} must be from 0 to --rollout.max-response-length "
            f"{args.rollout.max_response_length}"
        )
    if args.keep_surplus and args.policy.router_replay == "rollout":
        raise ValueError("--keep-surplus with --policy.router-replay rollout: checkpoints do not hold the experts that "
                         "the engine chose; set it to old-logp")


if __name__ == "__main__":
    check_command(Args, check, __doc__)  # a mistyped command ends here, before the slow imports

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing import errors

from common import losses
from common.correction import importance_weights, reject_and_weight
from common.metrics import spread
from common.rollouts.scoring import responses_from_state, responses_to_state
from common.run import Run
from common.segments import group_mean, group_std, is_constant
from rewards.format import soft_overlong


def group_advantages(rewards: Tensor, group: Tensor, norm_by_std: bool) -> Tensor:
    """Group-normalised advantages (GRPO, sec. 4.1): rewards [S] -> [S]. A response without a reward (NaN) gets 0."""
    centred = rewards - group_mean(rewards, group)                                              # [S]
    return (centred / (group_std(rewards, group) + 1e-6) if norm_by_std else centred).nan_to_num()


def groups_to_train(rewards: Tensor, group: Tensor) -> list[int]:
    """Dynamic sampling (sec. 3.2): the groups in which two rewards [S] differ. A lost reward (NaN) is no difference."""
    return group[~is_constant(rewards, group)].unique().tolist()


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


@errors.record  # torchrun prints a failed rank's traceback last
def main(args: Args) -> None:
    check(args)
    correction = resolve_correction(args.correction)
    P, G = args.prompts_per_step, args.samples_per_prompt
    num_updates = args.minibatches_per_step * args.epochs_per_step
    temperature = args.rollout.temperature
    reference_path = args.model if args.kl_loss_coef else ""
    with Run(args, P, correction) as run:
        engine, max_tokens = run.start_engine(args.max_tokens_per_gpu, reference_path)
        policy, optimizer = run.load_policy("policy", args.model, args.optim)
        reference = run.load_frozen("reference", reference_path) if reference_path else None
        run.describe(
            f"up to {args.max_gen_batches} rollouts a step, overlong penalty over {args.overlong_buffer} tokens; "
            f"clip {args.clip_low:g} {args.clip_high:g} {args.clip_dual:g}, norm by std {args.norm_by_std}; "
            f"KL coef {args.kl_loss_coef:g}, entropy coef {args.entropy_coef:g}",
            P, G, args.minibatches_per_step, args.epochs_per_step,
        )
        surplus = responses_from_state(run.resume().get("surplus") or b"", run.train_set)
        for step in run.steps():
            # 1 rollout: until P groups have unequal rewards, or max_gen_batches are spent
            run.metrics |= engine.wake(policy)
            sampled = surplus
            for num_gen_batches in range(1, args.max_gen_batches + 1):
                pending = run.sample(run.next_rows(P), G, args.rollout, step, num_gen_batches)
                sampled = sampled.cat(run.collect(pending))
                trainable = groups_to_train(sampled.scores, sampled.group)
                if len(trainable) >= P:
                    break
            run.metrics |= engine.sleep()

            # 2 rewards and advantages: of P groups, with the overlong penalty, the same on every rank; one per token
            fresh = sampled.select(sampled.group[sampled.step == step].unique().tolist())     # without the last surplus
            surplus = sampled.select(trainable[P:] if args.keep_surplus else [])
            rollout = sampled.select(trainable[:P])
            num_groups = min(len(trainable), P)
            if len(rollout) < args.minibatches_per_step or (num_groups < P and args.on_few_groups == "stop"):
                raise RuntimeError(
                    f"step {step + 1}: {num_groups} of {len(sampled.group.unique())} groups have unequal rewards after "
                    f"--max-gen-batches {args.max_gen_batches}, --prompts-per-step asks for {P}: take easier or harder "
                    f"prompts, raise --samples-per-prompt or --max-gen-batches"
                )
            limits = (args.rollout.max_response_length, args.overlong_buffer, args.overlong_factor)
            penalty = torch.tensor([soft_overlong(n, *limits) for n in rollout.response_lengths.tolist()])  # [S]
            rewards = rollout.scores + penalty                                                  # [S] NaN: no reward
            advantages = group_advantages(rewards, rollout.group, args.norm_by_std)             # [S]
            rollout.batch.advantage = rollout.to_tokens(advantages)                             # [T] of this rank

            # 3 mini-batches: each response moves to the rank that trains on it
            in_loss = rollout.has_score & ~rollout.truncated if args.mask_truncated else rollout.has_score  # [S]
            # the loss is on every token that was sampled: the stop token, and all of a truncated response
            minibatches = run.to_minibatches(rollout, in_loss, args.minibatches_per_step, max_tokens, step)

            # 4 log-probs: the old policy's, where it is not the current one, and the reference's
            if correction.needs_old_logp(num_updates > 1):
                with run.phase("old_log_prob", minibatches) as microbatches:
                    for microbatch in microbatches:
                        microbatch.old_logp = policy.score(microbatch, temperature)             # [T]
            if reference is not None:
                with run.phase("ref", minibatches) as microbatches:
                    for microbatch in microbatches:
                        microbatch.ref_logp = reference.score(microbatch, temperature)          # [T]
            reject_and_weight(minibatches, rewards, correction, run.meter)

            # 5 update
            with run.phase("update_actor", minibatches * args.epochs_per_step) as update:
                for minibatch in update.minibatches:
                    # a token's weight is 1 / count over the mini-batch on all ranks, however it was cut
                    weights = losses.token_weights(
                        minibatch, args.aggregation, norm_length=args.rollout.max_response_length
                    )
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
                    update.optimizer_step(policy, optimizer, args.optim, step)

            # 6 log, validate, save
            metrics = spread("critic/score", rollout.scores) | spread("critic/rewards", rewards)
            metrics |= spread("critic/advantages", advantages)
            metrics |= {
                "reward/overlong_penalty": float(penalty.mean()),
                "rollout/gen_batches": num_gen_batches,
                "rollout/surplus_groups": len(trainable) - num_groups,
                "rollout/score_all_groups": float(fresh.scores.nanmean()),
            }
            run.script_state["surplus"] = responses_to_state(surplus) if len(surplus) else None
            run.finish(step, rollout, minibatches, rewards, metrics, fresh)


if __name__ == "__main__":
    run_script(main, Args, __doc__)
