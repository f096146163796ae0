"""Connections to an episode's server. Its port is open to every process of the machine, and an episode has few file
descriptors: without a bound, whoever connects often enough ends the episode."""

import asyncio
from collections.abc import Callable
from typing import Any

MOST_UNKNOWN = 64
UNKNOWN_S = 10.0  # for the header of the first request with the token


class Connections:
    """Makes the protocol of each connection: `loop.create_server(Connections(runner.server), ...)`.

    A connection whose client has not shown the token is unknown. There are at most MOST_UNKNOWN of these, the oldest
    makes room for the next one, and each is closed after UNKNOWN_S seconds. aiohttp has neither bound."""

    def __init__(self, make: Callable[[], Any]):
        """`make`: gives an aiohttp.web.RequestHandler."""
        self.make = make
        self.timers: dict[Any, asyncio.TimerHandle] = {}  # of unknown connections, the oldest first

    def __call__(self) -> asyncio.Protocol:
        if len(self.timers) == MOST_UNKNOWN:
            self.close(next(iter(self.timers)))
        handler = self.make()
        self.timers[handler] = asyncio.get_running_loop().call_later(UNKNOWN_S, self.close, handler)
        return handler

    def know(self, handler: Any) -> None:
        """The client of this connection has shown the token."""
        timer = self.timers.pop(handler, None)
        if timer is not None:
            timer.cancel()

    def close(self, handler: Any) -> None:
        self.know(handler)
        handler.force_close()
