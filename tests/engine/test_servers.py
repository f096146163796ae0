"""The pool of servers: whatever they do, each request has one answer, of the present weights."""

import contextlib
import gc
import json
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from common.engine.base import EngineSetup, Request, Until
from common.engine.make import make_engine
from common.flags.model import ModelConfig
from common.flags.rollout import RolloutConfig, SamplingConfig
from common.flags.servers import check_servers, read_addresses
from common.parallel.ranks import seed_of
from common.prompts import Prompt
from common.servers.client import Gone, Limits, Refused, ServerError
from common.servers.dialect import Answer, Ask, Needs
from common.servers.folder import read_checksums
from common.servers.pool import Pool
from tests.conftest import launch
from tests.engine.told_server import SIZES, VOCABULARY, ToldServer, tokens_of
from tests.gpu.check_engine import random_policy
from tests.scripts.test_supervised import metrics_of
from tools import try_script

TIMEOUT_S = 1.0
NEEDS = Needs("float32", 64, SIZES)


@pytest.fixture
def servers():
    made = [ToldServer(), ToldServer()]
    yield made
    for server in made:
        if server.thread.is_alive():
            server.kill()


@pytest.fixture
def pool(servers):
    yield from pool_of([server.url for server in servers])


def pool_of(urls, key="", loads=True, work_s=3600.0):
    pool = Pool(lambda: urls, key, Limits(TIMEOUT_S, work_s), NEEDS, 64, loads)
    yield pool
    pool.close()


def ask(seed: int, count: int = 8) -> Ask:
    return Ask(f"name-{seed}", [5, 6, 7], seed, SamplingConfig(1.0, count), [2])


def collect(pool: Pool, count: int, most_s: float = 20.0) -> list[tuple[int, Answer]]:
    found = []
    end = time.monotonic() + most_s
    while len(found) < count and time.monotonic() < end:
        found += pool.take(0.1)
    return found


def begin(pool: Pool, num_ready: int = 2) -> None:
    pool.present(Path("/folder/1"), "run-1")
    pool.wait_ready(10.0)
    end = time.monotonic() + 10
    while pool.num_ready < num_ready and time.monotonic() < end:
        time.sleep(0.01)


def must_be_all(found: list[tuple[int, Answer]], count: int) -> None:
    assert sorted(number for number, _ in found) == [*range(count)]
    for number, answer in found:
        assert answer.tokens == tokens_of(number, 8) and set(answer.versions) == {"run-1"}


def test_requests_are_shared_and_answered_once(pool, servers):
    begin(pool)
    for server in servers:
        server.delay_s = 0.3
    for number in range(20):
        pool.add(number, ask(number))
    must_be_all(collect(pool, 20), 20)
    assert [len(server.generated) for server in servers] == [10, 10]
    assert pool.num_moved == 0 and not pool.open and pool.take(0.1) == []


@pytest.mark.parametrize("fault", ["kill", "stand still", "kill and return"])
def test_what_a_lost_server_was_asked_for_is_sampled_by_the_others(fault, pool, servers):
    begin(pool)
    first, second = servers
    first.delay_s = second.delay_s = 0.4
    for number in range(20):
        pool.add(number, ask(number))
    time.sleep(0.2)
    if fault == "stand still":
        first.stands_still = True
    else:
        first.kill()
    if fault == "kill and return":
        first.start()
    must_be_all(collect(pool, 20), 20)
    assert pool.num_moved == 10
    first.stands_still = False
    if fault == "stand still":
        end = time.monotonic() + 10
        while pool.num_ready < 2 and time.monotonic() < end:
            time.sleep(0.05)
        assert pool.num_ready == 2


def test_a_server_that_returns_gets_the_present_weights_before_its_first_request(pool, servers):
    begin(pool)
    first, second = servers
    second.delay_s = 0.05
    first.kill()
    pool.add(0, ask(0))
    must_be_all(collect(pool, 1), 1)
    first.calls.clear()
    first.generated.clear()
    first.start()
    number = 1
    end = time.monotonic() + 10
    while not first.generated and time.monotonic() < end:
        pool.add(number, ask(number))
        pool.add(number + 1, ask(number + 1))
        number += 2
        time.sleep(0.05)
    assert "/finish_weight_update" in first.calls[: first.calls.index("/inference/v1/generate")]
    assert first.version == "run-1"
    rest = collect(pool, number - 1)
    assert sorted(found[0] for found in rest) == [*range(1, number)]


