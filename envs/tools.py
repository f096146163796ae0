"""Tools that the model may call: what can be one, its schema, its time limit; how many episodes may call it at the same
time, and how often a call that fails is made again."""

import asyncio
import contextlib
import contextvars
import fcntl
import importlib
import inspect
import itertools
import math
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from envs.pictures import Content, result_of

LONGEST_WAIT_S = 1.0  # between two looks for a free place, and without a restart of the clock


@dataclass(frozen=True)
class Limits:
    at_once: int = 0
    retries: int = 0
    backoff_s: float = 1.0

    @contextlib.asynccontextmanager
    async def place(self, name: str, restart_clock: Callable[[], None]) -> AsyncIterator[None]:
        """One of the tool's `at_once` places. A place is a locked file in the folder that all episodes of an engine
        share: the system unlocks it if its episode is killed. `restart_clock`: see `pause`."""
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(Path(tempfile.gettempdir(), f"{name}.{i}.place"), "w"))
                     for i in range(self.at_once)]
            wait_s = 0.02
            while files and not any(map(is_locked, files)):
                await pause(wait_s, restart_clock)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            yield


def is_locked(file) -> bool:
    """Lock the file for this process, unless another one has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def pause(seconds: float, restart_clock: Callable[[], None]) -> None:
    """Sleep without counting against --rollout.tool-timeout-s: `restart_clock` (`Chat.restart_clock`) begins it anew,
    again and again, and at the end."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        await asyncio.sleep(min(left, LONGEST_WAIT_S))
        restart_clock()


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


def name_of(tool: Callable) -> str:
    """Of a function, or in the schema of another object."""
    name = getattr(tool, "__name__", None) or getattr(tool, "schema", {}).get("function", {}).get("name")
    if not callable(tool) or not name:
        raise TypeError(f"chat.tools takes functions, or callable objects with an attribute `schema`, not {tool!r:.80}")
    return name


def schema_of(tool: Callable) -> dict[str, Any]:
    """The JSON schema of a tool: its attribute `schema`, or made from its type hints and docstring. Raises ValueError
    that names what is missing there."""
    name = name_of(tool)
    if hasattr(tool, "schema"):
        return tool.schema
    for argument in inspect.signature(tool).parameters.values():
        if argument.kind not in (argument.KEYWORD_ONLY, argument.POSITIONAL_OR_KEYWORD):
            raise ValueError(f"the tool {name} takes {argument}, {argument.kind.description}, and the model gives "
                             f"arguments by their names: give the tool an attribute `schema`, or other arguments")
    from transformers.utils import chat_template_utils  # a second of CPU: see prepare_schemas

    # without torch, which takes seconds to import and is only asked for the type of audio
    with mock.patch.object(chat_template_utils, "is_torch_available", return_value=False):
        try:
            return chat_template_utils.get_json_schema(tool)
        except chat_template_utils.DocstringParsingException as error:
            raise ValueError(f"the tool {name} needs a docstring with its arguments: {error}") from None
        except chat_template_utils.TypeHintParsingException as error:
            raise ValueError(f"the tool {name} needs type hints of its arguments: {error}") from None


def prepare_schemas(modules: Iterable[ModuleType]) -> None:
    """Import what `schema_of` needs, if one of a user's modules has tools: the processes that are forked from this one
    then have it. Without it a fork takes half the time."""
    for file in (Path(getattr(module, "__file__", None) or "") for module in modules):
        installed = file.is_relative_to(sys.prefix) or file.is_relative_to(sys.base_prefix)
        if file.suffix == ".py" and file.is_file() and not installed and ".tools" in file.read_text(errors="replace"):
            importlib.import_module("transformers.utils.chat_template_utils")
            return


async def call_tool(tool: Callable, name: str, arguments: dict[str, Any], timeout_s: float,  # type: ignore[return]
                    restart_clock: Callable[[], None]) -> Content:
    """The result of a call, within the tool's limits; each try has `timeout_s`. `name`: of the tool, as the model calls
    it. `restart_clock`: `Chat.restart_clock`."""
    limits = getattr(tool, "limits", Limits())
    async with limits.place(name, restart_clock):
        for attempt in itertools.count():
            try:
                return result_of(await run_tool(tool, arguments, timeout_s))
            except Exception as error:
                if attempt == limits.retries or isinstance(error, TimeoutError):
                    raise
            restart_clock()  # the try that failed may have taken all
            await pause(limits.backoff_s * 2**attempt, restart_clock)


@dataclass
class Running:
    """A tool that runs, and the time that it has."""

    end: float  # the instant at which it must end
    late: TimeoutError  # which ends it
    timeout: asyncio.Timeout | None = None  # ends it where it is awaited
    num_asked: int = 0  # replies of the model that it waits for; then no clock runs
    left: float = 0.0  # seconds that it has after them

    def stop(self) -> None:
        self.num_asked += 1
        if self.num_asked == 1:
            self.left = self.end - time.monotonic()
            self.set_end(math.inf)

    def go_on(self) -> None:
        self.num_asked -= 1
        if not self.num_asked:
            self.set_end(time.monotonic() + self.left)

    def set_end(self, end: float) -> None:
        self.end = end
        if self.timeout is not None and not self.timeout.expired():
            left = end - time.monotonic()
            self.timeout.reschedule(None if left == math.inf else asyncio.get_running_loop().time() + left)


_running: dict[asyncio.Task, Running] = {}
"""The tools that run, each in a task."""
_inside: contextvars.ContextVar[tuple[Running, ...]] = contextvars.ContextVar("_inside", default=())
"""Those that the current task belongs to: a tool may call tools, and begin tasks."""


async def run_tool(tool: Callable, arguments: dict[str, Any], timeout_s: float) -> Any:
    """Its result. Raises TimeoutError if it takes longer. Code that hangs in C ends with the episode's deadline."""
    task = asyncio.current_task()
    running = Running(time.monotonic() + timeout_s, TimeoutError(f"it took longer than {timeout_s:g} s"))
    signal.signal(signal.SIGALRM, _watch)
    outer = _running.get(task)  # a tool that calls this one
    _running[task] = running
    token = _inside.set((*_inside.get(), running))
    try:
        _watch()
        result = tool(**arguments)
        if inspect.isawaitable(result):
            async with asyncio.timeout(timeout_s) as timeout:
                running.timeout = timeout
                result = await result
        return result
    except TimeoutError:
        if time.monotonic() < running.end:  # one of its own
            raise
        raise running.late from None
    finally:
        running.timeout = None  # a task that the tool has left behind changes it no more
        _inside.reset(token)
        del _running[task]
        if outer is not None:
            _running[task] = outer
        _watch()


@contextlib.contextmanager
def stopped_clocks(restart_clock: Callable[[], None]) -> Iterator[None]:
    """While the model writes: no clock runs of the tools that ask it. Then they have the time that they had left, and
    `restart_clock` (`Chat.restart_clock`) lets the episode's own end after theirs."""
    tools = _inside.get()
    for tool in tools:
        tool.stop()
    try:
        yield
    finally:
        for tool in tools:
            tool.go_on()
        if tools:
            _watch()
    if tools:
        restart_clock()


def _watch(*_) -> None:
    """End the tool that runs, if it is late, and set the alarm for the next of the others."""
    now = time.monotonic()
    left = [running.end - now for running in _running.values() if now < running.end < math.inf]
    signal.setitimer(signal.ITIMER_REAL, min(left, default=0.0))
    running = _running.get(asyncio.current_task())
    if running is not None and now >= running.end:  # else another is late, which is awaited: `asyncio.timeout` ends it
        raise running.late
