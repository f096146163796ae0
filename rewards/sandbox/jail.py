"""Runs one program inside a jail: `python -I -S jail.py JSON`, started by sandbox.py, with the standard library only.

Three processes: this one (waits), pid 1 of the jail (waits), the program. With "isolated" the jail has its own mount,
pid, network, ipc and host name spaces: it sees the system's and Python's folders read-only, four devices and one
writable folder, /box, which is a tmpfs. No /proc, /sys, home or network; what is outside has no name there, so it
cannot be opened or signalled. Root becomes nobody first, as the kernel does not bind uid 0 by RLIMIT_NPROC. All end
in a user namespace of their own, in which none can be made (syscalls.py), and with an empty session keyring.

What holds with and without isolation: the rlimits, the system call filter (syscalls.py), the keyring. As the program
cannot start processes, the limits of one process are those of all that it does: `memory_mb` of address space, the
standard output and error (`file_mb` each), what its `files` descriptors hold in pipes (64 KB each) and sockets (the
machine's net.core.wmem_default each, 208 KB unless somebody raised it), and `files` timers and queued signals.
Isolated, also /box: `folder_mb` and `num_files`. A judge of assertions (`forks`) has the same limits beside the
program's own. A shell (`forks`) starts `threads` processes, each with the limits of one; sandbox.py ends them when
they hold `total_mb` together. What does not hold: without isolation the disk is bounded for each file only, not for
their number; and a machine with less free memory than all its jails may use can still run out, then the kernel kills
jails first.

Needs Linux 5.14 (mount_setattr; RLIMIT_NPROC counted in each user namespace), x86-64 or arm64.
What goes wrong before the program starts is written to the descriptor `errors`; nothing is once it has started.
"""

import contextlib
import ctypes
import errno
import json
import math
import os
import platform
import resource
import signal
import struct
import sys

sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # -I leaves it out
import syscalls

NOBODY = 65534
BOX = "/box"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives",
          "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
# unshare
NEWNS = 0x20000
NEWUTS = 0x4000000
NEWIPC = 0x8000000
NEWUSER = 0x10000000
NEWPID = 0x20000000
NEWNET = 0x40000000
# mount, umount2
MS_NOSUID = 2
MS_NODEV = 4
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
# prctl
PDEATHSIG = 1
DUMPABLE = 4
NO_NEW_PRIVS = 38
# mount_setattr: its number, and its arguments
MOUNT_SETATTR = 442
AT_RECURSIVE = 0x8000
ATTR_RDONLY = 1
ATTR_NOSUID = 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
KEYCTL = {"x86_64": 250, "aarch64": 219}
JOIN_SESSION_KEYRING = 1

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
    user = os.geteuid()
    group = os.getegid()
    unshare(NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        write(proc, f"self/{name}", text)


def unshare(flags: int) -> None:
    try:
        call("unshare", flags)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}; this system or container allows no new namespaces (user."
                      f"max_user_namespaces, kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_"
                      f"userns, the container's seccomp profile)") from None


def write(folder: int, name: str, text: str) -> None:
    with open(os.open(name, os.O_WRONLY, dir_fd=folder), "w") as file:
        file.write(text)


def leave_keyring() -> None:
    """Join a new session keyring, which is empty: the present one holds the trainer's keys."""
    if libc.syscall(KEYCTL[platform.machine()], JOIN_SESSION_KEYRING, None) < 0:
        code = ctypes.get_errno()
        if code not in (errno.ENOSYS, errno.EPERM):  # no keyrings here, or a container that refuses them to all
            raise OSError(code, f"no new session keyring: {os.strerror(code)}")


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
        if not os.path.lexists(root + name):  # else Python lies below it, and it is shown as a folder to read
            os.symlink(BOX, root + name)
    for name, inside in spec["links"].items():
        if os.path.dirname(name) != "/":  # deeper it could lie in a folder of the machine
            raise ValueError(f"{name} must be a folder right below /")
        os.symlink(inside, root + name)
    attributes = struct.pack("4Q", ATTR_RDONLY | ATTR_NOSUID, 0, 0, 0)
    call("syscall", MOUNT_SETATTR, -1, root.encode(), AT_RECURSIVE, attributes, len(attributes))
    bounds = f"size={spec['folder_mb']}m,nr_inodes={spec['num_files']},mode=1777"
    mount("tmpfs", root + BOX, "tmpfs", MS_NOSUID | MS_NODEV, bounds)
    os.chdir(root)
    call("syscall", PIVOT_ROOT[platform.machine()], b".", b".")
    call("umount2", b".", MNT_DETACH)


def set_limits(spec: dict) -> None:
    # outside of a user namespace the kernel counts all that the user runs
    threads = spec["threads"] + (0 if spec["isolated"] else count_tasks())
    limits = {
        resource.RLIMIT_AS: spec["memory_mb"] << 20,
        resource.RLIMIT_CPU: math.ceil(spec["timeout_s"]) + 1,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: spec["file_mb"] << 20,
        resource.RLIMIT_NOFILE: spec["files"],
        resource.RLIMIT_NPROC: threads,
        resource.RLIMIT_SIGPENDING: spec["files"],
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


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
    with open(spec["program"], "rb") as file:  # a descriptor
        program = file.read()
    errors = spec["errors"]
    os.set_inheritable(errors, False)
    leave_keyring()
    proc = os.open("/proc", os.O_PATH)
    with open("/proc/self/oom_score_adj", "w") as file:  # the first to go when memory runs out
        file.write("1000")
    root = os.geteuid() == 0
    if spec["isolated"]:
        if not root:
            enter_user_namespace(proc)
        unshare(NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS)
    if child := os.fork():
        os.close(errors)
        wait_and_exit(child)
    die_with_parent()
    folder = spec["folder"]
    if spec["isolated"]:  # this is pid 1 of the jail
        build_root("/proc", spec)  # a folder that every machine has, and that no folder to show lies in
        folder = BOX
    elif root:
        os.chown(folder, NOBODY, NOBODY)
    os.chdir(folder)
    with open("main.py", "wb") as file:
        file.write(program)
    if root:
        drop_root()
    if spec["isolated"]:
        if root:
            enter_user_namespace(proc)
        with contextlib.suppress(OSError):  # containers mount it read-only; the filter of system calls says the same
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
    if spec["forks"]:
        env["NO_FORKS"] = syscalls.make_filter(forks=False).hex()
    syscalls.install(syscalls.make_filter(spec["forks"]))
    os.execve(spec["python"], [spec["python"], "-I", "-B", "main.py"], env)


if __name__ == "__main__":
    jail = json.loads(sys.argv[1])
    try:
        main(jail)
    except BaseException as error:
        os.write(jail["errors"], f"{type(error).__name__}: {error}".encode())
        os._exit(1)
