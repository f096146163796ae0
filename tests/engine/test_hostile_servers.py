"""What a hostile server can do to a run: say something wrong, and nothing else. Raw HTTP on real sockets."""

import asyncio
import gzip
import json
import pickle
import re
import time
import tracemalloc
from itertools import pairwise

import pytest

from common.flags.rollout import SamplingConfig
from common.flags.servers import check_address, is_loopback
from common.servers.client import Client, Gone, Limits, Refused, ServerError
from common.servers.dialect import Ask, check_answer, versions_of
from common.servers.guard import KEY, Guard
from common.servers.sglang import SGLang
from common.servers.vllm import VLLM
from tests.engine.served import KEY as SECRET

MIB = 1 << 20
VOCABULARY = 100


class Trap:
    """Unpickling it leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def answered(parts, work, key: str = SECRET, timeout_s: float = 5.0):
    """What `work(client)` returns, a coroutine, of a server that answers each request with these bytes, and the
    requests that it got."""
    requests: list[bytes] = []

    async def serve(reader, writer):
        try:
            requests.append(await reader.readuntil(b"\r\n\r\n"))
            if body := re.search(rb"Content-Length: (\d+)", requests[-1]):
                requests[-1] += await reader.readexactly(int(body[1]))
            for part in parts:
                writer.write(part)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = Client(f"http://127.0.0.1:{port}", key, Limits(timeout_s, 10 * timeout_s))
        try:
            return await work(client)
        finally:
            await client.close()
            server.close()

    return asyncio.run(run()), requests


def http(body: bytes, *headers: str, status: str = "200 OK") -> list[bytes]:
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "Connection: close", "", ""]
    return ["\r\n".join(head).encode(), body]


def endless(piece: bytes, *headers: str):
    yield "\r\n".join(["HTTP/1.1 200 OK", *headers, "Connection: close", "", ""]).encode()
    while True:
        yield piece


def bomb() -> list[bytes]:
    """256 MiB in 256 KiB."""
    return http(gzip.compress(bytes(256 * MIB), 9), "Content-Encoding: gzip")


ENDINGS = {
    "endless body": lambda: endless(b" " * 65536),
    "endless line of a header": lambda: iter([b"HTTP/1.1 200 OK\r\nX-A: ", *[b"a" * 65536] * 64]),
    "endless headers": lambda: iter([b"HTTP/1.1 200 OK\r\n", *[b"X-A: b\r\n" * 8192] * 64]),
    "compressed": bomb,
    "a pickle": lambda: http(pickle.dumps([1, 2, 3]), "Content-Type: application/octet-stream"),
    "deep": lambda: http(b"[" * 100_000 + b"]" * 100_000),
    "a long number": lambda: http(b"[" + b"9" * 100_000 + b"]"),
    "no text": lambda: http(b"\xff\xfe\x00\xd8{}"),
    "broken off": lambda: [b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"],
    "no HTTP": lambda: [b"\x00" * 100],
    "another status": lambda: http(b"<html>", status="201 Created"),
    "an error with the key": lambda: http(f"key {SECRET}\nin two lines".encode(), status="400 Bad"),
    "too busy": lambda: http(b"", status="503 Busy"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_answer_that_is_none_is_one_line_without_the_key(ending):
    tracemalloc.start()
    start = time.monotonic()
    with pytest.raises(ServerError) as raised:
        answered(ENDINGS[ending](), lambda client: client.call("/a", {}, most_bytes=MIB))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    said = str(raised.value)
    assert said.startswith("server http://127.0.0.1:") and "\n" not in said and len(said) <= 600
    assert SECRET not in said and time.monotonic() - start < 60
    if ending != "compressed":
        assert peak < 32 * MIB
    is_gone = ending in ("endless line of a header", "endless headers", "broken off", "no HTTP", "too busy")
    assert type(raised.value) is (Gone if is_gone else Refused), said


def test_a_server_that_never_answers_is_gone():
    async def work(client):
        with pytest.raises(Gone, match="no answer to /a within"):
            await client.call("/a")

    def slow():
        yield b"HTTP/1.1 200 OK\r\n"
        time.sleep(1.0)

    answered(slow(), work, timeout_s=0.5)


def test_a_server_may_close_a_connection_that_it_promised_to_keep():
    async def work(client):
        return [await client.call("/a", {}) for _ in range(20)]

    found, requests = answered([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"], work)
    assert found == [{}] * 20 and len(requests) == 20


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary", "308 Permanent"])
def test_no_redirect_is_followed(status):
    """The key would go along."""
    found: list[bytes] = []

    async def other(reader, writer):
        found.append(await reader.read(1000))
        writer.close()

    async def work(client):
        server = await asyncio.start_server(other, "127.0.0.1", 0)
        target = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/a"
        moved.append("\r\n".join([f"HTTP/1.1 {status}", f"Location: {target}", "Content-Length: 0", "", ""]).encode())
        with pytest.raises(Refused, match=f"status {status[:3]}"):
            await client.call("/a", {})
        server.close()

    moved: list[bytes] = []
    answered(moved, work)
    assert moved and not found


def test_the_key_is_a_header_and_no_proxy_is_asked(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", "/nothing")
    found, [request] = answered(http(b'{"a": 1}'), lambda client: client.call("/a"))
    assert found == {"a": 1} and f"authorization: bearer {SECRET}" in request.decode().lower()
    _, [request] = answered(http(b"{}"), lambda client: client.call("/a"), key="")
    assert b"authorization" not in request.lower()


def test_nothing_is_unpickled(tmp_path):
    data = pickle.dumps(Trap(tmp_path / "trap"))
    for headers in (["Content-Type: application/json"], ["Content-Type: application/x-pickle"], []):
        with pytest.raises(Refused, match="no JSON"):
            answered(http(data, *headers), lambda client: SGLang.version(client))
    assert not (tmp_path / "trap").exists()


GOOD = {
    "output_ids": [5, 6, 2],
    "meta_info": {
        "output_token_logprobs": [[-1.0, 5, None], [-2.0, 6, None], [-0.5, 2, None]],
        "finish_reason": {"type": "stop"},
        "weight_versions": [{"version": "run-1", "start": 0, "end": 3}],
    },
}


def with_logp(value) -> dict:
    entries = [[-1.0, 5, None], [value, 6, None], [-0.5, 2, None]]
    return GOOD | {"meta_info": GOOD["meta_info"] | {"output_token_logprobs": entries}}


def with_tokens(*tokens) -> dict:
    entries = [[-1.0, token, None] for token in tokens]
    spans = [{"version": "run-1", "start": 0, "end": len(tokens)}]
    meta = {"output_token_logprobs": entries, "weight_versions": spans}
    return {"output_ids": list(tokens), "meta_info": GOOD["meta_info"] | meta}


def with_meta(**entries) -> dict:
    return GOOD | {"meta_info": GOOD["meta_info"] | entries}


WRONG = {
    "a token outside": with_tokens(5, VOCABULARY, 2), "a negative one": with_tokens(-1, 2),
    "a text": with_tokens("5", 2), "a bool": with_tokens(True, 2), "a float": with_tokens(5.0, 2),
    "too many": with_tokens(*[5] * 8, 2),
    "none": with_tokens(), "no end": with_tokens(5, 6), "after its end": with_tokens(5, 2, 6, 2),
    "NaN": with_logp(float("nan")), "infinite": with_logp(float("-inf")), "above 0": with_logp(0.1),
    "no number": with_logp("-1"), "nothing": with_logp(None), "a list": with_logp([-1.0]),
    "other tokens": GOOD | {"output_ids": [5, 7, 2]}, "fewer log-probs": GOOD | {"output_ids": [5, 6, 2, 2]},
    "no versions": with_meta(weight_versions=[]),
    "spans beyond": with_meta(weight_versions=[{"version": "a", "start": 0, "end": 10**12}]),
    "spans of texts": with_meta(weight_versions=[{"version": "a", "start": "0", "end": "3"}]),
    "short": with_meta(finish_reason={"type": "length"}), "no reason": with_meta(finish_reason=None),
    "a list of all": [GOOD], "a text of all": "GOOD", "no meta": {"output_ids": [5]},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_response_that_cannot_be_one_is_refused(wrong):
    ask = Ask("a", [5], 1, SamplingConfig(1.0, 8), [2])

    async def work(client):
        check_answer(client, ask, await SGLang.generate(client, ask), VOCABULARY)

    answered(http(json.dumps(GOOD).encode()), work)
    with pytest.raises(Refused):
        answered(http(json.dumps(WRONG[wrong]).encode()), work)


def test_spans_of_versions_are_no_longer_than_the_tokens():
    def spans(*ends):
        return [{"version": f"v{i}", "start": a, "end": b} for i, (a, b) in enumerate(pairwise(ends))]

    assert versions_of(spans(0, 2, 3), 3) == ["v0", "v0", "v1"]
    assert len(versions_of(spans(0, 2, 10**6), 3)) == 4  # one too many, which `check_answer` refuses
    assert versions_of(spans(0, 5, 2), 5) == ["v0"] * 5


@pytest.mark.parametrize("dialect", [VLLM, SGLang])
@pytest.mark.parametrize("body", [b"[]", b'"text"', b"null", b"1", b"{}"])
def test_another_server_is_not_taken_for_one_of_ours(dialect, body):
    found, _ = answered(http(body), dialect.is_spoken)
    assert found is False


LOOPBACK = ["http://127.0.0.1:1", "http://127.8.9.1:1", "http://localhost:1", "http://[::1]:1"]
OTHERS = ["http://127.0.0.1.example.com:1", "http://0.0.0.0:1", "http://[::]:1", "http://[::ffff:10.0.0.1]:1",
          "http://localhost.example.com:1", "http://2130706433:1", "http://127.1:1", "http://xn--localhost:1"]


def test_other_hosts_need_a_key():
    for url in LOOPBACK:
        assert is_loopback(url) and check_address(url, "") == url
    for url in OTHERS:
        assert not is_loopback(url)
        with pytest.raises(ValueError, match="another machine"):
            check_address(url, "")
        assert check_address(url, "NAME") == url


def test_the_guard_asks_for_the_key_on_every_path(monkeypatch):
    monkeypatch.setenv(KEY, SECRET)
    reached = []

    async def app(scope, receive, send):
        reached.append(scope["path"])

    def status(path, *headers, kind="http"):
        sent = []

        async def send(message):
            sent.append(message)

        scope = {"type": kind, "path": path, "headers": [(b"authorization", header) for header in headers]}
        before = len(reached)
        asyncio.run(Guard(app)(scope, None, send))
        assert (len(reached) > before) is not bool(sent)
        return sent[0].get("status", sent[0].get("code")) if sent else None

    good = f"Bearer {SECRET}".encode()
    for path in ("/update_weights", "/collective_rpc", "/v1/models", "/healthy", "/health/", "//health", ""):
        assert status(path) == 401 and status(path, good) is None
        for wrong in (b"Bearer", b"Bearer ", good[:-1], good + b"x", good.lower(), b"Basic " + good):
            assert status(path, wrong) == 401
        assert status(path, good, good) == 401
    assert status("/health") is None and status("/x", kind="lifespan") is None
    assert status("/x", kind="websocket") == 1008
