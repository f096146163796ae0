"""GRPO: group-relative policy optimisation (Shao et al. 2024, arXiv 2402.03300).

For every prompt sample a group of G responses, score them, and give each its reward relative to its group:

    A_i = (R_i - mean_g) / (std_g + 1e-6)                                         ratio_t = p(y_t) / p_old(y_t)
    loss = mean over tokens of  max(-A ratio_t, -A clip(ratio_t, 1 - clip_low, 1 + clip_high))
           [+ kl_loss_coef KL(p || p_ref)] [- entropy_coef H(p)]

    torchrun --standalone --nproc-per-node 8 grpo.py --model Qwen/Qwen2.5-1.5B-Instruct \\
        --train-data gsm8k/train.parquet --val-data gsm8k/test.parquet --run-dir runs/gsm8k
"""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Literal

import numpy as np
import torch
import tyro
from torch import Tensor
from transformers import AutoTokenizer

from common import checkpoint, correction, dist, losses
from common.data import DataConfig, Prompt, PromptSampler, PromptSet, load_prompts
from common.kernels import choose_attention
from common.offload import Offload, OffloadConfig, resident_gb
from common.packing import Batch, exchange, gather_numbers, plan_step, sequence_cost, train_flops
from common.policy import (
    ModelConfig,
    OptimConfig,
    learning_rate,
    load_policy,
    make_optimizer,
    optimizer_step,
    read_config,
)
from common.rollout import Engine, Response, RolloutConfig, Sampling, check_rollout, make_engine, stop_tokens
from common.tracking import LogConfig, Meter, Timer, Tracker, fail, memory, say, spread, step_line, val_line
from rewards import lookup
from rewards.pool import RewardConfig, RewardPool


@dataclass
class Args:
    model: str
    """Hugging Face folder or hub name of the policy."""
    train_data: tuple[str, ...]
    """Parquet or JSON-lines files, folders or globs with verl's columns."""
    val_data: tuple[str, ...] = ()
    """Validation files, in the same columns."""
    run_dir: str = "runs/grpo"
    """Folder for metrics, checkpoints and the trained model."""
    seed: int = 0
    """Of everything random: prompt order, sampling, mini-batches."""
    total_steps: int = 100
    """Rollout-and-update rounds."""

    # batch sizes: global, over all ranks
    prompts_per_step: int = 128
    """Prompts sampled in one step, over all ranks."""
    samples_per_prompt: int = 8
    """G: responses per prompt, the group."""
    minibatches_per_step: int = 1
    """Optimizer steps per pass over the step's responses."""
    epochs_per_step: int = 1
    """Passes over the step's responses."""
    max_tokens_per_gpu: int = 16384
    """Token budget of one micro-batch (one forward and backward) on one rank. No effect on the gradient."""

    # the objective
    clip_low: float = 0.2
    """Lower clip: the ratio counts down to 1 - clip_low."""
    clip_high: float = 0.2
    """Upper clip: the ratio counts up to 1 + clip_high."""
    clip_dual: float = 3.0
    """Where the advantage is negative, the loss is capped at -A * clip_dual (dual clip, arXiv 1912.09729)."""
    aggregation: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
    ] = "token-mean"
    """From token losses to one number, over the global mini-batch. The GRPO paper's own is seq-mean-token-mean."""
    advantage: Literal["group", "passk"] = "group"
    """group: reward relative to the group's mean. passk: only the best response of a group counts, by its lead."""
    no_norm_by_std: bool = False
    """Do not divide advantages by the group's standard deviation (Dr.GRPO)."""
    kl_loss_coef: float = 0.0
    """Factor of KL(policy || reference) in the loss. 0: no reference model in memory."""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k3"
    """Per-token estimate of the KL; + keeps the value and uses the unbiased gradient."""
    entropy_coef: float = 0.0
    """Factor of the entropy bonus."""
    run_constant_groups: bool = False
    """Run groups whose rewards are all equal through the model too. Their advantage is 0: without KL and entropy terms
    they change no gradient and by default only count in the denominators (and are missing from actor/ metrics)."""
    correct_rollout: bool = False
    """Multiply token losses by min(p_trainer / p_engine, rollout_threshold) (TIS)."""
    rollout_threshold: float = 2.0
    """Truncation of the engine correction; reported in rollout_corr/ whether applied or not."""
    max_skipped_steps: int = 3
    """Stop after this many optimizer steps in a row whose gradient norm is not finite."""

    # validation
    eval_every: int = 10
    """Steps between validations; also before the first and after the last step. 0: only these two."""
    eval_samples: int = 4
    """Sampled responses per validation prompt, besides the greedy one; 0: greedy only."""
    eval_temperature: float = 1.0
    """Temperature of the sampled ones."""

    policy: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    save: checkpoint.SaveConfig = field(default_factory=checkpoint.SaveConfig)
    log: LogConfig = field(default_factory=LogConfig)


