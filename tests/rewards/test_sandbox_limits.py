"""Ways around the sandbox's limits: system calls, inodes, keyrings; and failures of the machine."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rewards.runtime import sandbox
from rewards.runtime.sandbox import Limits, run
from tests.rewards.jail_tools import needs_isolation, output, tries

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="the jail is Linux's"),
              pytest.mark.usefixtures("nothing_is_left")]


AROUND = """
libc = ctypes.CDLL(None, use_errno=True)
def refused(name, *numbers):
    result = libc.syscall(*numbers)
    print(name, result, ctypes.get_errno() if result < 0 else "")
number = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
refused("io_uring", 425, 4, ctypes.create_string_buffer(200))
refused("shmget", (29, 194)[number], 0, 1 << 20, 0o1600)
refused("msgget", (68, 186)[number], 0, 0o1600)
refused("semget", (64, 190)[number], 0, 1, 0o1600)
refused("mq_open", (240, 180)[number], b"queue", 0o102, 0o600, None)
refused("clone", (56, 220)[number], 17, 0, 0, 0, 0)
refused("clone3", 435, ctypes.create_string_buffer(64), 64)
"""


@needs_isolation
def test_the_filter_of_system_calls():
    """What would hold memory outside of the address space, or reach beyond the jail, is refused; threads are not."""
    lines = output(tries("os.memfd_create('x')", "os.fork()", "os.posix_spawn(sys.executable, ['python'], {})",
                         "socket.socket(40, 1)", "socket.socket(17, 3)", "socket.socket()", "socket.socketpair()",
                         "import threading; t = threading.Thread(target=print); t.start(); t.join()") + AROUND)
    assert lines[:9] == [*["PermissionError"] * 3, "OSError", "OSError", "done", "done", "", "done"]
    names = ["io_uring", "shmget", "msgget", "semget", "mq_open", "clone"]
    assert lines[9:] == [*(f"{name} -1 1" for name in names), "clone3 -1 38"]


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
from rewards.runtime import sandbox
libc.syscall(keyctl, 1, None)
key = libc.syscall(add, b"user", b"rewards-test", b"secret", 6, SESSION)
if key < 0 or search() != key:
    sys.exit("no keyrings: errno " + str(ctypes.get_errno()))
print(sandbox.run({KEYS!r} + "print(search(), libc.syscall(add, b'user', b'left', b'x', 1, SESSION))").stdout)
print(libc.syscall(keyctl, 10, SESSION, b"user", b"left", 0))
sys.path.insert(0, {str(ROOT)!r} + "/rewards/runtime")
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
from rewards.runtime import sandbox
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
