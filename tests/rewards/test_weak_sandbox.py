"""The sandbox without isolation, and as an ordinary user."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rewards import code, lookup
from rewards.sandbox import sandbox
from tests.rewards.jail_tools import SMALL, needs_isolation, tries
from tests.rewards.test_sandbox import COUNT_FORKS

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="the jail is Linux's"),
              pytest.mark.usefixtures("nothing_is_left")]


def test_weak_isolation_needs_the_flag_and_says_what_is_open(monkeypatch, caplog):
    real = sandbox.run

    def no_namespaces(program, stdin="", limits=SMALL, isolated=True, forks=False):
        if isolated:
            raise RuntimeError("no sandbox: OSError: unshare: Operation not permitted")
        return sandbox.Result(0, "", "")

    monkeypatch.setattr(sandbox, "run", no_namespaces)
    sandbox.isolation.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=r"unshare.*network.*allow_weak_sandbox"):
            sandbox.isolation()
        with pytest.raises(RuntimeError, match="allow_weak_sandbox"):
            lookup(["apps"])                                     # before training
        with pytest.raises(RuntimeError, match="allow_weak_sandbox"):
            code.compute_score("apps", "print(1)", {"inputs": [""], "outputs": ["1"]})
        lookup(["apps"], '{"sandbox_fusion_url": "http://127.0.0.1:9/run_code"}')
        assert caplog.text == ""
        lookup(["apps"], '{"allow_weak_sandbox": true}')
        assert sandbox.isolation(True) is False
        assert caplog.text.count("fill the disk") == 1   # said once
    finally:
        monkeypatch.setattr(sandbox, "run", real)
        sandbox.isolation.cache_clear()


WEAK = """
import threading, time
from rewards.sandbox.sandbox import run, Limits
for _ in range(20):  # what a user runs besides: the kernel counts it too
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
small = Limits(timeout_s=20, memory_mb=200, file_mb=1, files=16, threads=8)
def weak(program, **more):
    return run(program, isolated=False, **more)
result = weak("import os; print(os.getcwd() == os.environ['HOME'], os.listdir(), sorted(os.environ), input())",
              stdin="in")
print(result.exit_code, result.stdout, result.stderr)
print(weak("while True: pass", limits=Limits(timeout_s=0.5)).exit_code)
print("MemoryError" in weak("x = bytearray(300 << 20)", limits=small).stderr)
print(weak("while True: print('x' * 1000)", limits=small).exit_code)
print(weak("open('f', 'w').write('x'); print(open('f').read())", limits=small).stdout)
print(weak("import os, signal; os.kill(0, 9)", limits=small).exit_code)
print(weak(COUNT_FORKS, limits=small, forks=True).stdout)
print("PermissionError" in weak(COUNT_FORKS, limits=small).stderr)
"""


# A user of this test process alone: Linux counts processes by user, also those of another run of these tests.
USER = 50_000 + os.getpid() % 10_000


def as_user(program: str) -> list[str]:
    """Lines that a program prints as an ordinary user with the system's Python, beside a copy of the sandbox."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "rewards/sandbox").mkdir(parents=True)
        for name in ("__init__", "sandbox/__init__", "sandbox/sandbox", "sandbox/jail", "sandbox/syscalls"):
            shutil.copy(ROOT / f"rewards/{name}.py", f"{folder}/rewards/{name}.py")
        done = subprocess.run(["/usr/bin/python3", "-B", "-c", program], user=USER, group=USER, extra_groups=[],
                              cwd="/", env={"SECRET": "1", "PYTHONPATH": folder}, capture_output=True, text=True,
                              timeout=60)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.strip()]


needs_user = pytest.mark.skipif(os.geteuid() != 0 or not Path("/usr/bin/python3").exists(),
                                reason="needs root, to become a user who is not, and the system's Python")


@needs_user
def test_rlimits_alone_as_an_ordinary_user():
    lines = as_user(WEAK.replace("COUNT_FORKS", repr(COUNT_FORKS)))
    assert lines[:3] == ["0 True ['main.py'] ['HOME', 'LANG', 'OMP_NUM_THREADS', 'PATH', 'TMPDIR'] in", "None", "True"]
    assert lines[3] not in ("0", "None")
    assert lines[4:6] == ["x", "137"]
    assert 3 <= int(lines[6]) <= 8
    assert lines[7] == "True"


@needs_user
@needs_isolation
def test_isolation_as_an_ordinary_user():
    """The same jail through a user namespace: no privilege, bounded, nothing writable, no network."""
    attacks = tries("open('/usr/x', 'w')", "os.kill(os.getppid(), 9)", f"os.kill({os.getpid()}, 0)",
                    "socket.create_connection(('8.8.8.8', 53), 1)", "bytearray(300 << 20)") + COUNT_FORKS + """
libc = ctypes.CDLL(None)
print(libc.unshare(0x10000000), libc.mount(b"none", b"/box", b"tmpfs", 0, b""), libc.ptrace(16, 1, 0, 0))
print(libc.mount(None, b"/usr", None, 4096 | 32, None))  # read-only folders stay so
"""
    lines = as_user(f"from rewards.sandbox.sandbox import run, Limits\n"
                              f"result = run({attacks!r}, limits=Limits(memory_mb=200, threads=8), forks=True)\n"
                              f"print(result.stdout, result.stderr)")
    assert lines[:5] == ["OSError", "done", "ProcessLookupError", "OSError", "MemoryError"]
    assert 3 <= int(lines[5]) <= 6
    assert lines[6:] == ["-1 -1 -1", "-1"]
