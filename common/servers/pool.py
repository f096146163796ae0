"""The servers of a run as the trainer's thread uses them: `members.py` keeps them in another thread, so that they are
watched while the trainer computes."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from common.servers.client import Gone, Limits, Refused, ServerError
from common.servers.dialect import Answer, Ask, Needs, Weights
from common.servers.members import Members

SLOWER = 4.0
"""A sync waits for servers up to this factor of the time of the fastest one; slower ones join when they are ready."""


class Pool:
    """All methods are called from one thread."""

    def __init__(self, addresses: Callable[[], list[str]], key: str, limits: Limits, needs: Needs, most_at_once: int,
                 loads: bool):
        """See `Members`."""
        self.members = Members(addresses, key, limits, needs, most_at_once, loads)
        self.open: set[int] = set()  # added, and neither taken nor aborted
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="servers", daemon=True)
        self.thread.start()
        self.watching = self._submit(self.members.watch())

    def add(self, number: int, ask: Ask) -> None:
        self.open.add(number)
        self.loop.call_soon_threadsafe(self.members.add, number, ask)

    def take(self, wait_s: float) -> list[tuple[int, Answer]]:
        """The responses that have ended, waiting at most so long for the first. Raises ServerError for a request that
        no server samples."""
        self._must_watch()
        taken = []
        try:
            found = self.members.ended.get(timeout=wait_s)
            while True:
                if isinstance(found, ServerError):
                    raise found
                if found[0] in self.open:
                    self.open.remove(found[0])
                    taken.append(found)
                found = self.members.ended.get_nowait()
        except queue.Empty:
            return taken

    def abort(self, numbers: set[int]) -> list[tuple[int, Answer]]:
        """End requests early; returns what was sampled of those that are open."""
        wanted = numbers & self.open
        if not wanted:
            return []
        self._submit(self.members.abort(wanted)).result()
        others = []
        parts: dict[int, Answer] = {}
        for found in self._drain():
            if isinstance(found, ServerError) or found[0] not in wanted:
                others.append(found)
            else:
                parts[found[0]] = found[1]
        for found in others:
            self.members.ended.put(found)
        self.open -= wanted
        return sorted(parts.items())

    def present(self, weights: Weights | None, version: str) -> None:
        """From now on servers must hold these weights. None: another rank gives them."""
        self._submit(self.members.present(weights, version)).result()

    def wait_ready(self, most_s: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until the servers are ready: for the first one at most so long, and then for those that are not much
        slower. Raises ServerError if none gets ready, at once where none of them can be."""
        start = time.monotonic()
        most_others_s = None
        while True:
            self._must_watch()
            servers = list(self.members.servers.values())
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
    def num_moved(self) -> int:
        """Requests that began anew, at another server or after it had other weights."""
        return self.members.num_moved

    @property
    def num_compared(self) -> int:
        """Tensors of the last weights that a server compared."""
        return self.members.num_compared

    @property
    def num_ready(self) -> int:
        return sum(server.is_ready for server in list(self.members.servers.values()))

    @property
    def are_taken(self) -> bool:
        """Whether another run has taken all servers: none will be ready."""
        servers = list(self.members.servers.values())
        return bool(servers) and all(server.is_taken for server in servers)

    def troubles(self) -> str:
        """Of the servers that are not ready, in one line."""
        texts = []
        for server in list(self.members.servers.values()):
            if not server.is_ready:
                texts.append(server.trouble or f"server {server.client.url} has not answered yet")
        return "; ".join(texts) or "--rollout.servers names none"

    def close(self) -> None:
        self._submit(self.members.close()).result(timeout=10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(timeout=10)

    def _must_watch(self) -> None:
        """Raises what ended the other thread's work, if something did."""
        if self.watching.done():
            self.watching.result()

    def _submit(self, work: Coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def _drain(self) -> list[Any]:
        found = []
        while not self.members.ended.empty():
            found.append(self.members.ended.get())
        return found
