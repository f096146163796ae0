"""Weights that go to servers tensor by tensor: all that stay have them, whatever the others do meanwhile."""

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from common.engine.make import make_engine
from common.flags.rollout import RolloutConfig
from common.flags.servers import check_servers
from common.servers.client import Gone, Limits, Refused
from common.servers.dialect import Needs
from common.servers.group import own_address
from common.servers.pool import Pool
from common.servers.sglang import SGLang
from common.servers.transfer import Held
from tests.engine.test_servers import TIMEOUT_S, ask, collect, engine_setup
from tests.engine.told_server import SIZES, ToldServer, tokens_of
from tests.gpu.check_engine import random_policy

CPU = torch.device("cpu")


def held(seed: int) -> Held:
    torch.manual_seed(seed)
    tensors = {
        "embedding": torch.randn(100, 64).bfloat16(), "scale": torch.tensor(float(seed)), "none": torch.zeros(0, 3),
        "large": torch.randn(512, 512), "norm": torch.randn(64),
    }
    return Held("gloo", CPU, tensors, {name: (seed, tensor.numel()) for name, tensor in tensors.items()})


def must_hold(server, given: Held, version: str) -> None:
    received = dict(server.received)
    assert list(received) == list(given.tensors) and server.version == version
    for name, tensor in given.tensors.items():
        assert received[name].dtype == tensor.dtype and received[name].equal(tensor)
    assert {name: tuple(found) for name, found in server.sums.items()} == given.sums


@pytest.fixture
def servers():
    made = [ToldServer(), ToldServer()]
    yield made
    for server in made:
        server.kill()


@pytest.fixture
def pool(servers):
    needs = Needs("float32", 64, SIZES, "gloo")
    pool = Pool(lambda: [server.url for server in servers], "", Limits(TIMEOUT_S, 3600.0), needs, 64, True)
    yield pool
    pool.close()


def wait_for(pool: Pool, num_ready: int) -> None:
    end = time.monotonic() + 20
    while pool.num_ready < num_ready and time.monotonic() < end:
        time.sleep(0.02)
    assert pool.num_ready == num_ready


def must_sample(pool: Pool, version: str) -> None:
    for number in range(6):
        pool.add(number, ask(number))
    found = dict(collect(pool, 6))
    assert {number: answer.tokens for number, answer in found.items()} == {n: tokens_of(n, 8) for n in range(6)}
    assert all(set(answer.versions) == {version} for answer in found.values())


def test_all_servers_receive_each_version(pool, servers):
    for version in ("run-1", "run-2"):
        given = held(int(version[-1]))
        pool.present(given, version)
        pool.wait_ready(10.0)
        wait_for(pool, 2)
        for server in servers:
            must_hold(server, given, version)
        must_sample(pool, version)


@pytest.mark.parametrize("fault", ["dies", "stands still"])
def test_a_server_that_is_lost_in_a_transfer_is_left_out_and_joins_again(fault, pool, servers, capsys):
    first, second = servers
    lost = []

    def lose(number: int) -> None:
        if number < 2 or lost:
            return
        lost.append(number)
        if fault == "dies":
            first.group.close()
            first.loop.call_soon_threadsafe(lambda: [connection.transport.abort() for connection in
                                                     first.runner.server.connections])
            first.stands_still = True
            raise RuntimeError("killed")
        first.stands_still = True
        while first.stands_still:
            time.sleep(0.01)

    first.at_tensor = lose
    given = held(1)
    pool.present(given, "run-1")
    pool.wait_ready(10.0)
    wait_for(pool, 1)
    must_hold(second, given, "run-1")
    assert first.version == "loading run-1" and lost == [2]
    must_sample(pool, "run-1")
    assert first.generated == []
    end = time.monotonic() + 20
    said = ""
    while "left out until it answers" not in said and time.monotonic() < end:
        said += capsys.readouterr().out
        time.sleep(0.02)
    assert first.url in said
    first.stands_still = False
    wait_for(pool, 2)
    must_hold(first, given, "run-1")


def test_what_a_server_says_of_a_transfer_comes_before_what_the_group_says(pool, servers):
    def refuse(number: int) -> None:
        if number == 3:
            raise RuntimeError("there is no module named large")

    for server in servers:
        server.at_tensor = refuse
    pool.present(held(1), "run-1")
    with pytest.raises(Refused, match="there is no module named large"):
        pool.wait_ready(10.0)
    for server in servers:
        server.at_tensor = lambda number: None
    pool.present(held(2), "run-2")
    pool.wait_ready(10.0)
    wait_for(pool, 2)
    must_sample(pool, "run-2")


def test_a_server_that_does_not_join_ends_in_a_line(pool, servers, monkeypatch):
    monkeypatch.setattr("common.servers.transfer.ANSWER_S", 0.2)
    monkeypatch.setattr("tests.engine.told_server.join", lambda *_: time.sleep(4.0))
    pool.present(held(1), "run-1")
    with pytest.raises(Gone, match=r"no server is ready after 3 s: server http.*the transfer of weights broke"):
        pool.wait_ready(3.0)


def test_the_engine_sends_weights_whose_checksums_are_theirs(servers, world, tiny_llama):
    setup = engine_setup(servers, world, tiny_llama)
    engine = make_engine(replace(setup, config=replace(setup.config, server_transfer="gloo")))
    try:
        policy = random_policy(AutoConfig.from_pretrained(tiny_llama), world)
        assert engine.wake(policy)["sync/num_checksums"] == 3                       # of the told servers
        expected = {name: tensor.bfloat16() for name, tensor in policy.full_tensors(None)}
        for server in servers:
            received = dict(server.received)
            assert received.keys() == expected.keys() == server.sums.keys()
            for name, tensor in expected.items():
                assert received[name].equal(tensor)
                bits = tensor.reshape(-1).view(torch.int16).to(torch.int64)
                assert server.sums[name] == [bits.sum().item(), tensor.numel()]
    finally:
        engine.close()


def test_nccl_without_a_gpu_is_refused(servers, world, tiny_llama):
    setup = engine_setup(servers, world, tiny_llama)
    with pytest.raises(ValueError, match=r"--rollout.server-transfer nccl needs a GPU.*set it to gloo or folder"):
        make_engine(replace(setup, config=replace(setup.config, server_transfer="nccl")))


def test_flags_of_a_transfer(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "k")
    given = RolloutConfig(engine="server", servers=("http://10.0.0.1:1",), server_auth_env="SOME_KEY",
                          server_transfer="gloo")
    check_servers(given, "server")  # on another machine, without a folder
    with pytest.raises(ValueError, match=r"--rollout.server-weights /w is not read with .*server-transfer gloo"):
        check_servers(replace(given, server_weights="/w"), "server")


async def sglang_info(path: str) -> dict:
    return {"dtype": "float32", "max_req_input_len": 70, "speculative_algorithm": None, "quantization": None}


def test_sglang_is_refused_before_the_first_weights():
    client = SimpleNamespace(call=sglang_info)
    [problem] = asyncio.run(SGLang.problems(client, Needs("float32", 64, SIZES, "nccl")))
    assert problem == "SGLang takes no weights by --rollout.server-transfer nccl: set it to folder"
    assert asyncio.run(SGLang.problems(client, Needs("float32", 64, SIZES))) == []


def test_a_group_listens_where_the_server_is_reached_from():
    assert own_address("127.0.0.1")[0] == "127.0.0.1" and own_address("::1")[0] == "::1"
