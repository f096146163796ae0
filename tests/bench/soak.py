"""2,000 steps of a tiny run with episodes, reward workers and checkpoints in the background: memory, open files,
threads, processes and seconds of each step. Prints their slopes, and draws them.

    python -m tests.bench.soak --samples soak.jsonl --picture soak.png [--steps 2000] [--ranks 1] [--engine hf]

tests/evidence/soak.png is the picture of 2,000 steps.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import tyro

from tests.checkpoint.test_resume import tiny_run
from tests.conftest import ROOT, make_tiny_llama

# two turns, whose text the reward workers score
EPISODE = """async def episode(chat, row):
    await chat.reply(max_tokens=4)
    return await chat.reply({"role": "user", "content": "Are you sure?"}, max_tokens=4) or ""
"""
COLUMNS = {
    "rss_mb": "resident MiB of the rank(s)",
    "children_mb": "resident MiB of all that they started",
    "files": "open files of the rank(s)",
    "threads": "threads of the rank(s)",
    "processes": "processes",
    "step_s": "seconds a step",
}


@dataclass
class Args:
    samples: str
    """JSON lines, one a step. If the file is there, nothing runs: its samples are drawn."""
    picture: str
    steps: int = 2000
    ranks: int = 1
    engine: Literal["hf", "vllm"] = "hf"
    warm_up: int = 100
    """Steps before slopes are taken."""


def command(args: Args, folder: Path) -> list[str]:
    (folder / "episode.py").write_text(EPISODE)
    model = make_tiny_llama(folder / "model", 128 if args.engine == "vllm" else 32)
    flags = [
        *tiny_run(model, folder), "--run-dir", str(folder / "run"), "--total-steps", str(args.steps),
        "--rollout.engine", args.engine, "--rollout.kv-cache-gb", "0.1", "--rollout.max-num-seqs", "8",
        "--rollout.episode", str(folder / "episode.py"), "--rollout.max-response-length", "60",
        "--reward.num-workers", "2", "--eval-every", "100", "--save.every", "20", "--save.async",
    ]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    return [sys.executable, *(torchrun if args.ranks > 1 else []), "grpo.py", *flags]


def sample(job: psutil.Process, num_ranks: int) -> dict[str, float]:
    """What the job holds. Children that end meanwhile count as far as they were read."""
    ranks = job.children() if num_ranks > 1 else [job]
    children = [child for rank in ranks for child in rank.children(recursive=True)]
    row = {
        "rss_mb": sum(rank.memory_info().rss for rank in ranks) / 2**20,
        "children_mb": 0.0,
        "files": sum(rank.num_fds() for rank in ranks),
        "threads": sum(rank.num_threads() for rank in ranks),
        "processes": len(ranks) + len(children),
    }
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            row["children_mb"] += child.memory_info().rss / 2**20
    return row


def record(args: Args) -> None:
    """Run the job, and write a sample as each step's line comes."""
    with tempfile.TemporaryDirectory() as name, open(args.samples, "w", buffering=1) as samples:
        folder = Path(name)
        with (folder / "log").open("w") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": name}
            job = subprocess.Popen(command(args, folder), cwd=ROOT, stdout=log, stderr=log, env=environment)
        metrics, position = folder / "run/metrics.jsonl", 0
        while job.poll() is None:
            time.sleep(0.05)
            if not metrics.exists() or metrics.stat().st_size == position:
                continue
            with metrics.open("rb") as file:
                file.seek(position)
                lines = file.read().rpartition(b"\n")[0].splitlines(keepends=True)
            position += sum(map(len, lines)) + bool(lines)
            for line in lines:
                step = json.loads(line)
                if "timing_s/step" in step:
                    with contextlib.suppress(psutil.NoSuchProcess):  # after the last step
                        row = {"step": step["step"], "step_s": step["timing_s/step"]}
                        row |= sample(psutil.Process(job.pid), args.ranks)
                        samples.write(json.dumps(row) + "\n")
        assert job.returncode == 0, (folder / "log").read_text()[-6000:]
        assert not list(folder.glob("plainrl_*")), "temporary files are left"


def table(rows: list[dict[str, float]]) -> None:
    print("| | median of the first 100 | median of the last 100 | slope per 1,000 steps |\n| --- | --- | --- | --- |")
    for name, label in COLUMNS.items():
        values = [row[name] for row in rows]
        slope, _ = statistics.linear_regression([row["step"] for row in rows], values)
        ends = statistics.median(values[:100]), statistics.median(values[-100:])
        print(f"| {label} | {ends[0]:.4g} | {ends[1]:.4g} | {1000 * slope:+.3g} |")


def draw(rows: list[dict[str, float]], picture: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(12, 5), sharex=True, constrained_layout=True)
    for axis, (name, label) in zip(axes.flat, COLUMNS.items()):
        values = [row[name] for row in rows]
        axis.plot([row["step"] for row in rows], values, linewidth=0.5, alpha=0.4)
        middles = [statistics.median(values[max(i - 25, 0) : i + 25]) for i in range(len(values))]
        axis.plot([row["step"] for row in rows], middles, color="black", linewidth=1.5)
        axis.set_ylim(0, 1.2 * sorted(values)[int(0.995 * len(values))])
        axis.set_title(label, fontsize=10)
        axis.grid(alpha=0.3)
    figure.supxlabel("step (blue: each; black: medians of 50)", fontsize=9)
    figure.savefig(picture, dpi=100)


def main(args: Args) -> None:
    if not Path(args.samples).exists():
        record(args)
    rows = [json.loads(line) for line in Path(args.samples).read_text().splitlines()]
    table(rows[args.warm_up :])
    draw(rows, args.picture)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
