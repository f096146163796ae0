"""On-policy distillation by the exact divergence over the whole vocabulary (Agarwal et al. 2024, arXiv 2306.13649).

The policy p samples responses, and at each of their tokens a teacher q says what it would have done:

    loss = mean over tokens of  D(p, q)  [- reward_coef (R - mean_g) log p(y_t)]            p, q: over all V words

    reverse-kl  KL(p || q) = sum_v p (log p - log q)           forward-kl  KL(q || p) = sum_v q (log q - log p)
    jsd         beta KL(q || m) + (1 - beta) KL(p || m),  m = beta q + (1 - beta) p         (eq. 1 of the paper)

D and its gradient are those of the whole vocabulary, not of the sampled word or of the k best words, and no tensor of
the size [T, V] exists: logits are computed for some tokens at a time, twice. Part of the data may be answered
already (--answers-per-step). Several teachers share the rows by data_source. A teacher whose tokens are others is
compared at the texts that both spell (common/distillation/reading.py says which events D is then over). A teacher
behind a server tells its k best words; all others are one class, the rest (common/distillation/served.py).

Self-distillation (--teacher self): q is the policy itself, without a gradient, and its prompt is what --context makes
of the row x and of the group's responses: feedback, a reference answer, a sibling's success. A response of which
--context has nothing to say is in no divergence. With --teacher-update-rate a, q is an average of the policy:
q <- (1 - a) q + a p after each optimizer step. Two papers are settings of it:

    SDPO (Hübotter et al. 2026, arXiv 2601.20802)   D(p(. | x, y_<t), q(. | x, f, y_<t)),   f: feedback or a success
        --context common/distillation/contexts.py:sibling_success --divergence jsd --teacher-update-rate 0.05
    SDFT (Shenfeld et al. 2026, arXiv 2601.19897)   KL(p(. | x, y_<t) || q(. | x, c, y_<t)),   c: a demonstration
        --context common/distillation/contexts.py:reference_answer --divergence reverse-kl

    torchrun --standalone --nproc-per-node 8 distill.py --model Qwen/Qwen2.5-1.5B-Instruct \\
        --teacher Qwen/Qwen2.5-7B-Instruct \\
        --train-data data/gsm8k/train.parquet --val-data data/gsm8k/test.parquet
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from common.flags import RunArgs, resolve_correction, rules
from common.flags.served import ServedConfig, check_served, teacher_paths
from tools.command_line import check_command, run_script


@dataclass
class Args(RunArgs):
    run_dir: str = "runs/distill"
    """Folder for metrics, checkpoints and the trained model."""
    teacher: tuple[str, ...] = ()
    """Hugging Face folder or hub name of the teacher, or the address of a server that returns log-probs of prompts,
    http://host:port/v1#MODEL (needs --top-k). Several teachers: DATA_SOURCE=PATH of each, for the rows with this
    data_source. self: the policy, with --context."""
    context: str = ""
    """File and function, path/to/file.py:name, that writes the teacher's prompt: (row, responses) -> messages, or None
    where it has nothing to say. The first of the responses is the one that is taught, the others are its siblings."""
    max_context_length: int = 0
    """Tokens of the longest prompt of --context; a longer one teaches nothing and is counted. 0: the model's own limit.
    Needs --context."""
    teacher_update_rate: float = 0.0
    """Share of the way to the policy that the teacher moves after each optimizer step: it is an average, in float32. 0:
    the teacher is the policy of the moment. Needs --teacher self."""

    # batch sizes: global, over all ranks
    prompts_per_step: int = 128
    """Prompts sampled in one step, over all ranks."""
    samples_per_prompt: int = 1
    """G: responses per prompt, the group."""
    answers_per_step: int = 0
    """Further rows in one step whose answer is the data's, over all ranks (GKD: its share is 1 - lambda)."""
    answer_key: str = "answer"
    """Entry of extra_info with the data's answer, a text. Needs --answers-per-step."""
    minibatches_per_step: int = 1
    """Optimizer steps per pass over the step's responses."""
    epochs_per_step: int = 1
    """Passes over the step's responses."""
    max_tokens_per_gpu: int = 0
    """Token budget of one micro-batch (one forward and backward) on one rank. No effect on the gradient. 0: the largest
    that fits in a GPU's memory, by calculation; 16384 on CPUs."""

    # the objective
    divergence: Literal["reverse-kl", "forward-kl", "jsd"] = "reverse-kl"
    """What is minimised, of policy and teacher: a function in this file."""
    beta: float = 0.5
    """jsd: the teacher's share of the mixture, in (0, 1). Needs --divergence jsd."""
    top_k: int = 0
    """Sum only over the k most probable words, for comparison with what others compute; reverse-kl, and every
    divergence from a teacher behind a server, also over the rest as one class. 0: over the whole vocabulary."""
    top_k_of: Literal["teacher", "student"] = "teacher"
    """Whose words --top-k takes. Needs --top-k."""
    reward_coef: float = 0.0
    """Factor of the policy gradient of the rewards. 0: scores are only reported."""
    served: ServedConfig = field(default_factory=ServedConfig)


