"""What each thing that happens once a step costs the host of one rank, from 10 to 1,024 ranks and from 320 to 32,000
tokens a response:

    python -m tests.bench.bench_growth [--picture tests/evidence/scale.png]

One process is rank 0 of a job whose other ranks are not there: torch's fake process group answers collectives at once,
and what the others would send is made up from this rank's own. So the CPU seconds are of the host's own work on this
rank's share and on the numbers of all responses; nothing is said of GPUs. An exponent is that of a power law through
the three sizes. What happens once in a run is measured too: the reading of data files and of a model's files, where
rank 0 reads its shards from a file that is in no cache, and the pages that are in the cache afterwards are counted.
Collectives are timed by themselves, between processes with gloo on this machine, with the volumes of 1,024 ranks.
"""

import ctypes
import gc
import mmap
import multiprocessing
import os
import pickle
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
import tyro
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoTokenizer, Qwen2Config

from common import losses
from common.curriculum.sampler import PromptSampler
from common.dataset.store import PromptSet, load_prompts
from common.metrics import Meter
from common.model import loading
from common.model.flops import sequence_cost
from common.model.policy import ModelConfig
from common.packing import Sequences, plan_step
from common.parallel import exchange
from common.parallel.ranks import World, all_gather_objects, all_sum, seed_of
from common.prompts import DataConfig, Prompt
from common.rollout import Minibatch, Rollout, Sample
from common.rollouts.gather import gather_rollout
from common.rollouts.record import token_texts
from common.rollouts.scoring import responses_to_state
from common.segments import group_mean, group_std
from common.tracking.health import HealthCheck
from common.tracking.step import rollout_metrics
from envs.runtime.response import Response
from envs.stored import split, unpack
from rewards.runtime.pool import RewardPool
from tests.bench.bench_data import make_file
from tests.bench.bench_many_ranks import own_files
from tests.bench.bench_packing import QWEN_7B
from tests.bench.record import ROOT, report

GROUP, PROMPT, SHARE, BUDGET = 8, 200, 32, 16384    # samples a prompt, tokens of it, responses a rank, of a micro-batch
MODEL = ROOT / "models/SmolLM2-135M-Instruct"
TENSORS_70B = 723 * 3                                   # weights and moments
STEP_S, LIMIT = 60.0, 0.02
WORKERS = 4                                             # of a rank's pool, as --reward.num-workers
ROLLOUT, BATCH, SYNC, START = "sampling and rewards", "batch and plan", "sync, records, checkpoints", "start of a run"


@dataclass
class Args:
    ranks: tuple[int, int, int] = (10, 102, 1024)
    """Ranks, with 32 responses each."""
    tokens: tuple[int, int, int] = (320, 3200, 32000)
    """Of a response."""
    file_ranks: tuple[int, int, int] = (1, 10, 100)
    """Ranks that write a checkpoint's files."""
    rows: tuple[int, ...] = (10_000, 1_000_000)
    """Of a parquet file that one process of a node reads and tokenises."""
    responses: tuple[int, ...] = (32, 256, 2048)
    """Scored by one pool, 3,200 tokens each."""
    gloo_ranks: tuple[int, ...] = (2, 4, 8)
    """Processes that exchange, on this machine."""
    picture: str = ""
    """A file for the picture of the seconds."""


@dataclass
class Made:
    """What all jobs use."""

    tokenizer: Any
    written: list[int]                                  # tokens, from which responses are cut
    prompts: PromptSet
    pool: RewardPool


