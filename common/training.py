"""All that surrounds any training loop: ranks, run folder, data, models, resume, logging, saving.

`Training` is a helper, not a framework. It has no hooks, never calls back into the script, and knows nothing of what is
optimised. sft.py and dpo.py use it as it is; `Run` in run.py adds what a loop needs that samples from its policy.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
from transformers import PretrainedConfig, set_seed

from common.checkpoint.choice import first_day
from common.checkpoint.export import export, hf_files
from common.checkpoint.files import write_manifest
from common.checkpoint.manager import Checkpoints
from common.checkpoint.older_readers import left_out
from common.checkpoint.own import check_run_folder
from common.checkpoint.run_folder import FINISHED, finished, open_run_folder
from common.checkpoint.signals import Watchdog
from common.curriculum.sampler import PromptSampler
from common.flags.effect import check_effect
from common.flags.rules import check_at_least
from common.flags.run import TrainArgs
from common.flags.secrets import flags_of
from common.memory.plan import MemoryPlan
from common.metrics import Meter, Timer
from common.model.flops import update_flops
from common.model.held import Models
from common.model.loading import read_config, read_tokenizer
from common.model.policy import PackedModel
from common.parallel import ranks
from common.rollout import Minibatch
from common.tracking.console import batch_line, kernels_line, step_line, summary, val_line
from common.tracking.logger import Tracker
from common.tracking.phase import Phase
from common.tracking.start import check_best_metric, notes
from common.tracking.step import peak_flops, sharing_metrics, step_metrics
from envs.runtime.template import Clock

# the calls that make the attributes of a run, for the error of whoever reads one before
BEGIN = "with Run(args, ...) as run: (with Training(args) as run: in scripts that do not sample)"
LOAD_DATA = f"{BEGIN}, or run.load_data(...)"
START = "run.start_engine(max_tokens) or run.plan_memory(max_tokens)"
LOAD = 'run.load_policy("policy", args.model, args.optim)'
RESUME = "run.resume()"
STEPS = "for step in run.steps():"


class Training(Models):
    """One training, from `with Training(args) as run:` to the end of that block. An `Annotated` attribute begins to
    exist with the call that its annotation names."""

    watchdog: Annotated[Watchdog, BEGIN]
    world: Annotated[ranks.World, BEGIN]
    hf_config: Annotated[PretrainedConfig, BEGIN]
    tokenizer: Annotated[Any, BEGIN]
    train_set: Annotated[Any, LOAD_DATA]  # what the script's `load` returned
    val_set: Annotated[Any, LOAD_DATA]  # None without --val-data
    images: Annotated[Any, LOAD_DATA]  # whose `images_of` gives those of a sequence; None: there are none
    sampler: Annotated[PromptSampler, LOAD_DATA]
    total_steps: Annotated[int, LOAD_DATA]
    rows_per_step: Annotated[int, LOAD_DATA]
    plan: Annotated[MemoryPlan, START]
    max_tokens: Annotated[int, START]  # of a micro-batch
    policy: Annotated[Any, LOAD]  # the model of that name
    hf_files: Annotated[Any, RESUME]
    checkpoints: Annotated[Checkpoints, RESUME]
    tracker: Annotated[Tracker, RESUME]
    first_step: Annotated[int, RESUME]
    is_validated: Annotated[bool, RESUME]
    metrics: Annotated[dict[str, float], RESUME]  # of a step, beside the meter's
    timer: Annotated[Timer, STEPS]
    meter: Annotated[Meter, STEPS]
    step: Annotated[int, STEPS]
    updated_microbatches: Annotated[int, STEPS]  # that the policy's updates ran over, each pass counted
    max_sequence_length: int  # most tokens of a prompt and its response; scripts that do not sample set it
    engine_bytes = 0  # of a GPU: the engine's own, which torch counts as the trainer's, also while the engine sleeps

    def __init__(self, args: TrainArgs):
        super().__init__()
        self.args = args
        self.closing = ExitStack()  # what ends with the run; the last to begin ends first
        self.script_state: dict[str, Any] = {}
        """What the script adds to a checkpoint beside models and optimizers, plain JSON. `resume` brings it back."""
        self.is_finished = True  # the step that was begun last

    if not TYPE_CHECKING:  # mypy shall see a name that is misspelt

        def __getattr__(self, name: str) -> Any:
            """Only called for what does not exist (yet)."""
            for kind in type(self).__mro__:
                made_by = getattr(vars(kind).get("__annotations__", {}).get(name), "__metadata__", None)
                if made_by:
                    raise RuntimeError(f"run.{name} does not exist yet: call {made_by[0]} first")
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __enter__(self) -> Self:
        """Join the ranks, check the flags, take the run folder."""
        args = self.args
        self.watchdog = Watchdog(args.save.timeout_s)  # before the ranks meet: one of them may never come
        policy = args.policy
        self.world = ranks.init(args.save.timeout_s, policy.replicas, policy.sequence_parallel, policy.expert_parallel)
        self.closing.callback(ranks.shutdown)
        for line in check_effect(args, self.world.device.type):
            ranks.print_on_main(self.world, f"flags  {line}")
        said = ranks.on_main(self.world, partial(finished, args))
        if said:
            ranks.print_on_main(self.world, said)
            ranks.shutdown()
            sys.exit(0)
        self.watchdog.watch(self.world.job_store)
        self.closing.callback(self.watchdog.leave)
        if self.world.trains:
            ranks.on_main(self.world, partial(check_run_folder, args))
            open_run_folder(args.run_dir, self.world)
        checkpoints = Path(args.run_dir).resolve() / "checkpoints"
        Clock.keep(ranks.on_main(self.world, partial(first_day, checkpoints, args.save.resume)))
        self.hf_config = read_config(args.model, args.policy)
        self.tokenizer = read_tokenizer(args.model, args.policy)
        return self

    def load_data(self, load: Callable[[Sequence[str]], Any], rows_per_step: int,
                  load_val: Callable[[Sequence[str]], Any] | None = None) -> None:
        """Read the training and validation files, each with `load(files)`, and say what is in them. `load_val`: what
        reads the validation files instead, whose images no model of the run sees."""
        args = self.args
        self.rows_per_step = rows_per_step
        check_at_least(0, {"--total-epochs": args.total_epochs})
        self.train_set = load(args.train_data)
        self.total_steps = args.total_steps
        if args.total_epochs:
            epochs_in_steps = int(args.total_epochs * len(self.train_set) / rows_per_step)
            self.total_steps = max(epochs_in_steps, 1)
        self.val_set = None
        sets = [self.train_set]
        if args.val_data:
            self.val_set = (load_val or load)(args.val_data)
            if load_val is None:
                sets.append(self.val_set)
        self.images = self.train_set.images_of_all(sets)
        self.sampler = PromptSampler(len(self.train_set), self.train_set.loaded.data_hash, args.seed)
        for name, rows in {"train": self.train_set, "val": self.val_set}.items():
            if rows is not None and self.world.trains:
                ranks.print_on_main(self.world, f"{name:5}  {rows.loaded.summary()}")
                rows.loaded.write_skipped(f"{args.run_dir}/skipped_{name}.jsonl")
        check_best_metric(args.save.best_metric, self.val_set, flags_of(args).get("--eval-n"))
        if self.world.is_main:
            for line in notes(args, (self.total_steps, rows_per_step), self.train_set, self.val_set):
                ranks.print_on_main(self.world, f"note   {line}")

    def plan_memory(self, max_tokens: int, frozen: str | tuple = "", critic: str = "") -> int:
        """Return the token budget of a micro-batch: `max_tokens`, or if that is 0 the largest that fits. `frozen`,
        `critic`: folders or hub names of a frozen policy (or a tuple: of teachers, as in distill.py) and of a critic
        that will be loaded. Before, the script sets `max_sequence_length`, the most tokens of a prompt and its
        response, unless `Run` did."""
        self.plan = MemoryPlan(self.args, self.hf_config, self.world.size, self.max_sequence_length, frozen, critic)
        self.max_tokens, why = self.plan.choose_budget(max_tokens, self.world.device)
        self.recomputed_share = self.plan.share
        ranks.print_on_main(self.world, f"memory {why}")
        return self.max_tokens

    def describe(self, objective: str, *sizes: int) -> None:
        """Print what this run does, in words and units. `objective`: one line from the script. `sizes`: prompts and
        samples a step, mini-batches, epochs."""
        optim = self.args.optim
        batch = batch_line(sizes, self.max_tokens, self.max_sequence_length, self.world.size)
        kernels = kernels_line(self.args.policy, self.hf_config, self.world.device)
        recomputed = f"{self.policy.num_recomputed} of {self.policy.num_blocks} layers recomputed"
        ranks.print_on_main(
            self.world,
            f"batch  {batch}\ntrain  {objective}; lr {optim.lr:g} ({optim.schedule})\nruns   {kernels}, {recomputed}",
        )

    def resume(self) -> dict[str, Any]:
        """Continue from a checkpoint as --save.resume says: weights, optimizers, the order of the data. Returns
        `script_state`, {} for a run that starts. `steps` calls it, if the script has not."""
        if not self.has_resumed:
            self._resume()
        return self.script_state

    def _resume(self) -> None:
        args = self.args
        dtype = args.policy.compute_dtype if args.save.dtype == "auto" else args.save.dtype
        template_file = flags_of(args).get("--data.chat-template-file", "")
        self.hf_files = hf_files(args.model, self.policy.lm.config, self.tokenizer, dtype, template_file)
        self.has_resumed = True
        for model in self.models.values():
            model.prompts = self.images
        parts = {}
        for name, optimizer in self.optimizers.items():
            parts[name] = (self.models[name], optimizer)
        self.watch_frozen()
        self.checkpoints = Checkpoints(args, self.world, parts, self.hf_files, self.watchdog, self.models)
        state = self.checkpoints.resume()
        self.tracker = Tracker(args.log, args.run_dir, args, self.world, state.get("tracker", {}))
        self.watchdog.on_phase = self.tracker.now.phase
        if "policy" in self.optimizers:
            self.tracker.watch(self.policy, self.optimizers["policy"])
        self.closing.callback(self.tracker.close)
        self.closing.callback(self.checkpoints.wait)
        self.first_step = state.get("step", 0)
        self.metrics = state.get("not_validated", {})
        self.is_validated = bool(state) and not self.metrics
        self.timer = Timer(self.watchdog.phase)
        if state:
            self.note_loaded()
            self.sampler.load_state_dict(state["sampler"])
            self.script_state = state["script"]

    def steps(self) -> Iterator[int]:
        """The numbers of the steps, from 0. After the last one the trained model is written. Raises RuntimeError if the
        step before was not ended by `finish` or `end_step`."""
        self.resume()
        if self.metrics and self.val_set is None:  # a stop signal kept a step from its validation, which is off now
            self.log_validation({})
        self.checkpoints.timer = Timer(self.watchdog.phase)
        for step in range(self.first_step, self.total_steps):
            # a fork may draw from the global generators, also after a resume
            set_seed(ranks.seed_of(self.args.seed, step))
            self.step = step
            self.tracker.now.step(step, self.total_steps)
            self.timer = self.checkpoints.timer  # it began when the step before was logged, and has timed its save
            self.meter = Meter()
            self.metrics = {}
            self.is_finished = False
            self.updated_microbatches = 0
            yield step
            if not self.is_finished:
                raise RuntimeError(f"step {step + 1} was neither logged nor saved: call run.finish(...) (in "
                                   f"scripts that do not sample run.end_step(...)) at the end of each step")
            self.checkpoints.check_unchanged(self.script_state)
        if self.args.save.hf != "never":
            export(self.policy, self.hf_files, self.tracker.run_dir / "model", self.world)
            said = left_out(flags_of(self.args))
            if said:
                ranks.print_on_main(self.world, said)
        self.checkpoints.wait()
        if self.world.is_main:  # the other ranks may not see the last line yet
            write_manifest(self.tracker.run_dir / FINISHED, self.checkpoints.flags)
            print(summary(self.tracker.run_dir), flush=True)

    def next_rows(self, count: int) -> list[int]:
        """The next rows of the training data to train on, in a random order that a resumed run continues."""
        return self.sampler.take(count)

    @contextmanager
    def phase(self, name: str, minibatches: list[Minibatch]) -> Iterator[Phase]:
        """Time a phase that walks over these mini-batches, and show its progress. A name "update_NAME" gives its
        metrics NAME/..."""
        phase = Phase(self, name, minibatches)
        with self.timer(name), self.tracker.progress(name, phase.num_microbatches) as phase.advance:
            yield phase
            phase.check_complete()
        if name == "update_actor":
            self.updated_microbatches += phase.num_done

    def before_update(self, model: PackedModel) -> None:
        """Before each optimizer step of `model`."""

    def is_validation_due(self, step: int) -> bool:
        if self.val_set is None:
            return False
        if step + 1 == self.total_steps:
            return True
        return self.args.eval_every > 0 and (step + 1) % self.args.eval_every == 0

    def log_validation(self, results: dict[str, float]) -> None:
        """Log the validation before step 1. After a resume, log the validation that the stop signal prevented, together
        with its step."""
        self.checkpoints.check()
        self.checkpoints.after_validation(results)
        line = val_line("before training", results)
        if self.metrics:
            line = step_line(self.first_step, self.total_steps, self.metrics | results)
        self.tracker.log(self.first_step, self.metrics | results, line)

    def check_unfinished(self, step: int) -> None:
        if self.is_finished:
            raise RuntimeError(f"step {step + 1} was ended twice: call run.finish(...) or run.end_step(...) once a "
                               f"step, inside {STEPS}")

    def end_step(self, step: int, minibatches: list[Minibatch], lengths: np.ndarray, metrics: dict[str, float],
                 results: dict[str, float] | None) -> None:
        """Log and save. `minibatches`: what the policy's update ran over; `lengths` [S]: tokens of
        the step's sequences; `metrics`: the script's own; `results`: of the validation, {} without one. None: a stop
        signal interrupted validation; the resumed run validates and logs this step."""
        self.check_unfinished(step)
        self.is_finished = True
        self.check_frozen()
        args = self.args
        done = step + 1
        flops = update_flops(chain(*minibatches), self.hf_config, args.policy.share_prompt, args.lora.rank)
        flops *= self.updated_microbatches / max(sum(map(len, minibatches)), 1)  # passes over them
        used = (flops, peak_flops(self.world, args.policy.compute_dtype), self.engine_bytes)
        self.metrics |= step_metrics(self.meter, self.timer, self.world, lengths, minibatches, used)
        self.metrics |= self.tracker.noise.metrics(self.rows_per_step / max(len(minibatches), 1))
        self.metrics |= sharing_metrics(minibatches, args.policy.share_prompt)
        self.metrics |= metrics | {"training/global_step": done, "training/epoch": self.sampler.epoch}
        state: dict[str, Any] = {"step": done, "total_steps": self.total_steps}
        state |= {"sampler": self.sampler.state_dict(), "script": self.script_state, "day": str(Clock.day)}
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
