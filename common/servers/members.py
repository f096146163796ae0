"""The servers of a run, in a thread of their own: who is there and holds the present weights, and which one samples
what.

Each server has a keeper, a task that asks it again and again for the version of its weights. One that does not answer
is gone: what it was asked for goes to the others, anew and with the same seeds, so that no response is lost or counted
twice. One that holds other weights is given the present ones before it samples.
"""

import asyncio
import contextlib
import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from common.servers.client import Client, Gone, Limits, Refused, ServerError, Taken
from common.servers.dialect import Answer, Ask, Dialect, Needs, Weights, check_answer, is_of_another_run
from common.servers.sglang import SGLang
from common.servers.vllm import VLLM

DIALECTS: tuple[type[Dialect], ...] = (VLLM, SGLang)
ASK_AGAIN_S = 1.0
"""Between two questions of a keeper."""
MOST_FAILURES = 8
"""Of one request, at servers that are there: no server can sample it."""
UNEXPECTED = (LookupError, TypeError, ValueError, AttributeError)
"""What reading an answer raises that is not as the dialect has it."""
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
    is_taken: bool = False  # by another run
    was_given: bool = False  # weights of this run, which it had


class Members:
    """All methods run in the loop of asyncio. Numbers of requests are unique among those that are open."""

    def __init__(self, addresses: Callable[[], list[str]], key: str, limits: Limits, needs: Needs, most_at_once: int,
                 loads: bool):
        """`addresses`: of the servers now, which may change. `most_at_once`: requests that one server has at a time.
        `loads`: this rank gives the servers their weights; others wait until it has."""
        self.addresses = addresses
        self.key = key
        self.limits = limits
        self.needs = needs
        self.most_at_once = most_at_once
        self.loads = loads
        self.servers: dict[str, Server] = {}
        self.waiting: deque[tuple[int, Ask]] = deque()
        self.failures: dict[int, int] = {}
        self.aborted: set[int] = set()  # while they are being aborted
        self.ended: queue.SimpleQueue[tuple[int, Answer] | ServerError] = queue.SimpleQueue()
        self.weights: Weights | None = None
        self.version = ""  # "": servers need not hold any weights yet
        self.num_moved = 0  # requests that began anew
        self.num_compared = 0  # tensors of the last weights
        self.changed = asyncio.Event()

    async def watch(self) -> None:
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
                    self.servers[url] = Server(Client(url, self.key, self.limits))
                    keepers[url] = asyncio.create_task(self._keep(self.servers[url]))
            for keeper in keepers.values():
                if keeper.done():
                    keeper.result()  # raises what ended it, a fault of this program
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
            except UNEXPECTED as error:
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
        dialect = server.dialect  # a request that fails meanwhile makes it None
        if dialect is None:
            dialect = await dialect_of(client)
            problems = await dialect.problems(client, self.needs)
            if problems:
                raise Refused(client.line("; ".join(problems)))
        version = self.version
        held = await dialect.version(client)
        if version and held != version:
            server.is_ready = False
            if is_of_another_run(held, version):
                if server.was_given:
                    raise Taken(client.line(f"it holds {held}, which another run gave it since: two runs cannot share "
                                            f"a server, name others with --rollout.servers"))
                self._say(f"{client.line(f'it holds {held} of another run')}, which this run replaces")
            if not self.loads:
                return
            self.num_compared = await dialect.load(client, self.weights, version)
            held = await dialect.version(client)
            if held != version:
                raise Gone(client.line(f"it was given the weights {version} and holds {held}: does another run use "
                                       f"this server?"))
        server.dialect = dialect
        server.trouble = ""
        server.was_refused = False
        server.is_taken = False
        if version == self.version:
            server.was_given = bool(version)
            server.is_ready = True
            self._dispatch()

    def _lose(self, server: Server, error: ServerError) -> None:
        """The server cannot sample now. It will be asked again."""
        if not server.trouble:
            self._say(f"{error}; it is left out until it answers")
        server.trouble = str(error)
        server.was_refused = isinstance(error, Refused)
        server.is_taken = isinstance(error, Taken)
        server.is_ready = False
        server.dialect = None
        self._take_back(server)

    def _say(self, line: str) -> None:
        """Of several ranks, by the one that loads."""
        if self.loads:
            print(line, flush=True)

    def _take_back(self, server: Server) -> None:
        """What the server was asked for goes to others."""
        for number, (ask, task) in server.running.items():
            task.cancel()
            self.num_moved += 1
            self.waiting.appendleft((number, ask))
        server.running.clear()
        self._dispatch()

    def add(self, number: int, ask: Ask) -> None:
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
        except (ServerError, *UNEXPECTED) as raised:
            error = raised
            if not isinstance(error, ServerError):
                error = Refused(client.line(f"answered otherwise than expected: {error!r}"))
            if not self._ends(server, number):
                return
            # the server's own end shows at once in all that it was asked for; a keeper finds out what it is
            self._again(number, ask, error)
            self._lose(server, error)
            return
        if not self._ends(server, number):
            return
        is_present = set(answer.versions) <= {self.version}
        if is_present and (number in self.aborted or answer.finish_reason != "abort"):
            self.ended.put((number, answer))
        else:  # it was given other weights meanwhile, or started again: its keeper finds out
            self._again(number, ask, Gone(client.line(f"sampled with the weights {sorted(set(answer.versions))}")))
            server.is_ready = False
            self._wake_keepers()
        self._dispatch()

    def _ends(self, server: Server, number: int) -> bool:
        """Whether this task's request is still its own. One that was taken back meanwhile is another task's: of a task
        whose time is up as it is cancelled, aiohttp raises TimeoutError."""
        _, task = server.running.get(number, (None, None))
        if task is not asyncio.current_task():
            return False
        server.running.pop(number)
        return True

    def _again(self, number: int, ask: Ask, error: ServerError) -> None:
        self.num_moved += 1
        self.failures[number] = self.failures.get(number, 0) + 1
        if self.failures[number] > MOST_FAILURES:
            num_tokens = len(ask.tokens)
            self.ended.put(Refused(f"a request of {num_tokens} tokens failed {MOST_FAILURES} times, at last: {error}"))
            return
        self.waiting.appendleft((number, ask))

    async def abort(self, numbers: set[int]) -> None:
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

    async def present(self, weights: Weights | None, version: str) -> None:
        self.weights = weights
        self.version = version
        for server in self.servers.values():
            server.is_ready = False
            if server.was_refused:  # it may take these
                server.trouble = ""
                server.was_refused = False
        self._wake_keepers()

    def _wake_keepers(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def close(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        for server in self.servers.values():
            await server.client.close()


async def dialect_of(client: Client) -> type[Dialect]:
    for dialect in DIALECTS:
        if await dialect.is_spoken(client):
            return dialect
    names = " nor ".join(dialect.name for dialect in DIALECTS)
    raise Refused(client.line(f"speaks neither {names}"))
