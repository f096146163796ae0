"""The sandbox: programs that attack it, each contained and scored with this process untouched; and the code rewards.

Every attack runs with small limits. The attacks that a broken jail would let through to this machine (fork bomb, memory
bomb) run only after test programs showed that the limits hold.
"""

import contextlib
import functools
import http.server
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest

from rewards import code, lookup
from rewards.runtime import sandbox
from rewards.runtime.pool import RewardPool
from rewards.runtime.sandbox import Limits, run

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = Limits(timeout_s=5, memory_mb=200, processes=8, file_mb=1, folder_mb=2, files=16)


@functools.cache
def isolated() -> bool:
    """By util-linux and not by our own jail: a broken one must fail, not skip."""
    names = ["--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork"]
    release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    return release >= (5, 14) and subprocess.run(["unshare", *names, "true"], capture_output=True).returncode == 0


needs_isolation = pytest.mark.skipif(not isolated(), reason="no user namespaces here, or Linux before 5.14")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the jail is Linux's")


def jails(parent: int) -> list[int]:
    """Processes of the jails that `parent` started (before they become the program)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f'"parent": {parent},'.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.fixture(autouse=True)
def nothing_is_left():
    """After each test: no process of a jail, no open descriptor."""
    descriptors = len(os.listdir("/proc/self/fd"))
    yield
    deadline = time.monotonic() + 5
    while (left := jails(os.getpid())) or len(os.listdir("/proc/self/fd")) > descriptors:
        assert time.monotonic() < deadline, f"jails that outlived their run: {left}, or a descriptor did"
        time.sleep(0.05)


def output(program: str, stdin: str = "", limits: Limits = SMALL) -> list[str]:
    """Lines that a program prints in the jail; it must end well."""
    result = run(program, stdin, limits)
    assert result.exit_code == 0, result.stderr
    return result.stdout.splitlines()


def tries(*statements: str) -> str:
    """A program that prints, for each statement, "done" or the error's name."""
    return "import ctypes, os, signal, socket, sys\n" + "".join(
        f"try:\n    {statement}\n    print('done')\nexcept Exception as error:\n    print(type(error).__name__)\n"
        for statement in statements)


