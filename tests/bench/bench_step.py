"""A step of the quickstart against TRL's GRPOTrainer: same model, prompts, sizes, learning rate, threads, machine.

    tools/setup.sh trl && python -m tests.bench.bench_step [--rounds 3] [--steps 3] [--threads 2]

Each round runs four programs one after another: grpo.py as the quickstart does (`ours`), grpo.py with each response's
prompt computed and no group left out (`ours_equal`), and TRL with its own generate in micro-batches of 32 sequences, as
large as ours (`trl`), and of 16 (`trl_16`). All write a line a step to
metrics.jsonl; from outside, each line's moment, and the CPU seconds and peak memory of the processes then. So a step
is everything between two lines: set-up and the first step are not in it. Ratios are taken within a round, then their
median. TRL with colocated vLLM is tried once, unpatched; it joins the rounds if it runs.
"""

import contextlib
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil
import tyro
from transformers import AutoTokenizer

from common.curriculum.sampler import PromptSampler
from common.dataset.store import load_prompts
from common.prompts import DataConfig
from tests.bench.record import ROOT, report

DIFFERENCES = {
    "ours": "vLLM samples; a group's prompt is computed once; groups with equal rewards are not run",
    "ours_equal": "vLLM samples; otherwise the work of TRL: every prompt computed, every group run, nothing padded",
    "trl": "transformers' generate samples; micro-batches are padded to their longest; no gradient checkpointing",
    "all": "responses are sampled independently, so their lengths differ: see response_length; constant learning rate",
}


@dataclass
class Args:
    rounds: int = 3
    steps: int = 3
    """Of each program in each round; the first one is not counted."""
    prompts: int = 8
    samples: int = 8
    max_new_tokens: int = 40
    threads: int = 0
    """OMP_NUM_THREADS of all programs. 0: as set outside, else all cores."""
    trl_python: str = ".venv-trl/bin/python"
    try_trl_vllm: bool = True


def quickstart_flags() -> list[str]:
    """The Makefile's TASK."""
    command = ["make", "--no-print-directory", "--eval", "print-task:; @echo '$(TASK)'", "print-task"]
    return shlex.split(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def value_of(flags: list[str], name: str) -> str:
    return flags[flags.index(name) + 1]


def tree(process: psutil.Process) -> tuple[float, float]:
    """CPU seconds so far and peak resident GiB, added up over a process and its children."""
    cpu = peak = 0.0
    for member in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, StopIteration):
            cpu += sum(member.cpu_times()[:4])                          # user, system, and of children that ended
            status = Path(f"/proc/{member.pid}/status").read_text().splitlines()
            peak += int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 2**20
    return cpu, peak


def run(command: list[str], run_dir: Path, environment: dict[str, str]) -> list[dict]:
    """One program to its end: its lines of metrics, with the clock, CPU seconds and peak memory as each one came."""
    stamps, file, log = [], run_dir / "metrics.jsonl", run_dir.with_suffix(".log")
    with log.open("w") as out:
        job = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env=environment, stdin=subprocess.DEVNULL)
        try:
            process = psutil.Process(job.pid)
            while job.poll() is None:
                time.sleep(0.02)
                if file.exists() and file.read_text().count("\n") > len(stamps):
                    stamps.append((time.perf_counter(), *tree(process)))
        finally:
            job.kill()
    if job.returncode:
        raise RuntimeError(f"{shlex.join(command)} ended with {job.returncode}\n{log.read_text()[-4000:]}")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == len(stamps)
    return [row | {"clock": clock, "cpu": cpu, "peak_gb": peak} for row, (clock, cpu, peak) in zip(rows, stamps)]


def summary(rows: list[dict], responses: int, names: dict[str, str]) -> dict[str, float]:
    """Medians over the steps after the first."""
    steps = []
    for before, row in pairwise(rows):
        seconds, length = row["clock"] - before["clock"], row[names["length"]]
        steps.append({"step_s": seconds, "step_cpu_s": row["cpu"] - before["cpu"], "samples_per_s": responses / seconds,
                      "trained_tokens_per_s": responses * length / seconds, "response_length": length,
                      "cpu_ms_per_trained_token": 1000 * (row["cpu"] - before["cpu"]) / (responses * length),
                      "reward": row[names["reward"]]})
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]} | {
        "peak_gb": rows[-1]["peak_gb"]}


