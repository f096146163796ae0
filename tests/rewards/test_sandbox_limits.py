"""Ways around the sandbox's limits: system calls, inodes, keyrings; and failures of the machine."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rewards.sandbox import sandbox
from rewards.sandbox.sandbox import Limits, run
from tests.rewards.jail_tools import needs_isolation, output, tries

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="the jail is Linux's"),
              pytest.mark.usefixtures("nothing_is_left")]


CALLS = """
libc = ctypes.CDLL(None, use_errno=True)
def refused(name, *numbers):
    result = libc.syscall(*numbers)
    print(name, result, ctypes.get_errno() if result < 0 else "")
number = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
"""
MEMORY_AND_PROCESSES = """
refused("io_uring", 425, 4, ctypes.create_string_buffer(200))
refused("shmget", (29, 194)[number], 0, 1 << 20, 0o1600)
refused("msgget", (68, 186)[number], 0, 0o1600)
refused("semget", (64, 190)[number], 0, 1, 0o1600)
refused("mq_open", (240, 180)[number], b"queue", 0o102, 0o600, None)
refused("clone", (56, 220)[number], 17, 0, 0, 0, 0)
refused("clone3", 435, ctypes.create_string_buffer(64), 64)
"""
NAMESPACES = """
new_user = 0x10000000
refused("unshare", (272, 97)[number], new_user)
refused("setns", (308, 268)[number], 0, 0)
refused("clone", (56, 220)[number], new_user | 17, 0, 0, 0, 0)
refused("clone3", 435, ctypes.create_string_buffer(64), 64)
"""
KERNEL_MEMORY = """
import fcntl
def fill(write, held=0):
    try:
        while True:
            held += write(b"x" * 4096)
    except BlockingIOError:
        return held
pairs, pipes = [socket.socketpair() for _ in range(3)], [os.pipe() for _ in range(3)]
for a, b in pairs:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        try:
            a.setsockopt(socket.SOL_SOCKET, option, 1 << 26)
        except PermissionError:
            pass
    a.setblocking(False)
for _, end in pipes:
    try:
        fcntl.fcntl(end, 1031, 1 << 20)
    except PermissionError:
        pass
    os.set_blocking(end, False)
timers = ctypes.c_void_p()
print(max(fill(a.send) for a, b in pairs), max(fill(lambda data: os.write(end, data)) for _, end in pipes),
      sum(libc.timer_create(1, None, ctypes.byref(timers)) == 0 for _ in range(99)))
"""


@needs_isolation
def test_the_filter_of_system_calls():
    """What would hold memory outside of the address space, or reach beyond the jail, is refused; threads are not."""
    program = tries("os.memfd_create('x')", "os.fork()", "os.posix_spawn(sys.executable, ['python'], {})",
                    "socket.socket(40, 1)", "socket.socket(17, 3)", "socket.socket()", "socket.socketpair()",
                    "import threading; t = threading.Thread(target=print); t.start(); t.join()")
    lines = output(program + CALLS + MEMORY_AND_PROCESSES)
    assert lines[:9] == [*["PermissionError"] * 3, "OSError", "OSError", "done", "done", "", "done"]
    names = ["io_uring", "shmget", "msgget", "semget", "mq_open", "clone"]
    assert lines[9:] == [*(f"{name} -1 1" for name in names), "clone3 -1 38"]


@needs_isolation
@pytest.mark.parametrize("forks", [False, True])
def test_no_namespace_can_be_made(forks):
    """By the filter, too, because containers mount /proc/sys read-only: the judge of assertions may start processes."""
    lines = output(tries() + CALLS + NAMESPACES, forks=forks)
    assert lines == ["unshare -1 1", "setns -1 1", "clone -1 1", "clone3 -1 38"]


@needs_isolation
def test_memory_of_the_kernel_is_bounded():
    """Buffers keep the size that the machine gives them: a pipe 64 KB, a socket net.core.wmem_default, and what one
    message takes. Descriptors cannot be held by sending them, and timers count."""
    sockets, pipes, timers = map(int, output(tries() + CALLS + KERNEL_MEMORY)[0].split())
    assert 0 < sockets <= int(Path("/proc/sys/net/core/wmem_default").read_text()) + 8192
    assert (pipes, timers) == (65536, 16)
    program = tries("a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [0])", "__import__('asyncio').run("
                    "__import__('asyncio').sleep(0))")
    assert output(program) == ["PermissionError", "done"]


BELOW_TMP = """
from rewards.sandbox import sandbox
print(sandbox.run("import os, sys, tempfile; print(sys.base_prefix, os.listdir('/tmp'), tempfile.gettempdir())\\n"
                  "open('x', 'w').write('x')\\nopen(sys.base_prefix + '/x', 'w')", limits=sandbox.Limits(20)))