def check(args: Args, world: dist.World) -> None:
    """Refuse flags that cannot work, before anything heavy."""
    for name in ("total_steps", "prompts_per_step", "minibatches_per_step", "epochs_per_step", "max_tokens_per_gpu"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if args.samples_per_prompt < 2:
        raise ValueError(
            f"--samples-per-prompt {args.samples_per_prompt} must be at least 2: a group of one has no baseline"
        )
    engines = world.size // args.rollout.tp
    if args.prompts_per_step % engines:
        raise ValueError(
            f"--prompts-per-step {args.prompts_per_step} must be a multiple of the {engines} engines "
            f"(world size {world.size} / --rollout.tp {args.rollout.tp})"
        )
    responses = args.prompts_per_step * args.samples_per_prompt
    if responses % args.minibatches_per_step:
        raise ValueError(
            f"{responses} responses a step (--prompts-per-step {args.prompts_per_step} x --samples-per-prompt "
            f"{args.samples_per_prompt}) must be a multiple of --minibatches-per-step {args.minibatches_per_step}"
        )
    if not 0 <= args.clip_low <= 1 or args.clip_high < 0 or args.clip_dual <= 1:
        raise ValueError(
            f"--clip-low {args.clip_low} must be in [0, 1], --clip-high {args.clip_high} at least 0, "
            f"--clip-dual {args.clip_dual} above 1"
        )


def group_advantages(rewards: Tensor, norm_by_std: bool) -> Tensor:
    """Group-normalised advantages (Shao et al. 2024, sec. 4.1): rewards [P, G] -> [P, G]. NaN (no reward): 0."""
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)                                    # [P, G]
    return (centred / (group_std(rewards) + 1e-6) if norm_by_std else centred).nan_to_num()


def passk_advantages(rewards: Tensor, norm_by_std: bool) -> Tensor:
    """Pass@k objective: the best response of a group gets its lead over the second best, others 0 (tie: all 0)."""
    top, who = rewards.nan_to_num(nan=-torch.inf).topk(2, dim=1)                                # [P, 2]
    lead = (top[:, :1] - top[:, 1:]).nan_to_num(posinf=0.0)                                     # [P, 1]
    advantages = torch.zeros_like(rewards).scatter(1, who[:, :1], lead)                         # [P, G]
    return advantages / (group_std(rewards) + 1e-6) if norm_by_std else advantages


def group_std(rewards: Tensor) -> Tensor:
    """Unbiased standard deviation of each group's rewards, NaN left out: [P, G] -> [P, 1]."""
    squares = (rewards - rewards.nanmean(dim=1, keepdim=True)).nan_to_num().square()            # [P, G]
    num_scored = rewards.isfinite().sum(dim=1, keepdim=True)                                    # [P, 1]
    return (squares.sum(dim=1, keepdim=True) / (num_scored - 1).clamp(min=1)).sqrt()


ADVANTAGES = {"group": group_advantages, "passk": passk_advantages}


def score_later(pool: RewardPool, tokenizer, prompts: list[Prompt], i: int, response: Response) -> None:
    """Send a finished response to the reward workers while the engine goes on."""
    prompt, text = prompts[i], tokenizer.decode(response.tokens, skip_special_tokens=True)
    pool.submit(i, prompt.data_source, text, prompt.ground_truth, prompt.extra_info)


