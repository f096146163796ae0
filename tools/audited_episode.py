"""Runs the environments of tools/audit.py: after each episode, its process writes what the episode leaves behind.

`AUDIT_EPISODE` has the spec of --rollout.episode, `AUDIT_FOLDER` the folder for one JSON file an episode.
"""

import contextlib
import functools
import json
import os
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from envs.runtime.conversation import environments
from envs.runtime.server import load_episode

WAIT_S = 0.5  # a process that was told to end may take this long
MAX_SHOWN = 80  # characters of a command line


def spec_of(spec: str) -> str:
    """The spec with which each environment of `spec` runs through this file."""
    names = environments(spec)
    parts = [f"{name}={__file__}:{function_name(name)}" for name in names]
    return ",".join(parts) if "" not in names else f"{__file__}:{function_name('')}"


def function_name(name: str) -> str:
    return f"episode_of_{name}"


def watched(spec: str) -> Callable:
    """The episode that `spec` names. What it leaves behind is written down as it ends."""
    inner = load_episode(spec)

    @functools.wraps(inner)
    async def episode(chat: Any, row: Any) -> Any:
        try:
            return await inner(chat, row)
        finally:
            file = Path(os.environ["AUDIT_FOLDER"], f"{os.getpid()}.json")
            file.write_text(json.dumps(left_behind()))

    return episode


def left_behind() -> dict[str, Any]:
    """Processes that the episode started and that still run, their ports, and the next random numbers."""
    own = psutil.Process()
    started = own.children(recursive=True) + adopted(own)
    _, alive = psutil.wait_procs(started, timeout=WAIT_S)
    killed = {}  # with the episode, because they are in its process group
    stays = {}
    ports = listening([own, *alive])
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            name = " ".join(process.cmdline())[:MAX_SHOWN] or process.name()
            ends_with_episode = os.getpgid(process.pid) == os.getpgrp()
            (killed if ends_with_episode else stays)[process.pid] = name
    numbers = [random.random()]
    if "numpy" in sys.modules:
        numbers.append(float(sys.modules["numpy"].random.random()))
    return {"killed": killed, "stays": stays, "ports": ports, "numbers": numbers}


def adopted(own: psutil.Process) -> list[psutil.Process]:
    """Processes whose parent, an episode's process, has ended: they are children of the server of episodes now."""
    server = own.parent()
    if server is None:
        return []
    found = []
    for process in set(server.children()) - {own} - LOADED:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline() != server.cmdline():  # which other episodes have
                found.append(process)
    return found


def listening(processes: Iterable[psutil.Process]) -> list[int]:
    ports = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            for connection in process.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    ports.add(connection.laddr.port)
    return sorted(ports)


LOADED: set[psutil.Process] = set()
"""What the environments' files started when they were imported: all episodes share it."""
if "AUDIT_EPISODE" in os.environ:
    for _name, _spec in environments(os.environ["AUDIT_EPISODE"]).items():
        globals()[function_name(_name)] = watched(_spec)
    LOADED |= set(psutil.Process().children())
