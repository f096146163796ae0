"""GRPO: group-relative policy optimisation (Shao et al. 2024, arXiv 2402.03300).

For every prompt sample a group of G responses, score them, and give each its reward relative to its group:

    A_i = (R_i - mean_g) / (std_g + 1e-6)                                         ratio_t = p(y_t) / p_old(y_t)
    loss = mean over tokens of  max(-A ratio_t, -A clip(ratio_t, 1 - clip_low, 1 + clip_high))
           [+ kl_loss_coef KL(p || p_ref)] [- entropy_coef H(p)]

    torchrun --standalone --nproc-per-node 8 grpo.py --model Qwen/Qwen2.5-1.5B-Instruct \\
        --train-data gsm8k/train.parquet --val-data gsm8k/test.parquet --run-dir runs/gsm8k
"""

import math
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Literal

import torch
import tyro
from torch import Tensor
from torch.distributed.elastic.multiprocessing import errors
from transformers import AutoTokenizer

from common import correction, losses, seeds
from common.checkpoint import export, manager
from common.checkpoint.signals import Watch
from common.correction import CorrectionConfig
from common.dataset.store import PromptSet, load_prompts
from common.engine.base import Engine, RolloutConfig, Sampling
from common.engine.make import check_rollout, make_engine, stop_tokens
from common.experience import Asked, Scoring, check_sizes, deal, gather_results, validation_metrics
from common.metrics import Meter, spread, step_metrics
from common.model.attention import choose_attention
from common.model.flops import train_flops
from common.model.loading import load_policy, read_config
from common.model.memory import resident_gb
from common.model.offload import Offload, OffloadConfig
from common.model.policy import ModelConfig
from common.model.reward_model import RewardModelConfig, check_reward_model
from common.optim import OptimConfig, learning_rate, make_optimizer, optimizer_step
from common.parallel import ranks
from common.prompts import DataConfig, PromptSampler
from common.selection import SELECTED, select
from common.tracking.console import batch_line, fail, say, step_line, val_line
from common.tracking.logger import LogConfig, Tracker
from common.tracking.profiling import peak_flops
from common.tracking.rollouts import Record
from common.tracking.timer import Timer
from rewards.runtime.pool import RewardConfig


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
    loss: Literal[
        "grpo", "dr_grpo", "gspo", "gmpo", "cispo", "sapo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl"
    ] = "grpo"
    """Loss of a token: a function in common/losses.py. dr_grpo is Dr.GRPO's denominator; add --no-norm-by-std."""
    clip_low: float | None = None
    """Lower clip: the ratio counts down to 1 - clip_low. Default: of the loss's paper, printed at the start."""
    clip_high: float | None = None
    """Upper clip: the ratio counts up to 1 + clip_high. Default: of the loss's paper."""
    clip_dual: float | None = None
    """Where the advantage is negative, the loss is capped at -A * clip_dual (dual clip, arXiv 1912.09729). Default: 3
    for the losses of PPO's form, absent in the others."""
    aggregation: losses.Aggregation | None = None
    """From token losses to one number, over the global mini-batch. Default: of the loss's paper, printed at the start
    (grpo, ppo, dapo, rloo: token-mean; the GRPO paper's own is seq-mean-token-mean)."""
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

    # validation
    eval_every: int = 10
    """Steps between validations; also before the first and after the last step. 0: only these two."""
    eval_n: int = 4
    """Sampled responses per validation prompt (mean@N, best@N, maj@N), besides the greedy one; 0: greedy only."""
    eval_temperature: float = 1.0
    """Temperature of the sampled ones."""

    policy: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    save: manager.SaveConfig = field(default_factory=manager.SaveConfig)
    log: LogConfig = field(default_factory=LogConfig)