def evaluate(args: Args, engine: Engine, prompts: PromptSet, pool: RewardPool, tokenizer) -> dict[str, float]:
    """Mean score per data source with the weights in the engine: greedy, and over `eval_samples` sampled responses."""
    metrics = {}
    kinds = [("greedy", 1, 0.0), (f"mean@{args.eval_samples}", args.eval_samples, args.eval_temperature)]
    for name, samples, temperature in kinds:
        requests = [(p, g) for p in engine.deal(len(prompts)) for g in range(samples)]
        asked = [prompts[p] for p, _ in requests]
        engine.generate(
            [prompt.tokens for prompt in asked],
            [dist.seed_of(args.seed, "val", p, g) for p, g in requests],
            Sampling.validation(args.rollout, temperature),
            on_finish=partial(score_later, pool, tokenizer, asked),
        )
        scores, totals = pool.results(), defaultdict(lambda: [0.0, 0.0])
        for i, score, extra in zip(scores.index, scores.scores, scores.extras):
            totals[asked[i].data_source][0] += float(np.nan_to_num(extra.get("acc", score)))
            totals[asked[i].data_source][1] += 1
        for source in prompts.data_sources:
            total, count = dist.all_sum(totals[source]).tolist()
            if count:
                metrics[f"val-core/{source}/acc/{name}"] = total / count
    return metrics


