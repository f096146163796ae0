"""What a token costs over HTTP: `python -m tests.bench.bench_servers`. A server of vLLM and vLLM in process sample the
same responses of one model in turns: seconds of a rollout, CPU milliseconds a token of this process and of
the server, medians of rounds; and the seconds of a sync.
"""

import contextlib
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro
from transformers import AutoConfig

from common.engine.base import Engine, EngineSetup, Request, RolloutConfig, SamplingConfig
from common.engine.make import make_engine
from common.model.policy import ModelConfig
from common.parallel import ranks
from common.prompts import Prompt
from tests.bench.record import report
from tests.engine.servers import VLLMServer, make_model
from tests.gpu.check_engine import random_policy


@dataclass
class Args:
    model: str = ""
    """Default: a tiny one, which shows the cost beside the model."""
    responses: tuple[int, ...] = (64, 512)
    tokens: int = 64
    """Of each response."""
    prompt: int = 128
    """Tokens of a prompt; each has 8 responses."""
    rounds: int = 3
    """After one to warm up."""
    max_num_seqs: int = 256


def cpu_seconds(process: psutil.Process) -> float:
    """Of a process and those that it started."""
    total = 0.0
    for one in [process, *process.children(recursive=True)]:
        times = one.cpu_times()
        total += times.user + times.system
    return total


def measure(args: Args, engine: Engine, num_responses: int, seed: int, server: psutil.Process) -> dict[str, float]:
    requests = []
    for i in range(num_responses):
        tokens = [5 + (7 * (i // 8) + j) % 4000 for j in range(args.prompt)]
        requests.append(Request(Prompt(tokens, "", "", {}, []), seed * num_responses + i))
    own = psutil.Process()
    before = sum(own.cpu_times()[:2]), cpu_seconds(server)
    start = time.perf_counter()
    responses = engine.complete(requests, SamplingConfig(1.0, args.tokens))
    seconds = time.perf_counter() - start
    num_tokens = sum(len(response.tokens) for response in responses)
    return {
        "seconds": seconds,
        "own_cpu_ms": 1e3 * (sum(own.cpu_times()[:2]) - before[0]) / num_tokens,
        "server_cpu_ms": 1e3 * (cpu_seconds(server) - before[1]) / num_tokens,
        "tokens": num_tokens,
    }


def main(args: Args) -> None:
    world = ranks.init()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as closing:
        model = args.model or make_model(Path(folder) / "model")
        server = VLLMServer(model, Path(folder) / "log", max_num_seqs=str(args.max_num_seqs)).start()
        closing.callback(server.kill)
        server.wait()
        hf_config = AutoConfig.from_pretrained(model)
        policy = random_policy(hf_config, world)
        policy.version += 1
        engines = {}
        syncs = {}
        for name in ("vllm", "server"):
            servers = (server.url,) if name == "server" else ()
            config = RolloutConfig(engine=name, servers=servers, max_response_length=args.tokens,
                                   max_num_seqs=args.max_num_seqs, kv_cache_gb=1.0)
            length = args.prompt + args.tokens
            engines[name] = make_engine(EngineSetup(
                model, hf_config, config, ModelConfig(compute_dtype="float32"), world, [[1, 2, 3]], [2], length, 0
            ))
            engines[name].wake(policy)
            start = time.perf_counter()
            engines[name].sleep()
            engines[name].wake(policy)
            syncs[name] = time.perf_counter() - start
        process = psutil.Process(server.process.pid)
        rows: dict = {}
        for num_responses in args.responses:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
            for seed in range(args.rounds + 1):
                for name, engine in engines.items():
                    found[name].append(measure(args, engine, num_responses, seed, process))
            for name, rounds in found.items():
                rows[f"{num_responses} {name}"] = {
                    key: statistics.median(row[key] for row in rounds[1:]) for key in rounds[0]
                }
        for engine in engines.values():
            engine.close()
    report("servers", model=args.model or "tiny", sync_s=syncs, rows=rows)
    ranks.shutdown()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
