"""The trainer's end of the processes that run episodes. It starts them, sends them the model's replies, receives their
requests, and ends those that take too long."""

import contextlib
import json
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

from rewards.runtime.cleaner import own_folder, remove
from rewards.runtime.process import ROOT, START_S
from rewards.runtime.replies import MAX_TEXT, unpacked

GRACE_S = 1.0  # an episode ends itself at its deadline; one that hangs in C is killed this much later
DUMP_S = 2.0  # it may take this long to write where it hangs
LULL_S = 0.003  # where nothing else is to be done, answers that follow each other this fast are heard together
MAX_RECEIVED = 2**25  # bytes


@dataclass
class Process:
    """The process of one episode. Once it has ended, its connection is closed."""

    pid: int
    connection: Connection
    since: float  # when it was told something that it has not answered yet
    num_asked: int = 0  # replies of the model that it waits for
    heard: list[dict[str, Any]] = field(default_factory=list)  # its messages that nobody has been told yet

    @property
    def is_busy(self) -> bool:
        """It runs the user's code."""
        return not self.connection.closed and not self.num_asked

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionError, BlockingIOError):  # it died or does not read: `events` will see it
            self.connection.send_bytes(pickle.dumps(message))

    def receive(self) -> None:
        seconds = time.monotonic() - self.since
        try:
            message = unpacked(json.loads(self.connection.recv_bytes(MAX_RECEIVED)))
        except (EOFError, OSError, ValueError, TypeError, RecursionError):  # the last four: something else wrote there
            message = {"failure": "crash", "kind": "crash", "text": "the episode's process ended before its result"}
        self.since = time.monotonic()
        if "restart" in message:  # a tool begins or ends: each has the whole time
            return
        self.heard.append({"seconds": seconds} | message)
        if "messages" in message:
            self.num_asked += 1
        else:
            self.end()

    def take(self) -> list[dict[str, Any]]:
        """What was heard, once."""
        taken = self.heard
        self.heard = []
        return taken

    def expire(self, timeout_s: float) -> None:
        """End an episode that hangs, and read where it hung."""
        where = self.dump()
        self.end()
        text = f"no answer after {timeout_s:g} s (--rollout.tool-timeout-s)\n"
        text += where[:MAX_TEXT].decode(errors="replace")
        self.heard.append({
            "failure": "timeout",
            "kind": "timeout",
            "text": text,
            "seconds": timeout_s,
        })

    def dump(self) -> bytes:
        """What it writes of where it hangs."""
        written = b""
        end = time.monotonic() + DUMP_S
        reports = select.poll()  # select() takes no descriptor above 1,023
        reports.register(self.connection, select.POLLIN)
        with contextlib.suppress(ProcessLookupError, ConnectionResetError):  # it has died; with something unread
            os.kill(self.pid, signal.SIGUSR2)
            while True:
                left = end - time.monotonic()
                if left <= 0:
                    break
                if not reports.poll(1000 * left):
                    break
                data = os.read(self.connection.fileno(), 2**16)
                if not data:
                    break
                written += data
        return written

    def end(self) -> None:
        """End it, and the processes that it started, unless it has ended."""
        if not self.connection.closed:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.connection.close()


