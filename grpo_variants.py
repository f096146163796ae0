"""GRPO with what was published beside it, by flag: losses, advantages, KL in the reward, rewards per turn, a teacher.

    A = --advantage of the rewards [- kl_reward_coef sum_t KL(p_old || p_ref)_t]  ratio_t = p(y_t) / p_old(y_t)
    loss = --aggregation over tokens of  --loss(A, ratio_t)  [+ kl_loss_coef KL(p || p_ref)] [- entropy_coef H(p)]

By default it is grpo.py. Its subject is the choice: a paper of your own is better begun from grpo.py, where the formula
stands in the file. variants/losses.py has the losses, their papers and their defaults.

    torchrun --standalone --nproc-per-node 8 grpo_variants.py --loss gspo --model Qwen/Qwen2.5-1.5B-Instruct \\
        --train-data data/gsm8k/train.parquet --val-data data/gsm8k/test.parquet
"""

import math
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from common.flags import RunArgs, resolve_correction, rules
from tools.command_line import check_command, run_script
from variants.settings import LOSSES, LossSettings, PolicyLoss


@dataclass
class Args(RunArgs):
    run_dir: str = "runs/grpo_variants"
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
    loss: PolicyLoss = "grpo"
    """Loss of a token: a function in variants/losses.py."""
    clip_low: float | None = None
    """Lower clip: the ratio counts down to 1 - clip_low. Default: the loss's paper, printed at the start."""
    clip_high: float | None = None
    """Upper clip: the ratio counts up to 1 + clip_high. Default: the loss's paper; of DAPO for cispo, whose
    paper names none."""
    clip_dual: float | None = None
    """Where the advantage is negative, the loss is at most -A * clip_dual (arXiv 1912.09729). Default: 3 for ppo, grpo,
    dapo and dr_grpo, as in verl (their papers have no such limit)."""
    loss_numbers: dict[str, float] = field(default_factory=dict)
    """Further numbers of the loss, NAME VALUE ..., such as tau_neg 1.05 of sapo. Default: the loss's paper."""
    aggregation: rules.Aggregation | None = None
    """From token losses to one number, over the global mini-batch. Default: the loss's paper, but token-mean for
    grpo, as in grpo.py."""
    advantage: Literal["group", "passk", "gdpo"] = "group"
    """group: reward relative to the group's mean. passk: only the best response counts, by its lead. gdpo: each of
    --reward-components relative to its group, the sum whitened over all tokens as in its authors' code for verl (in
    their paper, arXiv 2601.05242, over all responses)."""
    reward_components: dict[str, float] = field(default_factory=dict)
    """gdpo: NAME FACTOR ... of numbers that the reward function returns beside its score. They replace the score."""
    norm_by_std: bool | None = None
    """Divide advantages by the group's standard deviation. Default: True, but False for --loss dr_grpo."""
    advantage_per_step: bool = False
    """Each turn of an episode has its own reward, in `turn_scores` that the episode returns, and its own advantage."""
    advantage_per_role: bool = False
    """Each role that an episode's conversations have (`chat.begin(role)`) has its own reward, the number `ROLE_score`
    that the episode returns or else its score, and its own groups."""
    reward_coef: float = 1.0
    """Factor of the scores in the rewards. 0: scores are only reported, and the policy learns from the KL alone."""
    teacher: str = ""
    """Model that takes the reference's place in every KL: distillation on the policy's own samples. It must have the
    tokens of --model."""
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


def check(args: Args) -> LossSettings:
    """Refuse flags that cannot work, before anything heavy. Returns the loss with its bounds and its aggregation."""
    rules.check_sizes(
        args.rollout.tp, args.prompts_per_step, args.samples_per_prompt, args.minibatches_per_step,
        epochs_per_step=args.epochs_per_step, total_steps=args.total_steps,
        max_tokens_per_gpu=args.max_tokens_per_gpu or 1,
    )
    rules.check_group(args.samples_per_prompt)
    rules.check_turns(args.rollout, args.advantage_per_step, args.advantage_per_role)
    if bool(args.reward_components) != (args.advantage == "gdpo"):
        raise ValueError(f"--reward-components {args.reward_components} go with --advantage gdpo, which needs them")
    has_units = args.advantage_per_step or args.advantage_per_role
    if args.advantage == "gdpo" and (has_units or args.norm_by_std is not None):
        raise ValueError("--advantage gdpo has no rewards per turn or role and always divides: leave out "
                         "--advantage-per-step, --advantage-per-role and --norm-by-std")
    if args.teacher and not (args.kl_loss_coef or args.kl_reward_coef):
        raise ValueError(f"--teacher {args.teacher} has no effect without a KL: set --kl-loss-coef (or "
                         f"--kl-reward-coef)")
    return resolve_loss(args)


