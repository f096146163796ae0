"""The checkpoints of a run: when they are written, what a stop signal does. choice.py: which one a run starts from.

RUN_DIR/checkpoints/step_N holds a file of each rank's shards (state.py), what each rank carries over of its responses
(in files of its own), `hf/` (config, tokenizer, chat template) and manifest.json, which names every file with its size
and CRC-32. It is written as .step_N.partial, the manifest last, and then renamed: a folder called step_N was
complete when it got this name.
"""

import json
import re
import shutil
import signal
import sys
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch.distributed as dist
import tyro
from torch import Tensor, get_device_module

from common.checkpoint.best import better, choose_metric, is_loss, write_best
from common.checkpoint.choice import choose
from common.checkpoint.export import write_files
from common.checkpoint.files import complete_checkpoints, entry_of, read_checkpoint, remove, sync, write_manifest
from common.checkpoint.own import remove_checkpoint
from common.checkpoint.secrets import differences, flags_of
from common.checkpoint.signals import Watchdog
from common.checkpoint.state import FILE, Parts, load_parts, save_shards, tensors_of
from common.metrics import Timer
from common.model.policy import PackedModel
from common.parallel.ranks import World, all_max, check_at_least, collective_timeout, on_main, print_on_main, together
from common.source.stored import fingerprint as checksum
from envs.stored import join, split, write_parts

