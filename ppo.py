"""PPO: proximal policy optimisation with a critic (Schulman et al. 2017, arXiv 1707.06347; for language models
Ziegler et al. 2019, arXiv 1909.08593).

A critic estimates the value V_t of the tokens so far; generalised advantage estimation (arXiv 1506.02438) turns the
rewards r_t (the score on the last token, minus kl_reward_coef KL(p_old || p_ref) on every token) into

    delta_t = r_t + gamma V_t+1 - V_t,    A_t = delta_t + gamma lam A_t+1 (then whitened),    returns_t = A_t + V_t
    loss = mean over tokens of  max(-A_t ratio_t, -A_t clip(ratio_t, 1 - clip_low, 1 + clip_high))
           [+ kl_loss_coef KL(p || p_ref)] [- entropy_coef H(p)]                 ratio_t = p(y_t) / p_old(y_t)
    critic = mean over tokens of  max((V_t - returns_t)^2, (clip(V_t, V_old +- value_clip) - returns_t)^2) / 2

    torchrun --standalone --nproc-per-node 8 ppo.py --model Qwen/Qwen2.5-1.5B-Instruct \\
        --train-data gsm8k/train.parquet --val-data gsm8k/test.parquet --run-dir runs/gsm8k_ppo
"""

import math
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Literal

import torch
import tyro
from torch.distributed.elastic.multiprocessing import errors
from transformers import AutoTokenizer