"""


@needs_isolation
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs the system's Python")
def test_python_may_lie_below_tmp():
    """As conda's or uv's on a cluster node. It is shown there, read-only, and nothing else of /tmp is."""
    version = subprocess.run(["/usr/bin/python3", "-c", "import sys; print('python%d.%d' % sys.version_info[:2])"],
                             capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        for name in ("bin", "lib"):
            (Path(folder) / "py" / name).mkdir(parents=True)
        shutil.copy("/usr/bin/python3", f"{folder}/py/bin/python3")
        (Path(folder) / "py/lib" / version).symlink_to(f"/usr/lib/{version}")
        done = subprocess.run([f"{folder}/py/bin/python3", "-B", "-c", BELOW_TMP], cwd=ROOT, env={},
                              capture_output=True, text=True)
    assert f"{folder}/py ['{Path(folder).name}'] /box" in done.stdout, done
    assert "Read-only file system" in done.stdout


@needs_isolation
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount /proc/sys as containers do")
def test_proc_sys_may_be_read_only():
    program = "from rewards.sandbox import sandbox; print(sandbox.run('print(3)', limits=sandbox.Limits(20)).stdout)"
    mounts = "mount --bind /proc/sys /proc/sys && mount -o remount,ro,bind /proc/sys"
    command = ["unshare", "-m", "sh", "-c", f"{mounts} && exec {sys.executable} -c \"{program}\""]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "3", done


@needs_isolation
def test_the_number_of_files_is_bounded():
    limits = Limits(threads=8, num_files=50)
    program = "for i in range(99):\n    open(str(i), 'w').close()"
    assert "No space left on device: '4" in run(program, limits=limits).stderr


KEYS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
add, keyctl = {"x86_64": (248, 250), "aarch64": (217, 219)}[os.uname().machine]
SESSION = -3
def search():
    return libc.syscall(keyctl, 10, SESSION, b"user", b"rewards-test", 0)
"""


@needs_isolation
def test_the_session_keyring_of_the_trainer_stays_closed():
    """A key of the parent is not found, neither behind the filter nor, where it allows the call, in the keyring."""
    parent = KEYS + f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from rewards.sandbox import sandbox
libc.syscall(keyctl, 1, None)
key = libc.syscall(add, b"user", b"rewards-test", b"secret", 6, SESSION)
if key < 0 or search() != key:
    sys.exit("no keyrings: errno " + str(ctypes.get_errno()))
print(sandbox.run({KEYS!r} + "print(search(), libc.syscall(add, b'user', b'left', b'x', 1, SESSION))").stdout)
print(libc.syscall(keyctl, 10, SESSION, b"user", b"left", 0))
sys.path.insert(0, {str(ROOT)!r} + "/rewards/sandbox")
import jail
jail.leave_keyring()
print(search(), ctypes.get_errno())
"""
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True)
    if done.stderr.startswith("no keyrings"):
        pytest.skip(done.stderr)
    assert done.stdout.split() == ["-1"] * 4 + ["126"], done  # ENOKEY


@needs_isolation
def test_a_full_temporary_folder_changes_nothing(monkeypatch, tmp_path):
    """Nothing is written to the disk; a program that prints megabytes ends well."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    assert run("print('x' * (1 << 20))").exit_code == 0
    with pytest.raises(sandbox.MachineFailure, match="no sandbox: FileNotFoundError"):
        run("print(1)", isolated=False)                      # this one needs a folder: no score, and no wrong one


MEMORY_RUNS_OUT = """
import os, sys
sys.path.insert(0, ROOT)
from rewards.sandbox import sandbox
group = sys.argv[1]
open(group + "/cgroup.procs", "w").write("0")
taken = bytearray(60 << 20)  # the trainer
for n in range(0, len(taken), 4096): taken[n] = 1
attempts = []
once = sandbox.run_once
sandbox.run_once = lambda *args: attempts.append(1) or once(*args)
try:
    print(sandbox.run("x = bytearray(100 << 20)\\nfor n in range(0, len(x), 4096): x[n] = 1").exit_code)
except sandbox.MachineFailure as error:
    print(len(attempts), error)
del taken
print(sandbox.run("import os; os.kill(os.getpid(), 9)").exit_code)
"""


@needs_isolation
def test_a_kill_for_want_of_memory_is_the_machines_failure():
    """In a control group of 130 MB, of which the parent holds 60: a program that may take 1024 is killed at 70. It is
    run twice, then an error. One that kills itself is a result. The kernel's kills in another group count for nobody
    here (of other jobs on a node; of this test, for the programs that other tests run meanwhile)."""
    counted, killed = sandbox.count_memory_kills(), machine_kills()
    group = Path("/sys/fs/cgroup/memory/rewards_test")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(130 << 20))
    except OSError as error:
        pytest.skip(f"no control group of version 1 can be made here: {error}")
    try:
        done = subprocess.run([sys.executable, "-c", MEMORY_RUNS_OUT.replace("ROOT", repr(str(ROOT))), str(group)],
                              capture_output=True, text=True)
    finally:
        group.rmdir()
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 the machine ran out of memory while a program ran"), done
    assert lines[1] == "137"
    assert machine_kills() >= killed + 2
    assert sandbox.count_memory_kills() == counted


def machine_kills() -> int:
    """As the kernel counts them, whatever the group."""
    return int(dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())["oom_kill"])
