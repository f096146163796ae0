"""The server through which an agent talks with an episode's model. Each episode has its own, on a port of its own of
the loopback address, with a token of its own: so a request needs no other sign of its episode.

A request whose messages begin with all that a conversation has seen, with the model's last reply at the end, is the
next turn of that conversation: what the model wrote before stays as it was sampled. Every other request begins a
conversation: a sub-agent, a summary, a second branch, the same question once more. A request that the client sends
again because it lost the answer gets the answer of the first.
"""

import asyncio
import hashlib
import hmac
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from aiohttp import web

from envs.endpoint import anthropic_messages, chat_completions, responses
from envs.endpoint.answers import answer_of, refusal_of
from envs.endpoint.asked import Answer, ApiError, Asked, Key, Message, key_of, read_pictures
from envs.endpoint.connections import Connections
from envs.endpoint.http import Http, as_event, as_object, body_of, model_of
from envs.endpoint.structured import told_of, with_text
from envs.endpoint.tools import stub_of

FORMS: dict[str, ModuleType] = {
    "/v1/chat/completions": chat_completions, "/v1/responses": responses, "/v1/messages": anthropic_messages,
}
AZURE_PLACES = ("/openai{}", "/openai/v1{}", "/openai/deployments/{{deployment}}{}")
CLEANUP_S = 0.8  # the trainer kills an episode GRACE_S after its deadline (envs/runtime/processes.py)
MAX_BODY = 2**26  # bytes of a request, which has all pictures of its conversation
COUNTS = {
    "requests": "all of them",
    "errors": "those that were answered with an error",
    "repeated": "those that got the answer of an earlier request",
    "aborted": "those whose client was gone before the answer was there",
    "conversations": "those that began a conversation",
    "not_called": "those with tool_choice required, or a tool's name there, whose answer does not call it",
    "structured": "those that asked for JSON",
    "unparsed": "those of them whose answer is none, and no call of a tool",
    "truncated": "those whose answer was cut off, or found no room",
    "unheeded": "those with a field that the model is not told: a seed, an effort, a verbosity",
    "temperatures": "those that asked for a temperature, in vain unless AGENT_TEMPERATURE=1",
}
"""The numbers of requests that an episode returns."""


@dataclass
class Conversation:
    chat: Any  # envs.runtime.chat.Chat
    role: str
    tools: list[dict[str, Any]]
    seen: list[Key]  # its messages as the client knows them, the last one is the model's
    is_busy: bool = False  # the model writes
    told: str = ""  # of a schema, or a tool's name


@dataclass
class Exchange:
    """A request and its answer."""

    answer: asyncio.Task
    request: web.Request
    is_delivered: bool = False

    @property
    def is_lost(self) -> bool:
        """The client closed the connection before it had the answer."""
        transport = self.request.transport
        return not self.is_delivered and (transport is None or transport.is_closing())