def resolve_loss(args: Args) -> LossSettings:
    """The flags that were given, and for the others the values of the loss's paper. Raises ValueError for a bound or
    number that the loss does not have, or one that cannot be meant."""
    default = LOSSES[args.loss]
    flags: dict = {"clip_low": args.clip_low, "clip_high": args.clip_high, "clip_dual": args.clip_dual,
                   "aggregation": args.aggregation}
    given = {}
    for name, value in flags.items():
        if value is not None:
            given[name] = value
            if getattr(default, name) is None:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} {value}: the loss {args.loss} has no such bound; leave it out")
    settings = default._replace(**given, numbers=default.numbers | args.loss_numbers, name=args.loss)
    for number, value in settings.numbers.items():
        if number not in default.numbers or value <= 0:
            raise ValueError(f"--loss-numbers {number} {value:g}: must be above 0, and --loss {args.loss} has only "
                             f"these: {', '.join(default.numbers) or 'none'}")
    low = settings.clip_low or 0.0
    high = settings.clip_high
    if high is None:
        high = math.inf
    dual = settings.clip_dual
    if dual is None:
        dual = math.inf
    rules.check_clip(low, high, dual)
    return settings


if __name__ == "__main__":
    check_command(Args, check, __doc__)  # a mistyped command ends here, before the slow imports

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing import errors

from common import losses
from common.batch import Batch
from common.correction import importance_weights, reject_and_weight
from common.episodes.turns import to_units
from common.metrics import spread
from common.parallel.ranks import all_gather_objects
from common.rollout import Rollout, scatter_fields, sum_per_response
from common.run import Run
from common.segments import group_lead, group_mean, group_std, whiten
from variants.losses import token_loss
from variants.selection import SELECTED, select


def group_advantages(rewards: Tensor, group: Tensor, norm_by_std: bool) -> Tensor:
    """Group-normalised advantages (GRPO, sec. 4.1): rewards [S] -> [S]. A response without a reward (NaN) gets 0."""
    centred = rewards - group_mean(rewards, group)                                              # [S]
    return (centred / (group_std(rewards, group) + 1e-6) if norm_by_std else centred).nan_to_num()


def passk_advantages(rewards: Tensor, group: Tensor, norm_by_std: bool) -> Tensor:
    """Pass@k objective (Tang et al. 2025, arXiv 2503.19595): the best response of a group gets its lead over the second
    best, others 0 (tie: all 0)."""
    lead = group_lead(rewards, group)                                                           # [S]
    if norm_by_std:
        lead = lead / (group_std(rewards, group) + 1e-6)
    return lead


def decoupled_rewards(rollout: Rollout, rewards: Tensor, factors: dict[str, float]) -> Tensor:
    """GDPO (Liu et al. 2026, arXiv 2601.05242): the sum over components r of factor * (r - group mean) / group std.
    Components are numbers that the reward function returned beside its score; `factors`: by their names. [S] on every
    rank; NaN where `rewards` [S] are: these responses (no score, rejected) are in no group. All ranks call this
    together. Raises ValueError, naming the row, where a component is missing."""
    mine = []                                                       # of this rank's responses that have a score
    for sample in rollout.samples:
        if math.isfinite(sample.score):
            numbers = [*map(sample.extras.get, factors)]
            mine.append((sample.index, sample.row, numbers))
    values = torch.full((len(factors), len(rollout)), torch.nan, dtype=torch.float64)
    for index, row, numbers in sorted(chain(*all_gather_objects(mine))):
        for k, (name, number) in enumerate(zip(factors, numbers)):
            if not isinstance(number, float):
                raise ValueError(f"row {row} of --train-data: the reward function returned {name} = {number!r:.80}, "
                                 f"must be a number (--reward-components)")
            values[k, index] = number
    values = values.where(~rewards.isnan(), torch.nan)                                          # [factors, S]
    group = rollout.group
    total = torch.zeros(len(rollout), dtype=torch.float64)                                      # [S]
    for factor, x in zip(factors.values(), values):
        normalised = (x - group_mean(x, group)) / (group_std(x, group) + 1e-6)                  # [S]
        total += factor * normalised
    return total


def decoupled_advantages(rewards: Tensor, group: Tensor, norm_by_std: bool) -> Tensor:
    """GDPO: `decoupled_rewards`, which are normalised by group already, minus what a KL in them adds to the mean."""
    return (rewards - group_mean(rewards, group)).nan_to_num()


ADVANTAGES = {"group": group_advantages, "passk": passk_advantages, "gdpo": decoupled_advantages}


