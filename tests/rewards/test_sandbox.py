"""The sandbox: what a program gets, and programs that attack it, each contained with this process untouched.

Every attack runs with small limits. The attacks that a broken jail would let through to this machine (fork bomb, memory
bomb) run only after test programs showed that the limits hold.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rewards.sandbox import sandbox
from rewards.sandbox.sandbox import Limits, run
from tests.rewards.jail_tools import SMALL, jails, needs_isolation, output, tries

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="the jail is Linux's"),
              pytest.mark.usefixtures("nothing_is_left")]


@needs_isolation
def test_a_program_runs_with_input_output_and_exit_code():
    result = run("import sys; print(sys.stdin.read()[::-1]); print('e', file=sys.stderr); sys.exit(3)", "abc \u00e4\n")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "\n\u00e4 cba\n", "e\n")
    assert run("").exit_code == 0
    assert run("1 +").exit_code == 1
    assert run("import os; os.kill(os.getpid(), 11)").exit_code == 128 + 11
    assert run("print('\ud800')").exit_code is not None   # text that is not valid UTF-8


@needs_isolation
def test_the_libraries_of_this_environment_are_there():
    assert output("import numpy; print(numpy.arange(4).sum())", limits=Limits(threads=8)) == ["6"]


@needs_isolation
def test_environment_and_files(monkeypatch):
    """No variable, no file of home, no file of this project, no process, and one writable folder that is empty."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    lines = output(f"""
import os
print(sorted(os.environ))
print(os.path.exists({str(ROOT / "grpo.py")!r}), os.path.exists("/etc/passwd"), os.path.exists("/proc"),
      os.path.exists("/sys"), os.path.exists({str(Path.home() / ".bashrc")!r}), os.path.exists({os.getcwd()!r}))
print(os.listdir(), os.getcwd(), os.path.expanduser("~"))
print(sorted(os.listdir("/dev")))
def open_descriptors():
    for descriptor in range(64):
        try:
            os.fstat(descriptor)
            yield descriptor
        except OSError:
            pass
print(list(open_descriptors()))
""")
    assert lines == [str(sorted(["PATH", "HOME", "TMPDIR", "LANG", "OMP_NUM_THREADS"])),
                     "False False False False False False", "['main.py'] /box /box",
                     "['null', 'random', 'shm', 'urandom', 'zero']", "[0, 1, 2]"]


@needs_isolation
def test_home_holds_nothing_but_the_way_to_python():
    listing = output(f"""
import os
for folder, _, files in os.walk({str(Path.home())!r}):
    if not folder.startswith({sys.base_prefix!r}):
        print(folder, files)
""")
    ways = {str(path) for path in Path(sys.base_prefix).parents}
    assert all(line.split(" [")[0] in ways and line.endswith("[]") for line in listing)


# --------------------------------------------------------------------------- attacks

@needs_isolation
def test_files_outside_cannot_be_written_or_deleted(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("here")
    victim.chmod(0o777)
    tmp_path.chmod(0o777)
    lines = output(tries(
        f"os.remove({str(victim)!r})", f"open({str(victim)!r}, 'a')", f"os.listdir({str(tmp_path)!r})",
        "open('/usr/x', 'w')", "open('/x', 'w')", f"open({sys.base_prefix + '/x'!r}, 'w')",
        f"os.remove({os.__file__!r})", "os.remove('/dev/null')", "os.chmod('/usr', 0o777)", "os.rmdir('/box')",
        "open('/box/ok', 'w').write('x')", "open('/tmp/ok', 'w').write('x')"))
    assert lines[-2:] == ["done", "done"]
    assert len(lines) == 12
    assert not {"done"} & set(lines[:-2]), lines
    assert victim.read_text() == "here"


@needs_isolation
def test_no_socket_reaches_anything():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        server.settimeout(0.2)
        lines = output("import socket; print(socket.if_nameindex())\n" + tries(
            f"socket.create_connection(('127.0.0.1', {port}), 1)", "socket.create_connection(('8.8.8.8', 53), 1)",
            "socket.getaddrinfo('example.com', 80)"))
        assert lines == ["[(1, 'lo')]", "OSError", "OSError", "gaierror"]
        with pytest.raises(TimeoutError):
            server.accept()


@needs_isolation
def test_the_parent_and_others_cannot_be_killed():
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        lines = output(tries("os.kill(os.getppid(), 9)", f"os.kill({os.getpid()}, 9)", f"os.kill({os.getpid()}, 0)",
                             f"os.kill({bystander.pid}, 9)", "os.kill(-1, 9)", "os.kill(1, 9)", "os.kill(1, 15)")
                       + "print(os.getppid())")
        # 1 is the jail's own first process: the kernel ignores signals from inside to it
        assert lines == ["done", *["ProcessLookupError"] * 4, "done", "done", "1"]
        assert run("import os; os.kill(0, 9)", limits=SMALL).exit_code == 128 + 9  # its own group
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@needs_isolation
def test_no_privilege_can_be_gained():
    """unshare (user, mount, network), mount, chroot, setuid, ptrace of the jail's first process, raising a limit."""
    lines = output("""
import ctypes, os, resource
libc = ctypes.CDLL(None)
print(libc.unshare(0x10000000), libc.unshare(0x20000), libc.unshare(0x40000000))
print(libc.mount(b"none", b"/box", b"tmpfs", 0, b""), libc.chroot(b"/box"), libc.setuid(0), libc.ptrace(16, 1, 0, 0))
print(os.getuid() == 0, libc.prctl(39, 0, 0, 0, 0))
for name in ("NPROC", "AS", "CPU", "FSIZE", "NOFILE"):
    soft, hard = resource.getrlimit(getattr(resource, "RLIMIT_" + name))
    try:
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (hard + 1, hard + 1))
        print("raised", name)
    except (ValueError, PermissionError):
        pass
""")
    assert lines == ["-1 -1 -1", "-1 -1 -1 -1", "False 1"]


