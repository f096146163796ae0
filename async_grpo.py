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
from dataclasses import dataclass
from typing import Literal

from common.flags import RunArgs, resolve_correction, rules
from tools.command_line import check_command, run_script


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
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if not 1 <= args.samplers < world_size:
        raise ValueError(f"--samplers {args.samplers} must be at least 1 and below the world size {world_size}, as the "
                         f"other ranks train; where all ranks train and sample: grpo.py")
    rules.check_at_least(0, {"--max-staleness": args.max_staleness})
    if args.offload.optimizer or args.offload.params or args.rollout.in_flight > 1:
        raise ValueError("--offload.optimizer, --offload.params and --rollout.in-flight must be left out: samplers "
                         "have GPUs of their own, and nobody waits for their slowest response")
    rules.check_sizes(
        args.rollout.tp, args.prompts_per_step, args.samples_per_prompt, args.minibatches_per_step,
        epochs_per_step=args.epochs_per_step, total_steps=args.total_steps,
        max_tokens_per_gpu=args.max_tokens_per_gpu or 1,
        samplers=args.samplers,
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
from common.engine.remote import Bridge, receive_weights
from common.metrics import Meter, spread
from common.parallel.ranks import SAMPLERS, all_max
from common.rollouts.scoring import RemoteRollout, RolloutSource, responses_to_state, start_rollout
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


def sample(run: Run, bridge: Bridge) -> None:
    """The samplers: take the weights that the trainers send, make the rollouts that they ask for, until they end."""
    engine, _ = run.start_engine()
    while True:
        kind, asked = bridge.receive(lambda: run.watchdog.phase("waiting for the trainers"))
        run.watchdog.phase(f"{kind}, for the trainers")
        if kind == "end":
            return
        if kind == "weights":
            bridge.send(receive_weights(engine, bridge, asked))
            continue
        start = time.perf_counter()
        data = run.val_set if asked.with_greedy else run.train_set    # only validation has greedy responses
        engine._wake_cache()                                    # no prefixes of a validation, as after engine.wake
        pending = start_rollout(RolloutSource(engine, run.scoring, data, bridge.has_message), asked)
        has_ended, gen_s = all_max([bridge.has_message(), time.perf_counter() - start]).tolist()    # of all samplers
        if has_ended:
            continue                                            # the trainers have ended: nobody wants this rollout
        meter = Meter()
        bridge.send_share(responses_to_state(pending.collect(meter)))
        made = {"metrics": meter.reduce() | engine.measured(), "gen_s": gen_s}
        bridge.send((made, int(all_max([run.watchdog.signal]))))    # of any sampler


def wait(run: Run, step: int, rollouts: list[RemoteRollout]) -> None:
    """The trainers, until the samplers have made these rollouts. A stop signal to a sampler stops the trainers too."""
    with run.timer("wait"):
        for pending in rollouts:
            if pending.made is None:
                pending.made, signal = pending.bridge.receive(run.checkpoints.check)
                pending.made |= {"version": step, "samples": pending.bridge.receive_share()}  # asked for in this step
                run.watchdog.signal = run.watchdog.signal or signal


@errors.record  # torchrun prints a failed rank's traceback last
def main(args: Args) -> None:
    check(args)
    if args.reward_model.path and not args.rollout.gpu_memory_utilization and torch.cuda.is_available():
        raise ValueError("--reward-model.path needs --rollout.gpu-memory-utilization, as its memory is not planned")
    os.environ[SAMPLERS] = f"{args.samplers} {args.rollout.engine}"  # with servers they need no GPUs
    correction = resolve_correction(args.correction)
    P, G = args.prompts_per_step, args.samples_per_prompt
    num_updates = args.minibatches_per_step * args.epochs_per_step
    temperature = args.rollout.temperature
    reference_path = args.model if args.kl_loss_coef else ""
    with Run(args, P, correction) as run:
        bridge = Bridge(run.world)
        if not run.world.trains:
            return sample(run, bridge)
        run.closing.callback(bridge.send, ("end", None))
        engine, max_tokens = run.start_engine(args.max_tokens_per_gpu, reference_path)
        engine.bridge = bridge  # type: ignore[attr-defined]
        policy, optimizer = run.load_policy("policy", args.model, args.optim)
        reference = run.load_frozen("reference", reference_path) if reference_path else None
        run.describe(
            f"clip {args.clip_low:g} {args.clip_high:g} {args.clip_dual:g}, norm by std {args.norm_by_std}; "
            f"KL coef {args.kl_loss_coef:g}, entropy coef {args.entropy_coef:g}; responses of "
            f"{args.samplers} sampler(s), up to {args.max_staleness} step(s) old, "
            f"{'corrected' if correction.covers_cut_sampling else 'NOT corrected (--correction.weights token)'}",
            P, G, args.minibatches_per_step, args.epochs_per_step,
        )
        ahead: list = [RemoteRollout(bridge, run.train_set, made) for made in run.resume().get("ahead", [])]
        for step in run.steps():
            # 1 rollout: the samplers get this step's weights, and begin the rollout of a later step
            run.metrics |= engine.wake(policy)
            for later in range(step + len(ahead), min(step + args.max_staleness + 1, run.total_steps)):
                wait(run, step, ahead)                              # the first step asks for more than one
                ahead.append(run.sample(run.next_rows(P), G, args.rollout, later))
            run.metrics |= engine.sleep()

            # 2 rewards and advantages: of this step's rollout, the same on every rank, then one per token
            wait(run, step, ahead[:1])
            pending = ahead.pop(0)
            rollout = run.collect(pending)
            run.timer.seconds["gen"] = pending.made["gen_s"]
            run.metrics["rollout/staleness"] = step - pending.made["version"]
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
            wait(run, step, ahead)                                        # a checkpoint has what was made ahead of it
            run.script_state["ahead"] = [pending.made for pending in ahead]
            run.finish(step, rollout, minibatches, rewards, metrics)


if __name__ == "__main__":
    run_script(main, Args, __doc__)
