"""All that surrounds a training loop: ranks, data, scoring, engine, models, resume, logging, validation, saving.

`Run` is a helper, not a framework. It has no hooks, is never subclassed, never calls back into the script, and knows
nothing of what is optimised: the loop, its phases and every formula are in the script.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AutoTokenizer

from common.batch import Batch
from common.checkpoint.export import export, hf_files
from common.checkpoint.manager import Checkpoints, SaveConfig, validation_score
from common.checkpoint.run_folder import is_finished, open_run_folder
from common.checkpoint.signals import Watchdog
from common.correction import CorrectionConfig
from common.dataset.store import load_prompts
from common.engine.base import Engine, RolloutConfig, SamplingConfig, validation_sampling
from common.engine.make import check_rollout, make_engine, stop_tokens
from common.engine.scoring import PendingRollout, Scoring, start_rollout
from common.metrics import Meter
from common.model.flops import update_flops
from common.model.loading import load_critic, load_policy, read_config
from common.model.memory_plan import MemoryPlan
from common.model.offload import Offload, OffloadConfig
from common.model.policy import Critic, ModelConfig, PackedModel, Policy
from common.model.reward_model import RewardModel, RewardModelConfig
from common.optim import OptimConfig, learning_rate, make_optimizer, optimizer_step
from common.parallel import ranks
from common.prompts import DataConfig, PromptSampler
from common.rollout import Minibatch, Rollout, to_minibatches
from common.tracking.console import print_on_main, start_screen, step_line, summary, val_line
from common.tracking.logger import LogConfig, Tracker
from common.tracking.profiling import Timer, peak_flops
from common.tracking.rollouts import Record, write_validation
from common.tracking.step import step_metrics
from common.tracking.validation import evaluate, spread_rows
from rewards.runtime.pool import RewardConfig


@dataclass
class RunArgs:
    """Flags that every script has."""

    model: str
    """Hugging Face folder or hub name of the policy."""
    train_data: tuple[str, ...]
    """Parquet or JSON-lines files, folders or globs with verl's columns."""
    val_data: tuple[str, ...] = ()
    """Validation files, in the same columns."""
    run_dir: str = "runs/run"
    """Folder for metrics, checkpoints and the trained model."""
    seed: int = 0
    """Random seed of prompt order, sampling and mini-batches."""
    total_steps: int = 100
    """Rollout-and-update rounds."""

    # validation
    eval_every: int = 10
    """Steps between validations; also before the first and after the last step. 0: only these two."""
    eval_prompts: int = 512
    """Most validation prompts, spread evenly over the files; 0: all."""
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
    save: SaveConfig = field(default_factory=SaveConfig)
    log: LogConfig = field(default_factory=LogConfig)