# --------------------------------------------------------------------------- what a program gets

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
    assert output("import numpy; print(numpy.arange(4).sum())", limits=Limits(processes=8)) == ["6"]


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
    result = run("print('begun', flush=True)\nwhile True: pass", limits=Limits(timeout_s=1.5))
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
    threads = [threading.Thread(target=lambda: counts.append(output(COUNT_FORKS))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == 2
    assert all(4 <= int(count[0]) <= 6 for count in counts), counts
    result = run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
                 limits=Limits(timeout_s=1, memory_mb=200, processes=8))
    assert result.exit_code is None
    threads = "threading.Thread(target=time.sleep, args=(9,), daemon=True)"
    result = run(f"import threading, time\nfor _ in range(50): {threads}.start()", limits=SMALL)
    assert "can't start new thread" in result.stderr


@needs_isolation
def test_daemons_end_with_the_program():
    start = time.monotonic()
    result = run("import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\n    time.sleep(60)\n"
                 "print('end')", limits=SMALL)
    assert result.stdout == "end\n"
    assert time.monotonic() - start < 4


@needs_isolation
def test_a_jail_dies_with_its_parent():
    """A killed reward worker leaves no program running."""
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from rewards.runtime.sandbox import run, Limits; " \
              f"run('import time; time.sleep(77)', limits=Limits(timeout_s=60))"
    parent = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 10
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


# --------------------------------------------------------------------------- without isolation

def test_weak_isolation_needs_the_flag_and_says_what_is_open(monkeypatch, caplog):
    real = sandbox.run

    def no_namespaces(program, stdin="", limits=SMALL, isolated=True):
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
        assert caplog.text.count("leave processes behind") == 1   # said once
    finally:
        monkeypatch.setattr(sandbox, "run", real)
        sandbox.isolation.cache_clear()


WEAK = """
import threading, time
from rewards.runtime.sandbox import run, Limits
for _ in range(20):  # what a user runs besides: the kernel counts it too
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
small = Limits(timeout_s=2, memory_mb=200, file_mb=1, files=16, processes=8)
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
print(weak(COUNT_FORKS, limits=small).stdout)
"""


def as_user(program: str) -> list[str]:
    """Lines that a program prints as an ordinary user with the system's Python, beside a copy of the sandbox."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "rewards/runtime").mkdir(parents=True)
        for name in ("__init__", "runtime/__init__", "runtime/sandbox", "runtime/jail"):
            shutil.copy(ROOT / f"rewards/{name}.py", f"{folder}/rewards/{name}.py")
        done = subprocess.run(["/usr/bin/python3", "-B", "-c", program], user=54321, group=54321, extra_groups=[],
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
    lines = as_user(f"from rewards.runtime.sandbox import run, Limits\n"
                              f"result = run({attacks!r}, limits=Limits(memory_mb=200, processes=8))\n"
                              f"print(result.stdout, result.stderr)")
    assert lines[:5] == ["OSError", "done", "ProcessLookupError", "OSError", "MemoryError"]
    assert 3 <= int(lines[5]) <= 6
    assert lines[6:] == ["-1 -1 -1", "-1"]


# --------------------------------------------------------------------------- code rewards

ADD = "```python\nprint(sum(map(int, input().split())))\n```"
SUMS = {"inputs": ["1 2\n", "3 4\n", "5 6\n", "7 8"], "outputs": ["3\n", "7\n", "11\n", "15"]}
CALL = {"inputs": [[[1, 2], 3], "[4]\n5"], "outputs": [[1, 2, 3], [[4, 5]]], "fn_name": "f"}
ASSERT = {"assert_case": ["assert f(1) == 2", "assert f(2) == 3"]}


@needs_isolation
@pytest.mark.parametrize(("response", "truth", "score", "pred"), [
    (ADD, SUMS, 1.0, "passed"),
    (ADD, json.dumps(SUMS), 1.0, "passed"),
    ("first\n```\nprint(0)\n```\nbetter\n" + ADD, SUMS, 1.0, "passed"),
    (ADD.removesuffix("```"), SUMS, 1.0, "passed"),                                        # cut off
    ("print(3)", SUMS, 0.25, "wrong answer"),
    ("```python\nprint(3)\nraise SystemExit(1)\n```", SUMS, 0.0, "exit code 1"),
    ("I cannot.", SUMS, 0.0, "exit code 1"),
    ("```python\nwhile True: pass\n```", SUMS, 0.0, "timeout"),
    ("```python\nprint('0.1000000001 2')\n```", {"inputs": [""], "outputs": ["0.1 2"]}, 1.0, "passed"),
    ("```python\nprint('1000000001')\n```", {"inputs": [""], "outputs": ["1000000000"]}, 0.0, "wrong answer"),
    ("```python\nprint(input()[:3])\n```", '{"inputs": [1' + "0" * 5000 + '], "outputs": [100]}', 1.0, "passed"),
    ("```python\nprint('a\\n b ')\n```", {"inputs": [""], "outputs": [["a", "b"]]}, 1.0, "passed"),
    ("```python\nfrom __future__ import annotations\ndef f(a: List[int], b): print('noise'); return (*a, b)\n```",
     CALL, 1.0, "passed"),
    ("```python\nclass Solution:\n    def f(self, a, b): return a + [b]\n```", CALL, 1.0, "passed"),
    ("```python\ndef f(a, b): return a\n```", CALL, 0.0, "wrong answer"),
    ("```python\ndef g(a, b): return a\n```", CALL, 0.0, "exit code 1"),
    ("```python\ndef f(x): return x + 1\n```", {"functional": "assert f(1) == 2\nassert f(2) == 3"}, 1.0, "passed"),
    ("```python\ndef f(x): return 2\n```", {"functional": "assert f(1) == 2\nassert f(2) == 3"}, 0.0, "exit code 1"),
    ("```python\ndef f(x): return 2\n```", ASSERT, 0.5, "exit code 1"),
    ("```python\ndef f(x): return x + 1\n```", ASSERT | {"inputs": ["", ""], "outputs": [None, None]}, 1.0, "passed"),
    ("```python\nimport sys; sys.exit(0)\n```", {"functional": "assert False"}, 0.0, "ended before the assertions"),
    ("```python\nimport os; os._exit(0)\n```", {"functional": "assert False"}, 0.0, "ended before the assertions"),
])
def test_code_scores_cases_worked_by_hand(response, truth, score, pred):
    result = code.compute_score("apps", response, truth, timeout_s=1.0 if pred == "timeout" else 20.0, total_s=60.0)
    assert result == {"score": score, "acc": score == 1.0, "pred": pred, "case_timeout": pred == "timeout"}


@needs_isolation
def test_code_all_or_nothing_and_the_number_of_cases(monkeypatch):
    three = "```python\nprint(3)\n```"
    assert code.compute_score("apps", three, SUMS, continuous=False)["score"] == 0.0
    assert code.compute_score("apps", three, SUMS, continuous=False, max_cases=1)["score"] == 1.0
    assert code.compute_score("apps", ADD, SUMS, continuous=False)["score"] == 1.0
    deadlines = []
    monkeypatch.setattr(sandbox, "run", lambda program, given, limits, isolated: deadlines.append(limits.timeout_s) or
                        time.sleep(0.2) or sandbox.Result(0 if len(deadlines) < 4 else None, "3", ""))
    result = code.compute_score("apps", three, {"inputs": [""] * 9, "outputs": ["3"] * 9}, timeout_s=2, total_s=2.1)
    assert result == {"score": 3 / 9, "acc": False, "pred": "timeout", "case_timeout": True}
    assert deadlines[0] == 2                               # of the case
    assert 1.5 > deadlines[3] > 0                          # what is left of all cases' time
    assert len(deadlines) == 4                             # the first time-out ends the sample
    for truth in ({"inputs": [], "outputs": []}, {"inputs": ["1"], "outputs": []}, {}):
        with pytest.raises(ValueError, match="as many of both"):
            code.compute_score("apps", ADD, truth)


ATTACKS = {
    "loop": "while True: pass",
    "fork": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "memory": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "output": "while True: print('x' * 1000)",
    "home": "import os; print(open(os.path.expanduser('~/.bashrc')).read())",
    "environment": "import os; print(os.environ['HOME_OF_SECRETS'])",
    "socket": "import socket; socket.create_connection(('127.0.0.1', 22)); print(3)",
    "parent": "import os\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)",
    "delete": "import shutil; shutil.rmtree('/usr'); shutil.rmtree('/root')",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "exit": "import os; os._exit(0)",
}


@needs_isolation
def test_attacks_through_the_pool_are_scored_and_not_errors(monkeypatch, tmp_path):
    """A hostile program is a wrong program: score 0 and no failure; the same workers then score a right one."""
    monkeypatch.setenv("HOME_OF_SECRETS", "3")
    (tmp_path / "small.py").write_text(
        "from rewards import code; from rewards.runtime import sandbox\n"
        "import functools\n"
        "code.sandbox.Limits = functools.partial(sandbox.Limits, processes=8, file_mb=1, folder_mb=1)\n"
        "compute_score = code.compute_score\n")
    with RewardPool(f"{tmp_path}/small.py", num_workers=2, timeout_s=20,
                    kwargs='{"timeout_s": 2.5, "memory_mb": 200}') as pool:
        workers = {worker.process.pid for worker in pool.workers.values()}
        for index, attack in enumerate(ATTACKS.values()):
            pool.submit(index, "apps", f"```python\n{attack}\n```", SUMS)
        results = pool.results()
        pool.submit(0, "apps", ADD, SUMS)
        assert pool.results().scores == [1.0]
        assert workers <= {worker.process.pid for worker in pool.workers.values()}
    assert results.failures == [None] * len(ATTACKS)
    assert results.scores == [0.0] * len(ATTACKS)
    timeouts = [name for name, extra in zip(ATTACKS, results.extras) if extra["case_timeout"]]
    assert {"loop", "fork"} <= set(timeouts)


class SandboxFusion(http.server.BaseHTTPRequestHandler):
    """POST /run_code of SandboxFusion (sandbox/server/sandbox_api.py there), answered by the real sandbox."""
    seen: ClassVar[list[dict]] = []
    busy = 0

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body)
        if SandboxFusion.busy:
            SandboxFusion.busy -= 1
            self.send_error(503)
            return
        assert self.path == "/run_code"
        assert body["language"] == "python"
        if body["code"] == "broken":
            failed = {"status": "Error", "execution_time": None, "return_code": None, "stdout": None, "stderr": None}
            answer = {"status": "SandboxError", "message": "no pods", "compile_result": None, "run_result": failed}
        else:
            result = run(body["code"], body["stdin"],
                         Limits(timeout_s=body["run_timeout"], memory_mb=body["memory_limit_MB"], processes=8))
            status = "TimeLimitExceeded" if result.exit_code is None else "Finished"
            answer = {"status": "Success" if result.exit_code == 0 else "Failed", "message": "", "compile_result": None,
                      "run_result": {"status": status, "execution_time": 0.1, "return_code": result.exit_code,
                                     "stdout": result.stdout, "stderr": result.stderr}, "files": {}}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with http.server.HTTPServer(("127.0.0.1", 0), SandboxFusion) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}/run_code"
        httpd.shutdown()
        thread.join()


@needs_isolation
def test_a_remote_sandbox_gives_the_same_scores(server):
    for response, truth in ((ADD, SUMS), ("print(3)", SUMS), ("```python\ndef f(a, b): return [*a, b]\n```", CALL),
                            ("```python\nwhile True: pass\n```", SUMS), ("1 +", SUMS),
                            ("```python\ndef f(x): return 2\n```", ASSERT)):
        here, there = (code.compute_score("apps", response, truth, timeout_s=1.0 if "while" in response else 20.0,
                                          total_s=60.0, memory_mb=300, sandbox_fusion_url=url)
                       for url in (None, server))
        assert here == there
    assert SandboxFusion.seen[0]["memory_limit_MB"] == 300
    assert set(SandboxFusion.seen[0]) == {"code", "stdin", "language", "compile_timeout", "run_timeout",
                                          "memory_limit_MB", "files", "fetch_files"}


@needs_isolation
def test_a_remote_sandbox_that_fails_is_an_error_and_never_a_score(server):
    SandboxFusion.busy = 2
    assert sandbox.run_remote(server, "print(7)").stdout == "7\n"            # the third attempt
    SandboxFusion.busy = 3
    with pytest.raises(RuntimeError, match=r"503.*attempt 3 of 3"):
        sandbox.run_remote(server, "print(7)")
    assert SandboxFusion.busy == 0
    with pytest.raises(RuntimeError, match="SandboxError: no pods"):
        sandbox.run_remote(server, "broken")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(RuntimeError, match=r"sandbox server .*refused"):
        sandbox.run_remote(f"http://127.0.0.1:{port}/run_code", "print(7)")
