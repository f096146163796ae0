"""HTTP around an episode's requests: bodies, events, and what is no HTTP at all."""

import asyncio
import json
import logging
from typing import Any

from aiohttp import web

from envs.endpoint import chat_completions
from envs.endpoint.asked import ApiError

BODY_S = 60.0  # for them to arrive
SILENT = logging.getLogger(f"{__name__}.aiohttp")
"""For aiohttp, which logs a traceback for each request that is no HTTP: anyone on the machine can send them."""
SILENT.disabled = True


class Http(web.RequestHandler):
    """A connection. What is no HTTP, or in an encoding that aiohttp does not know, never reaches `guard`."""

    def __init__(self, counts: dict[str, int], server: web.Server):
        super().__init__(server, loop=asyncio.get_running_loop(), access_log=None, logger=SILENT)
        self.counts = counts

    def handle_error(self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None,
                     message: str | None = None) -> web.StreamResponse:
        self.counts["requests"] += 1
        self.counts["errors"] += 1
        error = ApiError(f"the request cannot be read: {message or exc}"[:1000], status, "malformed")
        response = web.json_response(chat_completions.write_error(error), status=status)
        response.force_close()
        return response


async def body_of(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except web.HTTPException:
        raise
    except TimeoutError:
        raise ApiError(f"the body did not arrive within {BODY_S:.0f} s", 408, "timeout") from None
    except Exception as error:  # the parser has many: encodings, chunks, a client that is gone
        raise ApiError(f"the body cannot be read: {type(error).__name__}: {error}"[:1000], code="malformed") from None


def as_object(body: bytes) -> dict[str, Any]:
    found = json.loads(body)
    if not isinstance(found, dict):
        raise TypeError("the body is no JSON object")
    return found


def as_event(event: dict[str, Any] | str) -> bytes:
    """Data of a stream of server-sent events."""
    if isinstance(event, str):
        return f"data: {event}\n\n".encode()
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n".encode()


def model_of(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "type": "model", "display_name": name, "created": 0,
            "created_at": "1970-01-01T00:00:00Z", "owned_by": "plainrl"}
