"""Online DPO: preference optimisation on pairs of the policy's own responses (Guo et al. 2024, arXiv 2402.04792).

For every prompt sample a group of G responses and score them. The derivative of the loss by each log p(y) is its
advantage, with the sign turned, in the clipped loss of grpo.py. r(y) = log p(y) - log p_ref(y), summed over a response:

    dpo, ipo: loss of pairs as in dpo.py; the best and the worst response of a group are chosen and rejected
              SPIN (arXiv 2401.01335): the data's answer is chosen, each response rejected (--answer-key)
    sppo = mean over responses of  (r - (R - log mean_g exp R) / beta)^2           (Wu et al. 2024, arXiv 2405.00675)

    torchrun --standalone --nproc-per-node 8 online_dpo.py --model Qwen/Qwen2.5-1.5B-Instruct \\
        --train-data data/gsm8k/train.parquet --val-data data/gsm8k/test.parquet
"""

from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing import errors

import dpo
from common import losses
from common.batch import Batch
from common.correction import importance_weights, reject_and_weight, resolve_correction
from common.engine.make import check_sizes
from common.metrics import spread
from common.rollout import check_skipped, scatter_fields, sum_per_response
from common.rollouts.answers import add_answers
from common.run import Run, RunArgs
from common.segments import group_mean
from common.tracking.console import run_script


@dataclass
class Args(RunArgs):
    run_dir: str = "runs/online_dpo"
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
    loss: Literal["dpo", "ipo", "sppo"] = "dpo"
    """Loss of a pair: a function in dpo.py; sppo: of a response, a function in this file."""
    beta: float = 0.1
    """How strongly the policy is held near the reference: factor of the margin; ipo and sppo aim at about 1 / beta."""
    answer_key: str = ""
    """SPIN: entry of extra_info with the data's answer, which is chosen. Default: the best response of the group is."""
    refresh_reference_every: int = 0
    """Steps after which the reference becomes the policy as it is then. 0: it stays the model before training."""
    clip_low: float | None = None
    """Lower clip: the ratio counts down to 1 - clip_low. Default: of the loss's paper, printed at the start."""
    clip_high: float | None = None
    """Upper clip: the ratio counts up to 1 + clip_high. Default: of the loss's paper."""
    clip_dual: float | None = None
    """Where the advantage is negative, the loss is at most -A * clip_dual (arXiv 1912.09729). PPO's: 3."""
    aggregation: losses.Aggregation | None = None
    """From token losses to one number, over the global mini-batch. Default: of the loss's paper."""
    kl_loss_coef: float = 0.0
    """Factor of KL(policy || reference) in the loss. 0: no reference model in memory."""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k3"
    """Per-token estimate of the KL; + keeps the value and uses the unbiased gradient."""
    entropy_coef: float = 0.0
    """Factor of the entropy bonus."""


def check(args: Args) -> losses.LossSettings:
    """Refuse flags that cannot work, before anything heavy. Returns the loss's bounds and aggregation."""
    check_sizes(
        args.rollout.tp, args.prompts_per_step, args.samples_per_prompt, args.minibatches_per_step,
        epochs_per_step=args.epochs_per_step, total_steps=args.total_steps,
        max_tokens_per_gpu=args.max_tokens_per_gpu or 1,
    )
    if args.samples_per_prompt < 2:
        raise ValueError(f"--samples-per-prompt {args.samples_per_prompt}: a group of one has no baseline, at least 2")
    if args.beta <= 0 or args.refresh_reference_every < 0 or (args.lora.rank and args.refresh_reference_every):
        raise ValueError(f"--beta {args.beta} must be above 0, --refresh-reference-every "
                         f"{args.refresh_reference_every} at least 0 (0 with --lora.rank: its reference is fixed)")
    if args.answer_key and args.loss == "sppo":
        raise ValueError(f"--answer-key {args.answer_key} is for losses of pairs: --loss dpo or ipo")
    if args.correction.rejected_leave_group or resolve_correction(args.correction, "ppo").bypass:
        raise ValueError("--correction.rejected-leave-group and bypass: pairs need every response and its log-prob")
    return losses.resolve_loss(
        "ppo", args.clip_low, args.clip_high, args.clip_dual, args.aggregation or "seq-mean-token-sum", {}
    )


def best_and_worst(rewards: Tensor, group: Tensor) -> Tensor:
    """Numbers of chosen, rejected, chosen, ... [2 P]: from each group with two different rewards. NaN: no reward."""
    members = [((group == number) & rewards.isfinite()).nonzero()[:, 0] for number in group.unique()]
    pairs = [(m[rewards[m].argmax()], m[rewards[m].argmin()]) for m in members if len(rewards[m].unique()) > 1]
    return torch.tensor(pairs, dtype=torch.int64).flatten()