def check(args: Args) -> dict[str, str]:
    """Refuse flags that cannot work, before anything heavy. Returns the teachers: data_source ("": all) -> path."""
    rules.check_sizes(
        args.rollout.tp, args.prompts_per_step, args.samples_per_prompt, args.minibatches_per_step,
        epochs_per_step=args.epochs_per_step, total_steps=args.total_steps,
        max_tokens_per_gpu=args.max_tokens_per_gpu or 1,
    )
    least_samples = 1
    if args.reward_coef:                            # an advantage is relative to the others of the group
        least_samples = 2
    rules.check_group(args.samples_per_prompt, least_samples)
    paths = teacher_paths(args.teacher)
    if len(paths) > 1 and args.policy.sequence_parallel > 1:
        raise ValueError(f"several --teacher need --policy.sequence-parallel 1, not {args.policy.sequence_parallel}")
    if ("self" in paths.values() and not args.context) or (args.context and len(paths) > 1):
        raise ValueError(f"--teacher {' '.join(args.teacher)} and --context {args.context or 'none'}: self needs a "
                         f"--context, and that needs one --teacher")
    if args.context and args.policy.sequence_parallel > 1:
        raise ValueError(f"--context needs --policy.sequence-parallel 1, not {args.policy.sequence_parallel}")
    if args.teacher_update_rate and args.lora.rank:
        raise ValueError(f"--teacher-update-rate {args.teacher_update_rate:g}: the average has no adapters, leave out "
                         f"--lora.rank or the average")
    if args.lora.rank and args.model in paths.values():
        raise ValueError(f"--teacher {args.model} is --model, which is held once, below the adapters: leave out "
                         f"--lora.rank, or choose another teacher")
    rules.check_shares({"--teacher-update-rate": args.teacher_update_rate})
    rules.check_at_least(0, {"--max-context-length": args.max_context_length})
    if not 0 < args.beta < 1 or args.top_k < 0 or args.answers_per_step < 0 or args.reward_coef < 0:
        raise ValueError(f"--beta {args.beta} must be in (0, 1), --top-k {args.top_k}, --answers-per-step "
                         f"{args.answers_per_step} and --reward-coef {args.reward_coef} at least 0")
    check_served(paths.values(), args)
    return paths


if __name__ == "__main__":
    check_command(Args, check, __doc__)  # a mistyped command ends here, before the slow imports

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing import errors

from common import losses
from common.batch import Batch
from common.correction import importance_weights, reject_and_weight
from common.distillation import served
from common.distillation.lessons import Lessons, load_teachers, planned_teachers, teachers_of
from common.distillation.reading import Comparison, spans_of
from common.kernels.top_k import of_words
from common.metrics import spread
from common.model.policy import Policy
from common.rollouts.answers import answers_of
from common.run import Run
from common.segments import group_mean


def reverse_kl(logp: Tensor, logq: Tensor, beta: float) -> Tensor:
    """Log-probs [n, V] of the policy and of the teacher -> the divergence of each token [n]."""
    return (logp.exp() * (logp - logq)).sum(dim=1)


def forward_kl(logp: Tensor, logq: Tensor, beta: float) -> Tensor:
    return (logq.exp() * (logq - logp)).sum(dim=1)