UNFINISHED = re.compile(r"\.step_\d{6,}\.partial")
NOT_COMPARED = {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures", "use_cache"}
"""Entries of a model's config that may differ between a checkpoint and the run that continues from it."""
MAY_CHANGE = re.compile(
    "--(save|log|offload|policy.(gradient|share|replicas|sequence)|run-dir|model |"
    "reward.(num-workers|concurrency|timeout)|data|train-data|val-data|eval|total-|max-tokens-per-gpu|samplers|"
    "rollout.(max-num-seqs|tp|gpu-memory|kv-cache|enforce|val-top|max-probe|extra))"
)
"""Flags that change where and how fast a run computes, how long it goes on and what it reports, but not its steps."""


@dataclass
class SaveConfig:
    every: int = 20
    """Steps between checkpoints; the last step is always saved. 0: only the last step."""
    keep: int = 2
    """Number of newest checkpoints that stay on disk."""
    keep_best: bool = False
    """Also keep the checkpoint of the step with the best validation, which is saved even if --save.every does not ask
    for it. RUN_DIR/best.json names it. Of equal values the earlier step stays. Needs --val-data."""
    best_metric: str = ""
    """Metric of the validation that --save.keep-best ranks by, such as val-core/gsm8k/acc/greedy, or the score,
    val-aux/gsm8k/reward/greedy; higher is better, of a loss lower. Default: the first val-core/.../mean@N (sampled) in
    alphabetical order, without one the first val-core/. Needs --save.keep-best."""
    async_: Annotated[bool, tyro.conf.arg(name="async")] = False
    """Write checkpoints in the background, from a copy in host memory (12 bytes a parameter, over all ranks)."""
    hf: Literal["never", "end"] = "end"
    """When to write RUN_DIR/model, a Hugging Face folder (`python -m tools.checkpoints export` makes one later)."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of its weights. auto: the type of --policy.compute-dtype. float32: as they were trained."""
    resume: str = "auto"
    """auto: resume from the newest complete checkpoint of the run folder, if there is one. none: start anew. Else a run
    folder or a checkpoint to start from. none and a path need a run folder without checkpoints; a restart by torchrun
    or Slurm continues the run folder in any case."""
    allow_changes: bool = False
    """Continue a run although flags that change its results differ from those of its last start."""
    timeout_s: float = 3600.0
    """Seconds that a phase (model load, rollout, update, validation) may take before all ranks print their stacks and
    end. 0: no limit."""

    def __post_init__(self):
        check_at_least(0, {"--save.every": self.every, "--save.timeout-s": self.timeout_s})
        check_at_least(1, {"--save.keep": self.keep})
        if self.best_metric and not self.keep_best:
            raise ValueError(f"--save.best-metric {self.best_metric} needs --save.keep-best")


def fingerprint(state: Any) -> tuple[int, float]:
    """Of JSON: a checksum of all but its floats, and the sum of these: ranks on other CPUs may round otherwise."""
    floats = []
    rest = json.loads(json.dumps(state, sort_keys=True), parse_float=lambda text: floats.append(abs(float(text))))
    return zlib.crc32(json.dumps(rest).encode()), sum(floats)


class Checkpoints:
    """The checkpoints of one run: `resume` at its start, `check` at safe points, `after_step`, `wait`. All ranks call
    the same methods in the same order.

    A stop signal takes effect in `check`. Before the first optimizer step of a training step, `check` abandons that
    step and saves the state after the last finished step. After the first optimizer step, `check` lets the training
    step finish. So the saved state is always the state between two steps, and resuming is exact.
    """

    def __init__(self, args: Any, world: World, parts: Parts, files: dict[str, bytes], watchdog: Watchdog,
                 models: dict[str, PackedModel]):
        """`args`: the script's flags; `files`: from `hf_files`; `models`: all of the run, frozen ones too."""
        self.config: SaveConfig = args.save
        self.world = world
        self.parts = parts
        self.watchdog = watchdog
        self.root = Path(args.run_dir).resolve() / "checkpoints"
        self.files = files
        self.flags = flags_of(args)
        self.model = json.loads(files["config.json"]) | {"trained parts": sorted(parts), "checkpoint format": FILE}
        if self.flags.get("--lora.rank"):                       # adapters belong to one model
            self.model |= {name: value for name, value in self.flags.items() if name.startswith("--lora.")}
            self.model["--model"] = Path(self.flags["--model"]).name
        folders = {name: model.folder for name, model in models.items()
                   if name not in parts or self.flags.get("--lora.rank")}
        if reward_model := self.flags.get("--reward-model.path"):
            folders["reward model"] = reward_model
        self.outside = on_main(world, lambda: {name: checksum(folder) for name, folder in folders.items()})
        """Models whose weights (with adapters: their base's) no checkpoint holds -> the checksum of their folder."""
        # The state after the last finished step.
        self.state: dict[str, Any] = {"step": 0}
        self.of_rank: list[bytes] = []                          # what belongs into it on this rank alone
        self.script = 0, 0.0                                    # what ranks compare of the script's own part of it
        self.dirty = False                                      # True once an optimizer step was made since then
        # The saves. The threads that write have a process group of their own.
        self.saved_step = 0
        self.best: dict[str, Any] = {}                          # step, as {step, metric, value}; {}: none is known
        self.metric = ""                                        # what ranks, known at the first validation
        self.starts_from_own = False                            # the step it starts from is a checkpoint of this run
        # A new thread's device is GPU 0, whose memory belongs to another rank.
        self.thread = ThreadPoolExecutor(1, "checkpoint", get_device_module(world.device).set_device, (world.device,))
        self.group = dist.new_group(backend="gloo", timeout=collective_timeout(self.config.timeout_s))
        self.writing: Future | None = None
        if world.is_main:
            for leftover in self.root.glob(".step_*"):          # A killed process leaves such folders.
                if UNFINISHED.fullmatch(leftover.name):
                    remove(leftover)
            self._remove_deleted()
        for _, optimizer in parts.values():
            optimizer.register_step_post_hook(lambda *_: setattr(self, "dirty", True))

    def resume(self) -> dict[str, Any]:
        """Fills all parts as `--save.resume` says, from a checkpoint of any number of ranks. Returns the state that was
        saved with it, {} for a new run. Raises ValueError if a checkpoint does not fit."""
        folder = choose(self.root, self.config.resume, self.world)
        if folder is None:
            self._resume_best({})
            return {}
        manifest = read_checkpoint(folder)
        of_model = differences(manifest.get("model", {}), self.model)
        wrong = [text for text in of_model if text.split()[0] not in NOT_COMPARED]
        if wrong:
            raise ValueError(f"{folder} does not fit this run: {'; '.join(wrong[:4])}{' ...' if wrong[4:] else ''}: "
                             "choose another --run-dir or --save.resume")
        changed = differences(manifest["flags"], self.flags)
        algorithm = [text for text in changed if not MAY_CHANGE.match(text)]
        if algorithm and folder.parent == self.root and not self.config.allow_changes:
            raise ValueError(f"{self.root.parent} was trained with other flags: {'; '.join(algorithm)}: give "
                             "the old ones, or another --run-dir, or set --save.allow-changes")
        before = manifest.get("outside", {})
        # a run that starts from another one's checkpoint may have other frozen models, but adapters have one base
        compared = [*self.outside] if folder.parent == self.root else [*self.outside.keys() & self.parts.keys()]
        others = sorted(name for name in compared if before.get(name, self.outside[name]) != self.outside[name])
        if others and not self.config.allow_changes:
            raise ValueError(f"{folder} does not hold the weights of {', '.join(others)}, and those that are loaded "
                             "now are not those that it was trained with: put them back, give another --run-dir, or "
                             "set --save.allow-changes")
        changed += [f"the weights of {name}" for name in others]
        load_parts(self.parts, folder, self.world.rank)
        self.dirty = False
        self.state = manifest["state"]
        self.saved_step = self.state["step"]
        if folder.parent != self.root:
            self.state.pop("tracker", None)                     # The metrics of another run stay its own.
        print_on_main(self.world, f"resumed after step {self.saved_step} from {folder} of "
                                  f"{manifest['world_size']} rank(s)"
                                  f"{'; other flags: ' if changed else ''}{'; '.join(changed)}")
        made_by = manifest["flags"]["script"]
        held = {name: value for name, value in self.state.get("script", {}).items() if value}
        if held and made_by != self.flags["script"]:
            counts = [f"{len(value)} {name}" if isinstance(value, list) else name for name, value in held.items()]
            print_on_main(self.world, f"dropped what only {made_by} can use of the checkpoint: {', '.join(counts)}")
            self.state["script"] = {}                           # it would be used, long after, when that script resumes
        self.starts_from_own = folder.parent == self.root
        self._resume_best(self.state.pop("best", {}))
        return join(self.state, folder, range(self.world.rank, manifest["world_size"], self.world.size))

    def after_validation(self, results: dict[str, float]) -> None:
        """The state that this run starts from is validated. If that is a step that a stop signal kept from its
        validation, it is saved already and can be the best; the model before training cannot. Raises ValueError if the
        validation has no metric of the name --save.best-metric."""
        best = self._better(results)
        if best and self.starts_from_own:
            self.best = best
            together(lambda: self.world.is_main and self._keep(best), OSError)

    def after_step(self, state: dict[str, Any], results: dict[str, float] | None = None) -> None:
        """A step is finished and its metrics are logged. `state`: what the script needs to go on after it, JSON with
        "step" and "total_steps"; bytes in it are of this rank alone, in the same places on all ranks. `results`: of its
        validation, if it had one. Saves when it is time to, also the best step so far with --save.keep-best; obeys
        signals."""
        self.state, self.of_rank = split(state)
        self.script = fingerprint(self.state.get("script", {}))
        self.dirty = False
        self.timer = Timer(self.watchdog.phase)                 # of the save, and of the step that follows it
        try:
            best = self._better(results)
        except ValueError:                                      # the steps since the last save would be lost
            self._save()
            self.wait()
            raise
        self.best = best or self.best
        is_last = state["step"] == state["total_steps"]
        if is_last or best or (self.config.every and state["step"] % self.config.every == 0):
            self._save()
        self.check()

    def check(self) -> None:
        """A safe point: if a signal has reached any rank, and no optimizer step would be lost, all ranks save and raise
        SystemExit. The caller closes the engine and the process group."""
        if self.dirty:
            return
        code, total = self.script                               # with the signal, so that no collective is added
        number, *most = all_max([self.watchdog.signal, code, total, -code, -total]).tolist()
        if most[0] != -most[2] or most[1] + most[3] > 1e-6 * most[1]:
            raise ValueError("run.script_state differs between ranks, and a checkpoint holds that of the first: make "
                             "it of what all ranks have, rollout.scores for example; bytes are each rank's own")
        if not number:
            return
        number = int(number)
        if self.state["step"] != self.saved_step:
            self._save()
        self.wait()
        saved = ", which is saved" if self.saved_step else "; there is nothing to save yet"
        print_on_main(self.world, f"stopped by {signal.Signals(number).name} after step {self.state['step']}{saved}")
        sys.exit(128 + number)

    def stopping(self) -> bool:
        """Whether this rank got a signal, so that its running samples will not be used. The engine calls this often."""
        return bool(self.watchdog.signal) and not self.dirty

    def wait(self) -> None:
        """Waits until the last save is on disk. Raises OSError if it failed."""
        if self.writing is not None:
            self.writing.result()

    def _better(self, results: dict[str, float] | None) -> dict[str, Any]:
        """The last finished step as {step, metric, value} if its validation ranks it above all before; else {}. Every
        rank has the same results, and so the same answer. Raises ValueError if the first validation has no metric of
        the name --save.best-metric."""
        if not self.config.keep_best or not results:
            return {}
        if not self.metric:
            self.metric = choose_metric(results, self.config.best_metric)
            what = "lowest" if is_loss(self.metric) else "highest"
            print_on_main(self.world, f"the checkpoint with the {what} {self.metric} is kept (--save.best-metric)")
            if self.best.get("metric") != self.metric:          # an earlier start ranked by another one
                self.best = {}
        step = self.state["step"]
        if self.metric not in results:                          # maj@N, if no sample has a vote
            print_on_main(self.world, f"the validation after step {step} has no {self.metric}: this step cannot be the "
                                      f"best")
            return {}
        return better(step, results, self.metric, self.best)

    def _resume_best(self, best: dict[str, Any]) -> None:
        """Takes over the best step that the checkpoint knows, as long as its own checkpoint is on disk."""
        if not (self.config.keep_best and self.starts_from_own):
            best = {}
        if best and not on_main(self.world, lambda: bool(read_checkpoint(self._folder(best["step"])))):
            print_on_main(self.world, f"{self._folder(best['step'])}, which was the best checkpoint, is gone")
            best = {}
        self.best = best
        together(lambda: self.world.is_main and write_best(self.root.parent, best), OSError)

    def _keep(self, best: dict[str, Any]) -> None:
        """Names the best checkpoint, then deletes all but this one and the newest, so that a kill loses neither."""
        write_best(self.root.parent, best)
        for old in complete_checkpoints(self.root.parent)[: -self.config.keep]:
            if old != self._folder(best.get("step", 0)):        # no checkpoint is of step 0
                old.rename(old.with_name(f".{old.name}.deleted"))
        self._remove_deleted()

    def _remove_deleted(self) -> None:
        for deleted in self.root.glob(".step_*.deleted"):
            remove_checkpoint(deleted)

    def _folder(self, step: int) -> Path:
        return self.root / f"step_{step:06d}"

    def _save(self) -> None:
        with self.timer("save_checkpoint"):
            self.wait()
            tensors = tensors_of(self.parts)
            if self.config.async_:                              # the thread reads a copy, while training goes on
                tensors = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
            # with --rollout.tp vLLM gives this thread another stream, for whose copies the one that writes cannot wait
            get_device_module(self.world.device).synchronize()
            self.saved_step = self.state["step"]
            self.writing = self.thread.submit(self._write, tensors, self.state | {"best": self.best}, self.of_rank)
            if not self.config.async_:
                self.wait()

    def _write(self, tensors: dict[str, Tensor], state: dict[str, Any], of_rank: list[bytes]) -> None:
        """Writes one checkpoint, with all ranks' threads together. Raises OSError on all ranks."""
        final = self._folder(state["step"])
        partial = final.with_name(f".{final.name}.partial")
        try:
            files = together(lambda: self._write_own(partial, tensors, of_rank), Exception, self.group)
            manifest = {
                "state": state, "world_size": self.world.size, "model": self.model, "flags": self.flags,
                "outside": self.outside,
                "files": {name: entry for part in files for name, entry in part.items()},
            }
            together(lambda: self.world.is_main and self._publish(partial, final, manifest), OSError, self.group)
        except Exception as error:                              # of any rank; a full disk's can be a SafetensorError
            if self.world.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise OSError(f"{final} could not be written: {type(error).__name__}: {error}") from error

    def _write_own(self, partial: Path, tensors: dict[str, Tensor], of_rank: list[bytes]) -> dict[str, dict[str, int]]:
        """Writes this rank's shards and bytes, and `hf/` on rank 0. Returns size and checksum of all files of this
        rank, now on disk."""
        save_shards(tensors, partial, self.world.rank)
        write_parts(partial, self.world.rank, of_rank)
        mine = list(partial.glob(f"__{self.world.rank}_*"))
        if self.world.is_main:
            write_files(partial / "hf", self.files)
            mine += [partial / "hf" / name for name in self.files]
        for path in mine:
            path.chmod(partial.stat().st_mode & 0o666)          # of safetensors only its owner may read
            sync(path)
        return {str(path.relative_to(partial)): entry_of(path) for path in mine}

    def _publish(self, partial: Path, final: Path, manifest: dict[str, Any]) -> None:
        write_manifest(partial, manifest)
        for folder in (partial / "hf", partial):
            sync(folder)
        partial.rename(final)
        sync(self.root)
        self._keep(manifest["state"].get("best", {}))
