"""300 steps of a tiny run on two ranks, a checkpoint in the background every tenth: memory, open files and threads of
every rank, sampled twice a second, with their slopes over the steps after the first 50.

    python -m tests.bench.soak [--steps 300] [--ranks 2]
"""

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro

from tests.checkpoint.test_resume import metrics, tiny_run
from tests.conftest import ROOT, make_tiny_llama


@dataclass
class Args:
    steps: int = 300
    ranks: int = 2
    warm_up: int = 50
    """Steps before the slope is taken."""


def main(args: Args) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = folder / "run"
        flags = tiny_run(make_tiny_llama(folder / "model"), folder)
        flags += ["--total-steps", str(args.steps), "--eval-every", "50", "--save.every", "10", "--save.async"]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
        with (folder / "log").open("w") as log:
            command += ["grpo.py", *flags, "--run-dir", str(run)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            job = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment)
        samples: dict[int, list[tuple[int, float, int, int]]] = {}      # by rank: step, MiB, files, threads
        while job.poll() is None:
            time.sleep(0.5)
            if (run / "metrics.jsonl").exists():
                step = len(metrics(run)) - 1
                for rank, process in enumerate(sorted(psutil.Process(job.pid).children(), key=lambda p: p.pid)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        row = (step, process.memory_info().rss / 2**20, process.num_fds(), process.num_threads())
                        samples.setdefault(rank, []).append(row)
        assert job.returncode == 0, (folder / "log").read_text()[-6000:]
    print("| rank | | after warm-up | at the end | slope per 100 steps |\n| --- | --- | --- | --- | --- |")
    for rank, rows in samples.items():
        rows = [row for row in rows if args.warm_up <= row[0] < args.steps]
        for column, what in enumerate(("resident MiB", "open files", "threads"), start=1):
            values = [row[column] for row in rows]
            slope, _ = statistics.linear_regression([row[0] for row in rows], values)
            ends = statistics.median(values[:9]), statistics.median(values[-9:])
            print(f"| {rank} | {what} | {ends[0]:.0f} | {ends[1]:.0f} | {100 * slope:+.2f} |")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
