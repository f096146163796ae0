"""What an episode's endpoint refuses: requests that are not of the API's form, fields that it does not read, and
connections of others."""

import asyncio
import gzip
import json
import socket
from typing import Any, get_args

import anthropic.types
import anthropic.types.beta
import httpx
import pytest
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params

from envs.endpoint import connections, http, server
from envs.endpoint.chat_completions import FIELDS
from envs.endpoint.server import FORMS
from tests.envs.test_endpoint import TOOL, client_of, serve, user

CHAT, RESPONSES, MESSAGES = FORMS
RIGHT = {
    CHAT: {"model": "policy", "messages": [user("Hello.")]},
    RESPONSES: {"model": "policy", "input": "Hello."},
    MESSAGES: {"model": "policy", "messages": [user("Hello.")], "max_tokens": 9},
}
CALL_ID = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [user("Hello.") | fields]}


def called(**fields: Any) -> dict[str, Any]:
    call = CALL_ID | {"function": CALL_ID["function"] | fields}
    return {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}, user("Well?")]}


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [TOOL | {"function": TOOL["function"] | fields}]}


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": [fields]}, user("Well?")]}


OTHERS = (5, True, [1], {"a": 1})
WRONG = [
    *((CHAT, message(name=value)) for value in OTHERS),
    *((CHAT, message(content=value)) for value in (5, True, [1], {"a": 1}, [{"text": "x"}], [{"type": [1]}],
                                                   [{"type": "text", "text": 5}], [{"type": "text"}])),
    *((CHAT, message(role=value)) for value in (*OTHERS, None, "judge")),
    *((CHAT, {"model": value}) for value in (*OTHERS, "", "gpt-4o")),
    *((CHAT, {"messages": value}) for value in (5, "Hello.", [], [5], {"a": 1}, None, ["Hello."])),
    *((CHAT, called(name=value)) for value in (*OTHERS, None)),
    *((CHAT, called(arguments=value)) for value in (*OTHERS, None)),
    *((CHAT, {"messages": [{"role": "assistant", "tool_calls": value}, user("x")]}) for value in (5, "x", [5], [{}])),
    *((CHAT, message(role="tool", tool_call_id=value)) for value in OTHERS),
    *((CHAT, function(name=value)) for value in (*OTHERS, None, "")),
    *((CHAT, function(description=value)) for value in OTHERS),
    *((CHAT, function(parameters=value)) for value in (5, True, [1], "x")),
    *((CHAT, {"tools": value}) for value in (5, "x", [5], {"a": 1}, [{}], [{"type": "function"}],
                                             [{"type": "function", "function": 5}])),
    *((CHAT, {"tool_choice": value}) for value in (5, [1], {}, {"type": [1]}, "x")),
    *((CHAT, {"stream_options": value}) for value in (5, "x", [1], {"include_usage": True, "x": 1})),
    *((CHAT, {"stream": True, "stream_options": value}) for value in ([1], "x")),
    *((CHAT, {"stream": value}) for value in (5, "yes", [1])),
    *((CHAT, {"max_tokens": value}) for value in (True, 0, 1.5, "5", [1])),
    *((CHAT, {"temperature": value}) for value in (True, -1, 3, "1", [1])),
    *((CHAT, {"stop": value}) for value in (5, True, {"a": 1}, [""], [5])),
    *((RESPONSES, {"instructions": value}) for value in OTHERS),
    *((RESPONSES, {"input": value}) for value in (5, True, None, [5], [{"type": [1]}], [{"type": "message"}],
                                                  [{"role": "user"} | {"content": 5}], {"a": 1})),
    *((RESPONSES, {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"} | fields]})
      for fields in ({"name": {}}, {"call_id": 5}, {"arguments": {}})),
    (RESPONSES, {"input": [{"type": "function_call_output", "call_id": 5, "output": "x"}]}),
    (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "a", "output": 5}]}),
    *((RESPONSES, {"previous_response_id": value}) for value in (5, [1], {"a": 1}, "none")),
    *((RESPONSES, {"tools": [{"type": "function"} | fields]}) for fields in ({}, {"name": 5}, {"name": [1]})),
    (RESPONSES, {"text": 5}),
    (RESPONSES, {"max_output_tokens": True}),
    *((MESSAGES, {"system": value}) for value in (5, True, [1], {"a": 1}, [{"type": "text", "text": 5}])),
    *((MESSAGES, {"messages": value}) for value in (5, None, [5], [{}], [{"role": "user"}, {"role": 5}])),
    *((MESSAGES, block(**{"type": "tool_use", "id": "a", "name": "f", "input": {}} | fields))
      for fields in ({"id": 5}, {"name": {}}, {"input": "x"}, {"type": {}})),
    (MESSAGES, {"messages": [user([{"type": "tool_result", "tool_use_id": 5, "content": "x"}])]}),
    (MESSAGES, {"messages": [user([{"type": "tool_result", "tool_use_id": "a", "content": 5}])]}),
    *((MESSAGES, {"tools": [{"name": "f", "input_schema": {}} | fields]})
      for fields in ({"name": 5}, {"input_schema": 5}, {"description": {}}, {"input_schema": None})),
    *((MESSAGES, {"max_tokens": value}) for value in (None, True, "9")),
    *((MESSAGES, {"stop_sequences": value}) for value in (5, [5], {"a": 1})),
    (MESSAGES, {"output_config": [1]}),
    *((CHAT, {"response_format": value}) for value in (
        5, {"type": "grammar"}, {"type": 5}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": 5},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": [1]}})),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x"}}}), (RESPONSES, {"text": {"format": 5}}),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": 5}}}),
    (MESSAGES, {"output_format": {"type": "regex"}}),
    *((path, {"tool_choice": value, "tools": []}) for path, value in (
        (CHAT, {"type": "function", "function": {"name": "f"}}), (CHAT, {"type": "function"}),
        (RESPONSES, {"type": "function", "name": "f"}), (MESSAGES, {"type": "tool", "name": "f"}),
        (MESSAGES, {"type": "tool", "name": 5}))),
]
UNSERVED = [
    *((CHAT, {name: value}) for name, value in {
        "top_k": 5, "min_p": 0.1, "guided_json": {}, "structured_outputs": {"json": {}}, "repetition_penalty": 1.1,
        "chat_template_kwargs": {"enable_thinking": False}, "n": 2,
        "top_p": 0.9, "logit_bias": {"1": 5}, "mirostat": 1, "logprobs": True,
    }.items()),
    *((RESPONSES, {name: value}) for name, value in {
        "background": True, "top_p": 0.5,
        "top_k": 5, "response_format": {},
    }.items()),
    *((MESSAGES, {name: value}) for name, value in {
        "top_k": 5, "top_p": 0.9, "response_format": {}, "mcp_servers": [{}],
    }.items()),
]


