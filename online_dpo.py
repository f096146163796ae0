"""Online DPO: preference optimisation on pairs of the policy's own responses (Guo et al. 2024, arXiv 2402.04792).

For every prompt sample a group of G responses and score them. The derivative of the loss by each log p(y) is its
advantage, with the sign turned, in the clipped loss of grpo.py. r(y) = log p(y) - log p_ref(y), summed over a response:

    dpo, ipo: the loss of pairs of dpo.py; the best and the worst response of a group are chosen and rejected
              SPIN (arXiv 2401.01335): the data's answer is chosen, each response rejected (--answer-key)
    sppo = mean over responses of  (r - (P - 1/2) / beta)^2        P: win rate in the group (SPPO, arXiv 2405.00675)
    sppo-exact = the same of       (r - R / beta + log mean_g exp(R / beta))^2

    torchrun --standalone --nproc-per-node 8 online_dpo.py --model Qwen/Qwen2.5-1.5B-Instruct \\
        --train-data data/gsm8k/train.parquet --val-data data/gsm8k/test.parquet
"""

from dataclasses import dataclass
from itertools import chain
from typing import Literal

from common.flags import RunArgs, resolve_correction, rules
from tools.command_line import check_command, run_script


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
    loss: Literal["dpo", "ipo", "sppo", "sppo-exact"] = "dpo"
    """Loss of a pair, or with sppo and sppo-exact of a response: a function in this file."""
    beta: float = 0.1
    """Factor of the margin, large: near the reference; ipo aims at 1 / (2 beta); sppo: 1 / eta, 0.001 in its paper."""
    answer_key: str = ""
    """SPIN: entry of extra_info with the data's answer, which is chosen. Default: the best response of the group is."""
    refresh_reference_every: int = 0
    """Steps after which the reference becomes the policy as it is then. 0: it stays the model before training."""
    clip_low: float = 0.2
    """Lower clip: the ratio counts down to 1 - clip_low."""
    clip_high: float = 0.2
    """Upper clip: the ratio counts up to 1 + clip_high."""
    clip_dual: float = 3.0
    """Where the advantage is negative, the loss is at most -A * clip_dual (arXiv 1912.09729). 1e9: no limit."""
    aggregation: rules.Aggregation = "seq-mean-token-sum"
    """From token losses to one number, over the global mini-batch."""
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
    if args.beta <= 0 or args.refresh_reference_every < 0 or (args.lora.rank and args.refresh_reference_every):
        raise ValueError(f"--beta {args.beta} must be above 0, --refresh-reference-every "
                         f"{args.refresh_reference_every} at least 0 (0 with --lora.rank: its reference is fixed)")
    if args.answer_key and args.loss not in ("dpo", "ipo"):
        raise ValueError(f"--answer-key {args.answer_key} is for losses of pairs: --loss dpo or ipo")
    if resolve_correction(args.correction).bypass:
        raise ValueError("--correction.bypass: pairs need the old policy's log-prob of every response")


if __name__ == "__main__":
    check_command(Args, check, __doc__)  # a mistyped command ends here, before the slow imports

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing import errors

from common import losses
from common.batch import Batch
from common.correction import importance_weights, reject_and_weight
from common.metrics import spread
from common.rollout import scatter_fields, sum_per_response
from common.rollouts.answers import add_answers
from common.run import Run
from common.segments import best_and_worst, group_log_mean_exp, group_win_rate
from common.tracking.preferences import preference_metrics


def dpo_loss(log_ratio: Tensor, beta: float, rewards: Tensor, group: Tensor) -> Tensor:
    """log p / p_ref of responses that are chosen, rejected, chosen, ... [2 P] -> the loss of each pair [P]."""
    return -torch.nn.functional.logsigmoid(beta * (log_ratio[0::2] - log_ratio[1::2]))


def ipo_loss(log_ratio: Tensor, beta: float, rewards: Tensor, group: Tensor) -> Tensor:
    """The same for IPO (Azar et al. 2023, arXiv 2310.12036)."""
    return (log_ratio[0::2] - log_ratio[1::2] - 1 / (2 * beta)).square()


def sppo_loss(log_ratio: Tensor, beta: float, rewards: Tensor, group: Tensor) -> Tensor:
    """log p / p_ref, rewards, groups of responses [S] -> the loss of each [S] (algorithm 1, log Z = 1 / (2 beta))."""
    return (log_ratio - (group_win_rate(rewards, group) - 0.5) / beta).square()


