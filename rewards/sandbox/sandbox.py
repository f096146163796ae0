"""Runs model-written Python programs so that they can neither hurt nor outlive this process.

Local: a jail (jail.py) with no network, an empty environment, one writable folder in memory, rlimits, a filter of
system calls and a deadline. Where the system gives no namespaces, network and files are open: that is refused unless
`allow_weak` is given, and the log names what is open.
Remote: a server with SandboxFusion's HTTP interface (POST /run_code), which must isolate the programs itself.
"""

import contextlib
import functools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

log = logging.getLogger(__name__)
# by the controller in /proc/self/cgroup: version 2 names none
MEMORY_EVENTS = {"": "/sys/fs/cgroup{}/memory.events", "memory": "/sys/fs/cgroup/memory{}/memory.oom_control"}
LOOK_S = 0.05  # between two looks at the memory of a program's processes


@dataclass(frozen=True)
class Limits:
    """Of one program."""
    timeout_s: float = 4.0  # wall clock; the kernel ends it at one second more of CPU time
    memory_mb: int = 1024   # address space
    threads: int = 16       # two are the jail's own; no program starts processes
    file_mb: int = 16       # each file, standard output too
    folder_mb: int = 64     # all files together (isolated only)
    num_files: int = 1000   # in that folder (isolated only)
    files: int = 64         # open at once
    total_mb: int = 0       # resident memory of all processes together, for programs that start some; 0: not bounded


@dataclass(frozen=True)
class Result:
    exit_code: int | None   # 128 + N: ended by signal N; None: killed at the deadline
    stdout: str
    stderr: str


class MachineFailure(RuntimeError):
    """The machine failed and not the program: there is no result."""


def run(program: str, stdin: str = "", limits: Limits = Limits(), isolated: bool = True, forks: bool = False,
        links: Mapping[str, str] = MappingProxyType({})) -> Result:
    """Run Python source. Whatever the program does is a Result. Raises MachineFailure, after a second try, if the jail
    cannot be built or the kernel killed processes for want of memory meanwhile. `forks`: it may start processes; they
    have to restrict themselves (harness.judge), or `limits` must bound them together. `links`: {path outside of the
    writable folder: path in it}, for programs that know a folder by its absolute path (isolated only)."""
    try:
        return run_once(program, stdin, limits, isolated, forks, links)
    except MachineFailure as error:
        log.info("a program runs a second time: %s", error)
        return run_once(program, stdin, limits, isolated, forks, links)


def run_once(program: str, stdin: str, limits: Limits, isolated: bool, forks: bool, links: Mapping[str, str]) -> Result:
    kills = count_memory_kills()
    with contextlib.ExitStack() as stack:
        try:
            # memory and no disk: a full one would look like a failure of the program
            source, given, stdout, stderr = (
                stack.enter_context(open(os.memfd_create(name), "w+b")) for name in ("main.py", "in", "out", "err"))
            folder = None if isolated else stack.enter_context(tempfile.TemporaryDirectory())
            source.write(program.encode(errors="replace"))
            given.write(stdin.encode(errors="replace"))
            for file in (source, given):
                file.seek(0)
            errors, errors_end = os.pipe()
            failures = stack.enter_context(open(errors, "rb"))
            jail = asdict(limits) | interpreter(isolated) | {
                "parent": os.getpid(), "program": source.fileno(), "errors": errors_end, "folder": folder,
                "isolated": isolated, "forks": forks, "links": dict(links)}
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(Path(__file__).with_name("jail.py")), json.dumps(jail)], env={},
                    stdin=given, stdout=stdout, stderr=stderr, pass_fds=[source.fileno(), errors_end],
                    start_new_session=True)
            finally:
                os.close(errors_end)
        except OSError as error:
            raise MachineFailure(f"no sandbox: {type(error).__name__}: {error}") from error
        try:
            code = wait(process, limits)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also after its end: without isolation some may be left
            process.wait()
        if failure := failures.read():
            raise MachineFailure(f"no sandbox: {failure.decode(errors='replace')}")
        if code != 0 and count_memory_kills() > kills:
            raise MachineFailure(f"the machine ran out of memory while a program ran (exit code {code})")
        for file in (stdout, stderr):
            file.seek(0)
        texts = [file.read().decode(errors="replace") for file in (stdout, stderr)]
        return Result(128 - code if code and code < 0 else code, *texts)