def jensen_shannon(logp: Tensor, logq: Tensor, beta: float) -> Tensor:
    logm = torch.logaddexp(logp + math.log(1 - beta), logq + math.log(beta))
    return beta * reverse_kl(logq, logm, beta) + (1 - beta) * reverse_kl(logp, logm, beta)


DIVERGENCES = {"reverse-kl": reverse_kl, "forward-kl": forward_kl, "jsd": jensen_shannon}


def divergence_of(args: Args) -> Callable[[Tensor, Tensor], Tensor]:
    """The function of two models' log-probs [n, V] that is minimised: [n]."""
    def divergence(logp: Tensor, logq: Tensor) -> Tensor:
        if 0 < args.top_k < logp.shape[1]:
            ranked = logp
            if args.top_k_of == "teacher":
                ranked = logq
            words = ranked.topk(args.top_k).indices                                             # [n, k]
            with_rest = args.divergence == "reverse-kl"     # without it p = q / e on these words would be lowest
            logp = of_words(logp, words, with_rest)                                             # [n, k (+ 1)]
            logq = of_words(logq, words, with_rest)
        return DIVERGENCES[args.divergence](logp, logq, args.beta)

    return divergence


@torch.no_grad()
def follow(teacher: Policy, policy: Policy, rate: float) -> None:
    """Move the teacher by this share of its way to the policy."""
    for theirs, ours in zip(teacher.parameters(), policy.parameters(), strict=True):
        theirs.lerp_(ours.to(theirs.dtype), rate)


def answers_as_sampled(microbatch: Batch, logp: Tensor, num_sampled: int) -> Batch:
    """The engine has no log-probs of the data's answers. The policy's take their place: nothing corrects them."""
    of_engine = (microbatch.index < num_sampled)[microbatch.sequence_ids]                       # [T]
    return replace(microbatch, rollout_logp=microbatch.rollout_logp.where(of_engine, logp))