def sppo_exact_loss(log_ratio: Tensor, beta: float, rewards: Tensor, group: Tensor) -> Tensor:
    """The same with rewards for win rates and Z estimated from the group: 0 for p = p_ref exp(R / beta) / Z."""
    return (log_ratio - rewards / beta + group_log_mean_exp(rewards / beta, group)).square()


LOSSES = {"dpo": dpo_loss, "ipo": ipo_loss, "sppo": sppo_loss, "sppo-exact": sppo_exact_loss}
OF_PAIRS = "dpo", "ipo"


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
    reference_path = args.model                                     # responses are compared by log p - log p_ref
    with Run(args, P, correction) as run:
        engine, max_tokens = run.start_engine(args.max_tokens_per_gpu, reference_path)
        policy, optimizer = run.load_policy("policy", args.model, args.optim)
        reference = run.load_frozen("reference", reference_path, is_saved=bool(args.refresh_reference_every))
        run.describe(
            f"{args.loss}, beta {args.beta:g}; clip {args.clip_low:g} {args.clip_high:g} {args.clip_dual:g}; "
            f"KL coef {args.kl_loss_coef:g}, entropy coef {args.entropy_coef:g}",
            P, G, args.minibatches_per_step, args.epochs_per_step,
        )
        for step in run.steps():
            # 1 rollout: the engine takes the policy's weights; each response is scored as it ends
            run.metrics |= engine.wake(policy)
            pending = run.sample(run.next_rows(P), G, args.rollout, step)
            run.metrics |= engine.sleep()

            # 2 rewards: numbers per response, the same on every rank; and which responses are compared
            rollout = run.collect(pending)
            sampled, numbers = rollout, rollout.has_score.nonzero()[:, 0]                       # [N] those in the loss
            if args.answer_key:
                rollout, numbers = add_answers(sampled, run, args.answer_key)
            rewards = rollout.scores                                                            # [S] NaN: no reward
            if args.loss in OF_PAIRS and not args.answer_key:
                numbers = best_and_worst(rewards, rollout.group)

            # 3 mini-batches: each response moves to the rank that trains on it
            in_loss = torch.zeros(len(rollout), dtype=torch.bool).index_fill(0, numbers, True)  # [S]
            # the loss is on every token that was sampled: the stop token, and all of a truncated response
            minibatches = run.to_minibatches(rollout, in_loss, args.minibatches_per_step, max_tokens, step)

            # 4 log-probs: the old policy's and the reference's; advantages; then rejections: log p(y) is of all tokens
            if correction.needs_old_logp(script_needs_it=True):
                with run.phase("old_log_prob", minibatches) as microbatches:
                    for microbatch in microbatches:
                        microbatch.old_logp = policy.score(microbatch, temperature)             # [T]
                        of_engine = (microbatch.index < len(sampled))[microbatch.sequence_ids]  # [T] not of the data
                        microbatch.rollout_logp = microbatch.rollout_logp.where(of_engine, microbatch.old_logp)
            if reference is not None:
                with run.phase("ref", minibatches) as microbatches:
                    for microbatch in microbatches:
                        microbatch.ref_logp = reference.score(microbatch, temperature)          # [T]
            with run.timer("adv"):
                batch = Batch.cat([*chain(*minibatches)]).to("cpu")
                log_ratio = sum_per_response(batch, (batch.old_logp - batch.ref_logp) * batch.mask, len(rollout))
                log_ratio.requires_grad_()                                                              # [S]
                loss = LOSSES[args.loss](log_ratio[numbers], args.beta, rewards[numbers], rollout.group[numbers])
                if args.loss in OF_PAIRS:
                    run.metrics |= preference_metrics(log_ratio[numbers], args.beta) if len(loss) else {}
                    run.metrics["preference/pairs"] = len(loss)
                run.metrics["train/loss"] = loss.sum().item() / max(len(loss), 1)
                # the derivative of the loss by each log p(y), with the sign turned
                advantages = -in_loss.sum() * torch.autograd.grad(loss.mean(), log_ratio)[0]            # [S]
                scatter_fields(minibatches, advantages, advantage=batch.to_tokens(advantages))
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
            if args.refresh_reference_every and (step + 1) % args.refresh_reference_every == 0:
                for ours, theirs in zip(policy.parameters(), reference.parameters()):
                    theirs.to_local().copy_(ours.to_local().detach())
            metrics = spread("critic/score", rollout.scores) | spread("critic/rewards", rewards)
            metrics |= spread("critic/advantages", advantages)
            run.finish(step, rollout, minibatches, rewards, metrics, sampled)


if __name__ == "__main__":
    run_script(main, Args, __doc__)
