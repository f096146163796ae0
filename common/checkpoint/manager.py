"""Checkpoints: sharded, atomic, found by scanning, exact to resume from; and the Hugging Face folders made of them.

    python -m common.checkpoint list RUN
    python -m common.checkpoint export RUN_OR_CHECKPOINT OUT        # no GPU, any number of ranks before

RUN_DIR/checkpoints/step_N holds torch's distributed checkpoint (one file a rank), each rank's random state, `hf/`
(config, tokenizer, chat template) and manifest.json, which names every file with its size and CRC-32. It is written as
.step_N.partial, the manifest last, and then renamed: what is called step_N was complete.
"""

import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tyro
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from common.checkpoint.export import stored_weights, write_hf
from common.checkpoint.files import (
    check_files,
    complete_checkpoints,
    crc32,
    find,
    incomplete,
    read_manifest,
    sync,
    write_manifest,
)
from common.checkpoint.signals import Watch
from common.checkpoint.state import (
    Parts,
    Reader,
    differences,
    flags_of,
    get_random_state,
    make_optimizer_state,
    set_random_state,
    tensors_of,
)
from common.parallel.ranks import World, all_max, shutdown
from common.tracking.console import say

NOT_COMPARED = {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures", "use_cache"}
"""Entries of a model's config that may differ between a checkpoint and the run that continues from it."""


@dataclass
class SaveConfig:
    every: int = 0
    """Steps between checkpoints; the last step is saved in any case. 0: only that."""
    keep: int = 2
    """Newest checkpoints that stay on disk."""
    keep_best: int = 1
    """Checkpoints with the best validation scores that stay as well."""
    async_: Annotated[bool, tyro.conf.arg(name="async")] = False
    """Write checkpoints in the background, from a copy in host memory (12 bytes a parameter, over all ranks)."""
    on_error: Literal["stop", "continue"] = "stop"
    """When a checkpoint cannot be written (disk full, no permission): stop, or report it, count it and train on."""
    hf: Literal["never", "end", "always"] = "end"
    """Write the model as a Hugging Face folder. end: RUN_DIR/model, at the end; always: also in every checkpoint."""
    resume: str = "auto"
    """auto: from the newest complete checkpoint of the run folder, if there is one. none: from the start. Else a run
    folder or a checkpoint. none and a path need a run folder without newer checkpoints; a restart by torchrun or Slurm
    continues the run folder in any case."""
    timeout_s: float = 3600.0
    """Seconds that a phase of a step (rollout, update) may take before all ranks print their stacks and end. 0: any."""

    def __post_init__(self):
        if self.every < 0 or self.keep < 1 or self.keep_best < 0 or self.timeout_s < 0:
            raise ValueError(f"--save.every {self.every}, --save.keep-best {self.keep_best} and --save.timeout-s "
                             f"{self.timeout_s:g} must be at least 0, --save.keep {self.keep} at least 1")


class SaveError(RuntimeError):
    """A checkpoint could not be written. Raised on all ranks, with what each of them saw."""


class Checkpoints:
    """The checkpoints of one run: `resume` at its start, `check` at safe points, `after_step`, `close`. All ranks call
    the same in the same order.

    A stop signal takes effect in `check`. Before the first optimizer step of a training step, that step is abandoned
    and the state after the last finished one is what is saved; after it, `check` lets the step finish. So what is saved
    is always the state between two steps, and resuming is exact.
    """

    def __init__(self, config: SaveConfig, run_dir: str, args: Any, world: World, parts: Parts, files: dict[str, bytes],
                 watch: Watch):
        """`args`: the script's flags, for the manifest; `files`: from `hf_files`. Raises ValueError if `run_dir` cannot
        be written, or is not the same folder for all ranks."""
        self.config, self.world, self.parts, self.files, self.watch = config, world, parts, files, watch
        self.run_dir, self.root = run_dir, Path(run_dir).resolve() / "checkpoints"
        self.flags, self.script = flags_of(args), Path(sys.argv[0]).name
        self.state: dict[str, Any] = {"step": 0}                # after the last finished step, like the next three
        self.random_state = get_random_state()
        self.score: float | None = None
        self.best_score = -math.inf
        self.dirty = False                                      # an optimizer step was made since then
        self.saved_step, self.num_failed, self.blocked_s = 0, 0, None
        self.error: SaveError | None = None                     # of the newest save
        self.host: dict[str, Tensor] = {}                       # what the writer thread reads while training goes on
        self.writing: Future | None = None
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.group = dist.new_group(backend="gloo")             # of the writer threads alone
        for _, optimizer in parts.values():
            optimizer.register_step_post_hook(self._changed)
        self._check_folder()

    def resume(self) -> dict[str, Any]:
        """Fill all parts as `--save.resume` says, from a checkpoint of any number of ranks. Returns the state that was
        saved with it, {} for a run that starts. Raises ValueError where a checkpoint does not fit."""
        while (folder := self._on_main(self._choose)) is not None:
            damage = [x for found in gather(check_files(folder, self.world.rank, self.world.size)) for x in found]
            if not damage:
                break
            if self.config.resume != "auto":
                raise ValueError(f"{folder} is damaged: {'; '.join(damage)}: choose another --save.resume")
            say(self.world, f"{folder} is damaged: {'; '.join(damage)}. Renamed to damaged_{folder.name}")
            if self.world.is_main:
                folder.rename(folder.with_name(f"damaged_{folder.name}"))
        else:
            return {}
        manifest = read_manifest(folder)
        self._load(folder, manifest)
        self.state, self.best_score = manifest["state"], manifest["best_score"]
        if folder.parent == self.root:
            self.score, self.saved_step = manifest["score"], manifest["step"]
        else:
            self.state.pop("tracker", None)                     # another run's metrics stay its own
        if manifest["world_size"] == self.world.size:
            set_random_state(json.loads((folder / f"__{self.world.rank}_random.json").read_text()))
        self.random_state = get_random_state()
        changed = differences(manifest["flags"], self.flags)
        say(self.world, f"resumed after step {manifest['step']} from {folder} of {manifest['world_size']} rank(s)"
                        f"{'; other flags: ' if changed else ''}{'; '.join(changed)}")
        return json.loads(json.dumps(self.state))

    def after_step(self, state: dict[str, Any], last: bool, score: float | None = None) -> None:
        """A step is finished and its metrics are logged. `state`: what the script needs to go on after it, plain JSON
        with the step's number as "step"; `score`: from `validation_score`. Saves when it is time to, obeys signals."""
        self.state, self.score = json.loads(json.dumps(state)), score
        self.best_score = max(self.best_score, -math.inf if score is None else score)
        self.random_state, self.dirty = get_random_state(), False
        if last or (self.config.every and state["step"] % self.config.every == 0):
            self._save()
        self.check()

    def check(self) -> None:
        """A safe point: if a signal has reached any rank, and no optimizer step would be lost, all save and exit."""
        number = 0 if self.dirty else int(all_max([self.watch.signal]))
        if not number:
            return
        self.wait()
        if self.state["step"] != self.saved_step:
            self._save()
        self.close()
        say(self.world, f"stopped by {signal.Signals(number).name} after step {self.state['step']}"
                        f"{', which is saved' if self.saved_step else '; there is nothing to save yet'}")
        shutdown()
        sys.exit(128 + number)

    def stopping(self) -> bool:
        """For the engine to poll: this rank got a signal, and what it samples now will not be used."""
        return bool(self.watch.signal) and not self.dirty

    def metrics(self) -> dict[str, float]:
        """Seconds that saves since the last call blocked training, and the number of failed ones so far."""
        seconds = {} if self.blocked_s is None else {"timing_s/save_checkpoint": self.blocked_s}
        self.blocked_s = None
        return seconds | {"save/failed": self.num_failed}

    def wait(self) -> None:
        """Until the last save is on disk. Raises its SaveError, or reports it, as `--save.on-error` says."""
        if self.writing is None:
            return
        writing, self.writing = self.writing, None
        try:
            self.saved_step, self.error = writing.result(), None
        except SaveError as error:
            if self.config.on_error == "stop":
                raise
            self.num_failed, self.error = self.num_failed + 1, error
            say(self.world, f"{error}. Training goes on (--save.on-error continue)")

    def close(self) -> None:
        """Before the process group goes: wait for the last save. Raises its SaveError also with `on_error continue`."""
        self.wait()
        self.writer.shutdown()
        if self.error is not None:
            raise self.error

    # ---- saving

    def _changed(self, *_) -> None:
        self.dirty = True

    def _save(self) -> None:
        start, phase = time.perf_counter(), self.watch.current[0]
        self.watch.phase("save_checkpoint")
        self.wait()
        tensors = tensors_of(self.parts)
        if self.config.async_:
            self.host = self.host or {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
            for name, tensor in tensors.items():
                self.host[name].copy_(tensor)
            tensors = self.host
        manifest = {
            "step": self.state["step"], "score": self.score, "best_score": self.best_score, "state": self.state,
            "world_size": self.world.size, "script": self.script, "parts": sorted(self.parts),
            "flags": self.flags, "versions": {name: version(name) for name in ("torch", "transformers")},
        }
        self.writing = self.writer.submit(self._write, tensors, manifest, self.random_state)
        if not self.config.async_:
            self.wait()
        self.blocked_s = time.perf_counter() - start
        self.watch.phase(phase)

    def _write(self, tensors: dict[str, Tensor], manifest: dict[str, Any], random_state: dict[str, Any]) -> int:
        """In the writer threads of all ranks, together. Returns the step; raises SaveError."""
        final = self.root / f"step_{manifest['step']:06d}"
        partial = final.with_name(f".{final.name}.partial")
        try:
            self._together(lambda: self.world.is_main and self._make(partial))
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(partial), process_group=self.group)
            files = self._together(lambda: self._finish(partial, random_state))
            manifest["files"] = {name: entry for part in files for name, entry in part.items()}
            self._together(lambda: self.world.is_main and self._publish(partial, final, manifest))
        except CheckpointException as error:
            if self.world.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            reasons = [f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in error.failures.items()]
            raise SaveError(f"{final} could not be written: {'; '.join(reasons)}") from None
        return manifest["step"]

    def _together(self, work: Callable[[], Any]) -> list[Any]:
        """What `work` returns on every rank; if it raises OSError on one, all raise what DCP raises then."""
        try:
            result = work()
        except OSError as error:
            result = error
        results = gather(result, self.group)
        failures = {rank: (error, None) for rank, error in enumerate(results) if isinstance(error, OSError)}
        if failures:
            raise CheckpointException("save", failures)
        return results

    def _make(self, partial: Path) -> None:
        for rest in self.root.glob(".step_*"):                  # what a kill has left
            shutil.rmtree(rest)
        (partial / "hf").mkdir(parents=True)

    def _finish(self, partial: Path, random_state: dict[str, Any]) -> dict[str, dict[str, int]]:
        """After the tensors: what else this rank writes. Returns size and checksum of all its files, now on disk."""
        (partial / f"__{self.world.rank}_random.json").write_text(json.dumps(random_state))
        mine = list(partial.glob(f"__{self.world.rank}_*"))
        if self.world.is_main:
            weights = stored_weights(partial) if self.config.hf == "always" else []
            write_hf(partial / "hf", weights, self.files, file_gb=4.0)
            mine += [partial / ".metadata", *(path for path in (partial / "hf").rglob("*") if path.is_file())]
        for path in mine:
            sync(path)
        return {str(path.relative_to(partial)): {"size": path.stat().st_size, "crc32": crc32(path)} for path in mine}

    def _publish(self, partial: Path, final: Path, manifest: dict[str, Any]) -> None:
        write_manifest(partial, manifest)
        for folder in (partial / "hf", partial):
            sync(folder)
        replaced = final.with_name(f".{final.name}.replaced")   # an incomplete one: complete ones are never replaced
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        sync(self.root)
        shutil.rmtree(replaced, ignore_errors=True)
        found = complete_checkpoints(self.run_dir)
        scores = {folder: read_manifest(folder)["score"] for folder in found}
        ranked = sorted((score, folder) for folder, score in scores.items() if score is not None)
        best = [folder for _, folder in ranked[len(ranked) - self.config.keep_best :]]
        for old in found[: -self.config.keep]:
            if old not in best:
                shutil.rmtree(old.rename(old.with_name(f".{old.name}.deleted")))

    # ---- loading

    def _on_main(self, work: Callable[[], Any]) -> Any:
        """What `work` returns on rank 0; its ValueError is raised on all ranks."""
        result = [None, None]
        if self.world.is_main:
            try:
                result[0] = work()
            except ValueError as error:
                result[1] = str(error)
        dist.broadcast_object_list(result)
        if result[1] is not None:
            raise ValueError(result[1])
        return result[0]

    def _check_folder(self) -> None:
        probe = self.root / self._on_main(self._make_probe)
        blind = [rank for rank, sees in enumerate(gather(probe.exists())) if not sees]
        if blind:
            raise ValueError(f"--run-dir {self.run_dir} is another folder for rank(s) {blind} than for rank 0: it must "
                             f"be on a file system that all machines share")
        if self.world.is_main:
            probe.unlink()

    def _make_probe(self) -> str:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            file, name = tempfile.mkstemp(prefix=".probe_", dir=self.root)
        except OSError as error:
            raise ValueError(f"--run-dir {self.run_dir} cannot be written: {error}") from None
        os.close(file)
        return Path(name).name

    def _choose(self) -> Path | None:
        """The checkpoint to start from, None for a new run."""
        own, how = complete_checkpoints(self.run_dir), self.config.resume
        for folder in sorted(self.root.glob("step_*")):
            if folder not in own:
                say(self.world, f"{folder} is passed over: {incomplete(folder)}")
        counts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
        restarted = any(count != "0" for count in counts)
        if how == "auto" or (own and restarted):
            return own[-1] if own else None
        chosen = None if how == "none" else find(how)
        newer = [folder for folder in own if chosen not in own or folder > chosen]
        if newer:
            raise ValueError(f"--run-dir {self.run_dir} has newer checkpoints ({newer[-1].name}), which a later start "
                             f"would continue: with --save.resume {how}, choose another --run-dir or remove them")
        return chosen

    def _load(self, folder: Path, manifest: dict[str, Any]) -> None:
        reader = Reader(folder)
        stored = reader.read_metadata().state_dict_metadata
        wrong = []
        if self.config.resume == "auto":
            wrong += differences({"script": manifest["script"]}, {"script": self.script})
        wrong += differences({"trained parts": manifest["parts"]}, {"trained parts": sorted(self.parts)})
        before, now = (json.loads(x) for x in ((folder / "hf/config.json").read_bytes(), self.files["config.json"]))
        wrong += [text for text in differences(before, now) if text.split()[0] not in NOT_COMPARED]
        before = {n: tuple(x.size) for n, x in stored.items() if n.partition(".")[2].startswith("model.")}
        now = {n: tuple(x.shape) for n, x in tensors_of(self.parts).items() if n.partition(".")[2].startswith("model.")}
        wrong += differences(before, now)
        if wrong:
            raise ValueError(f"{folder} does not fit this run: {'; '.join(wrong[:4])}{' ...' if wrong[4:] else ''}: "
                             f"choose another --run-dir or --save.resume")
        make_optimizer_state(self.parts, stored)
        dcp.load(tensors_of(self.parts), storage_reader=reader)


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """`value` of every rank, on every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def validation_score(metrics: dict[str, float]) -> float | None:
    """What `--save.keep-best` ranks by: the mean of a step's validation results; None: the step had no validation."""
    results = [value for name, value in metrics.items() if name.startswith("val-core/")]
    return sum(results) / len(results) if results else None