async def post(endpoint: Any, path: str, **request: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {endpoint.token}"} | request.pop("headers", {})
    async with httpx.AsyncClient(base_url=endpoint.url, headers=headers) as client:
        return await client.post(path, **request)


def check_error(path: str, answer: httpx.Response) -> dict[str, Any]:
    """Raise AssertionError for an error that is not in the form of the API."""
    assert 400 <= answer.status_code < 500, answer.request.content
    assert answer.headers["Content-Type"].startswith("application/json")
    body = answer.json()
    assert "Traceback" not in answer.text and "object at 0x" not in answer.text
    if path == MESSAGES:
        assert body["type"] == "error" and body["error"].keys() == {"type", "message"}
    else:
        assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize("path", FORMS)
def test_a_request_of_another_form_is_refused_before_the_model_is_asked(path):
    bodies = [json.dumps(RIGHT[path] | change) for place, change in WRONG if place == path]
    assert len(bodies) >= 20

    async def agent(endpoint):
        for body in bodies:
            check_error(path, await post(endpoint, path, content=body))
        right = await post(endpoint, path, content=json.dumps(RIGHT[path]))
        assert right.status_code == 200

    _, chat, counts = serve(agent)
    assert (counts["errors"], counts["requests"], len(chat.begun)) == (len(bodies), len(bodies) + 1, 1)


def test_a_body_that_cannot_be_read():
    """Also a token that is no UTF-8, before anything is read."""
    text = json.dumps(RIGHT[CHAT]).encode()
    kinds = [(encoding, content) for encoding in ("gzip", "deflate", "br", "zstd")
             for content in (text, gzip.compress(text)[:9])]

    async def agent(endpoint):
        for encoding, content in kinds:
            check_error(CHAT, await post(endpoint, CHAT, content=content, headers={"Content-Encoding": encoding}))
        good = await post(endpoint, CHAT, content=gzip.compress(text), headers={"Content-Encoding": "gzip"})
        assert good.status_code == 200
        for header in ("Authorization", "x-api-key"):
            answer = await post(endpoint, CHAT, content=text, headers={header: b"Bearer \xff\xfe"})
            assert check_error(CHAT, answer)["code"] == "invalid_api_key"

    _, _, counts = serve(agent)
    assert counts["errors"] == len(kinds) + 2


def test_a_body_that_does_not_arrive(monkeypatch):
    monkeypatch.setattr(http, "BODY_S", 0.1)

    async def agent(endpoint):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.url.rpartition(":")[2]))
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {endpoint.token}\r\n"
                     f"Content-Length: 50\r\n\r\n{{".encode())
        said = await reader.readuntil(b"}}")
        writer.close()
        return said

    said, _, counts = serve(agent)
    assert said.startswith(b"HTTP/1.1 408") and b'"code": "timeout"' in said and counts["errors"] == 1


def test_a_fault_of_the_endpoint_ends_the_episode(monkeypatch):
    """It is no error of the request, which a client would send again."""
    monkeypatch.setattr(server, "without_instructions", lambda asked: 1 / 0)

    async def agent(endpoint):
        answer = await post(endpoint, CHAT, json=RIGHT[CHAT])
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "endpoint_failed"
        await asyncio.sleep(60)

    with pytest.raises(ZeroDivisionError):
        serve(agent)