def test_only_the_rank_that_loads_gives_weights(servers):
    for pool in pool_of([servers[0].url], loads=False):
        pool.present(Path("/folder/1"), "run-1")
        with pytest.raises(Gone, match="no server is ready"):
            pool.wait_ready(0.5)
        assert "/update_weights" not in servers[0].calls
        servers[0].version = "run-1"
        pool.wait_ready(5.0)


def test_what_other_weights_sampled_is_sampled_anew(pool, servers):
    """Another run gave the first server its own weights."""
    begin(pool)
    servers[0].version = "other-3"
    for number in range(10):
        pool.add(number, ask(number))
    must_be_all(collect(pool, 10), 10)
    assert pool.num_moved >= 1


def test_a_run_leaves_its_server_to_another_one_that_has_taken_it(servers):
    """With a server of its own it goes on; without one it ends, on ranks that do not load too."""
    urls = [server.url for server in servers]
    of_pool = contextlib.contextmanager(pool_of)
    with of_pool(urls) as pool, of_pool(urls, loads=False) as reader:
        for one in (pool, reader):
            one.present(Path("/folder/1"), "weights_a-000001")
        for one in (pool, reader):
            one.wait_ready(10.0)
        servers[0].version = "weights_b-000007"
        end = time.monotonic() + 30
        while pool.num_ready + reader.num_ready > 2 and time.monotonic() < end:
            time.sleep(0.02)
        for number in range(6):
            pool.add(number, ask(number))
        assert len(collect(pool, 6)) == 6 and servers[0].generated == [] and not pool.are_taken
        assert servers[0].version == "weights_b-000007" and "which another run gave it" in pool.troubles()
        servers[1].version = "loading weights_b-000008"
        while not (pool.are_taken and reader.are_taken) and time.monotonic() < end:
            time.sleep(0.02)
        assert pool.are_taken and reader.are_taken
        pool.present(Path("/folder/2"), "weights_a-000002")
        with pytest.raises(Refused, match=r"it holds weights_b-000007, which another run gave it since"):
            pool.wait_ready(60.0)
        servers[1].version = "default"  # it was started anew
        while pool.num_ready == 0 and time.monotonic() < end:
            time.sleep(0.02)
        assert servers[1].version == "weights_a-000002" and servers[0].version == "weights_b-000007"


def test_a_new_run_replaces_the_weights_of_one_that_has_ended(servers, capsys):
    servers[0].version = "loading weights_b-000007"
    for pool in pool_of([servers[0].url]):
        pool.present(Path("/folder/1"), "weights_a-000001")
        pool.wait_ready(10.0)
        assert servers[0].version == "weights_a-000001"
    assert "it holds loading weights_b-000007 of another run, which this run replaces" in capsys.readouterr().out


def test_while_weights_are_loaded_tokens_have_no_version_of_a_run(pool, servers):
    begin(pool)
    for server in servers:
        assert server.version_at_update == "loading run-1"


def test_weights_that_two_runs_loaded_at_once_are_no_ones(servers):
    """The other run's came after this one's, before they had a name."""
    servers[0].at_finish = lambda: setattr(servers[0], "loaded", "weights_b-000000")
    for pool in pool_of([servers[0].url]):
        pool.present(Path("/folder/1"), "weights_a-000001")
        with pytest.raises(Refused, match=r"given the weights weights_a-000001, and weights_b-000000 at the same time"):
            pool.wait_ready(10.0)
        assert servers[0].version == "loading weights_a-000001"


