"""Tools that misbehave, for test_tools.py, and an episode that calls what the model calls."""

import asyncio
import contextlib
import ctypes
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable

from envs import limited


def work(kind: str) -> str | Awaitable:
    """Misbehave.

    Args:
        kind: How.
    """
    if kind == "hang in C":
        sum(itertools.repeat(1))  # holds the interpreter and looks for no signal
    if kind == "hang":
        time.sleep(60)
    if kind == "die":
        os._exit(3)
    if kind == "segfault":
        ctypes.string_at(0)
    if kind == "print":
        for _ in range(1000):
            sys.stdout.write("x" * 2**20)
    if kind == "raise":
        raise KeyError("no such thing")
    if kind == "exit":
        sys.exit(1)
    if kind == "cancel":
        raise asyncio.CancelledError("by a library")
    if kind == "wait":
        return asyncio.sleep(60)
    if kind == "hang in a thread":
        return asyncio.to_thread(time.sleep, 20)
    if kind == "half a pair":
        return "a \ud83d b"
    if kind == "a dict":
        return {"city": "Zürich", "half": "\ud83d"}
    return "y" * 2**24 if kind == "much" else "fine"


async def episode(chat, row):
    chat.tools = [work]
    await chat.reply()
    while chat.tool_calls:
        await chat.reply(*[await chat.tool_call(call) for call in chat.tool_calls])
    return {"score": 1.0, "turns": chat.turns}


async def at_once(chat, row):
    chat.tools = [work]
    await chat.reply()
    while chat.tool_calls:
        await chat.reply(*await chat.call_tools())
    return 1.0


def untyped(a):
    """Work.

    Args:
        a: How.
    """


def any_number(*numbers: int) -> int:
    """Add.

    Args:
        numbers: To add.
    """


def by_name(**numbers: int) -> int:
    """Add.

    Args:
        numbers: To add.
    """


def by_place(number: int, /) -> int:
    """Add.

    Args:
        number: To add.
    """


def untold(a: int) -> int:
    return a


async def undescribed(chat, row):
    chat.tools = [globals()[row["tool"]]]
    await chat.reply()
    return 1.0


def plain(chat, row):
    return 1.0


async def per_token(chat, row):
    """One number for each character that the model wrote, as often as the row says, and those of the row."""
    text = await chat.reply()
    numbers = [ord(character) / 7 for character in text] * row["times"] + row["more"]
    return {"score": 1.0, "per_token": numbers, "note": [text]}


async def rude(chat, row):
    """What the row says, with the connection to the trainer and with what the trainer never sees."""
    kind = row["kind"]
    if kind == "unread":  # the reply is there, and this process hangs
        task = asyncio.create_task(chat.reply())
        await asyncio.sleep(0)
        time.sleep(60)
        await task
    if kind == "asks for ever":
        while True:
            await chat.reply({"role": "user", "content": "Go on."})
    if kind == "asks twice":
        await asyncio.gather(chat.reply(), chat.reply())
    if kind == "asks with too much":  # and then with less: nothing had been sent
        chat.tools = [work]
        for size in (2**24, 0):
            work.schema = {"type": "function", "function": {"name": "work", "description": "x" * size}}
            with contextlib.suppress(ValueError):
                await chat.reply()
        return float(chat.turns)
    if kind == "gives up a reply":
        task = asyncio.create_task(chat.reply())
        await asyncio.sleep(0)
        task.cancel()
        other = await chat.begin().reply({"role": "user", "content": "And you?"})
        await chat.reply({"role": "user", "content": f"They say {other}"})
    if kind == "asks for half a token":
        await chat.reply(max_tokens=1.5)
    await chat.reply()
    if kind == "orphan" and os.fork():  # the child holds the connection open
        os._exit(3)
    if kind == "orphan":
        time.sleep(60)
    if "bytes" in row:
        sockets = [fd for fd in range(3, 20) if "socket" in os.path.realpath(f"/proc/self/fd/{fd}")]
        for fd in sockets:
            os.set_blocking(fd, False)
            os.write(fd, row["bytes"])
        time.sleep(60)
    if kind == "a task that does not end":
        chat.task = asyncio.create_task(endless())
        await asyncio.sleep(0)
    if kind == "much":
        chat.tools = [work]
        results = [await chat.tool_call({"name": "work", "arguments": '{"kind": "much"}'}) for _ in range(34)]
        return {"score": 1.0, "lengths": [float(len(result["content"])) for result in results],
                "last": results[-1]["content"]}
    return 1.0