def check(args: Args, world: ranks.World) -> losses.LossDefaults:
    """Refuse flags that cannot work, before anything heavy. Returns the loss's bounds and aggregation."""
    check_sizes(
        world, args.rollout.tp, args.prompts_per_step, args.samples_per_prompt, args.minibatches_per_step,
        epochs_per_step=args.epochs_per_step, max_tokens_per_gpu=args.max_tokens_per_gpu, total_steps=args.total_steps,
    )
    if args.samples_per_prompt < 2:
        raise ValueError(f"--samples-per-prompt {args.samples_per_prompt}: a group of one has no baseline, at least 2")
    return losses.resolve_loss(args.loss, args.clip_low, args.clip_high, args.clip_dual, args.aggregation)


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


def evaluate(args: Args, engine: Engine, scoring: Scoring, prompts: PromptSet) -> dict[str, float]:
    """Scores per data source with the weights in the engine: greedy, and over `eval_n` sampled responses a prompt."""
    metrics, meter = {}, Meter()
    for num_samples, temperature in [(1, 0.0)] + [(args.eval_n, args.eval_temperature)] * (args.eval_n > 0):
        sampling = Sampling.validation(args.rollout, temperature)
        rows = range(len(prompts))
        asked = Asked(engine, scoring, prompts, rows, num_samples, sampling, args.seed, "val")
        metrics |= validation_metrics(asked.collect(meter), num_samples, greedy=temperature == 0)
    return metrics | {f"val-aux/{name}": value for name, value in meter.reduce().items()}


