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
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, get_device_module

from common.checkpoint.best import better, choose_metric, is_loss, write_best
from common.checkpoint.choice import check_fits, choose
from common.checkpoint.export import write_files
from common.checkpoint.files import complete_checkpoints, entry_of, read_checkpoint, remove, sync, write_manifest
from common.checkpoint.own import remove_checkpoint
from common.checkpoint.signals import Watchdog
from common.checkpoint.state import FILE, Parts, fingerprint, load_parts, save_shards, tensors_of
from common.flags.record import SaveConfig
from common.flags.secrets import flags_of
from common.metrics import Timer
from common.model.policy import PackedModel
from common.parallel.ranks import World, all_max, collective_timeout, on_main, print_on_main, together
from common.source.stored import fingerprints
from envs.stored import join, split, write_parts

UNFINISHED = re.compile(r"\.step_\d{6,}\.partial")


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
            for name, value in self.flags.items():
                if name.startswith("--lora."):
                    self.model[name] = value
            self.model["--model"] = Path(self.flags["--model"]).name
        folders = {}
        for name, model in models.items():
            if name not in parts or self.flags.get("--lora.rank"):
                folders[name] = model.folder
        if self.flags.get("--reward-model.path"):
            folders["reward model"] = self.flags["--reward-model.path"]
        self.outside = on_main(world, partial(fingerprints, folders))
        """Models whose weights (with adapters: their base's) no checkpoint holds -> the checksum of their folder."""
        # The state after the last finished step.
        self.state: dict[str, Any] = {"step": 0}
        self.of_rank: list[bytes] = []                          # what belongs into it on this rank alone
        self.script = (0, 0.0)                               # what ranks compare of the script's own part of it
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
            optimizer.register_step_post_hook(self._on_optimizer_step)

    def _on_optimizer_step(self, *_: Any) -> None:
        self.dirty = True

    def resume(self) -> dict[str, Any]:
        """Fills all parts as `--save.resume` says, from a checkpoint of any number of ranks. Returns the state that was
        saved with it, {} for a new run. Raises ValueError if a checkpoint does not fit."""
        folder = choose(self.root, self.config.resume, self.world)
        if folder is None:
            self._resume_best({})
            return {}
        is_own = folder.parent == self.root
        manifest = read_checkpoint(folder)
        now = {"model": self.model, "flags": self.flags, "outside": self.outside}
        changed = check_fits(folder, manifest, now, is_own, self.config.allow_changes)
        load_parts(self.parts, folder, self.world.rank)
        self.dirty = False
        self.state = manifest["state"]
        self.saved_step = self.state["step"]
        if not is_own:
            self.state.pop("tracker", None)                     # The metrics of another run stay its own.
        text = f"resumed after step {self.saved_step} from {folder} of {manifest['world_size']} rank(s)"
        if changed:
            text += f"; other flags: {'; '.join(changed)}"
        print_on_main(self.world, text)
        self._drop_of_other_script(manifest["flags"]["script"])
        self.starts_from_own = is_own
        self._resume_best(self.state.pop("best", {}))
        return join(self.state, folder, range(self.world.rank, manifest["world_size"], self.world.size))

    def _drop_of_other_script(self, made_by: str) -> None:
        """Drops the state that a script kept for itself, if this run has another one."""
        if made_by == self.flags["script"]:
            return
        counts = []
        for name, value in self.state.get("script", {}).items():
            if value and isinstance(value, list):
                counts.append(f"{len(value)} {name}")
            elif value:
                counts.append(name)
        if not counts:
            return
        print_on_main(self.world, f"dropped what only {made_by} can use of the checkpoint: {', '.join(counts)}")
        self.state["script"] = {}                       # it would be used, long after, when that script resumes

    def after_validation(self, results: dict[str, float]) -> None:
        """The state that this run starts from is validated. If that is a step that a stop signal kept from its
        validation, it is saved already and can be the best; the model before training cannot. Raises ValueError if the
        validation has no metric of the name --save.best-metric."""
        best = self._better(results)
        if best and self.starts_from_own:
            self.best = best
            self._on_main(partial(self._keep, best))

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
        is_due = state["step"] == state["total_steps"]
        if self.config.every and state["step"] % self.config.every == 0:
            is_due = True
        if best:
            self.best = best
            is_due = True
        if is_due:
            self._save()
        self.check()

    def check_unchanged(self, script: dict[str, Any]) -> None:
        """Raises RuntimeError if the script's state is not what `after_step` got: a checkpoint has the older one."""
        if fingerprint(split(script)[0]) != self.script:
            raise RuntimeError("run.script_state was changed after run.finish, which saves it: write it before")

    def check(self) -> None:
        """A safe point: if a signal has reached any rank, and no optimizer step would be lost, all ranks save and raise
        SystemExit. The caller closes the engine and the process group."""
        if self.dirty:
            return
        code, total = self.script                               # with the signal, so that no collective is added
        reduced = all_max([self.watchdog.signal, code, total, -code, -total]).tolist()
        number = int(reduced[0])
        most_code, most_total = reduced[1:3]
        least_code = -reduced[3]
        least_total = -reduced[4]
        if most_code != least_code or most_total - least_total > 1e-6 * most_total:
            raise ValueError("run.script_state differs between ranks, and a checkpoint holds that of the first: make "
                             "it of what all ranks have, rollout.scores for example; bytes are each rank's own")
        if not number:
            return
        if self.state["step"] != self.saved_step:
            self._save()
        self.wait()
        saved = "; there is nothing to save yet"
        if self.saved_step:
            saved = ", which is saved"
        print_on_main(self.world, f"stopped by {signal.Signals(number).name} after step {self.state['step']}{saved}")
        sys.exit(128 + number)

    def stopping(self) -> bool:
        """Whether this rank got a signal, so that its running samples will not be used. The engine calls this often."""
        return bool(self.watchdog.signal) and not self.dirty

    def wait(self) -> None:
        """Waits until the last save is on disk. Raises OSError if it failed."""
        if self.writing is not None:
            self.writing.result()

    def _on_main(self, work: Callable[[], None], group: dist.ProcessGroup | None = None) -> None:
        """Rank 0 does this. If it raises OSError, every rank raises it."""

        def work_of_rank() -> None:
            if self.world.is_main:
                work()

        together(work_of_rank, OSError, group)

    def _better(self, results: dict[str, float] | None) -> dict[str, Any]:
        """The last finished step as {step, metric, value} if its validation ranks it above all before; else {}. Every
        rank has the same results, and so the same answer. Raises ValueError if the first validation has no metric of
        the name --save.best-metric."""
        if not self.config.keep_best or not results:
            return {}
        if not self.metric:
            self.metric = choose_metric(results, self.config.best_metric)
            what = "highest"
            if is_loss(self.metric):
                what = "lowest"
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
        if not self.config.keep_best or not self.starts_from_own:
            best = {}
        if best:
            folder = self._folder(best["step"])
            if not on_main(self.world, lambda: bool(read_checkpoint(folder))):
                print_on_main(self.world, f"{folder}, which was the best checkpoint, is gone")
                best = {}
        self.best = best
        self._on_main(partial(write_best, self.root.parent, best))

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
                for name, tensor in tensors.items():
                    tensors[name] = tensor.to("cpu", copy=True)
            # with --rollout.tp vLLM gives this thread another stream, for whose copies the one that writes cannot wait
            get_device_module(self.world.device).synchronize()
            self.saved_step = self.state["step"]
            self.writing = self.thread.submit(self._write, tensors, self.state | {"best": self.best}, self.of_rank)
            if not self.config.async_:
                self.wait()

    def _write(self, tensors: dict[str, Tensor], state: dict[str, Any], of_rank: list[bytes]) -> None:
        """Writes one checkpoint, with all ranks' threads together. Raises OSError on all ranks."""
        final = self._folder(state["step"])
        unfinished = final.with_name(f".{final.name}.partial")
        try:
            write_own = partial(self._write_own, unfinished, tensors, of_rank)
            written = together(write_own, Exception, self.group)
            files: dict[str, dict[str, int]] = {}
            for entries in written:
                files |= entries
            manifest = {
                "state": state,
                "world_size": self.world.size,
                "model": self.model,
                "flags": self.flags,
                "outside": self.outside,
                "files": files,
            }
            self._on_main(partial(self._publish, unfinished, final, manifest), self.group)
        except Exception as error:                              # of any rank; a full disk's can be a SafetensorError
            if self.world.is_main:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise OSError(f"{final} could not be written: {type(error).__name__}: {error}") from error

    def _write_own(self, unfinished: Path, tensors: dict[str, Tensor],
                   of_rank: list[bytes]) -> dict[str, dict[str, int]]:
        """Writes this rank's shards and bytes, and `hf/` on rank 0. Returns size and checksum of all files of this
        rank, now on disk."""
        save_shards(tensors, unfinished, self.world.rank)
        write_parts(unfinished, self.world.rank, of_rank)
        mine = list(unfinished.glob(f"__{self.world.rank}_*"))
        if self.world.is_main:
            write_files(unfinished / "hf", self.files)
            for name in self.files:
                mine.append(unfinished / "hf" / name)
        entries = {}
        for path in mine:
            path.chmod(unfinished.stat().st_mode & 0o666)       # of safetensors only its owner may read
            sync(path)
            entries[str(path.relative_to(unfinished))] = entry_of(path)
        return entries

    def _publish(self, unfinished: Path, final: Path, manifest: dict[str, Any]) -> None:
        write_manifest(unfinished, manifest)
        for folder in (unfinished / "hf", unfinished):
            sync(folder)
        unfinished.rename(final)
        sync(self.root)
        self._keep(manifest["state"].get("best", {}))
