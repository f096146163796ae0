"""Where the start of a run goes: seconds and CPU seconds of each part, up to the first step, in a process of its own.

    python -m tests.bench.start                # grpo.py on the quickstart's task, 3 starts
    python -m tests.bench.start --early-vllm   # a thread imports vLLM while the data is read, beside starts without it

It prints the median of each part.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from unittest import mock

import psutil
import tyro

from tests.bench.record import ROOT

FLAGS = """--model models/SmolLM2-135M-Instruct --train-data data/word_problems/train.parquet
--val-data data/word_problems/test.parquet --data.max-prompt-length 160 --rollout.max-response-length 40
--prompts-per-step 8 --samples-per-prompt 8 --max-tokens-per-gpu 4096 --policy.share-prompt --reward.num-workers 1"""


@dataclass
class Args:
    starts: int = 3
    early_vllm: bool = False
    child: bool = False
    """This process is such a start."""


class Started(Exception):
    """The run has come to its first validation."""


def start(early_vllm: bool) -> None:
    parts: dict[str, tuple[float, float]] = {}
    process = psutil.Process()

    @contextmanager
    def timed(name: str):
        before = time.perf_counter(), time.process_time()
        yield
        parts[name] = time.perf_counter() - before[0], time.process_time() - before[1]

    def wrap(owner, method: str, name: str) -> None:
        inner = getattr(owner, method)

        def call(*args, **kwargs):
            with timed(name):
                return inner(*args, **kwargs)

        mock.patch.object(owner, method, call).start()

    with timed("import grpo"):
        import grpo
        from common.run import Run

    def load_data(run, *args):
        thread = threading.Thread(target=lambda: importlib.import_module("vllm").LLM)
        if early_vllm:
            thread.start()
        read(run, *args)
        run.early = thread if early_vllm else None

    def start_engine(run):
        if run.early is not None:
            with timed("waiting for that thread"):
                run.early.join()
        with timed("import vllm"):
            from vllm import LLM  # noqa: F401
        return construct(run)

    def stop(run):
        parts["all, from the start of the process"] = (
            time.time() - process.create_time(), sum(process.cpu_times()[:2])
        )
        raise Started

    read, construct = Run.load_data, Run.start_engine
    Run.load_data, Run.start_engine, Run.resume = load_data, start_engine, stop
    wrap(Run, "load_data", "data: read and tokenised")
    wrap(Run, "start_engine", "engine, import vllm included")
    wrap(Run, "load_policy", "policy: read, sharded, proven on packed rows")
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["grpo.py", *FLAGS.split(), "--run-dir", folder]
        try:
            grpo.main(tyro.cli(grpo.Args))
        except Started:
            print(json.dumps(parts))


def main(args: Args) -> None:
    if args.child:
        start(args.early_vllm)
        return
    found: dict[str, list[dict[str, list[float]]]] = {}
    for _ in range(args.starts):
        for flags in ([], ["--early-vllm"]) if args.early_vllm else ([],):
            command = [sys.executable, "-m", "tests.bench.start", "--child", *flags]
            run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            found.setdefault("vLLM imported while the data is read" if flags else "as it is", []).append(
                json.loads(run.stdout.splitlines()[-1])
            )
    for how, starts in found.items():
        print(f"\n| {how} | seconds | CPU seconds |\n| --- | --- | --- |")
        for part in starts[0]:
            seconds, cpu = (median(each[part][i] for each in starts) for i in (0, 1))
            print(f"| {part} | {seconds:.1f} | {cpu:.1f} |")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(tyro.cli(Args))
