"""What each thing that happens once a step costs the host of one rank, from 10 to 1,024 ranks and from 320 to 32,000
tokens a response:

    python -m tests.bench.bench_growth [--picture docs/scale.png]

One process is rank 0 of a job whose other ranks are not there: torch's fake process group answers collectives at once,
and what the others would send is made up from this rank's own. So the CPU seconds are of the host's own work on this
rank's share and on the numbers of all responses; nothing is said of networks and GPUs. An exponent is that of a power
law through the three sizes.
"""

import gc
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoTokenizer, Qwen2Config

from common import losses
from common.metrics import Meter
from common.model.flops import sequence_cost
from common.packing import Sequences, plan_step
from common.parallel import exchange
from common.parallel.ranks import all_gather_objects, seed_of
from common.prompts import Prompt
from common.rollout import Minibatch, Rollout, Sample, gather_rollout
from common.rollouts.record import token_texts
from common.rollouts.scoring import responses_to_state
from common.segments import group_mean, group_std
from common.tracking.health import HealthCheck
from common.tracking.step import rollout_metrics
from envs.runtime.response import Response
from envs.stored import split, unpack
from tests.bench.bench_packing import QWEN_7B
from tests.bench.record import ROOT, report

GROUP, PROMPT, SHARE, BUDGET = 8, 200, 32, 16384    # samples a prompt, tokens of it, responses a rank, of a micro-batch
MODEL = ROOT / "models/SmolLM2-135M-Instruct"
TENSORS_70B = 723 * 3                                   # weights and moments
STEP_S, LIMIT = 60.0, 0.02


@dataclass
class Args:
    ranks: tuple[int, int, int] = (10, 102, 1024)
    """Ranks, with 32 responses each."""
    tokens: tuple[int, int, int] = (320, 3200, 32000)
    """Of a response."""
    plan_ranks: tuple[int, int, int] = (1, 10, 100)
    """Ranks of a checkpoint's plan, whose objects for 1,024 would not fit in 3 GB."""
    picture: str = ""
    """A file for the picture of the seconds."""


class Job:
    """Rank 0 of `num_ranks`, with 32 responses of `length` tokens."""

    def __init__(self, num_ranks: int, length: int, tokenizer: Any):
        self.num_ranks, self.length, self.tokenizer = num_ranks, length, tokenizer
        self.num_responses = SHARE * num_ranks
        rng = np.random.default_rng(0)
        prompt = Prompt(rng.integers(40_000, size=PROMPT).tolist(), "", "1", {}, [])
        text = "".join(path.read_text() for path in sorted((ROOT / "common").rglob("*.py")))
        written = tokenizer(text)["input_ids"]
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

    def things(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """(name, what is done once a step), in the order of a step; later ones use what earlier ones made."""
        lengths = np.minimum(self.rng.lognormal(np.log(self.length), 0.7, self.num_responses), 4 * self.length)
        lengths = PROMPT + lengths.astype(np.int64)
        group = torch.arange(self.num_responses) // GROUP
        scores = torch.rand(self.num_responses, dtype=torch.float64)
        made: dict[str, Any] = {}

        def scoring() -> None:
            for sample in self.samples:
                sample.text = self.tokenizer.decode(sample.response.tokens, skip_special_tokens=True)

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

        yield "sampling: seeds of the requests", lambda: [seed_of(0, 1, s.group, k) for k, s in enumerate(self.samples)]
        yield "scoring: text of the responses", scoring
        yield "numbers of all responses", numbers
        yield "advantages", lambda: (scores - group_mean(scores, group)) / group_std(scores, group)
        yield "batch of this rank's responses", batch
        yield "plan", lambda: plan_step(
            Sequences(lengths, sequence_cost(lengths, Qwen2Config(**QWEN_7B))), 1, self.num_ranks, BUDGET, 0)
        yield "exchange", lambda: exchange.exchange(made["batch"], torch.arange(SHARE) % self.num_ranks)
        yield "micro-batches", minibatch
        yield "weights of the denominators", lambda: losses.token_weights(made["minibatch"], "token-mean")
        yield "metrics", meter
        # a group of the few that are recorded
        yield "records: texts of the tokens of 8 responses", lambda: [
            token_texts(self.tokenizer, s.prompt.tokens, s.response.tokens) for s in self.samples[:GROUP]]
        half = SimpleNamespace(samples=self.samples[: SHARE // 2])
        yield "in flight: half of the responses, written", lambda: made.update(data=responses_to_state(half))
        yield "in flight: read", lambda: unpack(made["data"])
        known = [{"number": n, "engine": 0, "row": n, "step": 1, "flags": "x" * 100} for n in range(SHARE // GROUP)]
        yield "in flight: known to all", lambda: all_gather_objects(known)
        yield "bridge: share of a sampler", lambda: responses_to_state(SimpleNamespace(samples=self.samples))
        state = {"step": 1, "script": {"in_flight": known * self.num_ranks, "held": b"x"}}
        yield "checkpoint: state", lambda: split(state)
        health, metrics = HealthCheck(), {f"actor/{n}": 0.5 for n in range(150)}
        yield "health checks", lambda: health.look(1, metrics)


def measure(job: Job) -> dict[str, tuple[float, int]]:
    """CPU seconds and bytes of the result (as pickled) of each thing: the least of 2 runs."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=job.num_ranks)
    exchange.all_sum = job.others
    exchange.all_to_all = lambda rows, sizes_out: (rows, sizes_out)
    found = {}
    for name, work in job.things():
        took = []
        for _ in range(2):
            gc.collect()
            start = time.process_time()
            result = work()
            took.append(time.process_time() - start)
            if name.startswith("batch") or took[0] > 1:                         # the batch is cached
                break
        found[name] = min(took), 0 if result is None else len(pickle.dumps(result))
        print(f"{job.num_ranks} ranks, {job.length} tokens: {name}: {found[name][0]:.5f} s", flush=True)
    dist.destroy_process_group()
    return found


def checkpoint_plan(num_ranks: int, num_tensors: int = TENSORS_70B) -> tuple[float, int]:
    """What rank 0 does in each save for the tensors of a 70B model: gathered plans, one plan, and the index's file."""
    size = torch.Size([1024 * 8, 8192])
    rows = size[0] // num_ranks
    properties = TensorProperties(dtype=torch.float32)

    def item(number: int, rank: int) -> WriteItem:
        offsets, sizes = torch.Size([rank * rows, 0]), torch.Size([rows, size[1]])
        whole = torch.Size([rows * num_ranks, size[1]])
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, whole)
        return WriteItem(MetadataIndex(f"policy.model.layers.{number}", offsets), WriteItemType.SHARD, tensor_data=data)

    def local_plan(rank: int) -> SavePlan:
        items = [item(number, rank) for number in range(num_tensors)]
        return SavePlan(items, planner_data={item.index.fqn: (item.index.fqn,) for item in items})

    sent = [pickle.dumps(local_plan(rank)) for rank in range(num_ranks)]
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, None, True)
    start = time.process_time()
    _, metadata = planner.create_global_plan([pickle.loads(plan) for plan in sent])
    data = pickle.dumps(metadata)
    return time.process_time() - start, len(data)


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


def exponent(sizes: tuple[int, ...], values: list[float]) -> float:
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(values, 1e-9)), 1)[0])


