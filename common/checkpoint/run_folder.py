"""The run folder as such: it must be one folder for all ranks, and writable."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common.parallel.ranks import World, all_gather_objects


def on_main(world: World, work: Callable[[], Any]) -> Any:
    """What `work` returns on rank 0, on every rank. If it raises ValueError there, every rank raises it."""
    result, error = None, None
    if world.is_main:
        try:
            result = work()
        except ValueError as raised:
            error = str(raised)
    shared = [result, error]
    dist.broadcast_object_list(shared)
    result, error = shared
    if error is not None:
        raise ValueError(error)
    return result


def check_run_folder(run_dir: str, world: World) -> None:
    """Raises ValueError if `run_dir` cannot be written, or is not the same folder for all ranks."""
    root = Path(run_dir).resolve() / "checkpoints"
    probe = root / on_main(world, lambda: _make_probe(run_dir, root))
    blind = [rank for rank, found in enumerate(all_gather_objects(probe.exists())) if not found]
    if blind:
        raise ValueError(
            f"--run-dir {run_dir} is another folder for rank(s) {blind} than for rank 0: it must be on a file system "
            f"that all machines share"
        )
    if world.is_main:
        probe.unlink()


def _make_probe(run_dir: str, root: Path) -> str:
    """The name of a new empty file in `root`."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        file, name = tempfile.mkstemp(prefix=".probe_", dir=root)
    except OSError as error:
        raise ValueError(f"--run-dir {run_dir} cannot be written: {error}") from None
    os.close(file)
    return Path(name).name
