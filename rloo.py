"""RLOO and its relatives: REINFORCE with a baseline, no critic (Ahmadian et al. 2024, arXiv 2402.14740).

For every prompt sample G responses, score them, and subtract a baseline that does not depend on the response:

    R_i = score_i - kl_reward_coef sum_t KL(p_old || p_ref)_t         rloo: A_i = R_i - mean of the group's other R
    loss = mean over tokens of  -A_i log p(y_t)                       --baseline NAME: another one, see BASELINES
           [with --clip: max(-A ratio_t, -A clip(ratio_t, 1 - clip, 1 + clip))] [- entropy_coef H(p)]

    torchrun --standalone --nproc-per-node 8 rloo.py --model Qwen/Qwen2.5-1.5B-Instruct \\
        --train-data gsm8k/train.parquet --val-data gsm8k/test.parquet --run-dir runs/gsm8k_rloo
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple

import torch
import tyro
from torch import Tensor
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
from common.model.loading import load_policy, read_config
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
    run_dir: str = "runs/rloo"
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
    baseline: Literal["rloo", "reinforce++", "reinforce++-baseline", "remax", "opo", "gpg"] = "rloo"
    """What is subtracted from a reward: a function in this file. remax samples one greedy response more a prompt."""
    clip: float = 0.0
    """0: plain REINFORCE, no importance ratio. Above: PPO's ratio, clipped to 1 - clip and 1 + clip."""
    aggregation: losses.Aggregation | None = None
    """From token losses to one number, over the global mini-batch. Default: of the loss's paper, printed at the start
    (grpo, ppo, dapo, rloo: token-mean; the GRPO paper's own is seq-mean-token-mean)."""
    gamma: float = 1.0
    """Discount per token (rloo.py: of reinforce++, the only baseline with a return-to-go)."""
    kl_reward_coef: float = 0.0
    """Factor of KL(old policy || reference) taken off every token's reward. 0 (and no KL in the loss): no reference
    model in memory."""
    kl_reward_estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    """Per-token estimate of the KL in the reward."""
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
    least = BASELINES[args.baseline].least_samples
    if args.samples_per_prompt < least:
        raise ValueError(f"--samples-per-prompt {args.samples_per_prompt}: --baseline {args.baseline} needs {least}")
    for name in ("gamma", "clip"):
        if not 0 <= getattr(args, name) <= 1:
            raise ValueError(f"--{name} {getattr(args, name)} must be in [0, 1]")
    clip = args.clip or None
    return losses.resolve_loss("ppo" if clip else "reinforce", clip, clip, None, args.aggregation)


def leave_one_out(rewards: Tensor, lengths: Tensor, greedy: Tensor) -> Tensor:
    """RLOO (Ahmadian et al. 2024): R_i minus the mean of the others of its group. Group of one scored response: 0."""
    num_scored = rewards.isfinite().sum(dim=1, keepdim=True)                                    # [P, 1]
    return (rewards - rewards.nanmean(dim=1, keepdim=True)) * num_scored / (num_scored - 1).clamp(min=1)


def no_baseline(rewards: Tensor, lengths: Tensor, greedy: Tensor) -> Tensor:
    """REINFORCE++ (Hu 2025, arXiv 2501.03262): the reward itself; whitening over all tokens is the baseline."""
    return rewards


def group_mean_baseline(rewards: Tensor, lengths: Tensor, greedy: Tensor) -> Tensor:
    """REINFORCE++-baseline (the same, sec. 3): R_i minus the group's mean, whitened over all tokens."""
    return rewards - rewards.nanmean(dim=1, keepdim=True)


def greedy_baseline(rewards: Tensor, lengths: Tensor, greedy: Tensor) -> Tensor:
    """ReMax (Li et al. 2023, arXiv 2310.10505): R_i minus the score of the greedy response [P]."""
    return rewards - greedy[:, None]


def length_weighted_baseline(rewards: Tensor, lengths: Tensor, greedy: Tensor) -> Tensor:
    """OPO (Hao et al. 2025, arXiv 2505.23585): R_i minus the group's mean weighted by response length."""
    weights = lengths * rewards.isfinite()                                                      # [P, G]
    total = weights.sum(dim=1, keepdim=True).clamp(min=1)
    return rewards - (rewards.nan_to_num() * weights).sum(dim=1, keepdim=True) / total


def scaled_baseline(rewards: Tensor, lengths: Tensor, greedy: Tensor) -> Tensor:
    """GPG (Chu et al. 2025, arXiv 2504.02546): alpha (R_i - group mean), alpha = responses / non-zero rewards."""
    num_nonzero = (rewards.nan_to_num() != 0).sum().clamp(min=1)
    return rewards.numel() / num_nonzero * (rewards - rewards.nanmean(dim=1, keepdim=True))


class Baseline(NamedTuple):
    """How `--baseline NAME` turns rewards [P, G], response lengths [P, G] and the greedy response's rewards [P] into
    advantages [P, G]; NaN: no reward."""

    function: Callable[[Tensor, Tensor, Tensor], Tensor]
    least_samples: int = 2
    per_token: bool = False  # the return-to-go of each token, not one number a response
    whiten: bool = False  # over all tokens of the step
    greedy: bool = False  # needs the greedy response