@errors.record  # torchrun prints a failed rank's traceback last
def main(args: Args) -> None:
    paths = check(args)
    correction = resolve_correction(args.correction, "reinforce")
    P, G = args.prompts_per_step, args.samples_per_prompt
    temperature = args.rollout.temperature
    with Run(args, P + args.answers_per_step, correction) as run:
        if "" not in paths and paths.keys() != run.train_set.loaded.data_sources:
            raise ValueError(f"--teacher {' '.join(args.teacher)} must name each data_source of --train-data and no "
                             f"other: {', '.join(sorted(run.train_set.loaded.data_sources))}")
        served_teachers = served.start_teachers(run, paths.values(), args.top_k, args.served)
        is_averaged = args.teacher_update_rate > 0
        engine, max_tokens = run.start_engine(args.max_tokens_per_gpu, planned_teachers(args.model, paths, is_averaged))
        lessons = Lessons(run, [] if served_teachers else [*paths.values()], args.context, args.max_context_length)
        policy, optimizer = run.load_policy("policy", args.model, args.optim)
        teachers: list[Any] = [*served_teachers] or load_teachers(run, paths, is_averaged)
        compared = replace(args, top_k=0) if served_teachers else args      # a server's words are chosen already
        comparison = Comparison(teachers, lessons.words, divergence_of(compared), temperature)
        run.describe(
            f"{args.divergence} to {len(teachers)} teacher(s), top k {args.top_k}; reward coef {args.reward_coef:g}; "
            f"{args.answers_per_step} rows with the data's answer",
            P, G, args.minibatches_per_step, args.epochs_per_step,
        )
        for step in run.steps():
            # 1 rollout: the engine takes the policy's weights; each response is scored as it ends
            run.metrics |= engine.wake(policy)
            rows = run.next_rows(P + args.answers_per_step)
            pending = run.sample(rows[:P], G, args.rollout, step)
            run.metrics |= engine.sleep()

            # 2 rewards and advantages: numbers per response, the same on every rank, then one per token
            rollout = sampled = run.collect(pending)
            if args.answers_per_step:
                rollout = sampled.cat(answers_of(run, rows[P:], args.answer_key))
            rewards = rollout.scores                                                            # [S] NaN: no reward
            advantages = args.reward_coef * (rewards - group_mean(rewards, rollout.group)).nan_to_num()     # [S]
            rollout.batch.advantage = rollout.to_tokens(advantages)                             # [T] of this rank
            rollout.batch.response_extra["teacher"] = teachers_of(rollout, [*paths])            # [S]
            lesson = lessons.write(rollout)                     # what the teachers read, if not what the policy does

            # 3 mini-batches: each response moves to the rank that trains on it
            # the loss is on every token that was sampled: the stop token, and all of a truncated response
            # the divergence needs no score: what --rollout.drop takes out is known by how the episode ended
            is_dropped = [sample.response.end_reason in args.rollout.drop for _, sample, *_ in rollout.sequences()]
            is_dropped_token = torch.tensor(is_dropped, dtype=torch.bool)[rollout.batch.sequence_ids]   # [T]
            in_loss = ~rollout.any_token(is_dropped_token)                                      # [S]
            is_read = spans_of(rollout.batch) >= 0                                              # [T]
            run.meter.mean("distillation/taught_frac", is_read, rollout.batch.mask)     # of all responses
            if lesson is not None and not args.reward_coef:     # what no teacher reads has no loss
                in_loss &= rollout.any_token(is_read)
            if served_teachers:
                with run.timer("teacher"):
                    served.write_best_words(rollout, in_loss, served_teachers, run.meter)
            minibatches = run.to_minibatches(rollout, in_loss, args.minibatches_per_step, max_tokens, step)
            read = lessons.deliver(lesson, minibatches)                                         # micro-batch -> Batch

            # 4 log-probs: the old policy's, where the correction needs them
            if correction.needs_old_logp():
                with run.phase("old_log_prob", minibatches) as microbatches:
                    for microbatch in microbatches:
                        microbatch.old_logp = policy.score(microbatch, temperature)             # [T]
                        known = answers_as_sampled(microbatch, microbatch.old_logp, len(sampled))
                        microbatch.rollout_logp = known.rollout_logp
            reject_and_weight(minibatches, rewards, correction, run.meter)

            # 5 update
            with run.phase("update_actor", minibatches * args.epochs_per_step) as update:
                for minibatch in update.minibatches:
                    # a token's weight is 1 / count over the mini-batch on all ranks, however it was cut
                    weights = losses.token_weights(minibatch, "token-mean")
                    taught = [spans_of(microbatch) >= 0 for microbatch in minibatch]            # [T] bool each
                    teacher_weights = losses.token_weights(minibatch, "token-mean", taught)
                    heads = [teacher.whole_head() for teacher in teachers]
                    parts = zip(minibatch, weights, taught, teacher_weights)                    # as many on every rank
                    for microbatch, weight, is_taught, teacher_weight in parts:
                        compare = comparison.of(microbatch, read[id(microbatch)], heads)
                        logp, entropy, loss = policy(microbatch, temperature, also=compare)             # [T] each
                        run.meter.mean("distillation/loss", loss, is_taught)
                        known = answers_as_sampled(microbatch, logp.detach(), len(sampled))
                        # 1 without --correction.weights: then it only measures how far the engine is from the trainer
                        correct_by = importance_weights(known, logp, correction, run.meter)
                        loss = update.term("distillation", (loss * teacher_weight).sum())
                        if args.reward_coef:
                            term = (microbatch.advantage * correct_by * logp * weight).sum()
                            loss = loss - update.term("policy", term)
                        (run.world.size * loss).backward()                                      # FSDP averages: undo it
                        update.done(microbatch, logp, entropy)
                    del heads                               # of weights that change, and the engine needs their memory
                    update.optimizer_step(policy, optimizer, args.optim, step)
                    if is_averaged:
                        follow(teachers[0], policy, args.teacher_update_rate)

            # 6 log, validate, save
            metrics = spread("critic/score", rewards) | spread("critic/rewards", rewards)
            metrics |= spread("critic/advantages", advantages)
            run.finish(step, rollout, minibatches, rewards, metrics, sampled)


if __name__ == "__main__":
    run_script(main, Args, __doc__)
