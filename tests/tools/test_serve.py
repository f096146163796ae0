"""tools.serve: what it starts, says and stops. Most tests have a server in the engine's place that writes down how it
was started; the last one has vLLM."""

import asyncio
import json
import os
import signal
import socket
import sys
import time
import urllib.request
from itertools import pairwise

import pytest

from common.flags.rollout import SamplingConfig
from common.servers.client import Client, Limits, Refused
from common.servers.dialect import Ask, Needs, check_answer
from common.servers.vllm import VLLM
from tests.conftest import VOCAB
from tests.engine.served import KEY, KEY_NAME, Served
from tests.engine.test_vllm_server import folder  # noqa: F401  # a fixture
from tools import serve

STAND_IN = '''#!{python}
import http.server, json, os, sys
flags = sys.argv[1:]
port = int(flags[flags.index("--port") + 1])
config = flags[flags.index("--config") + 1] if "--config" in flags else ""
text = open(config).read() if config else ""
json.dump([flags, dict(os.environ), text], open(f"{folder}/{{port}}.json", "w"))
if os.path.exists(f"{folder}/fails"):
    sys.exit("it cannot start")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/end":
            os._exit(7)
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
'''


@pytest.fixture
def engine(tmp_path):
    """Path of a Python that starts the stand-in, whatever module it is told to run."""
    path = tmp_path / "engine"
    path.write_text(STAND_IN.format(python=sys.executable, folder=tmp_path))
    path.chmod(0o755)
    return str(path)


def started(folder, port: int):  # noqa: F811
    return json.loads((folder / f"{port}.json").read_text())


def wait_until(condition, most_s: float = 30.0) -> None:
    end = time.monotonic() + most_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_vllm_on_gpus(engine, tmp_path, monkeypatch):
    """Two servers of two of the GPUs each; the key is in no flag and no file."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,4,5,7,9")
    addresses = tmp_path / "addresses"
    flags = ("--python", engine, "--gpus", "4", "--tp", "2", "--max-length", "300", "--auth-env", KEY_NAME,
             "--addresses", str(addresses), "--gpu-memory-utilization", "0.8")
    served = Served("vllm", "some/model", tmp_path, flags, count=2)
    served.command.remove("--servers")
    served.command.remove("2")
    with served:
        ports = [int(url.rpartition(":")[2]) for url in served.urls]
        for port, gpus in zip(ports, ("1,4", "5,7")):
            command, environment, _ = started(tmp_path, port)
            assert environment["CUDA_VISIBLE_DEVICES"] == gpus and environment["VLLM_SERVER_DEV_MODE"] == "1"
            assert command[-2:] == ["--gpu-memory-utilization", "0.8"] and KEY not in " ".join(command)
            given = dict(pairwise(command))
            assert given["--logprobs-mode"] == "processed_logprobs" and given["--max-model-len"] == "300"
            assert given["--tensor-parallel-size"] == "2" and given["--host"] == "127.0.0.1"
            assert given["--dtype"] == "bfloat16" and given["--middleware"] == "common.servers.guard.Guard"
            assert "--enforce-eager" not in command and environment[serve.KEY] == KEY
        said = served.said.read_text().splitlines()
        assert said == [f"--rollout.engine server --rollout.servers {addresses} --rollout.server-auth-env {KEY_NAME}"]
        assert addresses.read_text().splitlines() == served.urls
        processes = [pid for pids in served.pids().values() for pid in pids]
        assert len(processes) == 2
    assert addresses.read_text() == "" and not [pid for pid in processes if os.path.exists(f"/proc/{pid}")]


def test_sglang_on_a_cpu(engine, tmp_path):
    """SGLang takes the key as a flag only, or in a file, which is gone when the server answers."""
    flags = ("--python", engine, "--max-length", "300", "--dtype", "float32", "--auth-env", KEY_NAME, "--seeds")
    with Served("sglang", "some/model", tmp_path, flags) as served:
        command, environment, config = started(tmp_path, int(served.urls[0].rpartition(":")[2]))
        given = dict(pairwise(command))
        assert given["--context-length"] == "306" and given["--device"] == "cpu" and given["--dtype"] == "float32"
        assert "--enable-deterministic-inference" in command and environment["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"
        assert config == f'api-key: "{KEY}"\n' and KEY not in " ".join(command)
        assert not os.path.exists(given["--config"])


def test_a_server_that_ends_is_said_and_started_again(engine, tmp_path):
    addresses = tmp_path / "addresses"
    flags = ("--python", engine, "--addresses", str(addresses), "--restart")
    with Served("vllm", "some/model", tmp_path, flags, count=2) as served:
        first = {url: pids[0] for url, pids in served.pids().items()}
        with pytest.raises(OSError, match=r"."):
            urllib.request.urlopen(f"{served.urls[1]}/end", timeout=10)
        wait_until(lambda: "has ended with code 7" in served.said.read_text())
        wait_until(lambda: addresses.read_text().splitlines() == served.urls and len(served.pids()) == 2)
        now = {pids[0] for pids in served.pids().values()}
        assert len(now & set(first.values())) == 1


@pytest.mark.parametrize(("flags", "starts"), [((), 1), (("--restart",), 3)])
def test_no_server_left_is_the_end(flags, starts, engine, tmp_path):
    (tmp_path / "fails").touch()
    served = Served("vllm", "some/model", tmp_path, ("--python", engine, *flags), count=2)
    (tmp_path / "logs").mkdir()
    for url in served.urls:  # as an earlier start left it
        (tmp_path / f"logs/{url.rpartition(':')[2]}.log").write_text("an older error\n")
    served.start()
    assert served.process.wait(30) == 1
    said = served.said.read_text()
    assert "an older error" not in said
    assert said.count("has ended with code 1") == 2 * starts
    assert "it cannot start" in said and "no server is left" in said


REFUSED = {
    "servers on GPUs": ("--gpus 2 --servers 2", "leave it out"),
    "tp": ("--gpus 3 --tp 2", "--gpus 3 must be a multiple of --tp 2"),
    "tp on a CPU": ("--tp 2", "--tp 2 needs --gpus"),
    "more than there are": ("--gpus 4", "CUDA_VISIBLE_DEVICES names 3"),
    "port": ("--port 65535 --servers 2", "the ports 65535 to 65536"),
    "no key": ("--auth-env NOT_SET_ANYWHERE", "this environment variable is not set"),
    "host": ("--host 0.0.0.0", "with --auth-env"),
    "seeds": ("--seeds", "--engine sglang"),
    "length": ("--max-length 1", "must be positive"),
    "python": ("--python /nowhere/python", "--python /nowhere/python is no program"),
    "model": ("--model /nowhere/model", "--model /nowhere/model is no folder here"),
    "address": ("--host 192.0.2.1 --auth-env PATH", "--host 192.0.2.1 --port 8000: Cannot assign requested address;"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_flags_that_cannot_work_are_refused(case, monkeypatch, capsys):
    flags, said = REFUSED[case]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setattr(sys, "argv", ["serve", "--model", "m", *flags.split()])
    with pytest.raises(SystemExit) as ended:
        serve.main()
    errors = capsys.readouterr().err
    assert ended.value.code == 2 and said in errors and errors.count("\n") == 1


def test_a_port_that_another_server_has_is_refused(monkeypatch, capsys):
    """Whose answers would else count as those of the server that is being started."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["serve", "--model", "m", "--servers", "2", "--port", str(port - 1)])
        with pytest.raises(SystemExit) as ended:
            serve.main()
    assert ended.value.code == 2
    assert f"--port {port}: Address already in use; the servers here would have the ports" in capsys.readouterr().err