@errors.record  # torchrun prints a failed rank's traceback last
def main(args: Args) -> None:
    # setup
    world = ranks.init()
    watch = Watch(args.save.timeout_s)
    chosen = check(args, world)
    correct = correction.resolve(args.correction, args.loss)
    hf_config = read_config(args.model, args.policy)
    corrected = correct.weights != "none" or correct.bypass
    longest = check_rollout(args.rollout, hf_config, world, args.data.max_prompt_length, corrected)
    seeds.seed_everything(args.seed)

    # data and rewards
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=args.policy.trust_remote_code)
    train_set = load_prompts(args.train_data, tokenizer, args.data)
    val_set = load_prompts(args.val_data, tokenizer, args.data) if args.val_data else None
    sampler = PromptSampler(len(train_set), args.seed)
    for name, prompts in {"train": train_set, "val": val_set}.items():
        if prompts is not None:
            say(world, f"{name:5}  {prompts.summary()}")
            prompts.write_skipped(f"{args.run_dir}/skipped_{name}.jsonl")
    sources = {*train_set.data_sources, *(val_set.data_sources if val_set is not None else ())}
    scoring = Scoring(tokenizer, args.reward, args.reward_model, sources)

    # engine, then models: the engine reads free memory as it starts
    probe = [prompt.tokens for prompt in train_set[:4]]
    stops = stop_tokens(args.model, tokenizer)
    frozen = int(args.kl_loss_coef != 0)
    trainer_gb = resident_gb(hf_config, args.policy, args.offload, world.size, trained=1, frozen=frozen)
    trainer_gb += check_reward_model(args.reward_model, args.policy, world.size)
    engine = make_engine(
        args.model, hf_config, args.rollout, args.policy, world, probe, stops, longest, args.seed, trainer_gb
    )
    policy = load_policy(args.model, args.policy, world)
    reference = load_policy(args.model, args.policy, world, frozen=True) if args.kl_loss_coef else None
    optimizer = make_optimizer(policy, args.optim)
    parts = {"policy": (policy, optimizer)}
    scoring.load_model(args.reward_model, args.policy, world)
    loss_fn = losses.make_loss(args.loss, chosen)
    engine.offload = Offload(args.offload, [policy] + [reference] * (reference is not None), [optimizer])
    sampling = Sampling.training(args.rollout)
    attention = choose_attention(world.device, hf_config, args.policy.attention, args.policy.share_prompt)
    say(world, describe(args, chosen, world, attention))

    # resume
    files = export.hf_files(args.model, policy.lm.config, tokenizer)
    checkpoints = manager.Checkpoints(args.save, args.run_dir, args, world, parts, files, watch)
    state = checkpoints.resume()
    tracker = Tracker(args.log, args.run_dir, args, world, state.get("tracker", {}))
    first_step = 0
    if state:
        first_step = state["step"]
        sampler.load_state_dict(state["sampler"])
    elif val_set is not None:
        engine.wake(policy)
        with tracker.progress("validation", len(engine.deal(len(val_set))) * (1 + args.eval_n)) as scoring.advance:
            metrics = evaluate(args, engine, scoring, val_set)
        engine.sleep()
        tracker.log(0, metrics, val_line("before training", metrics))
        checkpoints.check()

    P, G = args.prompts_per_step, args.samples_per_prompt
    peak = peak_flops(world, args.policy.compute_dtype)
    for step in range(first_step, args.total_steps):
        tracker.begin(step + 1)
        timer, meter = Timer(tracker.run_dir, watch.phase), Meter()
        record = Record(args.log, tracker.run_dir, step + 1, G)

        # 1 rollout: scoring starts as each response ends
        metrics = engine.wake(policy) | checkpoints.metrics()
        with timer("gen"), tracker.progress("rollout", len(engine.deal(P)) * G) as scoring.advance:
            seed, stop = (args.seed, step), checkpoints.stopping
            asked = Asked(engine, scoring, train_set, sampler.take(P), G, sampling, *seed, stop=stop)
        metrics |= engine.sleep()
        checkpoints.check()

        # 2 reward: now known everywhere; then each response moves to the rank that trains on it
        with timer("reward"):
            samples = asked.collect(meter)
        results = gather_results(samples)                                                       # [S] each
        rewards = results.rewards.view(P, G)
        constant = (rewards == rewards[:, :1]).all(dim=1)                                       # [P] advantage 0
        all_count = args.kl_loss_coef or args.entropy_coef or correct.needs_old_logp() or args.loss in SELECTED
        skip_constant = not (args.run_constant_groups or all_count)
        trained = ~(constant & skip_constant).repeat_interleave(G)                              # [S]
        # trained is every token that was sampled: the stop token, responses that were cut
        minibatches, idle_lengths = deal(
            samples, results, trained, hf_config, world, num_minibatches=args.minibatches_per_step,
            max_tokens=args.max_tokens_per_gpu, seed=seeds.seed_of(args.seed, step, "minibatches"),
            share_groups_of=G if args.policy.share_prompt else 0,
        )

        # 3 log-probs: with one update per rollout, old is the detached current one and costs no forward
        num_updates = args.minibatches_per_step * args.epochs_per_step
        if correct.needs_old_logp(num_updates > 1 or args.loss in SELECTED):
            with timer("old_log_prob"):
                for microbatch in chain(*minibatches):
                    microbatch.old_logp = policy.score(microbatch, sampling.temperature)        # [T]
        if reference is not None:
            with timer("ref"):
                for microbatch in chain(*minibatches):
                    microbatch.ref_logp = reference.score(microbatch, sampling.temperature)     # [T]

        rejected = correction.prepare(minibatches, P * G, correct, meter)                       # [S] leave their group

        # 4 advantages
        rewards = torch.where(rejected.view(P, G), torch.nan, rewards)
        advantages = ADVANTAGES[args.advantage](rewards, not args.no_norm_by_std).flatten()     # [S]
        for microbatch in chain(*minibatches):
            per_response = advantages.float().to(world.device)[microbatch.index]
            microbatch.advantage = per_response[microbatch.sequence_ids] * microbatch.mask      # [T]

        # 5 update
        lr = learning_rate(args.optim, step, args.total_steps)
        num_microbatches = sum(map(len, minibatches)) * args.epochs_per_step
        with timer("update_actor"), tracker.progress("update", num_microbatches) as advance:
            for update, (microbatches, idle) in enumerate([*zip(minibatches, idle_lengths)] * args.epochs_per_step):
                # a token's weight is 1 / count: over the mini-batch on all ranks, whatever the micro-batches
                losses.set_weights(microbatches, chosen.aggregation, args.rollout.max_response_length, idle)
                score = partial(policy.score, temperature=sampling.temperature)
                selected = select(args.loss, microbatches, score, seeds.seed_of(args.seed, step, update), chosen)
                for microbatch, chosen_tokens in zip(microbatches, selected):                   # as many on every rank
                    logp, entropy = policy(microbatch, sampling.temperature, args.entropy_coef != 0)   # [T], [T]
                    losses.check_finite("logp", logp.detach(), microbatch)
                    old_logp = logp.detach() if microbatch.old_logp is None else microbatch.old_logp
                    loss, stats = loss_fn(
                        logp, old_logp, microbatch.advantage, microbatch.mask, microbatch.cu_seqlens, **chosen_tokens
                    )
                    loss = loss * correction.weights(microbatch, logp, correct, meter)
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
                    record.add(microbatch, logp, entropy, stats)
                    advance()
                    checkpoints.check()
                grad_norm = optimizer_step(policy, optimizer, lr, args.optim)
                meter.total("actor/grad_norm", grad_norm, per=num_updates * world.size)
                meter.total("actor/skipped_steps", not math.isfinite(grad_norm), per=world.size)

        # 6 log, validate, save
        done, last = step + 1, step + 1 == args.total_steps
        if val_set is not None and (last or (args.eval_every and done % args.eval_every == 0)):
            num_asked = len(engine.deal(len(val_set))) * (1 + args.eval_n)
            with timer("testing"), tracker.progress("validation", num_asked) as scoring.advance:
                engine.wake(policy)
                metrics |= evaluate(args, engine, scoring, val_set)
                engine.sleep()
        update_flops = train_flops(results.lengths[trained.numpy()], hf_config) * args.epochs_per_step
        metrics |= step_metrics(
            meter, timer, world, results, minibatches, max_prompt_length=args.data.max_prompt_length,
            max_response_length=args.rollout.max_response_length, update_flops=update_flops, peak_flops=peak,
        )
        record.write(tokenizer, samples, rewards.flatten())
        metrics |= spread("critic/score", results.rewards[results.rewards.isfinite()])
        metrics |= spread("critic/rewards", rewards[rewards.isfinite()]) | spread("critic/advantages", advantages)
        metrics |= {
            "training/global_step": done,
            "training/epoch": sampler.epoch,
            "actor/lr": lr,
            "reward/constant_group_frac": float(constant.double().mean()),
        }
        tracker.log(done, metrics, step_line(done, args.total_steps, metrics))
        state = {"step": done, "sampler": sampler.state_dict(), "tracker": tracker.state_dict(done)}
        checkpoints.after_step(state, last, manager.validation_score(metrics))

    if args.save.hf != "never":
        export.export(policy, files, tracker.run_dir / "model", world)
    checkpoints.close()
    tracker.close()
    scoring.close()
    engine.close()
    ranks.shutdown()


def describe(args: Args, chosen: losses.LossDefaults, world: ranks.World, attention: tuple[str, str]) -> str:
    """What this run does, in words and units."""
    P, G, M = args.prompts_per_step, args.samples_per_prompt, args.minibatches_per_step
    bounds = [f"{name} {value:g}" for name, value in chosen._asdict().items() if isinstance(value, float)]
    longest = args.data.max_prompt_length + args.rollout.max_response_length
    return (
        f"batch  {batch_line(P, G, M, args.epochs_per_step, args.max_tokens_per_gpu, longest, world.size)}\n"
        f"loss   {', '.join([args.loss, *bounds, chosen.aggregation])}; KL coef {args.kl_loss_coef:g}, "
        f"entropy coef {args.entropy_coef:g}; lr {args.optim.lr:g} ({args.optim.schedule})\n"
        f"runs   {args.policy.compute_dtype} on {world.device.type}, engine {args.rollout.engine}, "
        f"attention {attention[0]} ({attention[1]})"
    )


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except ValueError as error:
        fail(error)
