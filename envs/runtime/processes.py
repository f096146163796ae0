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
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

from rewards.runtime.cleaner import own_folder, remove
from rewards.runtime.process import ROOT, START_S
from rewards.runtime.worker import MAX_TEXT, unpacked

GRACE_S = 1.0  # an episode ends itself at its deadline; one that hangs in C is killed this much later
DUMP_S = 2.0  # it may take this long to write where it hangs
LULL_S = 0.003  # where nothing else is to be done, answers that follow each other this fast are heard together
MAX_RECEIVED = 2**25  # bytes


@dataclass
class Process:
    pid: int
    connection: Connection
    since: float  # when it was told something that it has not answered yet
    num_asked: int = 0  # replies of the model that it waits for

    @property
    def is_busy(self) -> bool:
        """It runs the user's code."""
        return not self.num_asked


class EpisodeProcesses:
    """One process an episode, each forked from a process that has imported the user's file."""

    def __init__(self, spec: str, timeout_s: float):
        """Raises ValueError for a mistake in `spec` (FILE.py:NAME), RuntimeError if the file cannot be loaded."""
        self.timeout_s = timeout_s
        self.running: dict[int, Process] = {}
        self.heard: list[tuple[int, dict[str, Any]]] = []  # that nobody has been told yet
        # episodes that go on between two rollouts: a process, unless it has ended, and messages that nobody was told
        self.aside: dict[Hashable, tuple[Process | None, list[dict[str, Any]]]] = {}
        # of temporary files; its name marks what they started
        self.folder = tempfile.mkdtemp(prefix="episodes_", dir=own_folder())
        self.loaded: set[psutil.Process] = set()  # what the file started when it was imported, and all episodes share
        self.control, theirs = socket.socketpair()
        self.control.settimeout(START_S)
        env = dict(os.environ, TMPDIR=self.folder, OMP_NUM_THREADS="1")
        env.pop("LD_PRELOAD", None)  # vLLM sets it for its own process
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
        arguments = [str(theirs.fileno()), str(os.getpid()), spec, str(timeout_s)]
        self.server = subprocess.Popen(
            [sys.executable, "-m", "envs.runtime.server", *arguments],
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
            last_line = reply["text"].strip()
            if "ValueError: --rollout.episode" in last_line:  # a mistake in the flag, which says all
                raise ValueError(last_line[last_line.rindex("--rollout.episode") :])
            raise RuntimeError(f"--rollout.episode {spec} could not be loaded:\n{reply['text']}")
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
        self.send(process, message)

    def tell(self, number: int, message: dict[str, Any]) -> None:
        """Tell an episode a reply, or that it gets none. One that has died is told nothing."""
        if number in self.running:
            process = self.running[number]
            process.num_asked -= 1
            process.since = time.monotonic()
            self.send(process, message)

    def send(self, process: Process, message: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionError, BlockingIOError):  # it died or does not read: `events` will see it
            process.connection.send_bytes(pickle.dumps(message))

    @property
    def num_busy(self) -> int:
        return sum(process.is_busy for process in self.running.values())

    def events(self, wait_s: float, wait_for_all: bool = False) -> list[tuple[int, dict[str, Any]]]:
        """The messages of episodes, (number, message) in the order of their numbers. Waits at most `wait_s` for the
        first message, then collects messages as long as more follow at once. `wait_for_all`: returns only when each
        busy episode has sent a message. Each message has "seconds": how long the user's code ran before it."""
        end = time.monotonic() + wait_s
        while True:
            running = {process.connection: number for number, process in self.running.items()}
            now = time.monotonic()
            deadlines = {number: process.since + self.timeout_s + GRACE_S
                         for number, process in self.running.items() if process.is_busy}
            lull = now + LULL_S if self.heard and not wait_for_all else end
            until = min([end, lull, *deadlines.values()])
            ready = wait(list(running), max(until - now, 0.0) if deadlines else 0.0) if running else []
            for connection in ready:
                self.receive(running[connection])
            for number, deadline in deadlines.items():
                if time.monotonic() > deadline and number in self.running and self.running[number].is_busy:
                    self.heard.append(self.expire(number))
            is_complete = not self.num_busy or (self.heard and not ready and not wait_for_all)
            if is_complete or time.monotonic() >= end:
                break
        if wait_for_all and self.num_busy:
            return []
        found, self.heard = self.heard, []
        return sorted(found, key=lambda event: event[0])

    def receive(self, number: int) -> None:
        process = self.running[number]
        seconds = time.monotonic() - process.since
        try:
            message = unpacked(json.loads(process.connection.recv_bytes(MAX_RECEIVED)))
        except (EOFError, OSError, ValueError, TypeError, RecursionError):  # the last four: something else wrote there
            message = {"failure": "crash", "kind": "crash", "text": "the episode's process ended before its result"}
        process.since = time.monotonic()
        if "tool" in message:  # one begins or ends: each has the whole time
            return
        self.heard.append((number, {"seconds": seconds} | message))
        if "messages" in message:
            process.num_asked += 1
        else:
            self.end(number)

    def expire(self, number: int) -> tuple[int, dict[str, Any]]:
        """End an episode that hangs, and read where it hung."""
        process = self.running[number]
        where = b""
        end = time.monotonic() + DUMP_S
        with contextlib.suppress(ProcessLookupError, ConnectionResetError):  # it has died; with something unread
            os.kill(process.pid, signal.SIGUSR2)
            while (left := end - time.monotonic()) > 0 and select.select([process.connection], [], [], left)[0]:
                data = os.read(process.connection.fileno(), 2**16)
                if not data:
                    break
                where += data
        self.end(number)
        text = f"no answer after {self.timeout_s:g} s (--rollout.tool-timeout-s)\n"
        text += where[:MAX_TEXT].decode(errors="replace")
        return number, {"failure": "timeout", "kind": "timeout", "text": text, "seconds": self.timeout_s}

    def put_aside(self, number: int, key: Hashable) -> None:
        """Let an episode go on without listening to it, until `take_back`."""
        unheard = [message for owner, message in self.heard if owner == number]
        self.heard = [(owner, message) for owner, message in self.heard if owner != number]
        self.aside[key] = (self.running.pop(number, None), unheard)

    def take_back(self, number: int, key: Hashable) -> None:
        process, unheard = self.aside.pop(key)
        if process is not None:
            self.running[number] = process
        self.heard += [(number, message) for message in unheard]

    def end_aside(self, but: Collection[Hashable] = ()) -> None:
        """End the episodes that were put aside, but those with these keys."""
        for key in self.aside.keys() - set(but):
            process, _ = self.aside.pop(key)
            if process is not None:
                self.kill(process)

    def end(self, number: int) -> None:
        """End the process of an episode, and the processes that it started; nothing if it has died."""
        if number in self.running:
            self.kill(self.running.pop(number))

    def kill(self, process: Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.connection.close()

    def end_all(self) -> None:
        """End the episodes that are listened to, and what they left behind, as far as it cannot belong to others."""
        self.heard = []
        for number in list(self.running):
            self.end(number)
        while not self.aside and (strays := self.children() - self.loaded):
            for process in strays:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def children(self) -> set[psutil.Process]:
        """Those of the server: episodes, what the file started, and what episodes started and left behind."""
        try:
            return set(psutil.Process(self.server.pid).children())
        except psutil.NoSuchProcess:
            return set()

    def close(self) -> None:
        self.end_aside()
        self.end_all()
        self.control.close()
        self.server.kill()
        self.server.wait()
        remove(self.folder)  # also of processes that left their process group
