"""The run folder: one folder for all ranks, writable, used by one run at a time; its run may be finished."""

import fcntl
import os
import socket
from pathlib import Path
from typing import Any

from common.checkpoint.files import read_manifest
from common.checkpoint.own import FINISHED, HOLDER, LOCK
from common.flags.secrets import differences, flags_of
from common.parallel.ranks import World, all_gather_objects, on_main

HELD: dict[Path, int] = {}
"""Lock files of this process -> their descriptors, which are never closed: closing any descriptor ends the lock."""


def open_run_folder(run_dir: str, world: World) -> None:
    """Makes the run folder, and locks it until this process ends, however it ends. Call it before anything is written.
    Raises ValueError if it cannot be written, is not the same folder for all ranks, or is in use by another run."""
    written = on_main(world, lambda: lock(run_dir))
    path = Path(run_dir).resolve() / LOCK
    found = True                                                # closing the file would end rank 0's own lock
    if not world.is_main:
        found = path.is_file() and path.read_text() == written
    blind = [rank for rank, finds in enumerate(all_gather_objects(found)) if not finds]
    if blind:
        raise ValueError(f"--run-dir {run_dir} is another folder for rank(s) {blind} than for rank 0: it must "
                         "be on a file system that all machines share")


def lock(run_dir: str) -> str:
    """Takes RUN_DIR/.lock for this process, and returns what it wrote there. Raises ValueError if another has it.

    It is a POSIX record lock: the kernel frees it when the process dies, child processes do not inherit it, and NFS
    carries it to other machines (there, the lock of a machine that crashed lasts until the server's lease ends).
    """
    path = Path(run_dir).resolve() / LOCK
    if path.is_symlink():
        raise ValueError(f"--run-dir {run_dir}: {LOCK} is a symbolic link, whose target would be overwritten; no run "
                         f"makes one: choose another --run-dir")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        HELD[path] = file
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not HOLDER.fullmatch(os.read(file, 10_000)):
            raise ValueError(f"--run-dir {run_dir}: {LOCK} is not of a run: choose another --run-dir")
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        os.write(file, holder().encode())
        os.fsync(file)                                          # other machines read it at once
    except BlockingIOError:
        other = os.read(file, 1000).decode().strip() or "another process"
        raise ValueError(f"--run-dir {run_dir} is in use by {other}: choose another --run-dir, or wait until "
                         "that run has ended") from None
    except OSError as error:
        raise ValueError(f"--run-dir {run_dir}: {path} cannot be written or locked: {error}") from None
    return holder()


def holder() -> str:
    """What RUN_DIR/.lock says of this process."""
    return f"process {os.getpid()} on {socket.gethostname()}\n"


def check_holder(run_dir: Path) -> None:
    """Raises ValueError if a later run has this process's folder too: its file system gives everybody the lock, or
    .lock was deleted."""
    path = run_dir.resolve() / LOCK
    if path not in HELD or not path.exists():
        return
    is_same_file = os.path.samestat(path.stat(), os.fstat(HELD[path]))
    if is_same_file:                                            # closing it again would end the lock
        found = os.pread(HELD[path], 1000, 0).decode()
    else:
        found = path.read_text()
    if found != holder():
        raise ValueError(f"--run-dir {run_dir} is in use by {found.strip() or 'another process'} too, which started "
                         f"later and goes on: a file system without locks needs a --run-dir for each run")


def finished(args: Any) -> str:
    """The message for a run that has reached its end in this folder and has nothing left to do, before anything heavy
    starts or is written; empty for any other run. A run's end leaves its flags in RUN_DIR/finished."""
    changed = differences(read_manifest(Path(args.run_dir) / FINISHED), flags_of(args))
    if any(text.startswith("--total-") for text in changed):
        return ""
    said = f"{args.run_dir} is finished. Nothing was changed"
    if changed:
        said += f"; other flags now: {'; '.join(changed)}"
    return said
