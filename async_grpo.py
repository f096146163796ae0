"""GRPO on two groups of ranks: samplers make the next step's rollout while trainers learn from this step's.

    step                        k                  k + 1                k + 2
    trainers    learn from      rollout k          rollout k + 1        rollout k + 2
    samplers    make            rollout k + 1      rollout k + 2        rollout k + 3
                with weights    after k steps      after k + 1          after k + 2

The objective is that of grpo.py. A rollout is made with weights that are --max-staleness training steps older than
those that it trains: p_rollout is not p_old, which --correction.weights token corrects.

    torchrun --standalone --nproc-per-node 8 async_grpo.py --samplers 4 --model Qwen/Qwen2.5-1.5B-Instruct \\
        --correction.weights token \\
        --train-data data/gsm8k/train.parquet --val-data data/gsm8k/test.parquet
"""

import os
import time
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from torch import Tensor
from torch.distributed.elastic.multiprocessing import errors

from common import losses
from common.batch import Batch
from common.correction import importance_weights, reject_and_weight, resolve_correction
from common.engine.make import check_sizes
from common.engine.remote import Bridge, receive_weights
from common.metrics import Meter, spread
from common.parallel.ranks import SAMPLERS, all_max
from common.rollout import check_skipped, scatter_fields, sum_per_response
from common.rollouts.scoring import RemoteRollout, responses_to_state, start_rollout
from common.rollouts.turns import check_turns, to_units
from common.run import Run, RunArgs
from common.segments import group_lead, group_mean, group_std
from common.variants.selection import SELECTED, select
from common.tracking.console import run_script


@dataclass
class Args(RunArgs):
    run_dir: str = "runs/async_grpo"
    """Folder for metrics, checkpoints and the trained model."""
    samplers: int = 1
    """Ranks that sample and score, the last ones of the job. All others train."""
    max_staleness: int = 1
    """Training steps by which a rollout's weights may be older than those that it trains, and rollouts that are made
    ahead. 0: trainers and samplers wait for each other. Above 1 nothing is gained: it is for studies of old data."""

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
    loss: losses.PolicyLoss = "grpo"
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
    advantage: Literal["group", "passk"] = "group"
    """group: reward relative to the group's mean. passk: only the best response counts, by its lead."""
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
    run_zero_advantage: bool = False
    """Run responses whose advantage is 0 too. By default they only count in denominators, not in actor/ metrics."""