def draw(path: str, rows: dict[str, dict], args: Args) -> None:
    """The seconds of each thing over the ranks and over the tokens, and the limit."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, plots = plt.subplots(1, 2, figsize=(11, 5), sharey=True)
    labels = "ranks, each with 32 short responses", "tokens of a response, most ranks"
    for plot, what, sizes, label in zip(plots, ("ranks", "tokens"), (args.ranks, args.tokens), labels):
        for name, row in rows.items():
            if what in row:
                plot.loglog(sizes, row[what], marker="o", label=name)
        plot.axhline(STEP_S * LIMIT, color="black", linestyle="--")
        plot.set_xlabel(label)
    plots[0].set_ylabel("CPU seconds of one rank")
    plots[1].legend(fontsize=6, bbox_to_anchor=(1.02, 1), loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main(args: Args) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    by_ranks = [measure(Job(num_ranks, args.tokens[0], tokenizer)) for num_ranks in args.ranks]
    by_tokens = [by_ranks[-1], *(measure(Job(args.ranks[-1], tokens, tokenizer)) for tokens in args.tokens[1:])]
    rows: dict[str, dict[str, Any]] = {}
    for name, (seconds, num_bytes) in by_tokens[-1].items():
        of_ranks, of_tokens = [found[name][0] for found in by_ranks], [found[name][0] for found in by_tokens]
        rows[name] = {"ranks": of_ranks, "tokens": of_tokens, "ranks_exponent": exponent(args.ranks, of_ranks),
                      "tokens_exponent": exponent(args.tokens, of_tokens), "s": seconds, "bytes": num_bytes}
    plans = [checkpoint_plan(num_ranks) for num_ranks in args.plan_ranks]
    growth = exponent(args.plan_ranks, [s for s, _ in plans])
    more = args.ranks[-1] / args.plan_ranks[-1]
    rows["checkpoint: plan and index (every save)"] = {
        "ranks_exponent": growth, "tokens_exponent": 0.0, "s": plans[-1][0] * more**growth,
        "bytes": int(plans[-1][1] * more), "measured": plans}
    syncs = [sync_calls(num_ranks) for num_ranks in args.ranks]
    rows["sync: calls for each weight"] = {
        "ranks": syncs, "ranks_exponent": exponent(args.ranks, syncs), "tokens_exponent": 0.0, "s": syncs[-1],
        "bytes": 0}
    print("| thing | ranks^ | tokens^ | CPU s at the largest | bytes | of the limit |\n|" + " --- |" * 6)
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["s"]):
        print(f"| {name} | {row['ranks_exponent']:.1f} | {row['tokens_exponent']:.1f} | {row['s']:.4f} | "
              f"{row['bytes']:,} | {row['s'] / (STEP_S * LIMIT):.1%} |", flush=True)
    if args.picture:
        draw(args.picture, rows, args)
    report("growth", share=SHARE, limit_s=STEP_S * LIMIT, rows=rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
