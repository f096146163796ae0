"""Writing one checkpoint: all ranks together, each in a thread of its own, while training may go on."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tyro
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from common.checkpoint.export import write_files
from common.checkpoint.files import complete_checkpoints, crc32, sync, write_manifest
from common.parallel.ranks import World, collective_timeout, together


@dataclass
class SaveConfig:
    every: int = 20
    """Steps between checkpoints; the last step is saved in any case. 0: only that."""
    keep: int = 2
    """Newest checkpoints that stay on disk."""
    async_: Annotated[bool, tyro.conf.arg(name="async")] = False
    """Write checkpoints in the background, from a copy in host memory (12 bytes a parameter, over all ranks)."""
    hf: Literal["never", "end"] = "end"
    """Write the model as a Hugging Face folder, RUN_DIR/model, at the end (tools/checkpoints.py: of a checkpoint)."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of the weights in it. auto: that of --policy.compute-dtype. float32: as they were trained."""
    resume: str = "auto"
    """auto: from the newest complete checkpoint of the run folder, if there is one. none: from the start. Else a run
    folder or a checkpoint. none and a path need a run folder without checkpoints; a restart by torchrun or Slurm
    continues the run folder in any case."""
    allow_changes: bool = False
    """Continue a run although flags that its results depend on are not those of its last start."""
    timeout_s: float = 3600.0
    """Seconds that a phase (model load, rollout, update, validation) may take before all ranks print their stacks and
    end. 0: any."""

    def __post_init__(self):
        if self.every < 0 or self.keep < 1 or self.timeout_s < 0:
            raise ValueError(
                f"--save.every {self.every} and --save.timeout-s {self.timeout_s:g} must be at least 0, "
                f"--save.keep {self.keep} at least 1"
            )


class ShardWriter(dcp.FileSystemWriter):
    """DCP's writer, which says why the disk refused. torch.save replaces that error by `unexpected pos 704 vs 598`."""

    def write_data(self, *args: Any) -> Any:
        try:
            return super().write_data(*args)
        except RuntimeError as error:
            raise (error.__context__ or error) from None


class Writer:
    """Writes checkpoints into `root` and deletes old ones. All ranks submit `write` to their threads in one order."""

    def __init__(self, config: SaveConfig, root: Path, world: World, files: dict[str, bytes]):
        self.config = config
        self.root = root
        self.world = world
        self.files = files
        # The writer threads have a process group of their own.
        self.group = dist.new_group(backend="gloo", timeout=collective_timeout(config.timeout_s))
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        if world.is_main:
            for leftover in root.glob(".step_*"):               # A killed process leaves such folders.
                shutil.rmtree(leftover)

    def write(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """Writes one checkpoint. Raises OSError on all ranks."""
        final = self.root / f"step_{manifest['state']['step']:06d}"
        partial = final.with_name(f".{final.name}.partial")
        try:
            dcp.save(tensors, storage_writer=ShardWriter(partial), process_group=self.group)
            files = together(lambda: self._finish(partial), OSError, self.group)
            manifest["files"] = {name: entry for part in files for name, entry in part.items()}
            together(lambda: self.world.is_main and self._publish(partial, final, manifest), OSError, self.group)
            return
        except CheckpointException as error:
            reasons = [f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in error.failures.items()]
        except OSError as error:
            reasons = [f"{type(error).__name__}: {error}"]
        if self.world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise OSError(f"{final} could not be written: {'; '.join(reasons)}")

    def _finish(self, partial: Path) -> dict[str, dict[str, int]]:
        """Writes `hf/` on rank 0. Returns size and checksum of all files of this rank, now on disk."""
        mine = list(partial.glob(f"__{self.world.rank}_*"))
        if self.world.is_main:
            write_files(partial / "hf", self.files)
            mine += [partial / ".metadata", *(path for path in (partial / "hf").rglob("*") if path.is_file())]
        for path in mine:
            sync(path)
        return {str(path.relative_to(partial)): {"size": path.stat().st_size, "crc32": crc32(path)} for path in mine}

    def _publish(self, partial: Path, final: Path, manifest: dict[str, Any]) -> None:
        write_manifest(partial, manifest)
        for folder in (partial / "hf", partial):
            sync(folder)
        partial.rename(final)
        sync(self.root)
        for old in complete_checkpoints(self.root.parent)[: -self.config.keep]:
            shutil.rmtree(old.rename(old.with_name(f".{old.name}.deleted")))