from common import correction, losses, seeds, segments
from common.batch import Batch
from common.checkpoint import export, manager
from common.checkpoint.signals import Watch
from common.correction import CorrectionConfig
from common.dataset.store import PromptSet, load_prompts
from common.engine.base import Engine, RolloutConfig, Sampling
from common.engine.make import check_rollout, make_engine, stop_tokens
from common.experience import Asked, Scoring, check_sizes, deal, gather_results, give_out, validation_metrics
from common.metrics import Meter, spread, step_metrics
from common.model.attention import choose_attention
from common.model.flops import train_flops
from common.model.loading import CAUSAL_LM, SCORED, load_critic, load_policy, read_config
from common.model.memory import resident_gb
from common.model.offload import Offload, OffloadConfig
from common.model.policy import ModelConfig
from common.model.reward_model import RewardModelConfig, check_reward_model
from common.optim import OptimConfig, learning_rate, make_optimizer, optimizer_step
from common.parallel import ranks
from common.prompts import DataConfig, PromptSampler
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
    run_dir: str = "runs/ppo"
    """Folder for metrics, checkpoints and the trained model."""
    seed: int = 0
    """Of everything random: prompt order, sampling, mini-batches."""
    total_steps: int = 100
    """Rollout-and-update rounds."""

    # batch sizes: global, over all ranks
    prompts_per_step: int = 128
    """Prompts sampled in one step, over all ranks."""
    samples_per_prompt: int = 1
    """G: responses per prompt, the group."""
    minibatches_per_step: int = 4
    """Optimizer steps per pass over the step's responses."""
    epochs_per_step: int = 1
    """Passes over the step's responses."""
    max_tokens_per_gpu: int = 16384
    """Token budget of one micro-batch (one forward and backward) on one rank. No effect on the gradient."""

    # the objective
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
    gamma: float = 1.0
    """Discount per token (rloo.py: of reinforce++, the only baseline with a return-to-go)."""
    lam: float = 1.0
    """Lambda of GAE: 1 trusts the rewards (no bias), 0 the critic (least variance)."""
    critic_model: str = ""
    """Hugging Face folder or hub name of the critic's backbone, or of a reward model. Default: --model."""
    critic_warmup_steps: int = 0
    """First steps that train only the critic."""
    value_clip: float = 0.5
    """A value may move this far from the old one before its error is clipped."""
    kl_reward_coef: float = 0.0
    """Factor of KL(old policy || reference) taken off every token's reward. 0 (and no KL in the loss): no reference
    model in memory."""
    kl_reward_estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    """Per-token estimate of the KL in the reward."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: kl_reward_coef moves so that the KL stays near --kl-target (Ziegler et al. 2019, sec. 2.2)."""
    kl_target: float = 0.1
    """Mean KL per token, in nats, that the adaptive controller aims at."""
    kl_horizon: float = 10000.0
    """Responses over which the adaptive controller corrects a relative error of 1."""
    kl_loss_coef: float = 0.0
    """Factor of KL(policy || reference) in the loss. 0: no reference model in memory."""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k3"
    """Per-token estimate of the KL; + keeps the value and uses the unbiased gradient."""
    entropy_coef: float = 0.0
    """Factor of the entropy bonus."""

    # validation
    eval_every: int = 10
    """Steps between validations; also before the first and after the last step. 0: only these two."""
    eval_n: int = 4
    """Sampled responses per validation prompt (mean@N, best@N, maj@N), besides the greedy one; 0: greedy only."""
    eval_temperature: float = 1.0
    """Temperature of the sampled ones."""

    policy: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    critic_optim: OptimConfig = field(default_factory=partial(OptimConfig, lr=1e-5))
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
    for name in ("gamma", "lam"):
        if not 0 <= getattr(args, name) <= 1:
            raise ValueError(f"--{name} {getattr(args, name)} must be in [0, 1]")
    if args.value_clip <= 0:
        raise ValueError(f"--value-clip {args.value_clip} must be above 0")
    if not 0 <= args.critic_warmup_steps < args.total_steps:
        raise ValueError(
            f"--critic-warmup-steps {args.critic_warmup_steps} must be from 0 to below --total-steps {args.total_steps}"
        )
    read_config(args.critic_model or args.model, args.policy, "--critic-model", CAUSAL_LM + SCORED)
    return losses.resolve_loss("ppo", args.clip_low, args.clip_high, args.clip_dual, args.aggregation)


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
    correct = correction.resolve(args.correction, "ppo")
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
    with_reference = bool(args.kl_loss_coef or args.kl_reward_coef)
    trainer_gb = resident_gb(hf_config, args.policy, args.offload, world.size, trained=2, frozen=with_reference)
    trainer_gb += check_reward_model(args.reward_model, args.policy, world.size)
    engine = make_engine(
        args.model, hf_config, args.rollout, args.policy, world, probe, stops, longest, args.seed, trainer_gb
    )
    policy = load_policy(args.model, args.policy, world)
    critic = load_critic(args.critic_model or args.model, args.policy, world)
    reference = load_policy(args.model, args.policy, world, frozen=True) if with_reference else None
    optimizer, critic_optimizer = make_optimizer(policy, args.optim), make_optimizer(critic, args.critic_optim)
    parts = {"policy": (policy, optimizer), "critic": (critic, critic_optimizer)}
    kl_target = args.kl_target if args.kl_controller == "adaptive" else None
    kl_in_reward = losses.KLController(args.kl_reward_coef, kl_target, args.kl_horizon)
    scoring.load_model(args.reward_model, args.policy, world)
    loss_fn = losses.make_loss("ppo", chosen)
    models, optimizers = [policy, critic] + [reference] * (reference is not None), [optimizer, critic_optimizer]
    engine.offload = Offload(args.offload, models, optimizers)
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
        kl_in_reward.coef = state["kl_coef"]
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
        rewards = results.rewards                                                               # [S]
        trained = torch.ones(len(rewards), dtype=torch.bool)                                    # [S]
        # trained is every token that was sampled: the stop token, responses that were cut
        minibatches, idle_lengths = deal(
            samples, results, trained, hf_config, world, num_minibatches=args.minibatches_per_step,
            max_tokens=args.max_tokens_per_gpu, seed=seeds.seed_of(args.seed, step, "minibatches"),
            share_groups_of=G if args.policy.share_prompt else 0,
        )

        # 3 log-probs: with one update per rollout, old is the detached current one and costs no forward; values
        num_updates = args.minibatches_per_step * args.epochs_per_step
        if correct.needs_old_logp(num_updates > 1 or args.kl_reward_coef > 0):
            with timer("old_log_prob"):
                for microbatch in chain(*minibatches):
                    microbatch.old_logp = policy.score(microbatch, sampling.temperature)        # [T]
        if reference is not None:
            with timer("ref"):
                for microbatch in chain(*minibatches):
                    microbatch.ref_logp = reference.score(microbatch, sampling.temperature)     # [T]

        correction.prepare(minibatches, P * G, correct, meter)
        with timer("values"):
            for microbatch in chain(*minibatches):
                microbatch.value = critic.score(microbatch)                                     # [T]

        # 4 advantages: on the CPU, as GAE walks from token to token
        with timer("adv"):
            batch = Batch.cat([*chain(*minibatches)]).to("cpu")
            score = rewards.nan_to_num().float()[batch.index]
            reward = losses.on_last_token(score, batch.mask, batch.cu_seqlens)                  # [T]
            if args.kl_reward_coef:
                kl = losses.kl_estimate(batch.old_logp, batch.ref_logp, args.kl_reward_estimator)   # [T]
                reward = reward - kl_in_reward.coef * kl
                meter.mean("actor/reward_kl_penalty", kl, batch.mask)
            advantage, returns = losses.gae(reward, batch.value, batch.mask, batch.cu_seqlens, args.gamma, args.lam)
            explained_variance = losses.explained_variance(batch.value, returns, batch.mask)
            advantage = segments.whiten(advantage, batch.mask)
            give_out(minibatches, advantage=advantage, returns=returns)
            for name, values in {"values": batch.value, "returns": returns, "advantages": advantage}.items():
                meter.spread(f"critic/{name}", values, batch.mask)

        # 5 update
        lr = learning_rate(args.optim, step, args.total_steps)
        critic_lr = learning_rate(args.critic_optim, step, args.total_steps)
        with timer("update_critic"):
            for microbatches, idle in [*zip(minibatches, idle_lengths)] * args.epochs_per_step:
                losses.set_weights(microbatches, chosen.aggregation, args.rollout.max_response_length, idle)
                for microbatch in microbatches:                                                 # as many on every rank
                    value = critic(microbatch)                                                  # [T]
                    losses.check_finite("value", value.detach(), microbatch)
                    loss, stats = losses.value_loss(
                        value, microbatch.value, microbatch.returns, microbatch.mask, args.value_clip
                    )
                    meter.total("critic/vf_loss", (loss * microbatch.weight).sum(), per=num_updates)
                    (world.size * (loss * microbatch.weight).sum()).backward()                  # FSDP averages: undo it
                    for name, values in stats.items():
                        meter.mean(name, values, microbatch.mask)
                grad_norm = optimizer_step(critic, critic_optimizer, critic_lr, args.critic_optim)
                meter.total("critic/grad_norm", grad_norm, per=num_updates * world.size)
                meter.total("critic/skipped_steps", not math.isfinite(grad_norm), per=world.size)
        actor_epochs = args.epochs_per_step if step >= args.critic_warmup_steps else 0
        num_microbatches = sum(map(len, minibatches)) * actor_epochs
        with timer("update_actor"), tracker.progress("update", num_microbatches) as advance:
            for microbatches, idle in [*zip(minibatches, idle_lengths)] * actor_epochs:
                # a token's weight is 1 / count: over the mini-batch on all ranks, whatever the micro-batches
                losses.set_weights(microbatches, chosen.aggregation, args.rollout.max_response_length, idle)
                for microbatch in microbatches:                                                 # as many on every rank
                    logp, entropy = policy(microbatch, sampling.temperature, args.entropy_coef != 0)   # [T], [T]
                    losses.check_finite("logp", logp.detach(), microbatch)
                    old_logp = logp.detach() if microbatch.old_logp is None else microbatch.old_logp
                    loss, stats = loss_fn(
                        logp, old_logp, microbatch.advantage, microbatch.mask, microbatch.cu_seqlens
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
        update_flops = train_flops(results.lengths[trained.numpy()], hf_config) * actor_epochs
        metrics |= step_metrics(
            meter, timer, world, results, minibatches, max_prompt_length=args.data.max_prompt_length,
            max_response_length=args.rollout.max_response_length, update_flops=update_flops, peak_flops=peak,
        )
        record.write(tokenizer, samples, rewards.flatten())
        metrics |= spread("critic/score", results.rewards[results.rewards.isfinite()])
        metrics |= spread("critic/rewards", rewards[rewards.isfinite()])
        metrics |= {
            "training/global_step": done,
            "training/epoch": sampler.epoch,
            "actor/lr": lr,
            "critic/lr": critic_lr,
            "critic/vf_explained_var": explained_variance,
        }
        metrics["actor/kl_coef"] = kl_in_reward.coef
        kl_in_reward.update(metrics.get("actor/reward_kl_penalty", 0.0), P * G)
        tracker.log(done, metrics, step_line(done, args.total_steps, metrics))
        state = {"step": done, "sampler": sampler.state_dict(), "tracker": tracker.state_dict(done)}
        state["kl_coef"] = kl_in_reward.coef
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
        f"loss   {', '.join(['ppo', *bounds, chosen.aggregation])}; KL coef {args.kl_loss_coef:g}, in the reward "
        f"{args.kl_reward_coef:g} ({args.kl_controller}), entropy coef {args.entropy_coef:g}; lr {args.optim.lr:g} "
        f"({args.optim.schedule}); GAE gamma {args.gamma:g}, lambda {args.lam:g}; critic lr {args.critic_optim.lr:g}\n"
        f"runs   {args.policy.compute_dtype} on {world.device.type}, engine {args.rollout.engine}, "
        f"attention {attention[0]} ({attention[1]})"
    )


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except ValueError as error:
        fail(error)
