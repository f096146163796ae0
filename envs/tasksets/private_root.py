"""A root folder of an episode's own: the machine's, read-only, with empty writable folders in memory at some paths.

Harbor's tasks and tests use absolute paths: /app, /tests, /logs, /tmp/tests.tgz. With the runtime `subprocess` these
are the machine's own, so that two episodes at once read each other's reward. After `enter_private_root` all that this
process and its children can write is the episode's own, or lies in TMPDIR, where verifiers makes a folder for each
episode. Nothing is hidden: what the machine's user may read stays readable.

Needs Linux 5.12 (mount_setattr), and root or user namespaces. `python -m envs.tasksets.private_root` tries it.
"""

import contextlib
import os
import platform
import struct
import sys
import tempfile
from pathlib import Path

from rewards.sandbox import jail

OWN = ("/app", "/tests", "/logs", "/oracle", "/solution", "/tmp")
OWN_IF_THERE = ("/var/tmp", "/dev/shm")
BOUNDS = "mode=1777,size=512m"  # of each of these folders
HOME = "/tmp/home"


def enter_private_root() -> None:
    """Move this process, which must have one thread. Raises OSError where the system refuses it."""
    here = os.getcwd()
    temporary = tempfile.gettempdir()
    root = f"{temporary}/root"
    os.makedirs(root, exist_ok=True)  # each episode mounts its own there
    if os.geteuid():
        jail.enter_user_namespace(os.open("/proc", os.O_PATH))
    jail.unshare(jail.NEWNS)
    jail.mount("none", "/", None, jail.MS_REC | jail.MS_PRIVATE)
    jail.mount("tmpfs", root, "tmpfs", jail.MS_NOSUID, "mode=755")
    show("/", root, (*OWN, "/proc"), jail.MS_REC)
    own = [*OWN, *filter(os.path.isdir, OWN_IF_THERE)]
    for path in own:
        os.makedirs(root + path, exist_ok=True)
        jail.mount("tmpfs", root + path, "tmpfs", jail.MS_NOSUID | jail.MS_NODEV, BOUNDS)
    show("/tmp", f"{root}/tmp")
    os.makedirs(root + HOME)
    os.makedirs(f"{root}/proc")
    os.makedirs(root + temporary, exist_ok=True)
    jail.mount(temporary, root + temporary, None, jail.MS_BIND)
    change(root, jail.ATTR_RDONLY, 0, jail.AT_RECURSIVE)
    for path in (*own, temporary):
        change(root + path, 0, jail.ATTR_RDONLY)
    jail.mount("/proc", f"{root}/proc", None, jail.MS_BIND | jail.MS_REC)  # what is written there is of one process
    os.chdir(root)
    jail.call("syscall", jail.PIVOT_ROOT[platform.machine()], b".", b".")
    jail.call("umount2", b".", jail.MNT_DETACH)
    os.chdir(here)
    os.environ["HOME"] = HOME


def show(folder: str, inside: str, hidden: tuple[str, ...] = (), flags: int = 0) -> None:
    """Bind the folders and links that are in `folder` into the folder `inside`; a file would be one for all
    episodes."""
    for path in Path(folder).iterdir():
        target = f"{inside}/{path.name}"
        if str(path) in hidden:
            continue
        with contextlib.suppress(FileNotFoundError):  # another process's temporary folder, gone meanwhile
            if path.is_symlink():
                os.symlink(os.readlink(path), target)
            elif path.is_dir():
                os.mkdir(target)
                jail.mount(str(path), target, None, jail.MS_BIND | flags)


def change(path: str, added: int, removed: int, flags: int = 0) -> None:
    """Change attributes of the mount at this path."""
    attributes = struct.pack("4Q", added, removed, 0, 0)
    jail.call("syscall", jail.MOUNT_SETATTR, -1, path.encode(), flags, attributes, len(attributes))


if __name__ == "__main__":
    enter_private_root()
    if not os.access(sys.executable, os.X_OK):
        sys.exit(f"{sys.executable} lies in one of the folders {', '.join(OWN)}, which an episode has for itself")