def test_a_request_that_is_never_answered_goes_to_another_server(servers, caplog):
    """By a server that answers all else: what computes hangs. All that it has ends at the same time."""
    for pool in pool_of([server.url for server in servers], work_s=1.0):
        begin(pool)
        servers[0].hanging_path = "/inference/v1/generate"
        for number in range(6):
            pool.add(number, ask(number))
        must_be_all(collect(pool, 6, most_s=60.0), 6)
        assert pool.num_moved >= 3
    gc.collect()
    assert not caplog.records                                           # of tasks that ended by an error


def test_a_server_whose_load_hangs_is_given_the_weights_again(servers):
    servers[0].hanging_path = "/update_weights"
    for pool in pool_of([server.url for server in servers], work_s=1.0):
        begin(pool, 1)
        assert pool.num_ready == 1
        end = time.monotonic() + 20
        while "/update_weights within 1 s, half of --save.timeout-s" not in pool.troubles() and time.monotonic() < end:
            time.sleep(0.02)
        servers[0].hanging_path = ""
        while pool.num_ready < 2 and time.monotonic() < end:
            time.sleep(0.02)
        assert pool.num_ready == 2 and servers[0].version == "run-1"


WRONG = {
    "token": {"token_ids": [VOCABULARY] * 8, "logprobs": {"content": [{"token_id": VOCABULARY, "logprob": -1.0}] * 8}},
    "token that is true": {"token_ids": [True], "logprobs": {"content": [{"token_id": True, "logprob": -1.0}]},
                           "weight_versions": [{"version": "run-1", "start": 0, "end": 1}]},
    "log-probs": {"logprobs": {"content": [{"token_id": token, "logprob": 0.5} for token in tokens_of(0, 8)]}},
    "no log-probs": {"logprobs": None},
    "versions": {"weight_versions": None},
    "reason": {"finish_reason": "bored"},
    "stop": {"finish_reason": "stop"},
    "nothing": {"token_ids": [], "logprobs": {"content": []}, "weight_versions": []},
    "long": {"token_ids": [9] * 9, "logprobs": {"content": [{"token_id": 9, "logprob": -1.0}] * 9},
             "weight_versions": [{"version": "run-1", "start": 0, "end": 9}]},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_answer_is_never_taken(wrong, pool, servers):
    begin(pool)
    servers[0].says = WRONG[wrong]
    pool.add(0, ask(0))
    pool.add(1, ask(1))
    must_be_all(collect(pool, 2), 2)


@pytest.mark.parametrize("raw", [b"x" * (2 << 20), b"not json", b"[1]"])
def test_an_answer_that_is_none_is_never_taken(raw, pool, servers):
    begin(pool)
    servers[0].raw = raw
    pool.add(0, ask(0))
    pool.add(1, ask(1))
    must_be_all(collect(pool, 2), 2)


def test_a_request_that_no_server_samples_ends_in_a_line(servers, monkeypatch):
    monkeypatch.setattr("common.servers.members.MOST_FAILURES", 2)
    servers[0].says = {"finish_reason": "bored"}
    for pool in pool_of([servers[0].url]):
        begin(pool, 1)
        pool.add(0, ask(0))
        with pytest.raises(ServerError, match=r"failed 2 times.*finish reason 'bored'"):
            collect(pool, 1, most_s=40.0)


def test_aborted_requests_return_what_was_sampled(pool, servers):
    begin(pool)
    for server in servers:
        server.delay_s = 30.0
    for number in range(6):
        pool.add(number, ask(number))
    time.sleep(0.3)
    parts = pool.abort({1, 2, 3, 77})
    assert [number for number, _ in parts] == [1, 2, 3]
    assert all(answer.tokens == tokens_of(n, 8)[:2] and answer.finish_reason == "abort" for n, answer in parts)
    assert pool.open == {0, 4, 5}


def test_an_abort_with_a_server_that_stands_still_loses_only_its_tokens(pool, servers, monkeypatch):
    monkeypatch.setattr("common.servers.members.ABORT_S", 1.0)
    begin(pool)
    for server in servers:
        server.delay_s = 30.0
    for number in range(6):
        pool.add(number, ask(number))
    time.sleep(0.3)
    servers[0].stands_still = True
    parts = pool.abort(set(range(6)))
    assert len(parts) == 3 and not pool.open
    for server in servers:
        server.stands_still = False
        server.delay_s = 0.0
    pool.add(0, ask(0))
    must_be_all(collect(pool, 1), 1)


PROBLEMS = {
    "dtype": ({"dtype": "bfloat16"}, "its dtype is bfloat16, must be --policy.compute-dtype float32"),
    "log-probs": ({"logprobs_mode": "raw_logprobs"}, "start it with --logprobs-mode processed_logprobs"),
    "no folder": ({"transfer": "nccl"}, "start it with --worker-extension-cls tools.vllm_worker.Extension"),
    "length": ({"max_model_len": 63}, "at most 63 tokens, must be 64"),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_server_that_cannot_be_used_is_refused_at_once(problem, servers):
    changed, said = PROBLEMS[problem]
    servers[0].model |= changed
    for pool in pool_of([servers[0].url]):
        with pytest.raises(Refused, match=said):
            pool.wait_ready(10.0)


def test_another_model_is_refused(servers):
    servers[0].sizes["vocab_size"] = 101
    for pool in pool_of([servers[0].url]):
        with pytest.raises(Refused, match="vocab_size 101, --model has 100"):
            pool.wait_ready(10.0)


def test_weights_that_a_server_does_not_take_end_in_its_words(pool, servers):
    for server in servers:
        server.load_error = "checksums differ in 3 tensors"
    pool.present(Path("/folder/1"), "run-1")
    with pytest.raises(Refused, match="checksums differ in 3 tensors"):
        pool.wait_ready(10.0)


def test_weights_that_are_refused_do_not_stand_for_the_next_ones(pool, servers):
    for server in servers:
        server.load_error = "checksums differ in 3 tensors"
    pool.present(Path("/folder/1"), "run-0")
    with pytest.raises(Refused):
        pool.wait_ready(10.0)
    for server in servers:
        server.load_error = ""
    begin(pool)


@pytest.mark.parametrize("answer", [{"choices": 3}, {"choices": [{"token_ids": 3, "logprobs": 4}]}, None, [[]]])
def test_an_answer_of_another_form_is_never_taken(answer, pool, servers):
    begin(pool)
    servers[0].raw = json.dumps(answer).encode()
    pool.add(0, ask(0))
    pool.add(1, ask(1))
    must_be_all(collect(pool, 2), 2)


def test_a_fault_of_the_other_thread_is_raised_in_the_trainers(servers, monkeypatch):
    async def faulty(self, server):
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("common.servers.members.Members._check", faulty)
    for pool in pool_of([servers[0].url]):
        with pytest.raises(ZeroDivisionError, match="a fault"):
            collect(pool, 1, most_s=5.0)


def test_a_server_joins_by_a_line_in_a_file(servers, tmp_path):
    path = tmp_path / "servers.txt"
    path.write_text(f"{servers[0].url}/\n")
    pool = Pool(lambda: read_addresses([str(path)], ""), "", Limits(TIMEOUT_S, 3600.0), NEEDS, 64, True)
    try:
        begin(pool, 1)
        path.write_text(f"{servers[0].url}\nhttp://10.1.1.1:80\n")  # no key: refused, and the first one stays
        time.sleep(1.5)
        assert pool.num_ready == 1
        path.write_text(f"{servers[0].url}\n{servers[1].url}\n")
        end = time.monotonic() + 10
        while pool.num_ready < 2 and time.monotonic() < end:
            time.sleep(0.05)
        assert pool.num_ready == 2 and servers[1].version == "run-1"
        path.write_text(f"{servers[1].url}\n")
        time.sleep(1.5)
        for number in range(4):
            pool.add(number, ask(number))
        must_be_all(collect(pool, 4), 4)
        assert servers[0].generated == []
    finally:
        pool.close()


REFUSED = {
    "none": ([], {}, "--rollout.engine server needs --rollout.servers"),
    "other machine": (["http://10.0.0.1:1"], {}, "is another machine.*--rollout.server-auth-env"),
    "password": (["http://me:secret@127.0.0.1:1"], {}, "no password"),
    "scheme": (["ftp://127.0.0.1:1"], {}, "must be http://host:port"),
    "file": (["/nothing/here"], {}, "No such file"),
    "timeout": (["http://127.0.0.1:1"], {"server_timeout_s": 0.0}, "--rollout.server-timeout-s 0 must be above 0"),
    "key": (["http://127.0.0.1:1"], {"server_auth_env": "NOT_SET_ANYWHERE"}, "this environment variable is not set"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_flags_that_cannot_work_are_refused(case):
    urls, others, said = REFUSED[case]
    config = RolloutConfig(servers=tuple(urls), **{"engine": "server"} | others)
    with pytest.raises(ValueError, match=said) as refused:
        check_servers(config, config.engine)
    assert "secret" not in str(refused.value)


def test_servers_on_other_machines_need_a_folder_that_they_see(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "k")
    config = RolloutConfig(engine="server", servers=("http://10.0.0.1:1",), server_auth_env="SOME_KEY")
    with pytest.raises(ValueError, match=r"--rollout.server-weights must name a folder"):
        check_servers(config, config.engine)


def engine_setup(servers, world, tiny_llama) -> EngineSetup:
    config = AutoConfig.from_pretrained(tiny_llama)
    for server in servers:
        server.sizes = {name: getattr(config, name) for name in SIZES}
    rollout = RolloutConfig(engine="server", servers=tuple(server.url for server in servers), max_response_length=8,
                            server_timeout_s=TIMEOUT_S, max_probe_diff=0.0)
    brief = replace(world, timeout=timedelta(seconds=300 + 3))  # as --save.timeout-s 3
    for server in servers:
        server.model["dtype"] = "bfloat16"
    return EngineSetup(tiny_llama, config, rollout, ModelConfig(compute_dtype="bfloat16"), brief, [[1, 2, 3]], [2], 64,
                       0)


@pytest.fixture
def engine(servers, world, tiny_llama):
    engine = make_engine(engine_setup(servers, world, tiny_llama))
    yield engine
    engine.close()


def requests(count: int) -> list[Request]:
    return [Request(Prompt([5, 6, 7], "", "", {}, []), seed) for seed in range(count)]


def test_the_engine_writes_weights_whose_checksums_are_theirs(engine, servers, world, tiny_llama):
    policy = random_policy(AutoConfig.from_pretrained(tiny_llama), world)
    metrics = engine.wake(policy)
    assert metrics["sync/num_checksums"] == 3                       # of the told servers
    folder = engine.weights.folder
    run, version, sums = read_checksums(folder)
    written = {}
    for file in folder.glob("*.safetensors"):
        written |= load_file(file)
    expected = {name: tensor.bfloat16() for name, tensor in policy.full_tensors(None)}
    assert written.keys() == expected.keys() == sums.keys() and version == 0
    for name, tensor in expected.items():
        assert written[name].equal(tensor)
        bits = tensor.reshape(-1).view(torch.int16).to(torch.int64)
        assert sums[name] == (bits.sum().item(), tensor.numel())
    assert all(server.version == f"{run}-000000" for server in servers)
    engine.sleep()
    engine.wake(policy)
    assert [path.name for path in folder.parent.iterdir()] == ["000001"]
    responses = engine.complete(requests(6), SamplingConfig(1.0, 8))
    assert [response.tokens for response in responses] == [tokens_of(seed, 8) for seed in range(6)]
    assert all(response.finish_reason == "length" for response in responses)
    assert engine.measured()["servers/ready"] == 2


def test_without_a_server_left_a_rollout_ends_in_a_line(engine, servers, world, tiny_llama):
    engine.wake(random_policy(AutoConfig.from_pretrained(tiny_llama), world))
    for server in servers:
        server.delay_s = 1.0
    killer = threading.Timer(0.3, lambda: [server.kill() for server in servers])
    killer.start()
    with pytest.raises(RuntimeError, match=r"no server is left for 3 s \(--save.timeout-s\): server http"):
        engine.complete(requests(6), SamplingConfig(1.0, 8))
    killer.join()


def test_a_rollout_whose_servers_another_run_takes_ends_at_once(engine, servers, world, tiny_llama):
    engine.limit_s = 3600.0
    engine.wake(random_policy(AutoConfig.from_pretrained(tiny_llama), world))
    for server in servers:
        server.delay_s = 60.0
    taker = threading.Timer(0.3, lambda: [setattr(server, "version", "weights_b-000001") for server in servers])
    taker.start()
    with pytest.raises(RuntimeError, match=r"holds weights_b-000001, which another run gave it since: two runs cannot"):
        engine.complete(requests(6), SamplingConfig(1.0, 8))
    taker.join()


def test_a_sync_without_a_server_ends_in_a_line(engine, servers, world, tiny_llama):
    for server in servers:
        server.kill()
    with pytest.raises(RuntimeError, match=r"weight sync: no server is ready after 3 s: server http"):
        engine.wake(random_policy(AutoConfig.from_pretrained(tiny_llama), world))


def test_what_ends_while_it_is_aborted_is_not_continued(engine, servers, world, tiny_llama, monkeypatch):
    """`complete` keeps its reason; an episode, which continues all that is aborted, samples its last token again."""
    engine.wake(random_policy(AutoConfig.from_pretrained(tiny_llama), world))
    ended = Answer([10, 11, 2], [-1.0] * 3, "stop", ["run-1"] * 3)
    monkeypatch.setattr(engine.pool, "abort", lambda numbers: [(0, ended)])
    monkeypatch.setattr(engine.pool, "take", lambda wait_s: [])
    [response] = engine.complete(requests(1), SamplingConfig(1.0, 8), until=Until(iter([False, True]).__next__))
    assert (response.tokens, response.finish_reason) == ([10, 11, 2], "stop")
    engine.config = replace(engine.config, episode="some.py:episode")
    [(_, part)] = engine.abort({0})
    assert (part.tokens, part.finish_reason) == ([10, 11], "")
    engine.pool.open.clear()


def test_a_run_goes_on_with_the_server_that_is_left(servers, tiny_llama, small_train, tmp_path):
    """The script as users start it. Each response is the told one of its seed: none is lost, and none is counted
    twice."""
    config = AutoConfig.from_pretrained(tiny_llama)
    for server in servers:
        server.sizes = {name: getattr(config, name) for name in SIZES}
        server.model["max_model_len"] = 1024
        server.delay_s = 0.3

    def kill_in_second_step():
        while len(servers[0].generated) + len(servers[1].generated) < 8 + 5 and not ended.is_set():
            time.sleep(0.01)
        servers[0].kill()

    ended = threading.Event()
    killer = threading.Thread(target=kill_in_second_step)
    killer.start()
    try:
        launch("grpo.py", "--model", tiny_llama, "--train-data", small_train, "--policy.compute-dtype", "float32",
               "--prompts-per-step", "2", "--samples-per-prompt", "4", "--data.max-prompt-length", "200",
               "--rollout.max-response-length", "8", "--reward.function", f"{try_script.__file__}:compute_score",
               "--reward.num-workers", "0", "--save.every", "0", "--save.hf", "never", "--log.rollouts-every", "1",
               "--total-steps", "3", "--rollout.max-probe-diff", "0", "--rollout.engine", "server",
               "--rollout.servers", *[server.url for server in servers], "--run-dir", tmp_path, warm=True)
    finally:
        ended.set()
        killer.join()
    lines = metrics_of(tmp_path)
    assert [line["servers/ready"] for line in lines] == [2, 1, 1] and lines[-1]["servers/moved"] >= 1
    expected = {tuple(tokens_of(seed, 8)) for server in servers for seed in server.generated}
    for step in range(3):
        rows = pq.read_table(tmp_path / f"rollouts/step_{step + 1:06d}.parquet").to_pylist()
        assert len(rows) == 8 and all(tuple(row["tokens"]) in expected for row in rows)
        seeds = {seed_of(0, step, group, k) for group in range(2) for k in range(4)}
        assert sorted(row["tokens"] for row in rows) == sorted(tokens_of(seed, 8) for seed in seeds)