def sppo_loss(log_ratio: Tensor, beta: float, rewards: Tensor, group: Tensor) -> Tensor:
    """log p / p_ref, rewards and groups of responses [S] -> the loss of each [S]."""
    return (log_ratio - (rewards - group_mean(rewards.exp(), group).log()) / beta).square()


@errors.record  # torchrun prints a failed rank's traceback last
def main(args: Args) -> None:
    settings = check(args)
    correction = resolve_correction(args.correction, settings.name)
    P, G = args.prompts_per_step, args.samples_per_prompt
    num_updates = args.minibatches_per_step * args.epochs_per_step
    needs_old_logp = with_reference = True                          # responses are compared by log p - log p_ref
    temperature = args.rollout.temperature
    with Run(args, P, correction.covers_cut_sampling) as run:
        max_tokens = run.plan_memory(args.max_tokens_per_gpu, with_reference)
        engine = run.start_engine()
        policy, optimizer = run.load_policy()
        reference = run.load_reference() if with_reference else None
        if args.refresh_reference_every:                            # it is in checkpoints; SGD has no state of its own
            run.optimizers["reference"] = torch.optim.SGD(reference.parameters())
        run.describe(
            f"{args.loss}, beta {args.beta:g}; "
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
            sampled, numbers = rollout, rollout.in_loss.nonzero()[:, 0]                         # [N] those in the loss
            if args.answer_key:
                rollout, numbers = add_answers(sampled, run.tokenizer, args.answer_key)
            rewards = args.reward_coef * rollout.scores                                         # [S] NaN: no reward
            if args.loss != "sppo" and not args.answer_key:
                numbers = best_and_worst(rewards, rollout.group)
            in_update = rollout.in_loss = torch.zeros(len(rollout), dtype=torch.bool).index_fill(0, numbers, True)
            # the loss is on every token that was sampled: the stop token, and all of a truncated response
            minibatches = run.to_minibatches(rollout, in_update, args.minibatches_per_step, max_tokens, step)

            # 3 log-probs: the old policy's, where they are not those of the update itself, and the reference's
            if correction.needs_old_logp(needs_old_logp):
                with run.phase("old_log_prob", minibatches) as microbatches:
                    for microbatch in microbatches:
                        microbatch.old_logp = policy.score(microbatch, temperature)             # [T]
                        of_engine = (microbatch.index < len(sampled))[microbatch.sequence_ids]  # [T] not of the data
                        microbatch.rollout_logp = microbatch.rollout_logp.where(of_engine, microbatch.old_logp)
            if reference is not None:
                with run.phase("ref", minibatches) as microbatches:
                    for microbatch in microbatches:
                        microbatch.ref_logp = reference.score(microbatch, temperature)          # [T]
            rewards = reject_and_weight(minibatches, rewards, correction, run.meter)            # [S] NaN: in no group

            # 4 advantages
            with run.timer("adv"):
                batch = Batch.cat([*chain(*minibatches)]).to("cpu")
                log_ratio = sum_per_response(batch, (batch.old_logp - batch.ref_logp) * batch.mask, len(rollout))
                log_ratio.requires_grad_()                                                              # [S]
                if args.loss == "sppo":
                    loss = sppo_loss(log_ratio[numbers], args.beta, rewards[numbers], rollout.group[numbers])
                else:
                    loss = dpo.LOSSES[args.loss](log_ratio[numbers], args.beta, label_smoothing=0.0)
                    run.metrics |= dpo.preference_metrics(log_ratio[numbers], args.beta) if len(loss) else {}
                    run.metrics["preference/pairs"] = len(loss)
                run.metrics["train/loss"] = loss.sum().item() / max(len(loss), 1)
                advantages = -in_update.sum() * torch.autograd.grad(loss.mean(), log_ratio)[0]          # [S]
                check_skipped(advantages, in_update, rollout)
                advantage = advantages.float()[batch.index][batch.sequence_ids] * batch.mask            # [T]
                scatter_fields(minibatches, advantage=advantage)

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
            if args.refresh_reference_every and (step + 1) % args.refresh_reference_every == 0:
                for ours, theirs in zip(policy.parameters(), reference.parameters()):
                    theirs.to_local().copy_(ours.to_local().detach())
            metrics = spread("critic/score", rollout.scores) | spread("critic/rewards", rewards)
            metrics |= spread("critic/advantages", advantages)
            run.finish(step, rollout, minibatches, rewards, metrics, args.epochs_per_step, sampled)


if __name__ == "__main__":
    run_script(main, Args, __doc__)
