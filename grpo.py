"""GRPO: group-relative policy optimisation (Shao et al. 2024, arXiv 2402.03300), with DAPO's mean over all tokens.

For every prompt sample a group of G responses, score them, and give each its reward relative to its group:

    A_i = (R_i - mean_g) / (std_g + 1e-6)                                         ratio_t = p(y_t) / p_old(y_t)
    loss = mean over tokens of  max(-A ratio_t, -A clip(ratio_t, 1 - clip_low, 1 + clip_high)), at most -A clip_dual
           where A < 0  [+ kl_loss_coef KL(p || p_ref)] [- entropy_coef H(p)]

    torchrun --standalone --nproc-per-node 8 grpo.py --model Qwen/Qwen2.5-1.5B-Instruct \\
        --train-data data/gsm8k/train.parquet --val-data data/gsm8k/test.parquet
"""

from dataclasses import dataclass
from typing import Literal

from common.flags import RunArgs, resolve_correction, rules
from tools.command_line import check_command, run_script


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
    clip_low: float = 0.2
    """Lower clip: the ratio counts down to 1 - clip_low."""
    clip_high: float = 0.2
    """Upper clip: the ratio counts up to 1 + clip_high."""
    clip_dual: float = 3.0
    """Where the advantage is negative, the loss is at most -A * clip_dual (arXiv 1912.09729). 1e9: no limit."""
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
    )
    rules.check_clip(args.clip_low, args.clip_high, args.clip_dual)
    rules.check_group(args.samples_per_prompt)


if __name__ == "__main__":
    check_command(Args, check, __doc__)  # a mistyped command ends here, before the slow imports

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing import errors

from common import losses
from common.correction import importance_weights, reject_and_weight
from common.metrics import spread
from common.run import Run
from common.segments import group_mean, group_std


def group_advantages(rewards: Tensor, group: Tensor, norm_by_std: bool) -> Tensor:
    """Group-normalised advantages (GRPO, sec. 4.1): rewards [S] -> [S]. A response without a reward (NaN) gets 0."""
    centred = rewards - group_mean(rewards, group)                                              # [S]
    return (centred / (group_std(rewards, group) + 1e-6) if norm_by_std else centred).nan_to_num()


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
            f"clip {args.clip_low:g} {args.clip_high:g} {args.clip_dual:g}, norm by std {args.norm_by_std}; "
            f"KL coef {args.kl_loss_coef:g}, entropy coef {args.entropy_coef:g}",
            P, G, args.minibatches_per_step, args.epochs_per_step,
        )
        for step in run.steps():
            # 1 rollout: the engine takes the policy's weights; each response is scored as it ends
            run.metrics |= engine.wake(policy)
            pending = run.sample(run.next_rows(P), G, args.rollout, step)
            run.metrics |= engine.sleep()

            # 2 rewards and advantages: numbers per response, the same on every rank, then one per token
            rollout = run.collect(pending)
            rewards = rollout.scores                                                            # [S] NaN: no reward
            advantages = group_advantages(rewards, rollout.group, args.norm_by_std)             # [S]
            rollout.batch.advantage = rollout.to_tokens(advantages)                             # [T] of this rank

            # 3 mini-batches: each response moves to the rank that trains on it
            # a response with advantage 0 need not run where no other term of the loss has a gradient on it
            skip_zero_advantage = reference is None and not args.entropy_coef and not correction.needs_old_logp()
            # the loss is on every token that was sampled: the stop token, and all of a truncated response
            minibatches = run.to_minibatches(
                rollout, rollout.has_score, args.minibatches_per_step, max_tokens, step, skip_zero_advantage
            )

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
                    update.optimizer_step(policy, optimizer, args.optim, step)

            # 6 log, validate, save
            metrics = spread("critic/score", rollout.scores) | spread("critic/rewards", rewards)
            metrics |= spread("critic/advantages", advantages)
            run.finish(step, rollout, minibatches, rewards, metrics)


if __name__ == "__main__":
    run_script(main, Args, __doc__)
