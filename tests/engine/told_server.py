"""A server that speaks vLLM's routes and does what a test tells it: die, stand still, forget its weights, answer
wrongly. What is right on those routes is what the real server of `servers.py` does, in test_servers_of_vllm.py."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import torch
from aiohttp import web
from torch import Tensor

from common.servers.group import Group, Meeting, join

VOCABULARY = 100
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2}
END = 2


def tokens_of(seed: int, count: int) -> list[int]:
    return [10 + (seed * 7 + i * i) % 80 for i in range(count)]


class ToldServer:
    def __init__(self) -> None:
        self.version = "default"
        self.loaded = ""  # the version of the weights that it has
        self.calls: list[str] = []  # paths, of those that change or read the engine
        self.generated: list[int] = []  # seeds
        self.delay_s = 0.0
        self.stands_still = False
        self.hanging_path = ""  # whose requests are not answered
        self.says: dict[str, Any] = {}  # entries of a choice that are answered instead
        self.raw: bytes | None = None  # instead of an answer
        self.model = {"logprobs_mode": "processed_logprobs", "dtype": "float32", "max_model_len": 64}
        self.sizes = dict(SIZES)
        self.load_error = ""
        self.group: Group | None = None
        self.received: list[tuple[str, Tensor]] = []  # of the last transfer
        self.sums: dict[str, Sequence[int]] = {}
        self.version_at_update = ""
        self.at_finish = lambda: None  # called as weights get their name
        self.at_tensor = lambda number: None  # called before the tensor of this number is received
        self.aborted: dict[str, asyncio.Event] = {}
        self.headers: list[str] = []
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """On the port that it had."""
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self.loop).result(10)

    async def _start(self) -> None:
        app = web.Application(middlewares=[self._before])
        app.add_routes([
            web.get("/version", self._simple({"version": "0.32.0"})),
            web.get("/weight_info", self._weight_info),
            web.post("/collective_rpc", self._rpc),
            web.get("/get_world_size", self._simple({"world_size": 1})),
            web.post("/init_weight_transfer_engine", self._join),
            web.post("/update_weights", self._update),
            web.post("/finish_weight_update", self._finish),
            web.post("/update_weight_version", self._name),
            web.post("/reset_prefix_cache", self._simple({"success": True})),
            web.post("/inference/v1/generate", self._generate),
            web.post("/inference/v1/abort_requests", self._abort),
        ])
        for path in ("/pause", "/start_weight_update", "/reset_encoder_cache", "/resume"):
            app.add_routes([web.post(path, self._simple({}))])
        self.runner = web.AppRunner(app, shutdown_timeout=0)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    def kill(self) -> None:
        """With all connections; it begins anew with the weights of a server that was started."""
        asyncio.run_coroutine_threadsafe(self._kill(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.version = "default"

    async def _kill(self) -> None:
        for connection in self.runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await self.runner.cleanup()

    @web.middleware
    async def _before(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.headers.append(request.headers.get("Authorization", ""))
        while self.stands_still or request.path == self.hanging_path:
            await asyncio.sleep(0.01)
        self.calls.append(request.path)
        if self.raw is not None and request.path == "/inference/v1/generate":
            return web.Response(body=self.raw)
        return await handler(request)

    def _simple(self, answer: Any) -> Any:
        async def handler(request: web.Request) -> web.Response:
            return web.json_response(answer)

        return handler

    async def _rpc(self, request: web.Request) -> web.Response:
        method = (await request.json())["method"]
        answer = {"count": 3, "version": self.loaded}
        if method == "describe":
            answer = {"transfer": "trainer", "sizes": self.sizes} | self.model
        return web.json_response({"results": [answer]})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _join(self, request: web.Request) -> web.Response:
        meeting = Meeting(**(await request.json())["init_info"])
        self.group = await asyncio.to_thread(join, meeting, 1, None, torch.device("cpu"))
        return web.json_response({})

    def _receive(self, update: dict[str, Any]) -> None:
        """What a worker does, in its own process."""
        self.received = []
        self.sums = update["sums"]
        try:
            for name, dtype, shape in zip(update["names"], update["dtype_names"], update["shapes"], strict=True):
                self.at_tensor(len(self.received))
                self.received.append((name, self.group.receive(shape, getattr(torch, dtype))))
        finally:
            self.group.close()

    async def _update(self, request: web.Request) -> web.Response:
        update = (await request.json())["update_info"]
        self.version_at_update = self.version
        if "names" in update:
            try:
                await asyncio.to_thread(self._receive, update)
            except RuntimeError as error:
                return web.json_response({"error": {"message": str(error)}}, status=500)
        if self.load_error:
            return web.json_response({"error": {"message": self.load_error}}, status=500)
        self.loaded = update["version"]
        return web.json_response({})

    async def _finish(self, request: web.Request) -> web.Response:
        self.at_finish()
        self.version = (await request.json())["weight_version"]
        return web.json_response({})

    async def _name(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        return web.json_response({})

    async def _abort(self, request: web.Request) -> web.Response:
        for name in (await request.json())["request_ids"]:
            if name in self.aborted:
                self.aborted[name].set()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.Response:
        asked = await request.json()
        params = asked["sampling_params"]
        name = f"generate-tokens-{asked['request_id']}"
        self.generated.append(params["seed"])
        version = self.version
        tokens = tokens_of(params["seed"], params["max_tokens"])
        reason = "length"
        self.aborted[name] = asyncio.Event()
        try:
            await asyncio.wait_for(self.aborted[name].wait(), self.delay_s)
            tokens = tokens[:2]
            reason = "abort"
        except TimeoutError:
            while self.stands_still:
                await asyncio.sleep(0.01)
        choice = {
            "token_ids": tokens,
            "logprobs": {"content": [{"token_id": token, "logprob": -1.5} for token in tokens]},
            "finish_reason": reason,
            "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}],
        } | self.says
        return web.json_response({"choices": [choice]})