def write_prompts(file: Path, flags: list[str], args: Args) -> None:
    """What grpo.py asks in its steps, in its order, as text."""
    tokenizer = AutoTokenizer.from_pretrained(value_of(flags, "--model"))
    config = DataConfig(max_prompt_length=int(value_of(flags, "--data.max-prompt-length")))
    prompts = load_prompts([value_of(flags, "--train-data")], tokenizer, config)
    sampler = PromptSampler(len(prompts), prompts.loaded.data_hash, seed=0)
    chosen = [prompts[i] for i in sampler.take(args.prompts * args.steps)]
    file.write_text("".join(json.dumps({"prompt": tokenizer.decode(p.tokens), "tokens": p.tokens,
                                        "ground_truth": p.ground_truth}) + "\n" for p in chosen))


def main(args: Args) -> None:
    if not (ROOT / args.trl_python).exists():
        raise SystemExit(f"error: --trl-python {args.trl_python} does not exist: run tools/setup.sh trl")
    os.chdir(ROOT)
    flags, responses = quickstart_flags(), args.prompts * args.samples
    threads = args.threads or int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1",
                                "TOKENIZERS_PARALLELISM": "false", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    sizes = ["--prompts-per-step", args.prompts, "--samples-per-prompt", args.samples, "--total-steps", args.steps,
             "--rollout.max-response-length", args.max_new_tokens, "--rollout.max-num-seqs", responses,
             "--optim.schedule", "constant", "--optim.warmup-steps", 0, "--save.hf", "never", "--val-data"]
    ours = [sys.executable, "grpo.py", *flags, *map(str, sizes)]
    ours_names = {"length": "response_length/mean", "reward": "critic/rewards/mean"}
    trl_names = {"length": "completions/mean_length", "reward": "reward"}

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_prompts(folder / "prompts.jsonl", flags, args)

        def trl(run_dir: Path, use_vllm: bool = False, sequences: int = 32) -> list[str]:
            per_microbatch = math.gcd(sequences, responses)  # 32 of about 127 tokens: grpo.py's 4,096 tokens
            job = {"model": value_of(flags, "--model"), "prompts": str(folder / "prompts.jsonl"),
                   "run_dir": str(run_dir), "prompts_per_step": args.prompts, "samples_per_prompt": args.samples,
                   "sequences_per_microbatch": per_microbatch, "max_new_tokens": args.max_new_tokens,
                   "lr": float(value_of(flags, "--optim.lr")), "steps": args.steps, "use_vllm": use_vllm}
            file = run_dir.with_suffix(".json")
            file.write_text(json.dumps(job))
            return [str(ROOT / args.trl_python), "-m", "tests.bench.step_trl", str(file)]

        programs = {
            "ours": lambda at: [*ours, "--run-dir", str(at)],
            "ours_equal": lambda at: [*ours, "--run-dir", str(at), "--policy.no-share-prompt", "--run-zero-advantage"],
            "trl": trl,
            "trl_16": lambda at: trl(at, sequences=16),
        }
        trl_vllm = "not tried"
        if args.try_trl_vllm:
            at = folder / "try"
            try:
                run(trl(at, use_vllm=True), at, environment)
                trl_vllm, programs["trl_vllm"] = "runs", lambda at: trl(at, use_vllm=True)
            except RuntimeError as error:
                trl_vllm = f"does not run unpatched: {str(error).strip().splitlines()[-1]}"
            print(f"TRL with colocated vLLM {trl_vllm}", flush=True)
        rounds = []
        for number in range(args.rounds):
            results = {}
            for kind, command in programs.items():
                at = folder / f"{kind}{number}"
                names = trl_names if kind.startswith("trl") else ours_names
                results[kind] = summary(run(command(at), at, environment), responses, names)
                print(f"round {number} {kind:10}", json.dumps(results[kind]), flush=True)
            rounds.append(results)

    def median(kind: str, figure: str, over: str | None = None) -> float:
        return statistics.median(r[kind][figure] / (r[over][figure] if over else 1) for r in rounds)

    compared = ("step_s", "step_cpu_s", "cpu_ms_per_trained_token", "peak_gb")
    ratios = {f"{peer}_over_{own}": {figure: median(peer, figure, own) for figure in compared}
              for peer in programs if peer.startswith("trl") for own in ("ours", "ours_equal")}
    ask = "from importlib.metadata import version; print(version('trl'))"
    trl_version = subprocess.run([args.trl_python, "-c", ask], capture_output=True, text=True, check=True).stdout
    report("step", trl_version=trl_version.strip(), threads=threads, prompts=args.prompts, samples=args.samples,
           max_new_tokens=args.max_new_tokens, counted_steps=args.rounds * (args.steps - 1), ratios=ratios,
           **{kind: {figure: median(kind, figure) for figure in rounds[0][kind]} for kind in programs},
           trl_with_vllm=trl_vllm, differences=DIFFERENCES, rounds=rounds)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