# --------------------------------------------------------------------------- fields

@pytest.mark.parametrize("path", FORMS)
def test_what_is_asked_for_is_done_or_refused(path):
    bodies = [RIGHT[path] | change for place, change in UNSERVED if place == path]

    async def agent(endpoint):
        for body in bodies:
            error = check_error(path, await post(endpoint, path, json=body))
            assert "leave it out" in error["message"]

    _, chat, counts = serve(agent)
    assert counts["errors"] == len(bodies) > 3 and chat.begun == []


SDK = {
    CHAT: completion_create_params.CompletionCreateParams,
    RESPONSES: response_create_params.ResponseCreateParams,
    MESSAGES: anthropic.types.MessageCreateParams | anthropic.types.beta.message_create_params.MessageCreateParams,
}


@pytest.mark.parametrize("path", FORMS)
def test_every_field_of_the_sdk_is_in_one_class(path):
    """So that a new field is neither dropped in silence nor forgotten."""
    fields = FORMS[path].FIELDS
    classes = [set(fields.read), {*fields.fixed}, {*fields.hints}, {*fields.beside}]
    assert sum(map(len, classes)) == len(set().union(*classes))
    known = {name.partition(".")[0] for name in set().union(*classes)}
    of_sdk = {name for kind in get_args(SDK[path]) for base in (kind, *kind.__orig_bases__)
              for name in getattr(base, "__annotations__", ())}
    assert len(of_sdk) > 15 and of_sdk <= known


def test_fields_that_ask_for_nothing_are_taken_and_hints_are_counted():
    plain = {name: values[0] for name, values in FIELDS.fixed.items() if values} | dict.fromkeys(FIELDS.fixed | {
        "mirostat": None})
    plain |= {"seed": None, "stream_options": {"include_usage": None}, "store": True, "metadata": {"a": "b"}}
    plain |= {"parallel_tool_calls": True, "stop": None, "tools": None, "tool_choice": None, "stream": False}
    usual = {name: values[0] for name, values in FIELDS.fixed.items() if values}
    hints = [(CHAT, {"seed": 1}), (CHAT, {"reasoning_effort": "low"}), (CHAT, {"parallel_tool_calls": False}),
             (RESPONSES, {"text": {"verbosity": "low"}}), (RESPONSES, {"reasoning": {"effort": "low"}}),
             (MESSAGES, {"thinking": {"type": "disabled"}}), (MESSAGES, {"output_config": {"effort": "low"}})]

    async def agent(endpoint):
        for more in (plain, usual):
            answer = await post(endpoint, CHAT, json=RIGHT[CHAT] | more)
            assert answer.status_code == 200, answer.text
        before = endpoint.counts["unheeded"]
        for path, more in hints:
            answer = await post(endpoint, path, json=RIGHT[path] | more)
            assert answer.status_code == 200, answer.text
        return before

    before, _, counts = serve(agent)
    assert (before, counts["unheeded"], counts["errors"]) == (0, len(hints), 0)


# --------------------------------------------------------------------------- connections

def begun_headers(endpoint: Any, number: int) -> list[socket.socket]:
    """Connections with half a header, as another process of the machine would open them."""
    sockets = []
    for _ in range(number):
        sockets.append(socket.create_connection(("127.0.0.1", int(endpoint.url.rpartition(":")[2]))))
        sockets[-1].sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost")
    return sockets


def test_connections_without_the_token_are_bounded(caplog):
    """300 of them leave an honest client its connection, which began before, one that begins after, and the
    episode's file descriptors. None of it is logged."""
    async def agent(endpoint):
        async with client_of(endpoint) as first, client_of(endpoint) as second:
            def ask(client, text):
                return client.chat.completions.create(model="policy", messages=[user(text)])

            await ask(first, "Hello.")
            others = []
            for _ in range(6):
                others += await asyncio.to_thread(begun_headers, endpoint, 50)
                await asyncio.sleep(0.01)
            others[-1].sendall(b"\r\n\x00\x01 nonsense\r\n\r\n")
            most = len(endpoint.connections.timers)
            served = len(endpoint.runner.server.connections)
            await ask(first, "Still there?")
            await ask(second, "Who is new?")
            for other in others:
                other.close()
            return most, served

    (most, served), chat, counts = serve(agent)
    assert most == connections.MOST_UNKNOWN and served <= most + 3
    assert len(chat.begun) == 3 and counts["aborted"] == 0
    assert not caplog.records


def test_a_client_without_the_token_is_told_to_go(monkeypatch):
    """And one that has shown it stays, however long it says nothing."""
    monkeypatch.setattr(connections, "UNKNOWN_S", 0.2)

    async def agent(endpoint):
        async with client_of(endpoint) as client:
            await client.chat.completions.create(model="policy", messages=[user("Hello.")])
            (known,) = endpoint.runner.server.connections
            (other,) = await asyncio.to_thread(begun_headers, endpoint, 1)
            other.settimeout(10)
            assert await asyncio.to_thread(other.recv, 1) == b""
            other.close()
            assert endpoint.runner.server.connections == [known]

    serve(agent)