def check(args: Args) -> losses.LossSettings:
    """Refuse flags that cannot work, before anything heavy. Returns the loss's bounds and aggregation."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if not 1 <= args.samplers < world_size:
        raise ValueError(f"--samplers {args.samplers} must be at least 1 and below the world size {world_size}, as the "
                         f"other ranks train; where all ranks train and sample: grpo.py")
    if args.max_staleness < 0:
        raise ValueError(f"--max-staleness {args.max_staleness} must be at least 0 training steps")
    if args.offload.optimizer or args.offload.params or args.rollout.in_flight > 1:
        raise ValueError("--offload.optimizer, --offload.params and --rollout.in-flight must be left out: samplers "
                         "have GPUs of their own, and nobody waits for their slowest response")
    check_sizes(
        args.rollout.tp, args.prompts_per_step, args.samples_per_prompt, args.minibatches_per_step,
        epochs_per_step=args.epochs_per_step, total_steps=args.total_steps,
        max_tokens_per_gpu=args.max_tokens_per_gpu or 1, samplers=args.samplers,
    )
    check_turns(args.rollout, args.advantage_per_step)
    if args.samples_per_prompt < 2:
        raise ValueError(f"--samples-per-prompt {args.samples_per_prompt}: a group of one has no baseline, at least 2")
    return losses.resolve_loss(
        args.loss, args.clip_low, args.clip_high, args.clip_dual, args.aggregation, args.loss_numbers
    )


def group_advantages(rewards: Tensor, group: Tensor, norm_by_std: bool) -> Tensor:
    """Group-normalised advantages (Shao et al. 2024, sec. 4.1): rewards [S] -> [S]. NaN (no reward): 0."""
    centred = rewards - group_mean(rewards, group)                                              # [S]
    return (centred / (group_std(rewards, group) + 1e-6) if norm_by_std else centred).nan_to_num()


def passk_advantages(rewards: Tensor, group: Tensor, norm_by_std: bool) -> Tensor:
    """Pass@k objective: the best response of a group gets its lead over the second best, others 0 (tie: all 0)."""
    return group_lead(rewards, group) / (group_std(rewards, group) + 1e-6 if norm_by_std else 1.0)


ADVANTAGES = {"group": group_advantages, "passk": passk_advantages}


def sample(run: Run, bridge: Bridge) -> None:
    """The samplers: take the weights that the trainers send, make the rollouts that they ask for, until they end."""
    engine = run.start_engine()
    while True:
        kind, *asked = bridge.receive(lambda: run.watchdog.phase("waiting for the trainers"))
        run.watchdog.phase(f"{kind}, for the trainers")
        if kind == "end":
            return
        if kind == "weights":
            bridge.send(receive_weights(engine, bridge))
            continue
        start = time.perf_counter()
        *asked, with_greedy = asked
        data = run.val_set if with_greedy else run.train_set    # only validation has greedy responses
        pending = start_rollout(engine, run.scoring, data, *asked, stop=bridge.has_message, with_greedy=with_greedy)
        gen_s = time.perf_counter() - start
        if all_max([bridge.has_message()]).item():
            continue                                            # the trainers have ended: nobody wants this rollout
        meter = Meter()
        samples = responses_to_state(pending.collect(meter))
        made = {"samples": samples, "metrics": meter.reduce(), "gen_s": gen_s}
        bridge.send((made, run.watchdog.signal))


def wait(run: Run, step: int, rollouts: list[RemoteRollout]) -> None:
    """The trainers, until the samplers have made these rollouts. A stop signal to a sampler stops the trainers too."""
    with run.timer("wait"):
        for pending in rollouts:
            if pending.made is None:
                pending.made, signal = pending.bridge.receive(run.checkpoints.check)
                pending.made["version"] = step                      # they are made in the step that asks for them
                run.watchdog.signal = run.watchdog.signal or signal


@errors.record  # torchrun prints a failed rank's traceback last
def main(args: Args) -> None:
    settings = check(args)
    os.environ[SAMPLERS] = str(args.samplers)
    correction = resolve_correction(args.correction, settings.name)
    P, G = args.prompts_per_step, args.samples_per_prompt
    num_updates = args.minibatches_per_step * args.epochs_per_step
    needs_old_logp = num_updates > 1 or settings.name in SELECTED or args.kl_reward_coef > 0
    temperature = args.rollout.temperature
    with_reference = bool(args.kl_loss_coef or args.kl_reward_coef)
    norm_by_std = args.loss != "dr_grpo" if args.norm_by_std is None else args.norm_by_std
    with Run(args, P, correction.covers_cut_sampling) as run:
        bridge = Bridge(run.world)
        if not run.world.trains:
            return sample(run, bridge)
        run.closing.callback(bridge.send, ("end",))
        max_tokens = run.plan_memory(args.max_tokens_per_gpu, with_reference)
        engine = run.start_engine()
        engine.bridge = bridge
        policy, optimizer = run.load_policy()
        reference = run.load_reference() if with_reference else None
        run.describe(
            f"{args.advantage}, KL coef in the reward {args.kl_reward_coef:g}; "
            f"{settings.describe()}; KL coef {args.kl_loss_coef:g}, entropy coef {args.entropy_coef:g}; responses of "
            f"{args.samplers} sampler(s), up to {args.max_staleness} step(s) old, "
            f"{'corrected' if correction.covers_cut_sampling else 'NOT corrected (--correction.weights token)'}",
            P, G, args.minibatches_per_step, args.epochs_per_step, max_tokens,
        )
        run.resume()
        ahead = [RemoteRollout(bridge, run.train_set, made) for made in run.script_state.get("ahead", [])]
        for step in run.steps():
            # 1 rollout: the samplers get this step's weights, and begin the rollout of a later step
            run.metrics |= engine.wake(policy)
            for later in range(step + len(ahead), min(step + args.max_staleness + 1, run.total_steps)):
                wait(run, step, ahead)                              # the first step asks for more than one
                ahead.append(run.sample(run.sampler.take(P), G, args.rollout, later))
            run.metrics |= engine.sleep()

            # 2 reward: of this step's rollout; then each response moves to the rank that trains on it
            wait(run, step, ahead[:1])
            pending = ahead.pop(0)
            rollout = run.collect(pending)
            run.timer.seconds["gen"] = pending.made["gen_s"]
            run.metrics["rollout/staleness"] = step - pending.made["version"]
            rewards = args.reward_coef * rollout.scores                                         # [S] NaN: no reward
            advantages = ADVANTAGES[args.advantage](rewards, rollout.group, norm_by_std)        # [S]
            all_run = args.run_zero_advantage or with_reference or args.entropy_coef or args.advantage_per_step
            all_run = all_run or correction.needs_old_logp() or settings.name in SELECTED
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
                if args.kl_reward_coef:
                    kl = losses.kl_estimate(batch.old_logp, batch.ref_logp, args.kl_reward_estimator)   # [T]
                    rewards = rewards - args.kl_reward_coef * sum_per_response(batch, kl * batch.mask, len(rollout))
                    run.metrics["actor/reward_kl_penalty"] = losses.mean_kl(kl, batch)
                batch, values, group = to_units(batch, rollout, rewards, args.reward_coef, args.advantage_per_step)
                advantages = ADVANTAGES[args.advantage](values, group, norm_by_std)
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
            wait(run, step, ahead)                                        # a checkpoint has what was made ahead of it
            run.script_state["ahead"] = [pending.made for pending in ahead]
            run.finish(step, rollout, minibatches, rewards, metrics, args.epochs_per_step)


if __name__ == "__main__":
    run_script(main, Args, __doc__)