class Endpoint:
    """`async with Endpoint(chat, models) as endpoint`: serves the model of `chat` while the block runs."""

    def __init__(self, chat: Any, models: Mapping[str, str], keeps_temperature: bool = False, key: str = "",
                 constrains: bool = False, on_refusal: Callable[[str], None] | None = None):
        """`models`: names under which clients may ask for the model -> the role of what is then sampled.
        `keeps_temperature`: sample with the temperature that a request asks for; what is sampled with another one than
        the run's is not trained. `key`: one that is taken beside the episode's own. `constrains`: sample under a
        grammar of the schema that a request asks for, instead of writing it into the prompt. `on_refusal` is called
        before a request that finds no turn or no room left is answered, with the error's code."""
        self.chat = chat
        self.models = models
        self.keeps_temperature = keeps_temperature
        self.constrains = constrains
        self.token = secrets.token_urlsafe(32)
        self.keys = [known.encode() for known in (self.token, key) if known]
        self.counts = dict.fromkeys(COUNTS, 0)
        self.on_refusal = on_refusal
        self.has_ended = False
        self.failure: asyncio.Future = asyncio.get_running_loop().create_future()
        self.conversations: list[Conversation] = []
        self.exchanges: dict[Key, list[Exchange]] = {}
        self.said: dict[str, list[Message]] = {}  # by the id of a response, for previous_response_id

    async def __aenter__(self) -> "Endpoint":
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self.guard])
        for path, form in FORMS.items():
            for place in (path, *AZURE_PLACES):
                app.router.add_post(place.format(path.removeprefix("/v1")), partial(self.serve, form))
        app.router.add_get("/v1/models", self.list_models)
        app.router.add_get("/v1/models/{name}", self.show_model)
        self.runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.1)
        await self.runner.setup()
        self.connections = Connections(partial(Http, self.counts, self.runner.server))
        self.listener = await asyncio.get_running_loop().create_server(self.connections, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_) -> None:
        self.listener.close()
        await self.runner.cleanup()

    async def run(self, agent: Awaitable) -> Any:
        """What the agent returns. Replies that are being sampled as it ends are waited for, and kept. Raises what made
        the episode impossible, if something did. Then, and where the episode's time is up, the agent is cancelled, and
        has CLEANUP_S for what it does at its end."""
        task = asyncio.ensure_future(agent)
        try:
            await asyncio.wait([task, self.failure], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.has_ended = True
            if not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=CLEANUP_S)
        if self.failure.done():
            raise self.failure.exception()
        answers = [exchange.answer for exchanges in self.exchanges.values() for exchange in exchanges]
        await asyncio.gather(*answers, return_exceptions=True)
        return task.result()

    def fail(self, error: Exception) -> None:
        """`run` raises this error, or one that came before it."""
        if not self.failure.done():
            self.failure.set_exception(error)

    # ----------------------------------------------------------------------- HTTP

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Only who has the token is served; every error is in the API's own form, and counted."""
        self.counts["requests"] += 1
        try:
            self.check_token(request)
            self.connections.know(request.protocol)
            if self.has_ended:
                raise ApiError("the episode has ended", 410, "episode_ended")
            return await handler(request)
        except web.HTTPException as http:
            error = ApiError(f"{request.method} {request.path}: {http.reason}", http.status, "not_served")
        except ApiError as api_error:
            error = api_error
        except Exception as fault:  # of the endpoint: no client can mend it, and the episode must not go on without it
            self.fail(fault)
            error = ApiError(f"the endpoint fails: {type(fault).__name__}: {fault}", 500, "endpoint_failed")
        self.counts["errors"] += 1
        form = anthropic_messages if "/messages" in request.path else chat_completions
        return web.json_response(form.write_error(error), status=error.status)

    def check_token(self, request: web.Request) -> None:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        given = request.headers.get("x-api-key") or request.headers.get("api-key") or bearer
        sent = given.encode(errors="surrogateescape")  # a header may be no UTF-8
        if not any(hmac.compare_digest(sent, key) for key in self.keys):
            raise ApiError("the API key is not this episode's: OPENAI_API_KEY or ANTHROPIC_API_KEY has it", 401,
                           "invalid_api_key")

    async def serve(self, form: ModuleType, request: web.Request) -> web.StreamResponse:
        """One request for a reply."""
        body = await body_of(request)
        try:
            asked = form.read(as_object(body), self.said)
            exchange = self.exchange_for(asked, request)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ApiError(f"the request is not of the form of {request.path}: {type(error).__name__}: "
                           f"{error}"[:1000], code="malformed") from error
        self.counts["unheeded"] += form.FIELDS.has_hint(asked.body)
        answer = await asyncio.shield(exchange.answer)
        self.said[f"resp_{answer.id}"] = [*without_instructions(asked), answer.message()]
        return await self.send(exchange, form, asked, answer, request)

    async def send(self, exchange: Exchange, form: ModuleType, asked: Asked, answer: Answer,
                   request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={
            "Content-Type": "text/event-stream" if asked.is_stream else "application/json", "Cache-Control": "no-cache",
        })
        try:
            if request.transport is None:
                raise ConnectionResetError("the client has closed the connection")
            await response.prepare(request)
            if asked.is_stream:
                for event in form.events(asked, answer):
                    await response.write(as_event(event))
            else:
                await response.write(json.dumps(form.write(asked, answer)).encode())
            await response.write_eof()
            exchange.is_delivered = True
        except ConnectionError:
            self.counts["aborted"] += 1
        return response

    async def list_models(self, request: web.Request) -> web.Response:
        data = [model_of(name) for name in self.models]
        return web.json_response({"object": "list", "data": data, "has_more": False})

    async def show_model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self.role_of(name)
        return web.json_response(model_of(name))

    # ----------------------------------------------------------------------- conversations

    def role_of(self, model: str) -> str:
        """The role that a request's model name stands for: NAME, or NAME:ROLE."""
        name, _, role = model.rpartition(":")
        if model in self.models:
            return self.models[model]
        if name in self.models:
            return role
        raise ApiError(f"there is no model {model!r:.200} here; there are {', '.join(self.models)}, and NAME:ROLE "
                       f"(the environment variable AGENT_MODELS)", 404, "model_not_found")

    def exchange_for(self, asked: Asked, request: web.Request) -> Exchange:
        """The earlier exchange that the request repeats, or a new one."""
        if not asked.messages:
            raise ApiError("the request has no messages", code="malformed")
        keys = [key_of(message) for message in asked.messages]
        role = self.role_of(asked.model)
        options = (asked.max_tokens, asked.temperature, tuple(asked.stop), asked.choice)
        if told := told_of(asked):
            options += (told,)
        key = (role, json.dumps(asked.tools, sort_keys=True), options, *keys)
        earlier = self.exchanges.setdefault(key, [])
        # the SDKs of OpenAI and Anthropic say that they ask again; of others a closed connection tells it. The same
        # request without either sign asks for another sample: an agent may take a vote
        is_told_again = request.headers.get("x-stainless-retry-count", "0") != "0"
        repeated = [exchange for exchange in earlier if exchange.is_lost] or (earlier if is_told_again else [])
        if repeated:
            self.counts["repeated"] += 1
            exchange = repeated[-1]
            exchange.request, exchange.is_delivered = request, False
            return exchange
        asked.messages = read_pictures(asked.messages)  # before a conversation begins, because some may be no pictures
        conversation = self.conversation_for(asked, role, keys)
        conversation.is_busy = True
        # this does not depend on the order in which requests come: an episode that is repeated says the same
        name = hashlib.sha256(repr((key, len(earlier))).encode(errors="surrogatepass")).hexdigest()[:16]
        answer = asyncio.ensure_future(self.complete(conversation, asked, keys, name))
        exchange = Exchange(answer, request)
        earlier.append(exchange)

        def forget(task: asyncio.Task) -> None:
            if task.cancelled() or task.exception():  # an error is no answer: asked again, the model is asked again
                earlier.remove(exchange)

        answer.add_done_callback(forget)
        return exchange

    def conversation_for(self, asked: Asked, role: str, keys: list[Key]) -> Conversation:
        """The longest conversation that the messages continue, or a new one."""
        known = [
            conversation for conversation in self.conversations
            if not conversation.is_busy and conversation.role == role and conversation.tools == asked.tools
            and len(conversation.seen) < len(keys) and conversation.seen == keys[: len(conversation.seen)]
        ]
        if known:
            return max(known, key=lambda conversation: len(conversation.seen))
        chat = self.chat.begin(role)
        chat.tools = [stub_of(tool) for tool in asked.tools]
        return Conversation(chat, role, asked.tools, [])

    async def complete(self, conversation: Conversation, asked: Asked, keys: list[Key], name: str) -> Answer:
        """The model's next turn in this conversation."""
        chat, num_seen = conversation.chat, len(conversation.seen)
        self.counts["temperatures"] += asked.temperature is not None
        self.counts["structured"] += asked.schema is not None
        schema = asked.schema if self.constrains and not asked.tools else None
        messages = asked.messages[num_seen:]
        told = told_of(asked) if schema is None else ""
        if told not in ("", conversation.told):  # the model sees it once
            messages = with_text(messages, told)
        try:
            text = await chat.reply(
                *messages, max_tokens=asked.max_tokens, stop=asked.stop, schema=schema,
                temperature=asked.temperature if self.keeps_temperature else None,
            )
        except Exception as error:
            self.fail(error)
            reason = f"{type(error).__name__}: {error}"
            raise ApiError(f"the episode cannot go on: {reason}", 500, "episode_failed") from error
        finally:
            conversation.is_busy = False
        self.counts["truncated"] += chat.finish_reason == "length"
        if text is None:
            refusal = refusal_of(chat.finish_reason)
            if self.on_refusal is not None:
                self.on_refusal(refusal.code)
            raise refusal
        if not num_seen:
            self.counts["conversations"] += 1
            self.conversations.append(conversation)
        conversation.told = told or conversation.told
        answer, num_unread = answer_of(chat, text, asked, name, self.counts)
        self.chat.num_tool_calls += len(answer.calls) + num_unread
        self.chat.num_tool_errors += num_unread
        conversation.seen = [*keys, key_of(answer.message())]
        return answer


def without_instructions(asked: Asked) -> list[Message]:
    """A response's messages as previous_response_id gives them to the next request, which has its own instructions."""
    return asked.messages[1:] if asked.body.get("instructions") else asked.messages