def wait(process: subprocess.Popen, limits: Limits) -> int | None:
    """The exit code; None at the deadline. Processes that use more than `total_mb` together are killed: -SIGKILL."""
    if not limits.total_mb:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(limits.timeout_s)
        return None
    import psutil  # only shells need it; all else runs in any Python

    jail = psutil.Process(process.pid)
    end = time.monotonic() + limits.timeout_s
    while time.monotonic() < end:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(LOOK_S, max(0.0, end - time.monotonic())))
        resident = 0  # bytes
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            for each in [jail, *jail.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    resident += each.memory_info().rss
        if resident > limits.total_mb << 20:
            return -signal.SIGKILL
    return None


def count_memory_kills() -> int:
    """Processes that the kernel has killed for want of memory: those of this control group where it counts them (what
    is killed in another job or container says nothing of this program), else those of the machine."""
    groups = (line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    own = [Path(MEMORY_EVENTS[name].format(path)) for name, path in groups if name in MEMORY_EVENTS]
    texts = [file.read_text() for file in (*own, Path("/proc/vmstat")) if file.is_file()]
    return int(re.findall(r"^oom_kill (\d+)$", "\n".join([*texts, "oom_kill 0"]), re.MULTILINE)[0])


def interpreter(isolated: bool) -> dict:
    """The Python of this process: where it lies in the jail, and the folders to show there, read-only."""
    if not isolated:
        return {"python": sys.executable, "folders": {}}
    folders = {} if sys.base_prefix == "/usr" else {sys.base_prefix: sys.base_prefix}
    if sys.prefix == sys.base_prefix:
        return {"python": sys.executable, "folders": folders}
    return {"python": f"/venv/bin/{Path(sys.executable).name}", "folders": folders | {sys.prefix: "/venv"}}


REWARD_FLAGS = ("""--reward.kwargs '{"sandbox_fusion_url": "http://HOST:8080/run_code"}'""",
                """--reward.kwargs '{"allow_weak_sandbox": true}'""")


@functools.cache
def isolation(allow_weak: bool = False, flags: tuple[str, ...] = REWARD_FLAGS) -> bool:
    """Whether programs can be isolated here, found by trying. If not: False with allow_weak, else RuntimeError, which
    names the flags that give a server or accept it."""
    try:
        run("", limits=Limits(timeout_s=30))
        return True
    except RuntimeError as error:
        files = ("read what all users may, write into folders open to all" if os.geteuid() == 0 else
                 "read and change all that this user may, signal all its processes, the trainer too")
        weak = (f"model-written code cannot be isolated here ({error}): only rlimits, a filter of system calls and a "
                f"deadline would hold. It could use the network, {files}, and fill the disk")
    if not allow_weak:
        raise RuntimeError(f"{weak}. Run where the sandbox can be built (Linux 5.14 with user namespaces), or give a "
                           f"server, {flags[0]}, or accept it, {flags[1]}")
    run("", limits=Limits(timeout_s=30), isolated=False)  # raises if even this is impossible
    log.warning("%s", weak)
    return False


def run_remote(url: str, program: str, stdin: str = "", limits: Limits = Limits(), attempts: int = 3) -> Result:
    """The same through a SandboxFusion server, e.g. http://host:8080/run_code. Busy or unreachable: tried again;
    RuntimeError if it stays so or the server itself failed."""
    body = {"code": program, "stdin": stdin, "language": "python", "compile_timeout": limits.timeout_s,
            "run_timeout": limits.timeout_s, "memory_limit_MB": limits.memory_mb, "files": {}, "fetch_files": []}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    for attempt in range(attempts):
        try:
            with urllib.request.urlopen(request, timeout=2 * limits.timeout_s + 10) as response:
                answer = json.load(response)
            break
        except OSError as error:  # URLError, HTTPError and time-outs
            final = isinstance(error, urllib.error.HTTPError) and error.code not in (429, 502, 503, 504)
            if final or attempt == attempts - 1:
                raise RuntimeError(f"sandbox server {url}: {error} (attempt {attempt + 1} of {attempts})") from error
            time.sleep(0.25 * 2**attempt)
    result = answer.get("run_result") or answer.get("compile_result")
    if answer["status"] == "SandboxError" or result is None:
        raise RuntimeError(f"sandbox server {url}: {answer['status']}: {answer.get('message')}")
    code = None if result["status"] == "TimeLimitExceeded" else result["return_code"]
    return Result(128 - code if code and code < 0 else code, result["stdout"] or "", result["stderr"] or "")
