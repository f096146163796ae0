"""JSON over HTTP to one server. Requests go to the host of the address alone: no redirect is followed, no proxy of the
environment is used, and an answer is read as JSON only."""

import json
from dataclasses import dataclass
from typing import Any

import aiohttp

REPEATED = (408, 409, 425, 429, 500, 502, 503, 504)
"""Statuses of a server that is busy, fails or starts again."""


@dataclass
class Limits:
    """Seconds that a request may take."""

    answer_s: float  # --rollout.server-timeout-s
    work_s: float  # of one that samples or loads: half of --save.timeout-s, so that another server has the other half


class ServerError(Exception):
    """What a server answered, or did not, in one line."""

    def __init__(self, line: str, status: int = 0):
        """`status`: of the answer, 0: there is none."""
        super().__init__(line)
        self.status = status


class Gone(ServerError):
    """The server did not answer, broke off or failed: the same request may succeed elsewhere, or later."""


class Refused(ServerError):
    """The server answered that it does not do this."""


class Taken(Refused):
    """Another run has given the server its own weights since this one did."""


class Client:
    """Of one server, in the loop of asyncio that made it."""

    def __init__(self, url: str, key: str, limits: Limits):
        """`key`: "" for none."""
        self.url = url
        self.key = key
        self.limits = limits
        headers = {}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self.http = aiohttp.ClientSession(
            headers=headers,
            trust_env=False,
            # a connection for each request: one that is kept may be closed by the server, after an error for example,
            # as the next request is written
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.answer_s),
        )

    async def call(self, path: str, body: dict[str, Any] | None = None, most_bytes: int = 1 << 24,
                   is_long: bool = False) -> Any:
        """The answer to a request, from JSON (None where it is empty): POST of `body`, GET without one. `is_long`: it
        samples or loads. Raises Gone or Refused."""
        method = "GET" if body is None else "POST"
        limit_s = self.limits.work_s if is_long else self.limits.answer_s
        limit = aiohttp.ClientTimeout(total=limit_s, sock_connect=self.limits.answer_s)
        content = bytearray()
        try:
            async with self.http.request(method, self.url + path, json=body, allow_redirects=False,
                                         timeout=limit) as answer:
                async for piece in answer.content.iter_any():
                    content += piece
                    if len(content) > most_bytes:
                        raise Refused(self.line(f"answered {path} with more than {most_bytes} bytes"))
        except TimeoutError as error:
            if is_long and not isinstance(error, aiohttp.ConnectionTimeoutError):
                text = f"no answer to {path} within {self.limits.work_s:g} s, half of --save.timeout-s"
            else:
                text = f"no answer to {path} within --rollout.server-timeout-s {self.limits.answer_s:g}"
            raise Gone(self.line(text)) from None
        except (aiohttp.ClientError, OSError) as error:
            raise Gone(self.line(f"{path}: {type(error).__name__}: {error}")) from None
        if answer.status != 200:
            said = content[:2000].decode(errors="replace")
            kind = Gone if answer.status in REPEATED else Refused
            raise kind(self.line(f"answered {path} with status {answer.status}: {said}"), answer.status)
        if not content:
            return None
        try:
            return json.loads(content)
        except (ValueError, RecursionError):  # of brackets in brackets
            raise Refused(self.line(f"answered {path} with no JSON: {bytes(content[:100])!r}")) from None

    def line(self, text: str) -> str:
        """One line that names the server, and never the key."""
        line = " ".join(f"server {self.url}: {text}".split())
        if self.key:
            line = line.replace(self.key, "$KEY")
        return line[:600]

    async def close(self) -> None:
        await self.http.close()