@needs_isolation
def test_infinite_loop_ends_at_the_deadline():
    start = time.monotonic()
    result = run("print('begun', flush=True)\nwhile True: pass", limits=Limits(timeout_s=5.0))
    assert (result.exit_code, result.stdout) == (None, "begun\n")
    assert time.monotonic() - start < 30
    assert run("import signal, time\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(60)",
               limits=Limits(timeout_s=0.5)).exit_code is None


@needs_isolation
def test_infinite_output_and_files_are_bounded():
    result = run("while True: print('x' * 1000)", limits=SMALL)
    assert result.exit_code not in (0, None)
    assert len(result.stdout) == 1 << 20
    assert run("import sys\nwhile True: print('x' * 1000, file=sys.stderr)", limits=SMALL).stderr.count("x") <= 1 << 20
    assert run("open('big', 'wb').write(bytes(1 << 21))", limits=SMALL).exit_code == 1
    result = run("for i in range(9): open(str(i), 'wb').write(bytes(1 << 19))", limits=SMALL)  # all together
    assert "No space left" in result.stderr
    assert "Too many open files" in run("x = [open('/dev/null') for _ in range(99)]", limits=SMALL).stderr


@needs_isolation
def test_memory_bomb():
    """First that 300 MB are refused under a limit of 200, then a bomb."""
    assert "MemoryError" in run("x = bytearray(300 << 20)", limits=SMALL).stderr
    assert run("x = bytearray(50 << 20); print(len(x))", limits=SMALL).stdout == "52428800\n"
    result = run("x = []\nwhile True: x.append(bytearray(1 << 20))", limits=SMALL)
    assert "MemoryError" in result.stderr
    assert run("x = 'x' * 10**12", limits=SMALL).exit_code == 1


COUNT_FORKS = """
import os, time
forks = 0
try:
    while forks < 20:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        forks += 1
except BlockingIOError:
    pass
print(forks)
"""


@needs_isolation
def test_fork_bomb():
    """First that a program that stops at 20 forks gets 8 - 2 - 1 or 8 - 1 - 1 (a jail's own count), then a bomb. Two
    jails at once do not share the count, and what a program started is gone with it (the fixture above)."""
    counts = []
    threads = [threading.Thread(target=lambda: counts.append(output(COUNT_FORKS, forks=True))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == 2
    assert all(4 <= int(count[0]) <= 6 for count in counts), counts
    result = run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
                 limits=Limits(timeout_s=1, memory_mb=200, threads=8), forks=True)
    assert result.exit_code is None
    threads = "threading.Thread(target=time.sleep, args=(9,), daemon=True)"
    result = run(f"import threading, time\nfor _ in range(50): {threads}.start()", limits=SMALL)
    assert "can't start new thread" in result.stderr


@needs_isolation
def test_daemons_end_with_the_program():
    start = time.monotonic()
    result = run("import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\n    time.sleep(60)\n"
                 "print('end')", limits=SMALL, forks=True)
    assert result.stdout == "end\n"
    assert time.monotonic() - start < 30                               # the daemon sleeps for 60


@needs_isolation
def test_a_jail_dies_with_its_parent():
    """A killed reward worker leaves no program running."""
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from rewards.sandbox.sandbox import run, Limits; " \
              f"run('import time; time.sleep(777)', limits=Limits(timeout_s=600))"
    parent = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 120
    while len(jails(parent.pid)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    while jails(parent.pid):
        assert time.monotonic() < deadline, "the jail outlived its parent"
        time.sleep(0.05)


@needs_isolation
def test_a_jail_that_cannot_be_built_is_an_error(monkeypatch):
    monkeypatch.setattr(sandbox, "interpreter", lambda isolated: {"python": "/no/python", "folders": {}})
    with pytest.raises(RuntimeError, match=r"no sandbox: FileNotFoundError.*python"):
        run("print(1)")
    monkeypatch.setattr(sandbox, "interpreter", lambda isolated: {"python": "/no", "folders": {"/no/folder": "/no"}})
    with pytest.raises(RuntimeError, match=r"no sandbox: FileNotFoundError.*mount.*/no/folder"):
        run("print(1)")