class Job:
    """Rank 0 of `num_ranks`, with 32 responses of `length` tokens."""

    def __init__(self, num_ranks: int, length: int, made: "Made"):
        self.num_ranks, self.length, self.tokenizer, self.made = num_ranks, length, made.tokenizer, made
        self.num_responses = SHARE * num_ranks
        rng = np.random.default_rng(0)
        prompt = Prompt(rng.integers(40_000, size=PROMPT).tolist(), "", "1", {}, [])
        written = made.written
        self.samples = []
        for number in range(SHARE):
            group = number // GROUP * num_ranks                                 # the engine's prompts: 0, ranks, ...
            first = int(rng.integers(len(written) - length))
            response = Response(written[first : first + length], [-0.5] * length, "stop")
            self.samples.append(Sample(group * GROUP + number % GROUP, group, 0, prompt, response, score=number % 2))
        self.rng = rng

    def others(self, values: Any, *_: Any) -> torch.Tensor:
        """In the place of `all_sum`: what the other ranks would add, made of this rank's own."""
        values = torch.as_tensor(values, dtype=torch.float64)
        if values.dim() == 1:
            return values * self.num_ranks
        missing = values[:, 0] == 0
        values[missing] = values[~missing][torch.arange(int(missing.sum())) % int((~missing).sum())]
        return values

    def things(self) -> Iterator[tuple[str, str, Callable[[], Any]]]:
        """(part of a step, name, what is done once a step), in the order of a step; later ones use what earlier ones
        made."""
        lengths = np.minimum(self.rng.lognormal(np.log(self.length), 0.7, self.num_responses), 4 * self.length)
        lengths = PROMPT + lengths.astype(np.int64)
        group = torch.arange(self.num_responses) // GROUP
        scores = torch.rand(self.num_responses, dtype=torch.float64)
        made: dict[str, Any] = {}

        def scoring() -> None:
            for sample in self.samples:
                sample.text = self.tokenizer.decode(sample.response.tokens, skip_special_tokens=True)

        sampler = PromptSampler(len(self.made.prompts), "hash", seed=0)

        def rows() -> list[Prompt]:
            taken = sampler.take(self.num_responses // GROUP)                   # all ranks know the rows of a step
            return [self.made.prompts[row] for row in taken[:: self.num_ranks]]

        def rewards() -> list[float]:
            for number, sample in enumerate(self.samples):
                self.made.pool.submit(number, "openai/gsm8k", sample.text, "1", {"index": number})
            return self.made.pool.results().scores

        def numbers() -> Rollout:
            made["rollout"] = gather_rollout(self.samples)
            return made["rollout"]

        def minibatch() -> Minibatch:
            parts = np.array_split(made["batch"].number.numpy(), 8)
            of_others = torch.zeros(self.num_responses, dtype=torch.float64)
            made["minibatch"] = Minibatch([made["batch"].microbatch(part) for part in parts], of_others)
            return made["minibatch"]

        def batch() -> Any:
            made["batch"] = made["rollout"].batch
            return made["batch"]

        def meter() -> dict[str, float]:
            found = Meter()
            for microbatch in made["minibatch"]:
                for name in range(30):
                    found.mean(f"actor/{name}", microbatch.rollout_logp, microbatch.mask)
            return found.reduce() | rollout_metrics(made["rollout"], 1.0, 1.0, PROMPT, self.length)

        yield ROLLOUT, "data: rows of a step", rows
        yield ROLLOUT, "sampling: seeds of the requests", lambda: [
            seed_of(0, 1, s.group, k) for k, s in enumerate(self.samples)]
        yield ROLLOUT, "scoring: text of the responses", scoring
        yield ROLLOUT, "rewards: to the workers and back", rewards
        yield ROLLOUT, "numbers of all responses", numbers
        yield ROLLOUT, "advantages", lambda: (scores - group_mean(scores, group)) / group_std(scores, group)
        yield BATCH, "batch of this rank's responses", batch
        yield BATCH, "plan", lambda: plan_step(
            Sequences(lengths, sequence_cost(lengths, Qwen2Config(**QWEN_7B))), 1, self.num_ranks, BUDGET, 0)
        yield BATCH, "exchange", lambda: exchange.exchange(made["batch"], torch.arange(SHARE) % self.num_ranks)
        yield BATCH, "micro-batches", minibatch
        yield BATCH, "weights of the denominators", lambda: losses.token_weights(made["minibatch"], "token-mean")
        yield BATCH, "metrics", meter
        # a group of the few that are recorded
        groups = list(range(0, self.num_responses // GROUP, 2))
        yield BATCH, "dynamic sampling: groups taken", lambda: made["rollout"].select(groups)
        yield SYNC, "records: texts of the tokens of 8 responses", lambda: [
            token_texts(self.tokenizer, s.prompt.tokens, s.response.tokens) for s in self.samples[:GROUP]]
        half = SimpleNamespace(samples=self.samples[: SHARE // 2])
        yield SYNC, "in flight: half of the responses, written", lambda: made.update(data=responses_to_state(half))
        yield SYNC, "in flight: read", lambda: unpack(made["data"])
        known = [{"number": n, "engine": 0, "row": n, "step": 1, "flags": "x" * 100} for n in range(SHARE // GROUP)]
        yield SYNC, "in flight: known to all", lambda: all_gather_objects(known)
        yield SYNC, "bridge: share of a sampler", lambda: responses_to_state(SimpleNamespace(samples=self.samples))
        state = {"step": 1, "script": {"in_flight": known * self.num_ranks, "held": b"x"}}
        yield SYNC, "checkpoint: state", lambda: split(state)
        health, metrics = HealthCheck(), {f"actor/{n}": 0.5 for n in range(150)}
        yield BATCH, "health checks", lambda: health.look(1, metrics)


def measure(job: Job) -> dict[str, tuple[str, float, int]]:
    """Part of a step, CPU seconds and bytes of the result (as pickled) of each thing: the least of 2 runs."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=job.num_ranks)
    exchange.all_sum = job.others
    exchange.all_to_all = lambda rows, sizes_out: (rows, sizes_out)
    found = {}
    for part, name, work in job.things():
        took = []
        for _ in range(2):
            gc.collect()
            start = time.process_time()
            result = work()
            took.append(time.process_time() - start)
            if name.startswith("batch") or took[0] > 1:                         # the batch is cached
                break
        num_bytes = 0 if result is None else len(pickle.dumps(result))
        found[name] = part, min(took), num_bytes
        print(f"{job.num_ranks} ranks, {job.length} tokens: {name}: {min(took):.5f} s, {num_bytes:,} bytes", flush=True)
    dist.destroy_process_group()
    return found


def sync_calls(num_ranks: int, num_tensors: int = TENSORS_70B // 3) -> float:
    """The host's seconds of gathering as many weights as a 70B model has, whose own bytes are almost none."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    mesh = init_device_mesh("cpu", (num_ranks,))
    shard = DTensor.from_local(torch.zeros(1, 8), mesh, [Shard(0)], run_check=False)
    start = time.process_time()
    for _ in range(num_tensors):
        shard.to(torch.bfloat16).full_tensor()
    seconds = time.process_time() - start
    dist.destroy_process_group()
    return seconds


def read_data(num_rows: int, folder: str, tokenizer: Any) -> tuple[dict[str, float], PromptSet]:
    """What one process of a node does at the start with a parquet file; the prompts. The file repeats 10,000 rows."""
    path = Path(folder) / f"{num_rows}.parquet"
    base = Path(folder) / "base.parquet"
    if not base.exists():
        make_file(base, min(num_rows, 10_000), 10_000)
    table = pq.read_table(base)
    with pq.ParquetWriter(path, table.schema) as writer:
        for _ in range(max(num_rows // len(table), 1)):
            writer.write_table(table)
    start = time.process_time()
    pq.ParquetFile(path).close()
    opened = time.process_time() - start
    prompts = load_prompts([str(path)], tokenizer, DataConfig())
    found = {"rows": len(prompts), "open_s": opened, "index_s": time.process_time() - start,
             "arrow_bytes": prompts.table.nbytes}
    start = time.process_time()
    PromptSampler(len(prompts), "hash", seed=0).take(4096)
    found["shuffle_s"] = time.process_time() - start
    start = time.process_time()
    taken = [prompts[row] for row in range(0, len(prompts), len(prompts) // 4)]
    return found | {"rows_of_a_step_s": (time.process_time() - start) * SHARE / GROUP / len(taken)}, prompts


def score_all(pool: RewardPool, text: str, num_responses: int) -> dict[str, float]:
    """CPU seconds of a rank and of its reward workers for this many responses."""
    workers = [psutil.Process(worker.process.pid) for worker in pool.workers.values()]

    def used() -> float:
        return sum(sum(worker.cpu_times()[:2]) for worker in workers)

    before, start = used(), time.process_time()
    for number in range(num_responses):
        pool.submit(number, "openai/gsm8k", text, "1", {"index": number})
    pool.results()
    return {"responses": num_responses, "rank_s": time.process_time() - start, "workers_s": used() - before,
            "worker_bytes": max(worker.memory_info().rss for worker in workers)}


def in_cache(path: Path) -> int:
    """Bytes of a file that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    may_write = mmap.PROT_READ | mmap.PROT_WRITE                    # ctypes asks for it
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, may_write) as view:
        pages = (len(view) - 1) // mmap.PAGESIZE + 1
        vector = (ctypes.c_ubyte * pages)()
        start = ctypes.c_char.from_buffer(view)
        done = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(view)), vector)
        del start
        assert done == 0, os.strerror(ctypes.get_errno())
        return sum(x & 1 for x in vector) * mmap.PAGESIZE


def read_model(num_ranks: int, folder: str) -> dict[str, float]:
    """Rank 0 of many loads a policy, from a file that is in no cache: its shards, and what was read of the file."""
    path = Path(folder) / "model.safetensors"
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    left = in_cache(path)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    mesh = init_device_mesh("cpu", (num_ranks,))
    os.environ["LOCAL_RANK"] = "0"
    start = time.process_time()
    with mock.patch.object(loading, "check_packing"):               # a forward pass, which nothing here can gather for
        policy = loading.load_policy(folder, ModelConfig(), World(0, num_ranks, torch.device("cpu"), mesh))
    found = {"ranks": num_ranks, "s": time.process_time() - start, "read_bytes": in_cache(path) - left,
             "shard_bytes": sum(p.to_local().nbytes for p in policy.parameters()), "file_bytes": path.stat().st_size}
    dist.destroy_process_group()
    return found


def gloo_rank(rank: int, size: int, file: str, queue: Any) -> None:
    """Collectives with the volumes of a step on 1,024 ranks, in one of `size` processes: name -> median seconds."""
    dist.init_process_group("gloo", store=dist.FileStore(file, size), rank=rank, world_size=size)
    num_responses = SHARE * 1024
    numbers = torch.ones(num_responses, 10, dtype=torch.float64)

    def exchanged(length: int) -> Callable[[], Any]:
        rows = torch.zeros(SHARE * (PROMPT + length), 29, dtype=torch.uint8)        # bytes of a token, as simulate.py
        sizes = torch.full((size,), len(rows) // size)
        return lambda: exchange.all_to_all(rows[: int(sizes.sum())], sizes)

    works = {"sum of one number": lambda: all_sum([1.0]),
             "sums of 10 numbers of 32,768 responses": lambda: all_sum(numbers),
             "objects of 500 bytes": lambda: all_gather_objects(b"x" * 500),
             "exchange of 320 tokens x 32": exchanged(320), "exchange of 3,200 tokens x 32": exchanged(3200),
             "exchange of 32,000 tokens x 32": exchanged(32000)}
    found = {}
    for name, work in works.items():
        took = []
        for _ in range(5):
            dist.barrier()
            start = time.perf_counter()
            work()
            took.append(time.perf_counter() - start)
        found[name] = statistics.median(took)
    if rank == 0:
        queue.put(found)
    dist.barrier()
    dist.destroy_process_group()


def network(size: int, folder: str) -> dict[str, float]:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    file = f"{folder}/store_{size}"
    ranks = [context.Process(target=gloo_rank, args=(rank, size, file, queue)) for rank in range(size)]
    for process in ranks:
        process.start()
    found = queue.get()
    for process in ranks:
        process.join()
    return {"ranks": size} | found


def exponent(sizes: tuple[int, ...], values: list[float]) -> float:
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(values, 1e-9)), 1)[0])


def draw(path: str, rows: dict[str, dict]) -> None:
    """The seconds of each thing over the ranks and over the tokens, and the limit."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parts = [part for part in (ROLLOUT, BATCH, SYNC) if any(row["part"] == part for row in rows.values())]
    figure, plots = plt.subplots(len(parts), 2, figsize=(10, 3.3 * len(parts)), sharey=True, sharex="col",
                                 squeeze=False)
    for (left, right), part in zip(plots, parts):
        shown = sorted((item for item in rows.items() if item[1]["part"] == part), key=lambda item: -item[1]["s"])
        for number, (name, row) in enumerate(shown):
            style = {"color": f"C{number % 10}", "marker": "osD^vPX*<>"[number % 10], "markersize": 5, "linewidth": 1.4}
            for plot, what in ((left, "ranks"), (right, "tokens")):
                if what in row:
                    label = f"{name}, last extrapolated" if "measured" in row else name
                    plot.loglog(*zip(*row[what]), label=label, **style)
        for plot, what in ((left, "ranks"), (right, "tokens")):
            plot.axhline(STEP_S * LIMIT, color="black", linestyle="--", linewidth=1)
            plot.grid(alpha=0.3)
            sizes = [size for size, _ in next(iter(rows.values()))[what]]
            plot.set_xticks(sizes, [f"{size:,}" for size in sizes])
            plot.minorticks_off()
        right.text(0.02, STEP_S * LIMIT * 1.25, f"{STEP_S * LIMIT:g} s: 2% of a step of 60 s", fontsize=8,
                   transform=right.get_yaxis_transform())
        left.set_ylabel("CPU s of one rank", fontsize=9)
        left.set_title(part, loc="left", fontsize=10, fontweight="bold")
        right.legend(*left.get_legend_handles_labels(), fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5),
                     frameon=False)
    plots[-1][0].set_xlabel("ranks W, each with 32 responses of 320 tokens", fontsize=9)
    plots[-1][1].set_xlabel("tokens of a response, 1,024 ranks", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main(args: Args) -> None:
    once: dict[str, list] = {}

    def say(name: str, found: dict[str, float]) -> None:
        once.setdefault(name, []).append(found)
        print(f"{name}: " + ", ".join(f"{key} {x:.5g}" for key, x in found.items()), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        for size in args.gloo_ranks:                                # they fork before there are threads
            say("gloo", network(size, folder))
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        for size in args.rows:
            found, prompts = read_data(size, folder, tokenizer)
            say("data files", found)
        for file in MODEL.iterdir():
            shutil.copy(file, folder)
        for size in args.ranks:
            say("model files", read_model(size, folder))
        text = "".join(path.read_text() for path in sorted((ROOT / "common").rglob("*.py")))
        with RewardPool(num_workers=WORKERS) as pool:
            while pool.num_ready < WORKERS:
                time.sleep(0.01)
            made = Made(tokenizer, tokenizer(text)["input_ids"], prompts, pool)
            for size in args.responses:
                say("rewards", score_all(pool, tokenizer.decode(made.written[:3200]), size))
            by_ranks = [measure(Job(num_ranks, args.tokens[0], made)) for num_ranks in args.ranks]
            by_tokens = [by_ranks[-1], *(measure(Job(args.ranks[-1], tokens, made)) for tokens in args.tokens[1:])]
    rows: dict[str, dict[str, Any]] = {}
    for name, (part, seconds, num_bytes) in by_tokens[-1].items():
        of_ranks, of_tokens = [found[name][1] for found in by_ranks], [found[name][1] for found in by_tokens]
        rows[name] = {"part": part, "ranks": [*zip(args.ranks, of_ranks)], "tokens": [*zip(args.tokens, of_tokens)],
                      "ranks_exponent": exponent(args.ranks, of_ranks),
                      "tokens_exponent": exponent(args.tokens, of_tokens), "s": seconds, "bytes": num_bytes}
    syncs = [sync_calls(num_ranks) for num_ranks in args.ranks]
    rows["sync: calls for each weight"] = {
        "part": SYNC, "ranks": [*zip(args.ranks, syncs)], "ranks_exponent": exponent(args.ranks, syncs),
        "tokens_exponent": 0.0, "s": syncs[-1], "bytes": 0}
    files = [own_files(num_ranks) for num_ranks in args.file_ranks]
    seconds, growth = [of["written"] for of in files], exponent(args.file_ranks, [of["written"] for of in files])
    at_most = seconds[-1] * (args.ranks[-1] / args.file_ranks[-1]) ** growth
    rows["checkpoint: entries"] = {
        "part": SYNC, "ranks": [*zip(args.file_ranks, seconds), (args.ranks[-1], at_most)], "ranks_exponent": growth,
        "tokens_exponent": 0.0, "s": at_most, "bytes": files[-1]["bytes"], "measured": files}
    print("| thing | ranks^ | tokens^ | CPU s at the largest | bytes | of the limit |\n|" + " --- |" * 6)
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["s"]):
        print(f"| {name} | {row['ranks_exponent']:.1f} | {row['tokens_exponent']:.1f} | {row['s']:.4f} | "
              f"{row['bytes']:,} | {row['s'] / (STEP_S * LIMIT):.1%} |", flush=True)
    report("growth", share=SHARE, limit_s=STEP_S * LIMIT, rows=rows, once=once)
    if args.picture:
        draw(args.picture, rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
