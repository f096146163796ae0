"""The servers of a run: who is there and holds the present weights, and which one samples what.

A thread runs the loop of asyncio, so that servers are watched while the trainer computes. Each server has a keeper, a
task that asks it again and again for the version of its weights. One that does not answer is gone: what it was asked
for goes to the others, anew and with the same seeds, so that no response is lost or counted twice. One that holds
other weights is given the present ones before it samples.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.servers.client import Client, Gone, Refused, ServerError
from common.servers.dialect import Answer, Ask, Dialect, Needs, check_answer
from common.servers.sglang import SGLang
from common.servers.vllm import VLLM

DIALECTS: tuple[type[Dialect], ...] = (VLLM, SGLang)
ASK_AGAIN_S = 1.0
"""Between two questions of a keeper."""
MOST_FAILURES = 8
"""Of one request, at servers that are there: no server can sample it."""
SLOWER = 4.0
"""A sync waits for servers up to this factor of the time of the fastest one; slower ones join when they are ready."""
ABORT_S = 10.0
"""Seconds for which an abort waits for what was sampled."""


@dataclass(eq=False)
class Server:
    """A server, and what is known of it."""

    client: Client
    dialect: type[Dialect] | None = None  # None: it has not been asked, or was gone
    is_ready: bool = False  # it holds the present weights, and may sample
    running: dict[int, tuple[Ask, asyncio.Task]] = field(default_factory=dict)
    trouble: str = ""  # the last error; "": none since it answered
    was_refused: bool = False  # the error will not pass by itself


class Pool:
    """All methods are called from the trainer's thread. Numbers of requests are unique among those that are open."""

    def __init__(self, addresses: Callable[[], list[str]], key: str, timeout_s: float, needs: Needs, most_at_once: int,
                 loads: bool):
        """`addresses`: of the servers now, which may change. `most_at_once`: requests that one server has at a time.
        `loads`: this rank gives the servers their weights; others wait until it has."""
        self.addresses = addresses
        self.key = key
        self.timeout_s = timeout_s
        self.needs = needs
        self.most_at_once = most_at_once
        self.loads = loads
        self.servers: dict[str, Server] = {}
        self.waiting: deque[tuple[int, Ask]] = deque()
        self.failures: dict[int, int] = {}
        self.aborted: set[int] = set()  # while they are being aborted
        self.ended: queue.SimpleQueue[tuple[int, Answer] | ServerError] = queue.SimpleQueue()
        self.open: set[int] = set()  # of the trainer's thread: added, and neither taken nor aborted
        self.folder: Path | None = None
        self.version = ""  # "": servers need not hold any weights yet
        self.num_moved = 0  # requests that began anew at another server
        self.num_loads = 0
        self.num_compared = 0
        self.loop = asyncio.new_event_loop()
        self.changed = asyncio.Event()
        self.thread = threading.Thread(target=self.loop.run_forever, name="servers", daemon=True)
        self.thread.start()
        self._submit(self._watch())

    # of the trainer's thread

    def add(self, number: int, ask: Ask) -> None:
        self.open.add(number)
        self.loop.call_soon_threadsafe(self._queue, number, ask)

    def take(self, wait_s: float) -> list[tuple[int, Answer]]:
        """The responses that have ended, waiting at most so long for the first. Raises ServerError for a request that
        no server samples."""
        taken = []
        try:
            found = self.ended.get(timeout=wait_s)
            while True:
                if isinstance(found, ServerError):
                    raise found
                if found[0] in self.open:
                    self.open.remove(found[0])
                    taken.append(found)
                found = self.ended.get_nowait()
        except queue.Empty:
            return taken

    def abort(self, numbers: set[int]) -> list[tuple[int, Answer]]:
        """End requests early; returns what was sampled of those that are open."""
        wanted = numbers & self.open
        if not wanted:
            return []
        self._submit(self._abort(wanted)).result()
        others = []
        parts: dict[int, Answer] = {}
        for found in self._drain():
            if isinstance(found, ServerError) or found[0] not in wanted:
                others.append(found)
            else:
                parts[found[0]] = found[1]
        for found in others:
            self.ended.put(found)
        self.open -= wanted
        return sorted(parts.items())

    def present(self, folder: Path, version: str) -> None:
        """From now on servers must hold these weights."""
        self._submit(self._present(folder, version)).result()

    def wait_ready(self, most_s: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until the servers are ready: for the first one at most so long, and then for those that are not much
        slower. Raises ServerError if none gets ready, at once where none of them can be."""
        start = time.monotonic()
        most_others_s = None
        while True:
            servers = list(self.servers.values())
            seconds = time.monotonic() - start
            pending = [server for server in servers if not server.is_ready and not server.trouble]
            num_ready = sum(server.is_ready for server in servers)
            if num_ready and most_others_s is None:
                most_others_s = max(1.0, SLOWER * seconds)
            if num_ready and (not pending or seconds > most_others_s):
                return
            if not num_ready and servers and all(server.was_refused for server in servers):
                raise Refused(self.troubles())
            if not num_ready and seconds > most_s:
                raise Gone(f"no server is ready after {most_s:g} s: {self.troubles()}")
            if stop():
                return
            time.sleep(0.01)

    @property
    def num_ready(self) -> int:
        return sum(server.is_ready for server in list(self.servers.values()))

    def troubles(self) -> str:
        """Of the servers that are not ready, in one line."""
        texts = []
        for server in list(self.servers.values()):
            if not server.is_ready:
                texts.append(server.trouble or f"server {server.client.url} has not answered yet")
        return "; ".join(texts) or "--rollout.servers names none"

    def close(self) -> None:
        self._submit(self._close()).result(timeout=10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(timeout=10)

    def _submit(self, work: Coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def _drain(self) -> list[Any]:
        found = []
        while not self.ended.empty():
            found.append(self.ended.get())
        return found

    # of the loop's thread

    async def _watch(self) -> None:
        """Keep the servers that the addresses name, which are read again and again."""
        keepers: dict[str, asyncio.Task] = {}
        urls: list[str] = []
        while True:
            try:
                urls = await asyncio.to_thread(self.addresses)
            except ValueError as error:  # a file is being written, or a line in it is no address
                print(f"{error}; the servers stay as they were", flush=True)
            for url in urls:
                if url not in keepers:
                    self.servers[url] = Server(Client(url, self.key, self.timeout_s))
                    keepers[url] = asyncio.create_task(self._keep(self.servers[url]))
            for url in keepers.keys() - set(urls):
                keepers.pop(url).cancel()
                server = self.servers.pop(url)
                self._lose(server, Gone(server.client.line("it is named no more")))
                await server.client.close()
            await asyncio.sleep(ASK_AGAIN_S)

    async def _keep(self, server: Server) -> None:
        while True:
            try:
                await self._check(server)
            except ServerError as error:
                self._lose(server, error)
            except (KeyError, TypeError, ValueError) as error:  # an answer that the dialect does not know
                self._lose(server, Refused(server.client.line(f"answered otherwise than expected: {error!r}")))
            pause_s = ASK_AGAIN_S
            if not server.is_ready and not server.trouble:
                pause_s = ASK_AGAIN_S / 20  # another rank gives it its weights
            await self._wait_for_change(pause_s)

    async def _wait_for_change(self, most_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.changed.wait(), most_s)

    async def _check(self, server: Server) -> None:
        """Find out what the server speaks and holds, and give it what it must hold."""
        client = server.client
        if server.dialect is None:
            server.dialect = await dialect_of(client)
            problems = await server.dialect.problems(client, self.needs)
            if problems:
                server.dialect = None
                raise Refused(client.line("; ".join(problems)))
        version = self.version
        held = await server.dialect.version(client)
        if version and held != version:
            server.is_ready = False
            if not self.loads:
                return
            self.num_compared = await server.dialect.load(client, self.folder, version)
            self.num_loads += 1
            held = await server.dialect.version(client)
            if held != version:
                raise Gone(client.line(f"it was given the weights {version} and holds {held}: does another run use "
                                       f"this server?"))
        server.trouble = ""
        server.was_refused = False
        if version == self.version:
            server.is_ready = True
            self._dispatch()

    def _lose(self, server: Server, error: ServerError) -> None:
        """The server cannot sample now. It will be asked again."""
        if not server.trouble and self.loads:
            print(f"{error}; it is left out until it answers", flush=True)
        server.trouble = str(error)
        server.was_refused = isinstance(error, Refused)
        server.is_ready = False
        server.dialect = None
        self._take_back(server)

    def _take_back(self, server: Server) -> None:
        """What the server was asked for goes to others."""
        for number, (ask, task) in server.running.items():
            task.cancel()
            self.num_moved += 1
            self.waiting.appendleft((number, ask))
        server.running.clear()
        self._dispatch()

    def _queue(self, number: int, ask: Ask) -> None:
        self.failures.pop(number, None)
        self.waiting.append((number, ask))
        self._dispatch()

    def _dispatch(self) -> None:
        """Give waiting requests to the servers that have the fewest."""
        ready = [server for server in self.servers.values() if server.is_ready]
        while self.waiting and ready:
            server = min(ready, key=lambda one: len(one.running))
            if len(server.running) >= self.most_at_once:
                return
            number, ask = self.waiting.popleft()
            server.running[number] = (ask, asyncio.create_task(self._sample(server, number, ask)))

    async def _sample(self, server: Server, number: int, ask: Ask) -> None:
        client = server.client
        try:
            answer = await server.dialect.generate(client, ask)
            check_answer(client, ask, answer, self.needs.sizes["vocab_size"])
        except ServerError as error:
            # the server's own end shows at once in all that it was asked for; a keeper finds out what it is
            server.running.pop(number)
            self._again(number, ask, error)
            self._lose(server, error)
            return
        server.running.pop(number)
        is_present = set(answer.versions) <= {self.version}
        if is_present and (number in self.aborted or answer.finish_reason != "abort"):
            self.ended.put((number, answer))
        else:  # it was given other weights meanwhile, or started again: its keeper finds out
            self._again(number, ask, Gone(client.line(f"sampled with the weights {sorted(set(answer.versions))}")))
            server.is_ready = False
            self._wake_keepers()
        self._dispatch()

    def _again(self, number: int, ask: Ask, error: ServerError) -> None:
        self.num_moved += 1
        self.failures[number] = self.failures.get(number, 0) + 1
        if self.failures[number] > MOST_FAILURES:
            num_tokens = len(ask.tokens)
            self.ended.put(Refused(f"a request of {num_tokens} tokens failed {MOST_FAILURES} times, at last: {error}"))
            return
        self.waiting.appendleft((number, ask))

    async def _abort(self, numbers: set[int]) -> None:
        """Ends these requests. What was sampled is in `ended`, or lost with a server that does not answer."""
        self.waiting = deque((number, ask) for number, ask in self.waiting if number not in numbers)
        self.aborted = numbers
        tasks = []
        for server in self.servers.values():
            own = [number for number in server.running if number in numbers]
            if own:
                names = [server.running[number][0].name for number in own]
                tasks += [server.running[number][1] for number in own]
                tasks.append(asyncio.create_task(self._tell_abort(server, names)))
        if tasks:
            await asyncio.wait(tasks, timeout=ABORT_S)
        for server in self.servers.values():
            for number in numbers & server.running.keys():
                server.running.pop(number)[1].cancel()
        self.waiting = deque((number, ask) for number, ask in self.waiting if number not in numbers)
        self.aborted = set()

    async def _tell_abort(self, server: Server, names: list[str]) -> None:
        try:
            await server.dialect.abort(server.client, names)
        except ServerError as error:
            self._lose(server, error)

    async def _present(self, folder: Path, version: str) -> None:
        self.folder = folder
        self.version = version
        for server in self.servers.values():
            server.is_ready = False
        self._wake_keepers()

    def _wake_keepers(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def _close(self) -> None:
        for task in asyncio.all_tasks(self.loop) - {asyncio.current_task()}:
            task.cancel()
        for server in self.servers.values():
            await server.client.close()


async def dialect_of(client: Client) -> type[Dialect]:
    for dialect in DIALECTS:
        if await dialect.is_spoken(client):
            return dialect
    names = " nor ".join(dialect.name for dialect in DIALECTS)
    raise Refused(client.line(f"speaks neither {names}"))
