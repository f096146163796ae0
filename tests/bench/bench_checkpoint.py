"""Seconds that a save blocks training, against torch.save of the same state: 135M parameters, AdamW, one rank.

    python -m tests.bench.bench_checkpoint [--repeats 5] [--folder DIR]
"""

import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch.distributed.tensor import DTensor

from common.checkpoint import state
from common.checkpoint.manager import Checkpoints, SaveConfig
from common.checkpoint.signals import Watchdog
from common.model.loading import load_policy
from common.model.optimizers import make_optimizer
from common.model.policy import ModelConfig
from common.optim import OptimConfig, optimizer_step
from common.parallel import ranks
from tests.bench.record import report
from tests.conftest import MODEL
from tests.rank_worker import Flags


@dataclass
class Args:
    repeats: int = 5
    """Saves of each kind, taken in turns."""
    folder: str = ""
    """Where to write; none: the system's temporary folder."""


def plain_save(tensors: dict[str, torch.Tensor], file: Path) -> float:
    """torch.save of what a checkpoint holds, down to the disk."""
    start = time.perf_counter()
    with file.open("wb") as out:
        torch.save({name: x.to_local() if isinstance(x, DTensor) else x for name, x in tensors.items()}, out)
        out.flush()
        os.fsync(out.fileno())
    return time.perf_counter() - start


def main(args: Args) -> None:
    world, watch = ranks.init(), Watchdog(0)
    policy = load_policy(str(MODEL), ModelConfig(), world)
    optimizer = make_optimizer(policy, OptimConfig())
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer_step(policy, optimizer, 1e-6, OptimConfig())
    parts = {"policy": (policy, optimizer)}
    tensors = state.tensors_of(parts)
    gb = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) / 2**30
    folder = Path(tempfile.mkdtemp(dir=args.folder or None))
    seconds: dict[str, list[float]] = {}
    runs = {}
    for name, in_background in (("in the foreground", False), ("in the background", True)):
        config = SaveConfig(async_=in_background, keep=1)
        flags = Flags(config, run_dir=str(folder / name))
        runs[name] = Checkpoints(flags, world, parts, {"config.json": b"{}"}, watch, {})
    for step in range(1, args.repeats + 1):
        seconds.setdefault("torch.save", []).append(plain_save(tensors, folder / "plain.pt"))
        for name, run in runs.items():
            start = time.perf_counter()
            run.after_step({"step": step, "total_steps": step})
            kind = f"{name}, first" if step == 1 and run.config.async_ else name
            seconds.setdefault(f"save {kind}: blocks", []).append(run.timer.metrics()["timing_s/save_checkpoint"])
            run.wait()
            seconds.setdefault(f"save {name}: complete after", []).append(time.perf_counter() - start)
    for run in runs.values():
        run.wait()
    shutil.rmtree(folder)
    base = statistics.median(seconds["torch.save"])
    print(f"{gb:.2f} GiB of weights and AdamW state, {args.repeats} saves each\n\n"
          f"| | median s | of torch.save | min to max |\n| --- | --- | --- | --- |")
    for name, values in seconds.items():
        middle = statistics.median(values)
        print(f"| {name} | {middle:.2f} | {middle / base:.2f} | {min(values):.2f} to {max(values):.2f} |")
    rows = {name: {"median_s": statistics.median(values), "of_torch_save": statistics.median(values) / base,
                   "min_s": min(values), "max_s": max(values)} for name, values in seconds.items()}
    report("checkpoint", state_gb=gb, repeats=args.repeats, rows=rows)
    ranks.shutdown()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
