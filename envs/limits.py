"""Limits of a tool: how many episodes may call it at the same time, and how often a call that fails is made again."""

import asyncio
import contextlib
import fcntl
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

LONGEST_WAIT_S = 1.0  # between two looks for a free place


@dataclass(frozen=True)
class Limits:
    at_once: int = 0
    retries: int = 0
    backoff_s: float = 1.0

    @contextlib.asynccontextmanager
    async def place(self, name: str, on_wait: Callable[[], None]) -> AsyncIterator[None]:
        """One of the tool's `at_once` places. `on_wait` is called each time that none is free. A place is a locked file
        in the folder that all episodes of an engine share: the system unlocks it if its episode is killed."""
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(Path(tempfile.gettempdir(), f"{name}.{i}.place"), "w"))
                     for i in range(self.at_once)]
            wait_s = 0.02
            while files and not any(map(is_locked, files)):
                on_wait()
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            yield


def is_locked(file) -> bool:
    """Lock the file for this process, unless another one has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def limited(at_once: int = 0, retries: int = 0, backoff_s: float = 1.0) -> Callable[[Callable], Callable]:
    """For a tool: `@limited(at_once=4, retries=3)`.

    `at_once`: most calls at the same time, over all episodes of one engine; 0: no limit. Waiting for a place does not
    count against --rollout.tool-timeout-s. `retries`: how often a call is made again that raised an error other than
    TimeoutError, after `backoff_s` seconds, twice as many, four times as many. Raises ValueError for numbers below
    0."""
    if min(at_once, retries, backoff_s) < 0:
        raise ValueError(f"limited(at_once={at_once}, retries={retries}, backoff_s={backoff_s}) must not be below 0")

    def mark(tool: Callable) -> Callable:
        tool.limits = Limits(at_once, retries, backoff_s)
        return tool

    return mark