def main(args: Args) -> None:
    # setup
    world = dist.init()
    check(args, world)
    hf_config = read_config(args.model, args.policy)
    longest = check_rollout(args.rollout, hf_config, world, args.data.max_prompt_length, args.correct_rollout)
    dist.seed_everything(args.seed)

    # data and rewards
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=args.policy.trust_remote_code)
    train_set = load_prompts(args.train_data, tokenizer, args.data)
    val_set = load_prompts(args.val_data, tokenizer, args.data) if args.val_data else None
    sampler = PromptSampler(len(train_set), args.seed)
    say(world, f"train  {train_set.summary()}")
    if val_set is not None:
        say(world, f"val    {val_set.summary()}")
    if not args.reward.function:
        lookup(set(train_set.data_sources) | set(val_set.data_sources if val_set else ()))
    pool = RewardPool(**vars(args.reward))

    # engine, then models: the engine reads free memory as it starts
    probe = [prompt.tokens for prompt in train_set[:4]]
    stops = stop_tokens(args.model, tokenizer)
    trainer_gb = resident_gb(hf_config, args.offload, world.size, trained=1, frozen=bool(args.kl_loss_coef))
    engine = make_engine(
        args.model, hf_config, args.rollout, args.policy, world, probe, stops, longest, args.seed, trainer_gb
    )
    policy = load_policy(args.model, args.policy, world)
    reference = load_policy(args.model, args.policy, world, frozen=True) if args.kl_loss_coef else None
    optimizer = make_optimizer(policy, args.optim)
    engine.offload = Offload(args.offload, [policy] + [reference] * (reference is not None), [optimizer])
    loss_fn = partial(losses.ppo, clip_low=args.clip_low, clip_high=args.clip_high, dual_clip=args.clip_dual)
    say(world, describe(args, world, choose_attention(world.device, hf_config)))

    # resume
    state = checkpoint.load_latest(args.run_dir, policy, optimizer) if args.save.resume else {}
    tracker = Tracker(args.log, args.run_dir, args, world, state.get("tracker", {}))
    sampling = Sampling.training(args.rollout)
    P, G = args.prompts_per_step, args.samples_per_prompt
    first_step, skipped_in_a_row = 0, 0
    if state:
        first_step = state["step"]
        sampler.load_state_dict(state["sampler"])
        say(world, f"resumed after step {first_step} of {args.run_dir}; --save.no-resume starts anew")
    elif val_set is not None:
        engine.wake(policy)
        metrics = evaluate(args, engine, val_set, pool, tokenizer)
        engine.sleep()
        tracker.log(0, metrics, val_line("before training", metrics))

    for step in range(first_step, args.total_steps):
        timer, meter = Timer(), Meter()

        # 1 rollout: engine e samples prompts e, e + engines, ...; a group never leaves its engine
        prompts = [train_set[i] for i in sampler.take(P)]
        metrics = engine.wake(policy)
        requests = [(p, g) for p in engine.deal(P) for g in range(G)]
        asked = [prompts[p] for p, _ in requests]
        with timer("gen"):
            responses = engine.generate(
                [prompt.tokens for prompt in asked],
                [dist.seed_of(args.seed, step, p, g) for p, g in requests],
                sampling,
                on_finish=partial(score_later, pool, tokenizer, asked),
            )
        metrics |= engine.sleep()

        # 2 reward: then lengths and rewards are known everywhere, and each response moves to the rank that trains on it
        with timer("reward"):
            scores = pool.results()
        mine = scores.index
        batch = Batch.build(
            [asked[i].tokens for i in mine],
            [responses[i].tokens for i in mine],
            rollout_logps=[responses[i].logp for i in mine],
            index=[requests[i][0] * G + requests[i][1] for i in mine],
        )
        numbers = [
            (np.isfinite(score), np.nan_to_num(score), len(responses[i].tokens), len(asked[i].tokens),
             responses[i].finish_reason == "length")
            for i, score in zip(mine, scores.scores)
        ]
        numbers = gather_numbers(torch.tensor(numbers, dtype=torch.float64), batch.index)       # [S, 5] on every rank
        scored, rewards, response_lengths, prompt_lengths, truncated = numbers.unbind(1)        # [S] each
        rewards = torch.where(scored > 0, rewards, torch.nan)                                   # NaN: on_error drop
        lengths = (response_lengths + prompt_lengths).numpy().astype(np.int64)
        constant = (rewards.view(P, G) == rewards.view(P, G)[:, :1]).all(dim=1)                 # [P] advantage 0
        skip_constant = not (args.run_constant_groups or args.kl_loss_coef or args.entropy_coef)
        trained = ~(constant.repeat_interleave(G) & skip_constant).numpy()                      # [S]
        plan = plan_step(
            lengths, sequence_cost(lengths, hf_config), args.minibatches_per_step, world.size, args.max_tokens_per_gpu,
            seed=dist.seed_of(args.seed, step, "minibatches"), trained=trained,
            groups=np.arange(P * G) // G if args.policy.share_prompt else None, prompt_lengths=prompt_lengths.numpy(),
        )
        batch = batch.select(torch.from_numpy(np.flatnonzero(trained[batch.index.numpy()])))
        batch = exchange(batch, plan.rank[batch.index.numpy()])
        batch.mask &= rewards.isfinite()[batch.index][batch.sequence_ids]                       # no reward, no loss
        batch = batch.to(world.device)
        minibatches = [[batch.microbatch(shares[world.rank]) for shares in planned] for planned in plan.minibatches]

        # 3 log-probs: with one update per rollout, old is the detached current one and costs no forward
        if args.minibatches_per_step * args.epochs_per_step > 1:
            with timer("old_log_prob"):
                for microbatch in chain(*minibatches):
                    microbatch.old_logp = policy.score(microbatch, sampling.temperature)        # [T]
        if reference is not None:
            with timer("ref"):
                for microbatch in chain(*minibatches):
                    microbatch.ref_logp = reference.score(microbatch, sampling.temperature)     # [T]

        # 4 advantages
        advantages = ADVANTAGES[args.advantage](rewards.view(P, G), not args.no_norm_by_std).flatten()     # [S]
        for microbatch in chain(*minibatches):
            per_response = advantages.float().to(world.device)[microbatch.index]
            microbatch.advantage = per_response[microbatch.sequence_ids] * microbatch.mask      # [T]

        # 5 update
        lr = learning_rate(args.optim, step, args.total_steps)
        num_updates = args.minibatches_per_step * args.epochs_per_step
        with timer("update_actor"):
            for microbatches, idle in [*zip(minibatches, plan.idle)] * args.epochs_per_step:
                norm_length = args.rollout.max_response_length
                losses.set_weights(microbatches, args.aggregation, norm_length, response_lengths[idle])
                for microbatch in microbatches:                                                 # as many on every rank
                    logp, entropy = policy(microbatch, sampling.temperature, args.entropy_coef != 0)   # [T], [T]
                    losses.check_finite("logp", logp.detach(), microbatch)
                    old_logp = logp.detach() if microbatch.old_logp is None else microbatch.old_logp
                    loss, stats = loss_fn(logp, old_logp, microbatch.advantage, microbatch.mask, microbatch.cu_seqlens)
                    if args.correct_rollout:
                        rollout_logp = microbatch.rollout_logp
                        loss = loss * correction.truncated_weights(old_logp, rollout_logp, args.rollout_threshold)
                    meter.total("actor/pg_loss", (loss * microbatch.weight).sum(), per=num_updates)
                    if reference is not None:
                        kl = losses.kl_estimate(logp, microbatch.ref_logp, args.kl_estimator)   # [T]
                        loss = loss + args.kl_loss_coef * kl
                        meter.mean("actor/kl_loss", kl, microbatch.mask)
                    if args.entropy_coef:
                        loss = loss - args.entropy_coef * entropy
                    (world.size * (loss * microbatch.weight).sum()).backward()                  # FSDP averages: undo it
                    for name, values in stats.items():
                        meter.mean(name, values, microbatch.mask)
                    meter.mean("actor/entropy", entropy, microbatch.mask)
                    correction.measure(meter, microbatch, old_logp, args.rollout_threshold)
                grad_norm = optimizer_step(policy, optimizer, lr, args.optim.max_grad_norm)
                skipped_in_a_row = 0 if np.isfinite(grad_norm) else skipped_in_a_row + 1
                meter.total("actor/skipped_steps", float(not np.isfinite(grad_norm)), per=world.size)
                meter.total("actor/grad_norm", grad_norm, per=num_updates * world.size)
                if skipped_in_a_row >= args.max_skipped_steps:
                    raise RuntimeError(
                        f"step {step + 1}: the gradient norm was not finite {skipped_in_a_row} times in a row "
                        f"(--max-skipped-steps): lower --optim.lr, look at actor/ppo_kl and rollout_probs_diff_max"
                    )

        # 6 log, validate, save
        done, last = step + 1, step + 1 == args.total_steps
        if val_set is not None and (last or (args.eval_every and done % args.eval_every == 0)):
            with timer("testing"):
                engine.wake(policy)
                metrics |= evaluate(args, engine, val_set, pool, tokenizer)
                engine.sleep()
        if last or (args.save.every and done % args.save.every == 0):
            with timer("save_checkpoint"):
                state = {"step": done, "sampler": sampler.state_dict(), "tracker": tracker.state_dict(done)}
                checkpoint.save(args.run_dir, done, policy, optimizer, state, world, args.save.keep)
        update_flops = train_flops(lengths[trained], hf_config) * args.epochs_per_step
        metrics |= meter.reduce() | timer.metrics() | memory(world)
        metrics |= spread("critic/rewards", rewards[rewards.isfinite()]) | spread("critic/advantages", advantages)
        metrics |= spread("response_length", response_lengths) | spread("prompt_length", prompt_lengths)
        metrics |= {
            "training/global_step": done,
            "training/epoch": sampler.epoch,
            "actor/lr": lr,
            "reward/constant_group_frac": float(constant.double().mean()),
            "response_length/clip_ratio": float(truncated.mean()),
            "perf/total_num_tokens": int(lengths.sum()),
            "perf/throughput": lengths.sum() / metrics["timing_s/step"] / world.size,
            "perf/update_tflops": update_flops / timer.seconds["update_actor"] / 1e12 / world.size,
            "rollout/tokens_per_s": float(response_lengths.sum()) / timer.seconds["gen"],
        } | dict(zip(
            ("reward/error_frac", "reward/timeout_frac"),
            (dist.all_sum([scores.num_errors, scores.num_timeouts]) / (P * G)).tolist(),
        ))
        tracker.log(done, metrics, step_line(done, args.total_steps, metrics))

    if args.save.hf:
        checkpoint.export(policy, tokenizer, args.model, tracker.run_dir / "model", world)
    tracker.close()
    pool.close()
    engine.close()
    dist.shutdown()


def describe(args: Args, world: dist.World, attention: tuple[str, str]) -> str:
    """What this run does, in words and units."""
    P, G, M = args.prompts_per_step, args.samples_per_prompt, args.minibatches_per_step
    return (
        f"batch  {P} prompts x {G} samples = {P * G} responses a step; {M} mini-batch(es) of {P * G // M}, "
        f"{args.epochs_per_step} epoch(s); micro-batches of up to {args.max_tokens_per_gpu} tokens on each of "
        f"{world.size} rank(s)\n"
        f"loss   clip [{1 - args.clip_low:g}, {1 + args.clip_high:g}], dual {args.clip_dual:g}, {args.aggregation}, "
        f"KL coef {args.kl_loss_coef:g}, entropy coef {args.entropy_coef:g}; lr {args.optim.lr:g} "
        f"({args.optim.schedule})\n"
        f"runs   {args.policy.compute_dtype} on {world.device.type}, engine {args.rollout.engine}, "
        f"attention {attention[0]} ({attention[1]})"
    )


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except ValueError as error:
        fail(error)
