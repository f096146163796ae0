"""Runs one program inside a jail: `python -I -S jail.py JSON`, started by sandbox.py, with the standard library only.

Three processes: this one (waits), pid 1 of the jail (waits), the program. With "isolated" the jail has its own mount,
pid, network, ipc and host name spaces: it sees the system's and Python's folders read-only, four devices and one
writable folder, /box, which is a tmpfs. No /proc, /sys, home or network; what is outside has no name there, so it
cannot be opened or signalled. Root becomes nobody first, as the kernel does not bind uid 0 by RLIMIT_NPROC. All end
in a user namespace of their own, which cannot be nested. The rlimits hold with and without isolation.

Needs Linux 5.14 (mount_setattr; RLIMIT_NPROC counted in each user namespace), x86-64 or arm64. Not covered: system
calls are not filtered, and memory is bounded for each process, not for all (the kernel's killer takes them first).
What goes wrong before the program starts is written to the descriptor `errors`; nothing is once it has started.
"""

import contextlib
import ctypes
import json
import math
import os
import platform
import resource
import signal
import struct
import sys

NOBODY = 65534
BOX = "/box"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache",
          "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 4096, 16384, 1 << 18, 2
PDEATHSIG, DUMPABLE, NO_NEW_PRIVS = 1, 4, 38                    # prctl
MOUNT_SETATTR, AT_RECURSIVE, ATTR_RDONLY, ATTR_NOSUID = 442, 0x8000, 1, 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *args) -> None:
    """A libc function that returns 0; OSError with its name if it does not."""
    if getattr(libc, name)(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}{args}: {os.strerror(code)}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    call("mount", *(text and text.encode() for text in (source, target, kind)), flags, data and data.encode())


def enter_user_namespace(proc: int) -> None:
    """A user namespace that knows one user, the present one. proc: descriptor of the outer /proc."""
    user, group = os.geteuid(), os.getegid()
    call("unshare", NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        write(proc, f"self/{name}", text)


def write(folder: int, name: str, text: str) -> None:
    with open(os.open(name, os.O_WRONLY, dir_fd=folder), "w") as file:
        file.write(text)


def build_root(root: str, spec: dict) -> None:
    """What the program sees, under a tmpfs on the folder `root`; this process moves into it."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID, "size=1m,mode=755")
    shown = {path: path for path in SYSTEM if os.path.lexists(path)}
    for source, target in shown.items() | spec["folders"].items():
        inside = root + target
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        if os.path.islink(source) and source in SYSTEM:
            os.symlink(os.readlink(source), inside)
            continue
        os.makedirs(inside, exist_ok=True) if os.path.isdir(source) else open(inside, "w").close()
        mount(source, inside, None, MS_BIND | MS_REC)
    os.mkdir(root + BOX)
    for name in ("/tmp", "/dev/shm"):
        os.symlink(BOX, root + name)
    attributes = struct.pack("4Q", ATTR_RDONLY | ATTR_NOSUID, 0, 0, 0)
    call("syscall", MOUNT_SETATTR, -1, root.encode(), AT_RECURSIVE, attributes, len(attributes))
    mount("tmpfs", root + BOX, "tmpfs", MS_NOSUID | MS_NODEV, f"size={spec['folder_mb']}m,mode=1777")
    os.chdir(root)
    call("syscall", PIVOT_ROOT[platform.machine()], b".", b".")
    call("umount2", b".", MNT_DETACH)


def set_limits(spec: dict) -> None:
    megabyte = 1 << 20
    # outside of a user namespace the kernel counts all that the user runs
    processes = spec["processes"] + (0 if spec["isolated"] else count_tasks())
    for name, value in (("AS", spec["memory_mb"] * megabyte), ("CPU", math.ceil(spec["timeout_s"]) + 1), ("CORE", 0),
                        ("FSIZE", spec["file_mb"] * megabyte), ("NOFILE", spec["files"]), ("NPROC", processes)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def count_tasks() -> int:
    """Processes and threads of this user."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def die_with_parent() -> None:
    """Each process sets this, and again after a change of user, because the kernel forgets it."""
    call("prctl", PDEATHSIG, signal.SIGKILL)


def drop_root() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    call("prctl", DUMPABLE, 1)  # else /proc/self stays root's


def wait_and_exit(child: int) -> None:
    """End as the child ended: its exit code, 128 + N for signal N."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def main(spec: dict) -> None:
    die_with_parent()
    if os.getppid() != spec["parent"]:
        os._exit(1)
    folder, errors = spec["folder"], spec["errors"]
    with open(f"{folder}/main.py", "rb") as file:
        program = file.read()
    os.set_inheritable(errors, False)
    proc = os.open("/proc", os.O_PATH)
    with open("/proc/self/oom_score_adj", "w") as file:  # the first to go when memory runs out
        file.write("1000")
    root = os.geteuid() == 0
    if spec["isolated"]:
        if not root:
            enter_user_namespace(proc)
        call("unshare", NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS)
    if child := os.fork():
        os.close(errors)
        wait_and_exit(child)
    die_with_parent()
    if spec["isolated"]:  # this is pid 1 of the jail
        build_root(folder, spec)
        folder = BOX
        with open(f"{BOX}/main.py", "wb") as file:
            file.write(program)
    elif root:
        os.chown(folder, NOBODY, NOBODY)
    os.chdir(folder)
    if root:
        drop_root()
    if spec["isolated"]:
        if root:
            enter_user_namespace(proc)
        write(proc, "sys/user/max_user_namespaces", "0")
    die_with_parent()
    call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
    set_limits(spec)
    if child := os.fork():
        os.close(errors)
        wait_and_exit(child)
    die_with_parent()
    os.umask(0o077)
    env = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    os.execve(spec["python"], [spec["python"], "-I", "-B", "main.py"], env)


if __name__ == "__main__":
    jail = json.loads(sys.argv[1])
    try:
        main(jail)
    except BaseException as error:
        os.write(jail["errors"], f"{type(error).__name__}: {error}".encode())
        os._exit(1)