BASELINES = {
    "rloo": Baseline(leave_one_out),
    "reinforce++": Baseline(no_baseline, least_samples=1, per_token=True, whiten=True),
    "reinforce++-baseline": Baseline(group_mean_baseline, whiten=True),
    "remax": Baseline(greedy_baseline, least_samples=1, greedy=True),
    "opo": Baseline(length_weighted_baseline),
    "gpg": Baseline(scaled_baseline),
}


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
    correct = correction.resolve(args.correction, "ppo" if args.clip else "reinforce")
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
    frozen = int(args.kl_reward_coef != 0)
    trainer_gb = resident_gb(hf_config, args.policy, args.offload, world.size, trained=1, frozen=frozen)
    trainer_gb += check_reward_model(args.reward_model, args.policy, world.size)
    engine = make_engine(
        args.model, hf_config, args.rollout, args.policy, world, probe, stops, longest, args.seed, trainer_gb
    )
    policy = load_policy(args.model, args.policy, world)
    reference = load_policy(args.model, args.policy, world, frozen=True) if args.kl_reward_coef else None
    optimizer = make_optimizer(policy, args.optim)
    parts = {"policy": (policy, optimizer)}
    baseline = BASELINES[args.baseline]
    scoring.load_model(args.reward_model, args.policy, world)
    loss_fn = losses.make_loss("ppo" if args.clip else "reinforce", chosen)
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
            rows, greedy = sampler.take(P), torch.zeros(P)
            if baseline.greedy:
                once = Sampling.validation(args.rollout, 0.0)
                asked = Asked(engine, scoring, train_set, rows, 1, once, args.seed, step)
                greedy = gather_results(asked.collect(meter)).rewards                           # [P]
            seed, stop = (args.seed, step), checkpoints.stopping
            asked = Asked(engine, scoring, train_set, rows, G, sampling, *seed, stop=stop)
        metrics |= engine.sleep()
        checkpoints.check()

        # 2 reward: now known everywhere; then each response moves to the rank that trains on it
        with timer("reward"):
            samples = asked.collect(meter)
        results = gather_results(samples)                                                       # [S] each
        rewards = results.rewards.view(P, G)
        constant = (rewards == rewards[:, :1]).all(dim=1)                                       # [P] advantage 0
        all_count = args.kl_reward_coef or args.entropy_coef or correct.needs_old_logp()
        skip_constant = not (args.run_constant_groups or all_count or baseline.whiten or baseline.greedy)
        trained = ~(constant & skip_constant).repeat_interleave(G)                              # [S]
        # trained is every token that was sampled: the stop token, responses that were cut
        minibatches, idle_lengths = deal(
            samples, results, trained, hf_config, world, num_minibatches=args.minibatches_per_step,
            max_tokens=args.max_tokens_per_gpu, seed=seeds.seed_of(args.seed, step, "minibatches"),
            share_groups_of=G if args.policy.share_prompt else 0,
        )

        # 3 log-probs: with one update per rollout, old is the detached current one and costs no forward
        num_updates = args.minibatches_per_step * args.epochs_per_step
        if correct.needs_old_logp(num_updates > 1 or args.kl_reward_coef > 0):
            with timer("old_log_prob"):
                for microbatch in chain(*minibatches):
                    microbatch.old_logp = policy.score(microbatch, sampling.temperature)        # [T]
        if reference is not None:
            with timer("ref"):
                for microbatch in chain(*minibatches):
                    microbatch.ref_logp = reference.score(microbatch, sampling.temperature)     # [T]

        rejected = correction.prepare(minibatches, P * G, correct, meter)                       # [S] leave their group

        # 4 advantages: on the CPU, as a return-to-go walks from token to token
        with timer("adv"):
            rewards = torch.where(rejected.view(P, G), torch.nan, rewards)
            batch = Batch.cat([*chain(*minibatches)]).to("cpu")
            penalty = torch.zeros(len(batch.tokens))                                            # [T]
            if args.kl_reward_coef:
                kl = losses.kl_estimate(batch.old_logp, batch.ref_logp, args.kl_reward_estimator)   # [T]
                penalty = -args.kl_reward_coef * kl * batch.mask
                meter.mean("actor/reward_kl_penalty", kl, batch.mask)
            if not baseline.per_token:                                  # then it is a part of the response's reward
                real, total = batch.index >= 0, torch.zeros(P * G, dtype=torch.float64)
                total[batch.index[real]] = segments.segment_sum(penalty.double(), batch.cu_seqlens)[real]
                rewards, penalty = rewards + ranks.all_sum(total).view(P, G), torch.zeros_like(penalty)
            advantages = baseline.function(rewards, results.response_lengths.view(P, G), greedy).nan_to_num().flatten()
            reward = losses.on_last_token(advantages.float()[batch.index], batch.mask, batch.cu_seqlens) + penalty
            gamma = args.gamma if baseline.per_token else 1.0
            advantage, _ = losses.gae(reward, torch.zeros_like(reward), batch.mask, batch.cu_seqlens, gamma, lam=1.0)
            if baseline.whiten:
                advantage = segments.whiten(advantage, batch.mask)
            give_out(minibatches, advantage=advantage)

        # 5 update
        lr = learning_rate(args.optim, step, args.total_steps)
        num_microbatches = sum(map(len, minibatches)) * args.epochs_per_step
        with timer("update_actor"), tracker.progress("update", num_microbatches) as advance:
            for microbatches, idle in [*zip(minibatches, idle_lengths)] * args.epochs_per_step:
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
        f"loss   {args.baseline}, {', '.join(['REINFORCE', *bounds, chosen.aggregation])}; KL in the reward "
        f"{args.kl_reward_coef:g}, entropy coef {args.entropy_coef:g}; lr {args.optim.lr:g} ({args.optim.schedule})\n"
        f"runs   {args.policy.compute_dtype} on {world.device.type}, engine {args.rollout.engine}, "
        f"attention {attention[0]} ({attention[1]})"
    )


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except ValueError as error:
        fail(error)