async def endless() -> None:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1)


async def leave_processes(chat, row):
    """Start processes that leave the episode's group, one of them without its environment, and one by two forks."""
    await chat.reply()
    known = [subprocess.Popen(["sleep", "300"], start_new_session=True, env=env).pid for env in (None, {})]
    read, write = os.pipe()
    if not os.fork():
        os.setsid()
        if not os.fork():
            os.write(write, str(os.getpid()).encode())
            os.closerange(0, 64)
            time.sleep(300)
        os._exit(0)
    return {"score": 1.0, "pids": json.dumps([*known, int(os.read(read, 100))])}


async def nap(seconds: float) -> str:
    """Sleep, awaited.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return f"slept {seconds}"


def spin(seconds: float) -> str:
    """Compute.

    Args:
        seconds: How long.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return f"spun {seconds}"


async def nested(chat, row):
    """A tool that calls a tool in its own task, and then is late itself."""
    async def outer() -> str:
        """Call another tool."""
        inner = await chat.tool_call({"name": "nap", "arguments": '{"seconds": 0.1}'})
        if row["late"]:
            spin(60)
        return inner["content"]

    chat.tools = [nap, outer]
    await chat.reply()
    (result,) = await chat.call_tools()
    return {"score": 1.0, "result": result["content"]}


class Counter:
    """A callable object."""

    def __init__(self):
        function = {"name": "count", "parameters": {"type": "object", "properties": {}}}
        self.schema, self.calls = {"type": "function", "function": function}, 0

    def __call__(self) -> str:
        self.calls += 1
        return str(self.calls)


async def parallel(chat, row):
    """All calls of a reply at the same time."""
    chat.tools = [nap, spin, Counter(), *([json.loads("{}")] if row.get("wrong") else [])]
    await chat.reply()
    start = time.monotonic()
    results = await chat.call_tools()
    took = time.monotonic() - start
    await chat.reply(*results)
    return {"score": took}


@limited(at_once=2, retries=2, backoff_s=0.01)
async def rare(kind: str) -> str:
    """A tool with two places.

    Args:
        kind: What happens in the first call.
    """
    log = os.open(os.environ["RARE_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, b"+")
    if kind == "die":
        os._exit(3)
    await asyncio.sleep(0.1)
    rare.calls += 1
    os.write(log, b"-")
    if kind == "fail" or (kind == "fail twice" and rare.calls <= 2):
        raise OSError(f"failure {rare.calls}")
    return f"call {rare.calls}"


rare.calls = 0


async def with_limits(chat, row):
    chat.tools = [rare]
    await chat.reply()
    (result,) = await chat.call_tools()
    return {"score": 1.0, "result": result["content"]}


@limited(retries=1, backoff_s=10.0)
async def flaky() -> str:
    """Fail in the first call."""
    flaky.calls += 1
    if flaky.calls == 1:
        await asyncio.sleep(1.0)
        raise OSError("come again")
    return f"call {flaky.calls}"


flaky.calls = 0


@limited(at_once=1)
async def lone(seconds: float) -> str:
    """Sleep, alone.

    Args:
        seconds: How long.
    """
    return await nap(seconds)


async def patient(chat, row):
    """Its tools wait for longer than --rollout.tool-timeout-s."""
    chat.tools = [flaky, lone]
    await chat.reply()
    await asyncio.sleep(row["after"])
    (result,) = await chat.call_tools()
    return {"score": 1.0, "result": result["content"]}


async def with_sub_agents(chat, row):
    """A tool that asks the model twice at the same time, and then thinks itself."""
    async def ask(seconds: float) -> str:
        """Ask two others.

        Args:
            seconds: To think about what they say.
        """
        question = {"role": "user", "content": "And you?"}
        answers = await asyncio.gather(*(chat.begin().reply(question) for _ in range(2)))
        await nap(seconds)
        return " ".join(answers)

    chat.tools = [ask]
    await chat.reply()
    (result,) = await chat.call_tools()
    return {"score": 1.0, "result": result["content"]}