class EpisodeProcesses:
    """One process an episode, each forked from a process that has imported the user's file."""

    def __init__(self, spec: str, timeout_s: float):
        """Raises ValueError for a mistake in `spec` (FILE.py:NAME), RuntimeError if the file cannot be loaded."""
        self.timeout_s = timeout_s
        self.running: dict[int, Process] = {}
        # of temporary files; its name marks what they started
        self.folder = tempfile.mkdtemp(prefix="episodes_", dir=own_folder())
        self.loaded: set[psutil.Process] = set()  # what the file started when it was imported, and all episodes share
        self.control, theirs = socket.socketpair()
        self.control.settimeout(START_S)
        env = dict(os.environ, TMPDIR=self.folder, OMP_NUM_THREADS="1", TOOL_TIMEOUT_S=str(timeout_s))
        env.pop("LD_PRELOAD", None)  # vLLM sets it for its own process
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "envs.runtime.server"]
        arguments = [str(theirs.fileno()), str(os.getpid()), spec, str(timeout_s)]
        self.server = subprocess.Popen(
            command + arguments,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=env,
        )
        theirs.close()
        try:
            reply = json.loads(self.control.recv(2**20) or b'{"text": "it died"}')
        except TimeoutError:
            reply = {"text": f"no answer after {START_S:g} s"}
        if reply:
            self.close()
            text = reply["text"]
            if "ValueError: --rollout.episode" in text:  # a mistake in the flag, which says all
                raise ValueError(text[text.rindex("--rollout.episode") :].strip())
            raise RuntimeError(f"--rollout.episode {spec} could not be loaded:\n{text}")
        self.loaded = self.children()

    def start(self, number: int, message: dict[str, Any]) -> None:
        """Start an episode. `message`: {"row", "messages", "tokens_left"}."""
        ours, theirs = socket.socketpair()
        # neither an episode that reads nothing nor half a message can stop the trainer for longer
        limit = struct.pack("ll", *divmod(int(self.timeout_s * 1e6), 10**6))
        for direction in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, direction, limit)
        pid = 0
        with theirs, contextlib.suppress(ConnectionError, TimeoutError):
            socket.send_fds(self.control, [b"e"], [theirs.fileno()])
            pid = int.from_bytes(self.control.recv(8), "little")
        if not pid:
            raise RuntimeError("the process that starts episodes has died, or does not answer")
        process = self.running[number] = Process(pid, Connection(ours.detach()), time.monotonic())
        process.send(message)

    def tell(self, number: int, message: dict[str, Any]) -> None:
        """Tell an episode a reply, or that it gets none. One that has died is told nothing."""
        process = self.running[number]
        if not process.connection.closed:
            process.num_asked -= 1
            process.since = time.monotonic()
            process.send(message)

    def events(self, wait_s: float, wait_for_all: bool = False) -> list[tuple[int, dict[str, Any]]]:
        """The messages of episodes, (number, message) in the order of their numbers. Waits at most `wait_s` for the
        first message, then collects messages as long as more follow at once. `wait_for_all`: returns only when each
        busy episode has sent a message. Each message has "seconds": how long the user's code ran before it."""
        end = time.monotonic() + wait_s
        self.running = {n: p for n, p in self.running.items() if p.heard or not p.connection.closed}
        while True:
            running = {p.connection: p for p in self.running.values() if not p.connection.closed}
            until = end
            is_lull = False
            if not wait_for_all and any(process.heard for process in self.running.values()):
                is_lull = True
                until = min(end, time.monotonic() + LULL_S)
            ready = self.hear(running, until)
            is_busy = any(process.is_busy for process in running.values())
            if not is_busy or (is_lull and not ready) or time.monotonic() >= end:
                break
        if wait_for_all and is_busy:
            return []
        found = []
        for number in sorted(self.running):
            for message in self.running[number].take():
                found.append((number, message))
        return found

    def hear(self, running: dict[Any, Process], until: float) -> list[Any]:
        """Receive what has arrived. Where nothing has and an episode is busy, wait for the first message, till
        `until` or a deadline, and end the episodes whose time is up. Returns the connections that had a
        message."""
        deadlines = [self.deadline(process) for process in running.values() if process.is_busy]
        wait_s = 0.0
        if deadlines:
            wait_s = max(min(until, *deadlines) - time.monotonic(), 0.0)
        ready = wait(list(running), wait_s)
        for connection in ready:
            running[connection].receive()
        for process in running.values():
            if process.is_busy and time.monotonic() > self.deadline(process):
                process.expire(self.timeout_s)
        return ready

    def deadline(self, process: Process) -> float:
        return process.since + self.timeout_s + GRACE_S

    def end_all(self, with_strays: bool = True) -> None:
        """End the episodes that are listened to, and, `with_strays`, whatever episodes left behind."""
        for process in self.running.values():
            process.end()
        self.running = {}
        if with_strays:
            self.kill_strays()

    def kill_strays(self) -> None:
        while True:
            strays = self.children() - self.loaded
            if not strays:
                # a process whose parent ends while the list is read may be missing from it: read it again
                strays = self.children() - self.loaded
            if not strays:
                break
            for stray in strays:
                with contextlib.suppress(psutil.NoSuchProcess):
                    stray.kill()

    def children(self) -> set[psutil.Process]:
        """Those of the server: episodes, what the file started, and what episodes started and left behind."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return set(psutil.Process(self.server.pid).children())
        return set()

    def close(self) -> None:
        self.end_all()
        self.control.close()
        self.server.kill()
        self.server.wait()
        remove(self.folder)  # also of processes that left their process group
