"""Removes what a process leaves behind, however it ends: `python -I -S cleaner.py FOLDER`, started by `own_folder`.

It waits until its standard input ends, which the kernel does as its owner ends. Then it kills all processes whose
TMPDIR lies in the folder, and removes the folder. What ends the cleaner too, such as a `kill -9` of all processes of a
job, leaves the folder.
"""

import atexit
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

STARTING = threading.Lock()


def own_folder() -> str:
    """The folder for this process's temporary files. It is gone soon after this process is."""
    with STARTING:  # the loser of a race would be closed, which is the end of its folder
        return start_cleaner(os.getpid())[1]


@functools.cache
def start_cleaner(_: int) -> tuple[subprocess.Popen, str]:
    """The cleaner of the process with this number (a fork has one of its own), and its folder."""
    folder = tempfile.mkdtemp(prefix="plainrl_")
    cleaner = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, folder],
        stdin=subprocess.PIPE,
        start_new_session=True,  # because torchrun kills the groups of its ranks
        cwd="/",
    )
    atexit.register(cleaner.communicate, timeout=10.0)  # if it can: Slurm kills at once what is there after the end
    return cleaner, folder


def remove(folder: str) -> None:
    """Kill the processes that were started with this TMPDIR or one inside of it, and remove the folder."""
    variable = f"TMPDIR={folder}".encode()
    while left := find_processes(variable):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def find_processes(variable: bytes) -> list[int]:
    """Processes of this user that were started with a variable in their environment that begins with this text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            variables = path.read_bytes().split(b"\0")
            if any(text.startswith(variable) for text in variables):
                found.append(int(path.parent.name))
    return found


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # a cluster sends some to all processes of a job
    sys.stdin.read()
    remove(sys.argv[1])
