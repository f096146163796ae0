"""All that surrounds any training loop: ranks, run folder, data, models, resume, logging, saving.

`Training` is a helper, not a framework. It has no hooks, never calls back into the script, and knows nothing of what is
optimised. sft.py and dpo.py use it as it is; `Run` in run.py adds what a loop needs that samples from its policy.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, set_seed

from common.batch import Batch
from common.checkpoint.export import export, hf_files
from common.checkpoint.files import write_manifest
from common.checkpoint.manager import Checkpoints, SaveConfig
from common.checkpoint.run_folder import FINISHED, finished, open_run_folder
from common.checkpoint.signals import Watchdog
from common.metrics import Meter
from common.model.attention import choose_attention
from common.model.bf16_adamw import WEIGHTS, make_optimizer
from common.model.flops import update_flops
from common.model.loading import load_critic, load_policy, read_config, uses_liger
from common.model.lora import LoRAConfig
from common.model.memory_plan import MemoryPlan
from common.model.policy import Critic, ModelConfig, PackedModel, Policy
from common.optim import OptimConfig, learning_rate, optimizer_step
from common.parallel import ranks
from common.prompts import PromptSampler
from common.rollout import Minibatch
from common.tracking.console import batch_line, print_on_main, step_line, summary, val_line
from common.tracking.logger import LogConfig, Tracker
from common.tracking.step import Timer, peak_flops, step_metrics


@dataclass
class TrainArgs:
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
    """Random seed of the order of the data, sampling and mini-batches."""
    total_steps: int = 100
    """Training steps; where the policy is sampled from, rollout-and-update rounds."""
    total_epochs: float = 0.0
    """Passes over the training data. Above 0 they decide the number of steps, and --total-steps does not."""

    eval_every: int = 10
    """Steps between validations; also before the first and after the last step. 0: only these two."""
    eval_prompts: int = 512
    """Most validation prompts, spread evenly over the files; 0: all."""

    policy: ModelConfig = field(default_factory=ModelConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    log: LogConfig = field(default_factory=LogConfig)


class Training:
    """One training, from `with Training(args) as run:` to the end of that block."""

    def __init__(self, args: TrainArgs):
        self.args = args
        self.closing = ExitStack()  # what ends with the run, the last to begin first
        self.models: dict[str, PackedModel] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.script_state: dict[str, Any] = {}
        """What the script adds to a checkpoint beside models and optimizers, plain JSON; it is back after `resume`."""

    def __enter__(self) -> Self:
        """Join the ranks, check the flags, take the run folder."""
        args = self.args
        if args.save.keep_best and not args.val_data:
            raise ValueError("--save.keep-best ranks checkpoints by their validation: give --val-data, or leave it out")
        self.watchdog = Watchdog(args.save.timeout_s)  # before the ranks meet: one of them may never come
        policy = args.policy
        self.world = ranks.init(args.save.timeout_s, policy.replicas, policy.sequence_parallel, policy.expert_parallel)
        self.closing.callback(ranks.shutdown)
        if said := ranks.on_main(self.world, lambda: finished(args)):
            print_on_main(self.world, said)
            ranks.shutdown()
            sys.exit(0)
        if self.world.trains:
            open_run_folder(args.run_dir, self.world)
        self.hf_config = read_config(args.model, args.policy)
        self.tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=args.policy.trust_remote_code)
        return self

    def load_data(self, load: Callable[[Sequence[str]], Any], rows_per_step: int) -> None:
        """Read the training and validation files, each with `load(files)`, and say what is in them."""
        args = self.args
        self.train_set = load(args.train_data)
        epochs_in_steps = int(args.total_epochs * len(self.train_set) / rows_per_step)
        self.total_steps = max(epochs_in_steps, 1) if args.total_epochs else args.total_steps
        self.val_set = load(args.val_data) if args.val_data else None
        self.sampler = PromptSampler(len(self.train_set), self.train_set.loaded.data_hash, args.seed)
        for name, rows in {"train": self.train_set, "val": self.val_set}.items():
            if rows is not None and self.world.trains:
                print_on_main(self.world, f"{name:5}  {rows.loaded.summary()}")
                rows.loaded.write_skipped(f"{args.run_dir}/skipped_{name}.jsonl")

    def plan_memory(self, max_tokens: int, reference: bool = False, critic: str = "") -> int:
        """Return the token budget of a micro-batch: `max_tokens`, or if that is 0 the largest that fits. `reference`: a
        frozen policy will be loaded; `critic`: folder of a second model that will be trained."""
        self.plan = MemoryPlan(self.args, self.hf_config, self.world.size, self.max_sequence_length, reference, critic)
        self.max_tokens, why = self.plan.choose_budget(max_tokens, self.world.device)
        print_on_main(self.world, f"memory {why}")
        return self.max_tokens

    def load_policy(self) -> tuple[Policy, torch.optim.Optimizer]:
        self.watchdog.phase("loading models")
        set_seed(ranks.seed_of(self.args.seed))  # vLLM has seeded random, numpy and torch otherwise
        return self._load("policy", load_policy, self.args.model, self.args.optim)

    def load_critic(self, path: str, optim: OptimConfig) -> tuple[Critic, torch.optim.Optimizer]:
        return self._load("critic", load_critic, path, optim)

    def _load(self, name: str, load: Callable[..., Any], path: str, optim: OptimConfig) -> tuple[Any, Any]:
        args = self.args
        self.models[name] = load(path, args.policy, self.world, lora=args.lora, dtype=WEIGHTS[optim.kind])
        self.optimizers[name] = make_optimizer(self.models[name], optim)
        return self.models[name], self.optimizers[name]

    def describe(self, objective: str, *sizes: int) -> None:
        """Print what this run does, in words and units. `objective`: one line from the script. `sizes`: prompts and
        samples a step, mini-batches, epochs, tokens of a micro-batch."""
        args, kernels = self.args, (self.world.device, self.hf_config, self.args.policy)
        print_on_main(
            self.world, f"batch  {batch_line(*sizes, self.max_sequence_length, self.world.size)}\n"
            f"train  {objective}; lr {args.optim.lr:g} ({args.optim.schedule})\nruns   {args.policy.compute_dtype} on "
            f"{self.world.device.type}, attention {choose_attention(*kernels)}, Liger's kernels "
            f"{'on' if uses_liger(*kernels) else 'off'}"
        )

    def resume(self) -> None:
        """Continue from a checkpoint as --save.resume says: weights, optimizers, the order of the data,
        `script_state`. All models must be loaded by now."""
        args = self.args
        self.policy = self.models["policy"]
        dtype = args.policy.compute_dtype if args.save.dtype == "auto" else args.save.dtype
        self.hf_files = hf_files(args.model, self.policy.lm.config, self.tokenizer, dtype)
        parts = {name: (self.models[name], optimizer) for name, optimizer in self.optimizers.items()}
        self.checkpoints = Checkpoints(args, self.world, parts, self.hf_files, self.watchdog)
        state = self.checkpoints.resume()
        self.tracker = Tracker(args.log, args.run_dir, args, self.world, state.get("tracker", {}))
        self.closing.callback(self.tracker.close)
        self.closing.callback(self.checkpoints.wait)
        self.first_step = state.get("step", 0)
        self.metrics: dict[str, float] = state.get("not_validated", {})
        self.is_validated = bool(state) and not self.metrics
        self.timer = Timer(self.watchdog.phase)
        if state:
            self.policy.version += 1  # not the model of --model's folder
            self.sampler.load_state_dict(state["sampler"])
            self.script_state = state["script"]

    def steps(self) -> Iterator[int]:
        """The numbers of the steps, from 0. After the last one the trained model is written."""
        args = self.args
        self.peak_flops = peak_flops(self.world, args.policy.compute_dtype)
        for step in range(self.first_step, self.total_steps):
            set_seed(ranks.seed_of(args.seed, step))  # a fork may draw from the global generators, also after a resume
            self.timer = Timer(self.watchdog.phase)
            self.meter = Meter()
            self.metrics = self.checkpoints.timer.metrics()
            yield step
        if args.save.hf != "never":
            export(self.policy, self.hf_files, self.tracker.run_dir / "model", self.world)
        self.checkpoints.wait()
        if self.world.is_main:  # the other ranks may not see the last line yet
            write_manifest(self.tracker.run_dir / FINISHED, self.checkpoints.flags)
            print(summary(self.tracker.run_dir), flush=True)

    @contextmanager
    def phase(self, name: str, minibatches: list[Minibatch]) -> Iterator[Iterator[Batch]]:
        """Time a phase that walks over these mini-batches, and show its progress. What it yields gives each micro-batch
        in turn; a loop that has its own order calls `microbatch_done` instead."""
        num_microbatches = sum(len(minibatch) for minibatch in minibatches)
        self.check = self.checkpoints.spread_checks(num_microbatches)
        self.outputs: list[tuple[Batch, Tensor]] = []  # what the model said of each micro-batch
        with self.timer(name), self.tracker.progress(name, num_microbatches) as self.advance:
            yield self._each(chain(*minibatches))

    def _each(self, microbatches: Iterator[Batch]) -> Iterator[Batch]:
        for microbatch in microbatches:
            yield microbatch
            self.advance()
            self.check()

    def microbatch_done(self, microbatch: Batch, stats: dict[str, Tensor], output: Tensor,
                        entropy: Tensor | None = None) -> None:
        """After each micro-batch of an update. `stats`: numbers per token [T], averaged where the mask is True.
        `output` [T]: values, or log-probs, which are kept for the recorded rollouts with the `entropy` [T]."""
        self.outputs.append((microbatch, output.detach()))
        for name, values in stats.items():
            self.meter.mean(name, values, microbatch.mask)
        if entropy is not None:
            self.meter.mean("actor/entropy", entropy, microbatch.mask)
            if self.policy.router_changed is not None:  # by --policy.router-replay
                self.meter.mean("actor/router_changed", self.policy.router_changed, microbatch.mask)
            found = stats | {"logp": output, "entropy": entropy}
            microbatch.last_pass = {name: values.detach() for name, values in found.items()}
        self.advance()
        self.check()  # a stop signal takes effect here, unless an optimizer step would be lost

    def optimizer_step(self, name: str, model: PackedModel, optimizer: torch.optim.Optimizer, config: OptimConfig,
                       step: int, first_step: int = 0) -> None:
        """One guarded step at the learning rate of `step`, in a schedule that begins at `first_step`. The rate, the
        gradient norm and skipped steps are logged. Raises ValueError, naming the response, for a log-prob or value that
        is not finite. A GPU is not asked before, so that it need not wait for the host between micro-batches."""
        lr = learning_rate(config, step - first_step, self.total_steps - first_step)
        self.metrics[f"{name}/lr"] = lr
        grad_norm = optimizer_step(model, optimizer, lr, config)
        for microbatch, output in [] if math.isfinite(grad_norm) else self.outputs:
            microbatch.check_finite(f"the output of the {name}", output)
        self.meter.mean(f"{name}/grad_norm", torch.tensor([grad_norm], dtype=torch.float64))
        self.meter.total(f"{name}/skipped_steps", not math.isfinite(grad_norm), per=self.world.size)

    def is_validation_due(self, step: int) -> bool:
        args, done = self.args, step + 1
        is_last = done == self.total_steps
        return self.val_set is not None and (is_last or (args.eval_every > 0 and done % args.eval_every == 0))

    def log_validation(self, results: dict[str, float]) -> None:
        """Log the validation before the first step, or the one that a stop signal kept from the end of a step, and with
        it that step."""
        self.checkpoints.check()
        self.checkpoints.after_validation(results)
        line = val_line("before training", results)
        if self.metrics:
            line = step_line(self.first_step, self.total_steps, self.metrics | results)
        self.tracker.log(self.first_step, self.metrics | results, line)

    def end_step(self, step: int, minibatches: list[Minibatch], lengths: np.ndarray, metrics: dict[str, float],
                 results: dict[str, float] | None, num_epochs: int = 1) -> None:
        """Log and save. `minibatches`: what the policy's update ran over `num_epochs` times; `lengths` [S]: tokens of
        the step's sequences; `metrics`: the script's own; `results`: of the validation, {} without one. None: a stop
        signal came before its end, then the resumed run validates and logs the step."""
        args, done = self.args, step + 1
        flops = update_flops(chain(*minibatches), self.hf_config, args.policy.share_prompt, args.lora.rank)
        self.metrics |= step_metrics(
            self.meter, self.timer, self.world, lengths, minibatches, update_flops=flops * num_epochs,
            peak_flops=self.peak_flops,
        )
        self.metrics |= metrics | {"training/global_step": done, "training/epoch": self.sampler.epoch}
        state: dict[str, Any] = {"step": done, "total_steps": self.total_steps}
        state |= {"sampler": self.sampler.state_dict(), "script": self.script_state}
        if results is None:
            state["not_validated"] = self.metrics
        else:
            self.metrics |= results
            self.tracker.log(done, self.metrics, step_line(done, self.total_steps, self.metrics))
        state["tracker"] = self.tracker.state_dict(done)
        self.checkpoints.after_step(state, results)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        """Leave together, at the end or after a stop signal. After an error nothing is closed: closing waits for other
        ranks, which may be gone."""
        if kind in (None, SystemExit):
            self.closing.close()
