"""The checkpoints of a run: when they are written, which one a run starts from, what a stop signal does.

RUN_DIR/checkpoints/step_N holds torch's distributed checkpoint (one file a rank), `hf/` (config, tokenizer, chat
template) and manifest.json, which names every file with its size and CRC-32. It is written as .step_N.partial, the
manifest last, and then renamed: a folder called step_N was complete when it got this name.
"""

import itertools
import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor

from common.checkpoint.files import check_files, find, read_manifest
from common.checkpoint.signals import Watchdog
from common.checkpoint.state import Parts, Reader, differences, flags_of, make_optimizer_state, tensors_of
from common.checkpoint.writer import SaveConfig, Writer
from common.model.lora import adapter_flags
from common.parallel.ranks import World, all_gather_objects, all_max, on_main
from common.tracking.console import print_on_main
from common.tracking.profiling import Timer

NOT_COMPARED = {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures", "use_cache"}
"""Entries of a model's config that may differ between a checkpoint and the run that continues from it."""
MAY_CHANGE = re.compile(
    "--(save|log|offload|policy.(attention|gradient|share|replicas|sequence)|run-dir|model |"
    "reward.(num-workers|concurrency|timeout)|data|train-data|val-data|eval|total-|max-tokens-per-gpu|"
    "rollout.(max-num-seqs|tp|gpu-memory|kv-cache|enforce|sleep|max-probe|extra))"
)
"""Flags that change where and how fast a run computes, how long it goes on and what it reports, but not its steps."""
MAX_CHECKS = 16
"""Of a phase: a check is a collective, whose time grows with the number of ranks."""


class Checkpoints:
    """The checkpoints of one run: `resume` at its start, `check` at safe points, `after_step`, `close`. All ranks call
    the same methods in the same order.

    A stop signal takes effect in `check`. Before the first optimizer step of a training step, that step is abandoned
    and the state after the last finished one is what is saved; after it, `check` lets the step finish. So what is saved
    is always the state between two steps, and resuming is exact.
    """

    def __init__(self, args: Any, world: World, parts: Parts, files: dict[str, bytes], watchdog: Watchdog):
        """`args`: the script's flags; `files`: from `hf_files`."""
        self.config: SaveConfig = args.save
        self.world = world
        self.parts = parts
        self.watchdog = watchdog
        self.root = Path(args.run_dir).resolve() / "checkpoints"
        self.flags = flags_of(args)
        self.model = json.loads(files["config.json"]) | {"trained parts": sorted(parts)} | adapter_flags(self.flags)
        # The state after the last finished step.
        self.state: dict[str, Any] = {"step": 0}
        self.dirty = False                                      # True once an optimizer step was made since then
        # The saves.
        self.saved_step = 0
        self.timer = Timer(watchdog.phase)
        self.host: dict[str, Tensor] = {}                       # what the writer thread reads while training goes on
        self.writing: Future | None = None
        self.writer = Writer(self.config, self.root, world, files)
        for _, optimizer in parts.values():
            optimizer.register_step_post_hook(self._mark_dirty)

    def resume(self) -> dict[str, Any]:
        """Fills all parts as `--save.resume` says, from a checkpoint of any number of ranks. Returns the state that was
        saved with it, {} for a run that starts. Raises ValueError where a checkpoint does not fit."""
        folder = self._choose()
        if folder is None:
            return {}
        manifest = read_manifest(folder)
        wrong = [d for d in differences(manifest.get("model", {}), self.model) if d.split()[0] not in NOT_COMPARED]
        if wrong:
            raise ValueError(
                f"{folder} does not fit this run: {'; '.join(wrong[:4])}{' ...' if wrong[4:] else ''}: choose another "
                f"--run-dir or --save.resume"
            )
        changed = differences(manifest["flags"], self.flags)
        algorithm = [text for text in changed if not MAY_CHANGE.match(text)]
        if algorithm and folder.parent == self.root and not self.config.allow_changes:
            raise ValueError(
                f"{self.root.parent} was trained with other flags: {'; '.join(algorithm)}: give the old ones, or "
                f"another --run-dir, or set --save.allow-changes"
            )
        reader = Reader(folder)
        make_optimizer_state(self.parts, reader.read_metadata().state_dict_metadata)
        dcp.load(tensors_of(self.parts), storage_reader=reader)
        self.dirty = False
        self.state = manifest["state"]
        self.saved_step = self.state["step"]
        if folder.parent != self.root:
            self.state.pop("tracker", None)                     # The metrics of another run stay its own.
        print_on_main(
            self.world,
            f"resumed after step {self.saved_step} from {folder} of {manifest['world_size']} rank(s)"
            f"{'; other flags: ' if changed else ''}{'; '.join(changed)}",
        )
        return json.loads(json.dumps(self.state))

    def after_step(self, state: dict[str, Any]) -> None:
        """A step is finished and its metrics are logged. `state`: what the script needs to go on after it, plain JSON
        with "step" and "total_steps". Saves when it is time to, obeys signals."""
        self.state = json.loads(json.dumps(state))
        self.dirty = False
        is_last = state["step"] == state["total_steps"]
        if is_last or (self.config.every and state["step"] % self.config.every == 0):
            self._save()
        self.check()

    def check(self) -> None:
        """A safe point: if a signal has reached any rank, and no optimizer step would be lost, all save and raise
        SystemExit. The engine and the process group are the caller's to close."""
        number = 0 if self.dirty else int(all_max([self.watchdog.signal]))
        if not number:
            return
        if self.state["step"] != self.saved_step:
            self._save()
        self.close()
        saved = ", which is saved" if self.saved_step else "; there is nothing to save yet"
        print_on_main(self.world, f"stopped by {signal.Signals(number).name} after step {self.state['step']}{saved}")
        sys.exit(128 + number)

    def spread_checks(self, num_microbatches: int) -> Callable[[], None]:
        """What to call after each micro-batch of a phase. It checks MAX_CHECKS times at most, evenly spread."""
        number = itertools.count(1)
        every = math.ceil(num_microbatches / MAX_CHECKS)
        return lambda: self.check() if next(number) % every == 0 else None

    def stopping(self) -> bool:
        """Whether this rank got a signal, so that what it samples now will not be used. The engine calls this often."""
        return bool(self.watchdog.signal) and not self.dirty

    def metrics(self) -> dict[str, float]:
        """Seconds that saves since the last call blocked training."""
        timings = {f"timing_s/{phase}": seconds for phase, seconds in self.timer.seconds.items()}
        self.timer.seconds.clear()
        return timings

    def wait(self) -> None:
        """Waits until the last save is on disk. Raises OSError if it failed."""
        if self.writing is not None:
            self.writing.result()

    def close(self) -> None:
        """Waits for the last save. Raises OSError if it failed."""
        self.wait()
        self.writer.thread.shutdown()

    def _mark_dirty(self, *_) -> None:
        self.dirty = True

    def _save(self) -> None:
        with self.timer("save_checkpoint"):
            self.wait()
            tensors = tensors_of(self.parts)
            if self.config.async_:
                self.host = self.host or {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
                for name, tensor in tensors.items():
                    self.host[name].copy_(tensor)
                tensors = self.host
            manifest = {"state": self.state, "world_size": self.world.size, "model": self.model, "flags": self.flags}
            self.saved_step = self.state["step"]
            self.writing = self.writer.thread.submit(self.writer.write, tensors, manifest)
            if not self.config.async_:
                self.wait()

    def _choose(self) -> Path | None:
        """The checkpoint to start from, every file of it read and compared; None for a new run."""
        for folder in on_main(self.world, self._candidates):
            damage = all_gather_objects(check_files(folder, self.world.rank, self.world.size))
            what = "; ".join(sorted(set().union(*damage)))
            if not what:
                return folder
            if folder.parent != self.root:
                raise ValueError(f"{folder} is damaged: {what}: choose another --save.resume")
            print_on_main(self.world, f"{folder} is damaged: {what}. Renamed to damaged_{folder.name}")
            if self.world.is_main:
                folder.rename(folder.with_name(f"damaged_{folder.name}"))
        return None

    def _candidates(self) -> list[Path]:
        """The checkpoints to start from, the first of them that is undamaged."""
        own = sorted(self.root.glob("step_*"), reverse=True)
        how = self.config.resume
        counts = {os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")}
        if how == "auto" or (own and counts != {"0"}):
            return own
        if own:
            raise ValueError(
                f"--run-dir {self.root.parent} has checkpoints ({own[0].name}), which a later start would continue: "
                f"with --save.resume {how}, choose another --run-dir or remove them"
            )
        return [] if how == "none" else [find(how)]