class Run:
    """One run of a script, from `with Run(args) as run:` to the end of that block."""

    def __init__(self, args: RunArgs, is_corrected: bool = False):
        """`is_corrected`: see `check_rollout`."""
        self.args = args
        self.is_corrected = is_corrected
        self.models: dict[str, PackedModel] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.script_state: dict[str, Any] = {}
        """What the script adds to a checkpoint beside models and optimizers, plain JSON; it is back after `resume`."""

    # ---- setup

    def __enter__(self) -> Self:
        """Join the ranks, check the flags, take the run folder, read data, start the reward workers."""
        args = self.args
        self.watchdog = Watchdog(args.save.timeout_s)  # before the ranks meet: one of them may never come
        self.world = ranks.init(args.save.timeout_s)
        if is_finished(args, self.world):
            ranks.shutdown()
            sys.exit(0)
        open_run_folder(args.run_dir, self.world)
        self.hf_config = read_config(args.model, args.policy)
        self.max_sequence_length = check_rollout(
            args.rollout, self.hf_config, self.world, args.data.max_prompt_length, self.is_corrected
        )
        self.tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=args.policy.trust_remote_code)
        self.train_set = load_prompts(args.train_data, self.tokenizer, args.data)
        self.val_set = load_prompts(args.val_data, self.tokenizer, args.data) if args.val_data else None
        self.sampler = PromptSampler(len(self.train_set), self.train_set.loaded.data_hash, args.seed)
        sources = set()
        for name, prompts in {"train": self.train_set, "val": self.val_set}.items():
            if prompts is not None:
                print_on_main(self.world, f"{name:5}  {prompts.summary()}")
                prompts.write_skipped(f"{args.run_dir}/skipped_{name}.jsonl")
                sources |= set(prompts.loaded.data_sources)
        self.scoring = Scoring(self.tokenizer, args.reward, args.reward_model, sources)
        return self

    def plan_memory(self, max_tokens: int, reference: bool = False, critic: str = "") -> int:
        """Return the token budget of a micro-batch: `max_tokens`, or if that is 0 the largest that fits. `reference`: a
        frozen policy will be loaded; `critic`: folder of a second model that will be trained."""
        self.plan = MemoryPlan(self.args, self.hf_config, self.world.size, self.max_sequence_length, reference, critic)
        return self.plan.choose_budget(max_tokens, self.world.device)

    def start_engine(self) -> Engine:
        """Start the engine before the models, because it reads how much memory is free."""
        args = self.args
        self.watchdog.phase("start of the engine")
        probe = [prompt.tokens for prompt in self.train_set[:4]]
        stops = stop_tokens(args.model, self.tokenizer)
        self.engine = make_engine(
            args.model, self.hf_config, args.rollout, args.policy, self.world, probe, stops, self.max_sequence_length,
            args.seed, sum(self.plan.beside_engine().values()),
        )
        ranks.seed_everything(args.seed)
        return self.engine

    def load_policy(self) -> tuple[Policy, torch.optim.Optimizer]:
        self.watchdog.phase("loading models")
        self.models["policy"] = load_policy(self.args.model, self.args.policy, self.world)
        self.optimizers["policy"] = make_optimizer(self.models["policy"], self.args.optim)
        return self.models["policy"], self.optimizers["policy"]

    def load_critic(self, path: str, optim: OptimConfig) -> tuple[Critic, torch.optim.Optimizer]:
        self.models["critic"] = load_critic(path, self.args.policy, self.world)
        self.optimizers["critic"] = make_optimizer(self.models["critic"], optim)
        return self.models["critic"], self.optimizers["critic"]

    def load_reference(self) -> Policy:
        """The policy's model as it is before training, frozen."""
        self.models["reference"] = load_policy(self.args.model, self.args.policy, self.world, frozen=True)
        return self.models["reference"]

    def describe(self, objective: str, *sizes: int) -> None:
        """Print what this run does, in words and units. `objective`: one line from the script. `sizes`: prompts and
        samples a step, mini-batches, epochs, tokens of a micro-batch."""
        print_on_main(
            self.world, start_screen(self.args, self.world, self.hf_config, self.plan, objective, sizes)
        )

    def resume(self) -> None:
        """Continue from a checkpoint as --save.resume says: weights, optimizers, the order of prompts,
        `script_state`. All models must be loaded by now."""
        args = self.args
        if args.reward_model.path:
            self.scoring.model = RewardModel(args.reward_model, args.policy, self.world)
        self.engine.offload = Offload(args.offload, list(self.models.values()), list(self.optimizers.values()))
        self.policy = self.models["policy"]
        self.hf_files = hf_files(args.model, self.policy.lm.config, self.tokenizer, args.policy.compute_dtype)
        parts = {name: (self.models[name], optimizer) for name, optimizer in self.optimizers.items()}
        self.checkpoints = Checkpoints(args, self.world, parts, self.hf_files, self.watchdog)
        state = self.checkpoints.resume()
        self.tracker = Tracker(args.log, args.run_dir, args, self.world, state.get("tracker", {}))
        self.first_step = state.get("step", 0)
        self.metrics: dict[str, float] = state.get("not_validated", {})
        self.is_validated = bool(state) and not self.metrics
        if state:
            self.sampler.load_state_dict(state["sampler"])
            self.script_state = state["script"]

    # ---- the loop

    def steps(self) -> Iterator[int]:
        """The numbers of the steps, from 0. A run that starts is validated before its first step; after the last step
        the trained model is written."""
        args = self.args
        if self.val_set is not None and not self.is_validated:
            self.watchdog.phase("validation")
            results = self._validate(self.first_step)
            self.checkpoints.check()
            line = val_line("before training", results)
            if self.metrics:
                line = step_line(self.first_step, args.total_steps, self.metrics | results)
            self.tracker.log(self.first_step, self.metrics | results, line)
        self.peak_flops = peak_flops(self.world, args.policy.compute_dtype)
        for step in range(self.first_step, args.total_steps):
            ranks.seed_everything(args.seed, step)  # a fork may draw from the global generators, also after a resume
            self.tracker.profiler.start(step + 1)
            self.timer = Timer(self.watchdog.phase)
            self.meter = Meter()
            self.num_sampled_tokens = 0.0
            self.record = Record(args.log, self.tracker.run_dir, step + 1)
            self.metrics = self.checkpoints.metrics()
            yield step
        if args.save.hf != "never":
            export(self.policy, self.hf_files, self.tracker.run_dir / "model", self.world)
        if self.world.is_main:  # the other ranks may not see the last line yet
            print(summary(self.tracker.run_dir), flush=True)

    def sample(
        self, rows: Sequence[int], num_samples: int, sampling: SamplingConfig, *seed: int | str
    ) -> PendingRollout:
        """Sample responses to these rows; scoring of each one starts as it ends."""
        num_responses = len(self.engine.local_prompts(len(rows))) * num_samples
        with self.timer("gen"), self.tracker.progress("rollout", num_responses) as self.scoring.advance:
            return start_rollout(
                self.engine, self.scoring, self.train_set, rows, num_samples, sampling, (self.args.seed, *seed),
                stop=self.checkpoints.stopping,
            )

    def collect(self, pending: PendingRollout, meter: Meter | None = None) -> Rollout:
        """Wait for the scores. `meter` takes the scorers' numbers; default: that of the step."""
        self.checkpoints.check()
        with self.timer("reward"):
            rollout = pending.collect(self.meter if meter is None else meter)
        self.num_sampled_tokens += float(rollout.response_lengths.sum())
        return rollout

    def greedy_scores(self, rows: Sequence[int], *seed: int | str) -> Tensor:
        """The score [P] of the greedy response to each of these rows."""
        pending = self.sample(rows, 1, validation_sampling(self.args.rollout, temperature=0.0), *seed)
        return self.collect(pending, Meter()).scores

    def to_minibatches(self, rollout: Rollout, in_update: Tensor, num_minibatches: int, max_tokens: int, step: int,
                       ) -> list[Minibatch]:
        """Send every response to the rank that trains on it; see `rollout.to_minibatches`."""
        self.record.keep(rollout.group)
        return to_minibatches(
            rollout, in_update, self.hf_config, self.world, num_minibatches=num_minibatches, max_tokens=max_tokens,
            seed=ranks.seed_of(self.args.seed, step, "minibatches"), share_prompt=self.args.policy.share_prompt,
        )

    @contextmanager
    def phase(self, name: str, minibatches: list[Minibatch]) -> Iterator[Iterator[Batch]]:
        """Time a phase that walks over these mini-batches, and show its progress. What it yields gives each micro-batch
        in turn; a loop that has its own order calls `microbatch_done` instead."""
        num_microbatches = sum(len(minibatch) for minibatch in minibatches)
        with self.timer(name), self.tracker.progress(name, num_microbatches) as self.advance:
            yield self._each(chain(*minibatches))

    def _each(self, microbatches: Iterator[Batch]) -> Iterator[Batch]:
        for microbatch in microbatches:
            yield microbatch
            self._count_microbatch()

    def _count_microbatch(self) -> None:
        """Between micro-batches a stop signal takes effect, unless an optimizer step would be lost."""
        self.advance()
        self.checkpoints.check()

    def microbatch_done(self, microbatch: Batch, stats: dict[str, Tensor], logp: Tensor | None = None,
                        entropy: Tensor | None = None) -> None:
        """After each micro-batch of an update. `stats`: numbers per token [T], averaged where the mask is True. `logp`
        and `entropy` of the policy [T] are also kept for the recorded rollouts."""
        for name, values in stats.items():
            self.meter.mean(name, values, microbatch.mask)
        if logp is not None:
            self.meter.mean("actor/entropy", entropy, microbatch.mask)
            self.record.add(microbatch, logp, entropy, stats)
        self._count_microbatch()

    def optimizer_step(self, name: str, model: PackedModel, optimizer: torch.optim.Optimizer, config: OptimConfig,
                       step: int, first_step: int = 0) -> None:
        """One guarded step at the learning rate of `step`, in a schedule that begins at `first_step`. The rate, the
        gradient norm and skipped steps are logged."""
        lr = learning_rate(config, step - first_step, self.args.total_steps - first_step)
        self.metrics[f"{name}/lr"] = lr
        grad_norm = optimizer_step(model, optimizer, lr, config)
        self.meter.mean(f"{name}/grad_norm", torch.tensor([grad_norm], dtype=torch.float64))
        self.meter.total(f"{name}/skipped_steps", not math.isfinite(grad_norm), per=self.world.size)

    def finish(self, step: int, rollout: Rollout, minibatches: list[Minibatch], rewards: Tensor,
               metrics: dict[str, float], num_epochs: int, sampled: Rollout | None = None) -> None:
        """End a step: validate when it is time to, log, save. `rewards` [S]: what the update was made from; `metrics`:
        the script's own; `num_epochs`: passes of the policy's update over `minibatches`; `sampled`: all that was
        sampled for the step, if that is more than `rollout`."""
        args = self.args
        done = step + 1
        last = done == args.total_steps
        results: dict[str, float] | None = {}
        if self.val_set is not None and (last or (args.eval_every and done % args.eval_every == 0)):
            with self.timer("testing"):
                results = self._validate(done)
        flops = update_flops(chain(*minibatches), self.hf_config, args.policy.share_prompt)
        self.metrics |= step_metrics(
            self.meter, self.timer, self.world, rollout, sampled or rollout, minibatches,
            num_sampled_tokens=self.num_sampled_tokens, max_prompt_length=args.data.max_prompt_length,
            max_response_length=args.rollout.max_response_length, peak_flops=self.peak_flops,
            update_flops=flops * num_epochs,
        )
        self.metrics |= self.plan.error_frac(minibatches, self.world.device)
        self.record.write(self.tokenizer, rollout.samples, rewards)
        self.metrics |= metrics
        self.metrics |= {"training/global_step": done, "training/epoch": self.sampler.epoch}
        state: dict[str, Any] = {"step": done, "sampler": self.sampler.state_dict(), "script": self.script_state}
        if results is None:  # a stop signal came first: the resumed run validates, and logs the step
            state["not_validated"] = self.metrics
        else:
            self.metrics |= results
            self.tracker.log(done, self.metrics, step_line(done, args.total_steps, self.metrics))
        state["tracker"] = self.tracker.state_dict(done)
        self.checkpoints.after_step(state, last, validation_score(self.metrics, args.save.best_metric))

    def _validate(self, step: int) -> dict[str, float] | None:
        """Validation results after `step`; None after a stop signal. The engine sleeps before and after."""
        args = self.args
        rows = spread_rows(len(self.val_set), args.eval_prompts)
        num_responses = len(self.engine.local_prompts(len(rows))) * (1 + args.eval_n)
        with self.tracker.progress("validation", num_responses) as self.scoring.advance:
            self.engine.wake(self.policy)
            metrics = evaluate(
                self.engine, self.scoring, self.val_set, rows, args.rollout, args.eval_n, args.eval_temperature,
                args.seed, stop=lambda: bool(self.watchdog.signal),
                record=lambda samples: write_validation(args.log, self.tracker.run_dir, step, self.tokenizer, samples),
            )
            self.engine.sleep()
        return metrics

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        """Leave together, at the end or after a stop signal. After an error nothing is closed: closing waits for other
        ranks, which may be gone."""
        if kind not in (None, SystemExit):
            return
        self.checkpoints.close()
        self.tracker.close()
        self.scoring.close()
        self.engine.close()
        ranks.shutdown()
