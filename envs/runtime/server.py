"""Runs episodes, `python -m envs.runtime.server FD PARENT SPEC TIMEOUT_S`: imports the user's file once and forks one
process for each episode, so that none can hang, kill or change another.

The socket FD brings one socket for each episode; its answer is the process's number. Over an episode's socket the
trainer sends pickles: the row, then the model's replies. The episode sends JSON: {"conversation", "messages", ...} to
ask for a reply (`Chat.reply`), {"restart"} as a tool begins and as it ends (`Chat.restart_clock`), and at its end a
reward worker's reply, {"score", "extra", "texts"} or {"failure", "kind", "text"}, or {"text"} that the reward functions
shall score.
"""

import asyncio
import ctypes
import faulthandler
import inspect
import json
import os
import pickle
import random
import resource
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from envs.runtime.chat import Chat
from envs.runtime.conversation import environments
from envs.tools import prepare_schemas
from rewards import load_function
from rewards.runtime.replies import failure_of, packed, plain, reply_of
from rewards.runtime.worker import ignore_stops

MAX_PRINTED = 10_000  # characters that an episode may print; the rest is dropped
TOOL_GRACE_S = 0.5  # a tool that takes too long is told to the model, and does not end the episode
MAX_SENT = 2**24  # bytes of one message to the trainer; replies.MAX_NUMBERS numbers of a result take two thirds


class Printed:
    """An episode's printed output, bounded, on the trainer's stderr."""

    def __init__(self, fd: int):
        self.fd = fd
        self.left = MAX_PRINTED

    def write(self, text: str) -> int:
        shown = text[: self.left]
        self.left -= len(shown)
        os.write(self.fd, shown.encode(errors="replace"))
        if shown and not self.left:
            os.write(self.fd, f"\n[an episode printed more than {MAX_PRINTED} characters]\n".encode())
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""


def load_episode(spec: str) -> Callable:
    """A coroutine function that --rollout.episode names."""
    function = load_function(spec, "--rollout.episode", "episode")
    if not inspect.iscoroutinefunction(function):
        raise ValueError(
            f"--rollout.episode {spec}: {function.__name__} is a plain `def`; an episode waits for the model: write\n"
            f"    async def {function.__name__}(chat, row):\n"
            f"        text = await chat.reply()\n"
            f"        return 1.0 if ... else 0.0"
        )
    inspect.signature(function).bind(None, None)
    return function


async def run(connection: Connection, episodes: dict[str, Callable], timeout_s: float) -> None:
    """One of these episodes, from its row to its result. Then the trainer ends the process: nothing waits for the
    episode's threads and tasks. `timeout_s` bounds the time between a reply and the next request, which the tools use.
    No clock runs while the model writes."""
    loop = asyncio.get_running_loop()
    waiting: dict[int, asyncio.Future] = {-1: loop.create_future()}  # conversations, for the model; -1: for the row

    def hear() -> None:
        try:
            message = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):  # the trainer has ended, or gave up an episode that was still starting
            os.killpg(0, signal.SIGKILL)
        future = waiting.pop(message.get("conversation", -1))
        if not future.done():  # else the episode has given up this reply
            future.set_result(message)

    loop.add_reader(connection.fileno(), hear)
    start = await waiting[-1]
    began = loop.time()

    async def ask(question: dict[str, Any]) -> dict[str, Any]:
        nonlocal began
        seconds = 0.0 if waiting else loop.time() - began
        send(connection, question | {"seconds": seconds})
        answer = waiting[question["conversation"]] = loop.create_future()
        deadline.reschedule(None)
        await answer
        if not waiting:
            began = loop.time()
            deadline.reschedule(began + timeout_s)
        return answer.result()

    def restart_clock() -> None:
        """A tool begins or ends, or something waits: the clock restarts, here (after a tool's own alarm) and in the
        trainer."""
        if not waiting:
            deadline.reschedule(loop.time() + timeout_s + TOOL_GRACE_S)
        send(connection, {"restart": True})

    episode = episodes[start.get("environment", "")]
    chat = Chat(start["messages"], start["tokens_left"], timeout_s, ask, restart_clock)
    reseed(start.get("seed") or 0)
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            result = await episode(chat, start["row"])
        # a text is scored by the reward functions, as a response is
        if isinstance(result, str):
            reply = {"text": result}
        else:
            reply = packed(reply_of(episode.__name__, result))
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        reply = failure_of(error)
        if deadline.expired():
            reply["failure"] = "timeout"
    more = {
        "num_tool_calls": sum(part.num_tool_calls for part in chat.all),
        "num_tool_errors": sum(part.num_tool_errors for part in chat.all),
        "seconds": loop.time() - began,
    }
    try:
        send(connection, reply | more)
    except ValueError as error:
        send(connection, failure_of(error) | more)


def reseed(seed: int) -> None:
    """Python's and NumPy's global generators: in each episode others than in the process that it was forked from."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed(seed)


def send(connection: Connection, message: dict[str, Any]) -> None:
    # the model may write half a surrogate pair in the JSON of a call: that is no text, and no tokenizer takes it
    data = json.dumps(message, default=plain, ensure_ascii=False).encode(errors="replace")
    if len(data) > MAX_SENT:
        raise ValueError(f"the episode sends {len(data)} bytes at once, at most {MAX_SENT}: shorten what tools return, "
                         f"or the episode's result")
    connection.send_bytes(data)


def run_process(connection: Connection, episodes: dict[str, Callable], timeout_s: float) -> None:
    """The whole life of an episode's process."""
    os.setsid()  # what it starts ends with it
    faulthandler.register(signal.SIGUSR2, file=connection.fileno(), chain=True)  # shows where it hangs, then ends it
    printed = Printed(os.dup(2))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    sys.stdout = sys.stderr = printed
    asyncio.run(run(connection, episodes, timeout_s))


def die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    _, fd, parent, spec, timeout_s = sys.argv
    die_with_parent(int(parent))
    ignore_stops()
    # what an episode started becomes a child of this process when its own parent ends, whatever it did to leave the
    # episode's group: the trainer finds it here, and ends it
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=int(fd))
    ours = set(sys.modules)
    try:
        episodes = {name: load_episode(file) for name, file in environments(spec).items()}
        prepare_schemas([sys.modules[name] for name in sys.modules.keys() - ours])
    except (Exception, SystemExit) as error:
        control.sendall(json.dumps(failure_of(error)).encode())
        return
    control.sendall(b"{}")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system takes away processes that ended
    server = os.getpid()
    while fds := socket.recv_fds(control, 1, 1)[1]:
        pid = os.fork()
        if not pid:
            die_with_parent(server)
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run_process(Connection(fds[0]), episodes, float(timeout_s))
            os._exit(0)
        os.close(fds[0])
        control.sendall(pid.to_bytes(8, "little"))


if __name__ == "__main__":
    main()
