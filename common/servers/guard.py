"""Asks for the key on every path of vLLM's server, whose own --api-key guards only those of OpenAI's interface: anybody
who reaches the others could load weights. tools.serve starts vLLM with `--middleware common.servers.guard.Guard`.
SGLang guards all of its paths itself.
"""

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

KEY = "PLAINRL_SERVER_KEY"
"""Environment variable of the server that holds the key."""
OPEN = ("/health", "/ping")
"""Say whether the server is there, and nothing else."""
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Guard:
    """Middleware of ASGI: requests without the key get status 401, and go no further."""

    def __init__(self, app: Callable[[dict[str, Any], Receive, Send], Awaitable[None]]):
        self.app = app
        self.expected = f"Bearer {os.environ[KEY]}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        is_request = scope["type"] in ("http", "websocket")
        if not is_request or scope["path"] in OPEN or self.has_key(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    def has_key(self, scope: dict[str, Any]) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self.expected)
