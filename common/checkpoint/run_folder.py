"""The run folder as such: one folder for all ranks, writable, used by one run at a time, perhaps of a finished run."""

import fcntl
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from common.checkpoint.files import complete_checkpoints, read_manifest
from common.checkpoint.state import differences, flags_of
from common.parallel.ranks import World, all_gather_objects
from common.tracking.console import print_on_main

LOCK = ".lock"
_locks: dict[Path, TextIO] = {}
"""The open lock files of this process. Closing one ends the lock, so they stay here."""


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


def open_run_folder(run_dir: str, world: World) -> None:
    """Makes the run folder, and locks it until this process ends, however it ends. Call it before anything is written.
    Raises ValueError if it cannot be written, is not the same folder for all ranks, or is in use by another run."""
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
    on_main(world, lambda: lock(run_dir))


def lock(run_dir: str) -> None:
    """Takes RUN_DIR/.lock for this process; nothing happens if it has it already. Raises ValueError if another has it.

    It is a POSIX record lock: the kernel frees it when the process dies, child processes do not inherit it, and NFS
    carries it to other machines (there, the lock of a machine that crashed lasts until the server's lease ends).
    """
    path = Path(run_dir).resolve() / LOCK
    if path in _locks:
        return
    file = path.open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        if not isinstance(error, BlockingIOError | PermissionError):
            raise ValueError(f"--run-dir {run_dir}: its file system cannot lock {path}: {error}") from None
        raise ValueError(
            f"--run-dir {run_dir} is in use by {holder}: choose another --run-dir, or wait until that run has ended"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    _locks[path] = file


def unlock(run_dir: str) -> None:
    """Gives the lock back before the process ends."""
    _locks.pop(Path(run_dir).resolve() / LOCK).close()


def is_finished(run_dir: str, args: Any, total_steps: int, with_model: bool, world: World) -> bool:
    """Whether the run in `run_dir` has nothing left to do, and says so, before anything heavy starts or is written.
    `args`: the script's flags; `with_model`: the run exports its model at the end, so RUN_DIR/model must be there."""
    found = on_main(world, lambda: _finished(run_dir, args, total_steps, with_model))
    if found:
        print_on_main(world, found)
    return bool(found)


def _finished(run_dir: str, args: Any, total_steps: int, with_model: bool) -> str:
    checkpoints = complete_checkpoints(run_dir)
    if not checkpoints or (with_model and not (Path(run_dir) / "model/config.json").is_file()):
        return ""
    manifest = read_manifest(checkpoints[-1])
    stopped_in_last_validation = bool(manifest["state"].get("not_validated"))
    if manifest["step"] < total_steps or stopped_in_last_validation:
        return ""
    changed = differences(manifest["flags"], flags_of(args))
    return (
        f"{run_dir} is finished: {checkpoints[-1].name} is its last checkpoint, --total-steps is {total_steps}. "
        f"Nothing was changed{'; other flags now: ' if changed else ''}{'; '.join(changed)}"
    )


def _make_probe(run_dir: str, root: Path) -> str:
    """The name of a new empty file in `root`."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        file, name = tempfile.mkstemp(prefix=".probe_", dir=root)
    except OSError as error:
        raise ValueError(f"--run-dir {run_dir} cannot be written: {error}") from None
    os.close(file)
    return Path(name).name
