"""What two things that break first (tests/evidence/scale.md) cost the host of rank 0, part by part, by the number of
ranks:

    python -m tests.bench.bench_many_ranks

A save of a 70B model's tensors, beside writing the shards: with torch's distributed checkpoint, which gathers entries
of all ranks; and with a file of each rank, which holds its own entries (common/checkpoint/state.py). What is read of
these files: by as many ranks again, of whom each opens its own file, and by one rank, which opens all. And the calls
that gather the weights, with the share of torch's fake process group: it copies what this rank sends to the place of
each other rank, one after the other, which no real group does on the host. CPU seconds, the least of three; a save with
torch's distributed checkpoint once.
"""

import json
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import tyro
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.checkpoint.state import FILE, load_shards, open_shards, save_shards
from tests.bench.record import report

WEIGHTS = 723                                                                   # of a 70B model
TENSORS = 3 * WEIGHTS                                                           # with moments


@dataclass
class Args:
    ranks: tuple[int, ...] = (10, 102, 1024)
    """Ranks that gather."""
    save_ranks: tuple[int, ...] = (10, 100)
    """Ranks that save; their objects for 1,024 would not fit in 3 GB."""


class Save:
    """What ranks send to rank 0 in a save."""

    def __init__(self, num_ranks: int):
        self.num_ranks, rows = num_ranks, 8192 // num_ranks
        self.shape, self.whole = torch.Size([rows, 8192]), torch.Size([rows * num_ranks, 8192])
        self.plans = [pickle.dumps(self.plan(rank)) for rank in range(num_ranks)]
        self.written = [pickle.dumps(self.results(rank)) for rank in range(num_ranks)]

    def plan(self, rank: int) -> SavePlan:
        offsets, properties = torch.Size([rank * self.shape[0], 0]), TensorProperties(dtype=torch.float32)
        data = TensorWriteData(ChunkStorageMetadata(offsets, self.shape), properties, self.whole)
        names = [f"policy.model.layers.{number}" for number in range(TENSORS)]
        items = [WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data) for name in names]
        return SavePlan(items, planner_data={name: (name,) for name in names})

    def results(self, rank: int) -> list[WriteResult]:
        return [WriteResult(item.index, 100, _StorageInfo(f"__{rank}_0.distcp", 100 * number, 100))
                for number, item in enumerate(self.plan(rank).items)]


def save(num_ranks: int) -> dict[str, float]:
    """CPU seconds of rank 0 by part, and the bytes of DCP's index."""
    sent, seconds = Save(num_ranks), {}
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, None, True)

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        seconds[name] = time.process_time() - start

    with timed("plans gathered and checked"):
        plans, metadata = planner.create_global_plan([pickle.loads(plan) for plan in sent.plans])
    with timed("plans sent back"):
        for plan in plans:
            pickle.dumps(plan)
    del plans, plan
    with timed("index gathered, written and sent"):
        metadata.storage_data = {x.index: x.storage_data for rank in sent.written for x in pickle.loads(rank)}
        data = pickle.dumps(metadata)
        pickle.dumps(metadata)
    del metadata
    return seconds | {"bytes": len(data)}


def own_files(num_ranks: int) -> dict[str, float]:
    """CPU seconds of rank 0 with a file of each rank, and the bytes of a file without its numbers."""
    names = [f"policy.model.layers.{number}" for number in range(TENSORS)]
    with fake_group(num_ranks) as mesh, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tensors = {name: DTensor.from_local(torch.zeros(1, 8), mesh, [Shard(0)], run_check=False) for name in names}

        def write() -> None:
            save_shards(tensors, folder, 0)
            files = [{FILE.format(rank, 0): {"size": 2**30, "crc32": 2**31}} for rank in range(num_ranks)]
            json.dumps([pickle.loads(pickle.dumps(of_rank)) for of_rank in files])  # the manifest names all files

        found = {"written": least(write)}
        _, entries = next(open_shards(folder))
        for rank in range(1, num_ranks):
            others = {name: entry | {"start": [rank, 0]} for name, entry in entries.items()}
            save_file({name: torch.zeros(1, 8) for name in names}, folder / FILE.format(rank, 0),
                      {"entries": json.dumps(others)})
        found["read by as many ranks"] = least(lambda: load_shards(tensors, open_shards(folder, 0)))
        whole = {name: torch.empty(num_ranks, 8) for name in names}
        found["read by one rank"] = least(lambda: load_shards(whole, open_shards(folder, 0)))
        return found | {"bytes": (folder / FILE.format(0, 0)).stat().st_size}


@contextmanager
def fake_group(num_ranks: int) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    yield init_device_mesh("cpu", (num_ranks,))
    dist.destroy_process_group()


def sync(num_ranks: int) -> dict[str, float]:
    """Seconds of gathering as many weights as a 70B model has, whose own bytes are almost none."""
    with fake_group(num_ranks) as mesh:
        shard = DTensor.from_local(torch.zeros(1, 8), mesh, [Shard(0)], run_check=False)
        own, whole = torch.zeros(8, dtype=torch.bfloat16), torch.empty(8 * num_ranks, dtype=torch.bfloat16)
        return {
            "one by one": least(lambda: [shard.to(torch.bfloat16).full_tensor() for _ in range(WEIGHTS)]),
            "the fake group alone": least(lambda: [dist.all_gather_single(whole, own) for _ in range(WEIGHTS)]),
        }


def least(work: Callable[[], object]) -> float:
    took = []
    for _ in range(3):
        start = time.process_time()
        work()
        took.append(time.process_time() - start)
    return min(took)


def main(args: Args) -> None:
    syncs = {num_ranks: sync(num_ranks) for num_ranks in args.ranks}
    saves = {num_ranks: save(num_ranks) for num_ranks in args.save_ranks}
    files = {num_ranks: own_files(num_ranks) for num_ranks in args.save_ranks}
    for what, found in (("sync", syncs), ("save", saves), ("files", files)):
        for num_ranks, row in found.items():
            print(f"{what}, {num_ranks} ranks: {', '.join(f'{name} {x:.4g}' for name, x in row.items())}", flush=True)
    report("many_ranks", syncs=syncs, saves=saves, files=files)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
