"""Weights from trainers to samplers (async_grpo.py) over gloo: bytes per second, as a share of bare broadcasts.

    python -m tests.bench.bridge --trainers 2 --samplers 2

Each round times one sync of a sharded model (gathered by the trainers, checksums included; the samplers only keep the
tensors), then broadcasts of the same tensors and of the same bytes in pieces of 64 MiB in the same process group.
`--table` prints arithmetic for H100s instead: nothing is measured.
"""

import os
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import torch
import tyro

from common.engine import remote
from common.engine.base import Engine
from common.model.loading import load_policy
from common.model.policy import ModelConfig
from common.parallel import ranks
from common.sync.checksums import as_numbers, checksum
from tests.conftest import MODEL

PIECE = 1 << 26


@dataclass
class BridgeBench:
    """Sizes."""

    trainers: int = 2
    samplers: int = 2
    rounds: int = 5
    table: bool = False


class Keep(Engine):
    """Receives weights and keeps them."""

    def __init__(self, world, dtype):
        self.world, self.dtype, self.name_of = world, dtype, lambda name: name
        self.config = SimpleNamespace(tp=1)

    def _load(self, tensors, sent):
        held = as_numbers({name: checksum(x, self.dtype) for name, x in tensors})
        expected = as_numbers(sent)
        return len(held), {name for name, number in held.items() if number != expected[name]}

    def _sample_probe(self):
        return SimpleNamespace(to=lambda device: None)


def work(bench: BridgeBench) -> None:
    torch.set_num_threads(1)
    os.environ[ranks.SAMPLERS] = str(bench.samplers)
    world = ranks.init()
    bridge, dtype = remote.Bridge(world), torch.bfloat16
    if world.trains:
        policy = load_policy(str(MODEL), ModelConfig(), world)
        engine = remote.RemoteEngine.__new__(remote.RemoteEngine)
        engine.world, engine.bridge, engine.dtype, engine.policy = world, bridge, dtype, policy
        engine.name_of = lambda name: name
        sizes = [(x.shape, x.dtype) for x in policy.described(dtype).values()]
        bridge.send(("sizes", sizes))
    else:
        engine, sizes = Keep(world, dtype), bridge.receive()[1]
    num_bytes = sum(shape.numel() * kind.itemsize for shape, kind in sizes)
    rates: dict[str, list[float]] = {"sync": [], "gather alone": [], "same tensors": [], "64 MiB pieces": []}
    member = world.is_main or world.samples

    def timed(name, act):
        if member:
            bridge.group.barrier().wait()
        start = time.perf_counter()
        act()
        if member:
            bridge.group.barrier().wait()
        rates[name].append(num_bytes / (time.perf_counter() - start) / 1e6)

    def sync():
        if world.trains:
            engine._sync(policy)
            return
        _, asked = bridge.receive()
        bridge.send(remote.receive_weights(engine, bridge, asked))

    def gather():
        if world.trains:
            for _ in policy.full_tensors(dtype):
                pass

    whole = [torch.zeros(shape, dtype=kind) for shape, kind in sizes] if member else []
    pieces = torch.zeros(num_bytes, dtype=torch.uint8).split(PIECE) if member else []
    for _ in range(bench.rounds):
        timed("sync", sync)
        timed("gather alone", gather)
        timed("same tensors", lambda: [bridge.group.broadcast(x, 0).wait() for x in whole])
        timed("64 MiB pieces", lambda: [bridge.group.broadcast(x, 0).wait() for x in pieces])
    if world.is_main:
        print(f"{num_bytes / 1e6:.0f} MB, {len(sizes)} tensors, {bench.trainers} + {bench.samplers} processes, MB/s, "
              f"median (smallest to largest) of {bench.rounds}")
        for name, found in rates.items():
            print(f"{name:15} {statistics.median(found):6.0f} ({min(found):.0f} to {max(found):.0f})")
        of = [a / b for a, b in zip(rates["sync"], rates["64 MiB pieces"])]
        print(f"sync as a share of bare broadcasts in pieces, round by round: {' '.join(f'{x:.2f}' for x in of)}")


CARD, NVLINK, PER_NODE = 40e9, 360e9, 8  # bytes/s of a network card and of a GPU's links in its node; GPUs and cards
# layers, hidden size, heads x head size, keys and values, MLP's width, experts (1: dense), vocabulary (head untied)
MODELS = {"7B": (28, 3584, 3584, 1024, 18944, 1, 152064), "70B": (80, 8192, 8192, 2048, 28672, 1, 128256),
          "235B-A22B": (94, 4096, 8192, 1024, 1536, 128, 151936)}


def table() -> None:
    """What `RemoteEngine._load` and `receive_weights` move and hold, in bfloat16."""
    print("| model | trainers + samplers | whole model | gather: network, NVLink | broadcast | both | "
          "share of a card's bytes/s | most on a rank |\n| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, (layers, hidden, queries, kv, width, experts, vocab) in MODELS.items():
        mlp = [2 * experts * width * hidden, experts * width * hidden] if experts > 1 else [width * hidden] * 3
        layer = [queries * hidden, kv // 2 * hidden, kv // 2 * hidden, queries * hidden, *mlp, hidden, hidden]
        tensors = [2 * n for n in (vocab * hidden, *(layer * layers), hidden, vocab * hidden)]
        whole = sum(tensors)
        two = max(map(sum, pairwise(tensors)))
        for ranks_a_side in (8, 64):
            nodes = ranks_a_side // PER_NODE
            network, nvlink = whole * (nodes - 1) / nodes / PER_NODE / CARD, whole / NVLINK
            seconds = max(network, nvlink) + whole / CARD
            print(f"| {name} | {ranks_a_side} + {ranks_a_side} | {whole / 1e9:.0f} GB "
                  f"| {network:.2f} s, {nvlink:.2f} s | {whole / CARD:.2f} s | {seconds:.2f} s "
                  f"| {whole / seconds / CARD:.0%} | {two / 1e9:.1f} GB |")


def main(bench: BridgeBench) -> None:
    if bench.table:
        return table()
    if "RANK" in os.environ:
        return work(bench)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    size = bench.trainers + bench.samplers
    group = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ours = [os.environ | {k: str(v) for k, v in (group | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            for rank in range(size)]
    processes = [subprocess.Popen([sys.executable, "-m", "tests.bench.bridge", *sys.argv[1:]], env=env)
                 for env in ours]
    sys.exit(max(process.wait() for process in processes))


if __name__ == "__main__":
    main(tyro.cli(BridgeBench, description=__doc__))