def test_the_cpu_is_not_taken_by_mistake_where_there_are_gpus(monkeypatch, tmp_path, capsys):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(serve, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(sys, "argv", ["serve", "--model", "m"])
    with pytest.raises(SystemExit):
        serve.main()
    assert "--gpus 0 serves on the CPU, and this machine has 2 GPUs: set --gpus" in capsys.readouterr().err


@pytest.mark.engine
@pytest.mark.sweep
def test_vllm_itself_is_ready_for_training(folder, tmp_path):  # noqa: F811
    flags = ("--dtype", "float32", "--max-length", "300", "--auth-env", KEY_NAME)
    needs = Needs("float32", 300, {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2})
    ask = Ask("a", [5, 6, 7], 1, SamplingConfig(1.0, 8), [2])

    async def work(url):
        client, stranger = Client(url, KEY, Limits(60.0, 600.0)), Client(url, "", Limits(60.0, 600.0))
        try:
            assert await VLLM.is_spoken(client) and await VLLM.problems(client, needs) == []
            check_answer(client, ask, await VLLM.generate(client, ask), VOCAB)
            for path in ("/update_weights", "/collective_rpc", "/pause", "/inference/v1/generate"):
                with pytest.raises(Refused, match="status 401"):
                    await stranger.call(path, {})
        finally:
            await client.close()
            await stranger.close()

    with Served("vllm", folder, tmp_path, flags) as served:
        asyncio.run(work(served.urls[0]))
        served.process.send_signal(signal.SIGTERM)
        served.process.wait(60)
    for log in (tmp_path / "logs").iterdir():
        assert KEY not in log.read_text() and log.stat().st_mode & 0o77 == 0