@errors.record  # torchrun prints a failed rank's traceback last
def main(args: Args) -> None:
    settings = check(args)
    correction = resolve_correction(args.correction, settings.name, groups_after_rejection=True)
    P, G = args.prompts_per_step, args.samples_per_prompt
    num_updates = args.minibatches_per_step * args.epochs_per_step
    temperature = args.rollout.temperature
    is_selective = settings.name in SELECTED
    pulls_to_old = settings.name == "dro"   # by a squared distance, where the advantage is 0, too
    reference_path = ""
    if args.kl_loss_coef or args.kl_reward_coef:
        reference_path = args.teacher or args.model
    compute_advantages = ADVANTAGES[args.advantage]
    norm_by_std = args.norm_by_std
    if norm_by_std is None:
        norm_by_std = args.loss != "dr_grpo"
    with Run(args, P, correction) as run:
        engine, max_tokens = run.start_engine(args.max_tokens_per_gpu, reference_path)
        policy, optimizer = run.load_policy("policy", args.model, args.optim)
        reference = run.load_frozen("reference", reference_path) if reference_path else None
        run.describe(
            f"{args.advantage}, KL coef in the reward {args.kl_reward_coef:g}; {settings.describe()}; "
            f"KL coef {args.kl_loss_coef:g}, entropy coef {args.entropy_coef:g}",
            P, G, args.minibatches_per_step, args.epochs_per_step,
        )
        for step in run.steps():
            # 1 rollout: the engine takes the policy's weights; each response is scored as it ends
            run.metrics |= engine.wake(policy)
            pending = run.sample(run.next_rows(P), G, args.rollout, step)
            run.metrics |= engine.sleep()

            # 2 rewards: numbers per response, the same on every rank
            rollout = run.collect(pending)
            rewards = args.reward_coef * rollout.scores                                         # [S] NaN: no reward

            # 3 mini-batches: each response moves to the rank that trains on it
            # a response with advantage 0 need not run where no other term of the loss has a gradient on it
            advantages = compute_advantages(rewards, rollout.group, norm_by_std)                # [S] of whole responses
            rollout.batch.advantage = rollout.to_tokens(advantages)                             # [T] of this rank
            skip_zero_advantage = reference is None and not args.entropy_coef and not correction.needs_old_logp()
            if pulls_to_old or is_selective:
                skip_zero_advantage = False
            if args.advantage == "gdpo":                                # it makes other advantages below
                skip_zero_advantage = False
            if args.advantage_per_step or args.advantage_per_role:      # so do these
                skip_zero_advantage = False
            # the loss is on every token that was sampled: the stop token, and all of a truncated response
            minibatches = run.to_minibatches(
                rollout, rollout.has_score, args.minibatches_per_step, max_tokens, step, skip_zero_advantage
            )

            # 4 log-probs: the old policy's, where it is not the current one, and the reference's; advantages
            if correction.needs_old_logp(num_updates > 1 or args.kl_reward_coef > 0 or is_selective):
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
                if args.reward_components:                              # what was rejected is in no standard deviation
                    rewards = args.reward_coef * decoupled_rewards(rollout, rewards, args.reward_components)
                if args.kl_reward_coef:
                    kl = losses.kl_estimate(batch.old_logp, batch.ref_logp, args.kl_reward_estimator)   # [T]
                    rewards = rewards - args.kl_reward_coef * sum_per_response(batch, kl * batch.mask, len(rollout))
                    run.metrics["actor/reward_kl_penalty"] = losses.mean_kl(kl, batch)
                # a unit has a reward and an advantage: a response, each turn of an episode, or each of its sequences
                units, values, group = to_units(
                    batch, rollout, rewards, args.reward_coef, args.advantage_per_step, args.advantage_per_role
                )
                advantages = compute_advantages(values, group, norm_by_std)                     # [U]
                advantage = units.to_tokens(advantages)                                         # [T]
                if args.advantage == "gdpo":
                    advantage = whiten(advantage, batch.mask)
                scatter_fields(minibatches, advantages, advantage=advantage)

            # 5 update
            with run.phase("update_actor", minibatches * args.epochs_per_step) as update:
                for number, minibatch in enumerate(update.minibatches):
                    # a token's weight is 1 / count over the mini-batch on all ranks, however it was cut
                    weights = losses.token_weights(
                        minibatch, settings.aggregation, norm_length=args.rollout.max_response_length
                    )
                    select(settings, minibatch.microbatches, policy, temperature, args.seed, step, number)
                    for microbatch, weight in zip(minibatch, weights):                          # as many on every rank
                        logp, entropy = policy(microbatch, temperature)                             # [T], [T]
                        old_logp = logp.detach() if microbatch.old_logp is None else microbatch.old_logp
                        loss, stats = token_loss(settings, logp, old_logp, microbatch)
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
