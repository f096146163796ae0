"""The kinds of --optim.kind side by side: sft.py on the quickstart's solved problems, the bytes that stay of a weight,
and the seconds of an optimizer step. `float32` is adamw with --policy.compute-dtype float32; `nearest` is adamw-bf16
that rounds to nearest.

    python -m tests.bench.optim_kinds [--steps 14] [--lr 3e-6] [--out runs/optim]

It prints the table of tests/evidence/optimizer_kinds.md. The kinds differ in their rounding alone: same seed, rows and
order.
"""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import tyro

import sft
from common.model import optimizers
from common.model.loading import Weights, load_policy
from common.model.optimizers import make_optimizer
from common.model.policy import ModelConfig
from common.optim import OptimConfig
from common.parallel import ranks
from tests.bench.record import ROOT

SOLVED = "data/word_problems/solved"
KINDS = "adamw", "float32", "adamw-bf16", "adamw-8bit", "nearest"


@dataclass
class Args:
    steps: int = 14
    lr: float = 3e-6
    rows_per_step: int = 16
    out: str = "runs/optim"
    model: str = "models/SmolLM2-135M-Instruct"
    kind: str = ""
    """Run this one alone, in this process."""


def nearest(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    return x.bfloat16()


def run(args: Args) -> None:
    """One kind: its optimizer step alone, then sft.py."""
    kind = {"nearest": "adamw-bf16", "float32": "adamw"}.get(args.kind, args.kind)
    rounding = nearest if args.kind == "nearest" else optimizers.round_stochastically
    folder = Path(args.out) / args.kind
    flags = [
        "--model", args.model, "--train-data", f"{SOLVED}/train.parquet", "--val-data", f"{SOLVED}/test.parquet",
        "--total-steps", args.steps, "--eval-every", args.steps, "--rows-per-step", args.rows_per_step,
        "--max-tokens-per-gpu", 2048, "--optim.lr", args.lr, "--optim.kind", kind, "--run-dir", folder,
        "--save.every", 0, "--save.hf", "never",
        "--policy.compute-dtype", "float32" if args.kind == "float32" else "bfloat16",
    ]
    with mock.patch.object(optimizers, "round_stochastically", rounding):
        sft.main(tyro.cli(sft.Args, args=[str(flag) for flag in flags]))
        measured = measure(args.model, kind)
    shutil.rmtree(folder / "checkpoints")
    (folder / "optimizer.json").write_text(json.dumps(measured))


def measure(model: str, kind: str) -> dict[str, float]:
    """Bytes that stay of a weight, its gradient included, and seconds of a step (the fastest of 3)."""
    world = ranks.init()
    policy = load_policy(model, ModelConfig(), world, Weights(dtype=optimizers.WEIGHTS[kind]))
    optimizer = make_optimizer(policy, OptimConfig(kind=kind))
    seconds = []
    for _ in range(4):
        for weight in policy.parameters():
            weight.grad = torch.randn_like(weight) * 1e-3
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    kept = [x for p in policy.parameters() for x in (p, p.grad, *optimizer.state[p].values())]
    count = sum(p.numel() for p in policy.parameters())
    ranks.shutdown()
    return {"bytes": sum(x.nbytes for x in kept) / count, "seconds": min(seconds[1:]), "weights": count}


def main(args: Args) -> None:
    print("| `--optim.kind` | bytes a weight | validation loss before and after | seconds of a step |")
    print("|---|---|---|---|")
    for kind in KINDS:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in vars(args).items() if name != "kind"]
        command = [sys.executable, "-m", "tests.bench.optim_kinds", *flags, f"--kind={kind}"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        folder = ROOT / args.out / kind
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        validated = [row["val/loss"] for row in rows if "val/loss" in row]
        own = json.loads((folder / "optimizer.json").read_text())
        print(f"| {kind} | {own['bytes']:.2f} | {validated[0]:.4f} {validated[-1]:.4f} "
              f"| {own['seconds']:.2f} |", flush=True)


if __name__ == "__main__":
    arguments = tyro.cli(Args)
    if arguments.kind:
        run(arguments)
    else:
        main(arguments)
