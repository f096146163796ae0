"""Several ranks on one GPU: `python -m tests.gpu.several_ranks`. 5 minutes on an H100; needs neither data nor network.

NCCL refuses two ranks on one GPU of one host. With a name of a host for each rank (NCCL_HOSTID) it takes them for
nodes of one GPU each, whose data goes through sockets: kernels, groups and collectives are those of a cluster, their
speed is not. Each run is compared with the same run on one rank: rewards, losses and gradient norms of two steps, in
float32. With vLLM the responses differ, so that those runs must only end, with probabilities that agree with the
trainer's. On a machine without a GPU it runs the same on gloo (not those with vLLM).
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.gpu.first_parts import OFFLOADED, ROWS, SAMPLES, Wrong

APART = 1e-3
"""Relative difference of a norm, a loss or a reward that rounding may make in two steps."""
AGREE = 0.01
"""Mean |p_engine - p_trainer|."""
COMPARED = ("critic/rewards/mean", "train/loss", "actor/grad_norm", "critic/grad_norm")
FLOAT32 = ["--policy.compute-dtype", "float32"]
HF = [*SAMPLES, *FLOAT32, "--optim.lr", "1e-3"]
EXPERTS = [*HF, "--model", "experts"]
# the size of the cache is given: vLLM would measure what is free, which other runs take at the same time
VLLM = [*(flag for flag in SAMPLES if flag not in ("--rollout.engine", "hf")), "--rollout.enforce-eager",
        "--rollout.gpu-memory-utilization", "0.1", "--rollout.extra", '{"kv_cache_memory_bytes": 1000000000}']
GAME = ["--data.max-prompt-length", "1200", "--rollout.episode", "tests/engine/episodes_of_tests.py:three_turns",
        "--rollout.max-turns", "3", "--rollout.max-response-length", "120"]


class Run(NamedTuple):
    ranks: int
    script: str
    flags: list[str]
    like: str = ""
    """The run with the same numbers; empty: the run is an own one."""
    first: list[str] | None = None
    """Flags of a run in the same folder before it, on 2 ranks."""


RUNS = {
    "grpo": Run(1, "grpo.py", HF),
    "grpo, 2 ranks": Run(2, "grpo.py", HF, "grpo"),
    "grpo, 4 ranks": Run(4, "grpo.py", HF, "grpo"),
    "grpo, 4 ranks, 2 copies": Run(4, "grpo.py", [*HF, "--policy.replicas", "2"], "grpo"),
    "grpo, 2 ranks, sequence parallel": Run(2, "grpo.py", [*HF, "--policy.sequence-parallel", "2"], "grpo"),
    "grpo, 4 ranks, copies, sequence parallel": Run(
        4, "grpo.py", [*HF, "--policy.replicas", "2", "--policy.sequence-parallel", "2"], "grpo"),
    "grpo, 2 ranks, offloaded": Run(2, "grpo.py", [*HF, *OFFLOADED], "grpo"),
    "grpo, 2 ranks, then 4": Run(4, "grpo.py", [*HF, "--save.every", "1"], "grpo",
                                 [*HF, "--save.every", "1", "--total-steps", "1"]),
    "async_grpo, no staleness": Run(2, "async_grpo.py", [*HF, "--max-staleness", "0"], "grpo"),
    "async_grpo, 2 and 2": Run(4, "async_grpo.py", [*HF, "--max-staleness", "0", "--samplers", "2"], "grpo"),
    "experts": Run(1, "grpo.py", EXPERTS),
    "experts, 2 ranks": Run(2, "grpo.py", EXPERTS, "experts"),
    "experts, expert parallel": Run(2, "grpo.py", [*EXPERTS, "--policy.expert-parallel", "2"], "experts"),
    "ppo": Run(1, "ppo.py", HF),
    "ppo, 2 ranks": Run(2, "ppo.py", HF, "ppo"),
    "Muon": Run(1, "grpo.py", [*HF, "--optim.kind", "muon"]),
    "Muon, 2 ranks": Run(2, "grpo.py", [*HF, "--optim.kind", "muon"], "Muon"),
    "adapters": Run(1, "grpo.py", [*HF, "--lora.rank", "8", "--kl-loss-coef", "0.1"]),
    "adapters, 2 ranks": Run(2, "grpo.py", [*HF, "--lora.rank", "8", "--kl-loss-coef", "0.1"], "adapters"),
    "dapo": Run(1, "dapo.py", HF),
    "dapo, 2 ranks": Run(2, "dapo.py", HF, "dapo"),
    "sft": Run(1, "sft.py", [*ROWS, *FLOAT32]),
    "sft, 2 ranks": Run(2, "sft.py", [*ROWS, *FLOAT32], "sft"),
    "dpo": Run(1, "dpo.py", [*ROWS, *FLOAT32]),
    "dpo, 2 ranks": Run(2, "dpo.py", [*ROWS, *FLOAT32], "dpo"),
    "vLLM, 2 ranks": Run(2, "grpo.py", VLLM),
    "vLLM, tensor parallel": Run(2, "grpo.py", [*VLLM, "--rollout.tp", "2", "--rollout.extra", json.dumps(
        {"kv_cache_memory_bytes": 10**9, "disable_custom_all_reduce": True})]),     # which looks for a second GPU
    "vLLM, experts": Run(1, "grpo.py", [*VLLM, "--model", "experts"]),
    "vLLM, async_grpo": Run(2, "async_grpo.py", [*VLLM, "--correction.weights", "token"]),
    "vLLM, async_grpo, 2 and 2, episodes": Run(
        4, "async_grpo.py", [*VLLM, *GAME, "--correction.weights", "token", "--samplers", "2"]),
    "vLLM, in flight": Run(1, "grpo.py", [*VLLM, "--rollout.in-flight", "1.5", "--total-steps", "4"]),
    "vLLM, in flight, 2 ranks": Run(2, "grpo.py", [*VLLM, "--rollout.in-flight", "1.5", "--total-steps", "4"]),
    "vLLM, episodes": Run(1, "grpo.py", [*VLLM, *GAME]),
    "vLLM, episodes in flight": Run(1, "grpo.py", [*VLLM, *GAME, "--rollout.in-flight", "1.5"]),
    "vLLM, experts, router replay": Run(
        1, "grpo.py", [*VLLM, "--model", "experts", "--policy.router-replay", "rollout"]),
    "vLLM, adapters": Run(1, "grpo.py", [*VLLM, "--lora.rank", "8"]),
    "vLLM, 8 bits": Run(1, "grpo.py", [*VLLM, "--rollout.extra", json.dumps(
        {"kv_cache_memory_bytes": 10**9, "quantization": "fp8_per_tensor"})]),
    "vLLM, torch.compile": Run(1, "grpo.py", [f for f in VLLM if f != "--rollout.enforce-eager"]),
}


def main(args: argparse.Namespace) -> dict[str, Any]:
    if not (args.work / "experts").is_dir():
        args.work.mkdir(parents=True, exist_ok=True)
        for command in (["data/word_problems.py", "--out", str(args.work / "data"), "--solved"],
                        ["-m", "tests.gpu.first_parts", "models", "--tiny", "--work", str(args.work)]):
            subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    names = [name for name in RUNS if not args.runs or any(name.startswith(run) for run in args.runs)]
    with ThreadPoolExecutor(args.jobs) as pool:
        rows = list(pool.map(partial(one_run, args.work), names))
    print("".join(row.pop("said", "") for row in rows))
    steps = {row["run"]: row.pop("steps") for row in rows}
    for row in rows:
        like = RUNS[row["run"]].like
        if steps[row["run"]] and steps.get(like):
            row["apart"] = apart(steps[row["run"]], steps[like])
    print(json.dumps({"rows": rows}))                                   # the report keeps them
    wrong = [row["run"] for row in rows if row["ended with"] or row.get("apart", 0) > APART]
    wrong += [row["run"] for row in rows if row.get("probabilities", 0) > AGREE]
    if wrong:
        raise Wrong(f"wrong: {', '.join(wrong)}")
    return {"rows": rows}


def apart(found: list[dict[str, float]], right: list[dict[str, float]]) -> float:
    """The largest relative difference."""
    if len(found) != len(right):
        return float("inf")
    pairs = [(a[name], b[name]) for a, b in zip(found, right) for name in COMPARED if name in a or name in b]
    return max(abs(x - y) / max(abs(x), abs(y), 1e-3) for x, y in pairs)


def one_run(work: Path, name: str) -> dict[str, Any]:
    """`said`: the end of all ranks' output, if one failed."""
    run = RUNS[name]
    folder = work / "runs" / name.replace(", ", "_").replace(" ", "_")
    start = time.monotonic()
    said, codes = launch(work, folder, 2, run.script, run.first) if run.first else ("", [0])
    if not any(codes):
        said, codes = launch(work, folder, run.ranks, run.script, run.flags)
    row: dict[str, Any] = {"run": name, "ranks": run.ranks, "ended with": max(codes, key=abs),
                           "seconds": time.monotonic() - start, "steps": []}
    if any(codes):
        return row | {"said": f"===== {name}: {codes}\n{said}"}
    row["steps"] = steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    row |= {"norm": steps[-1].get("actor/grad_norm"), "probabilities": steps[-1].get(
        "training/rollout_probs_diff_mean", 0.0), "sync/probe_prob_diff": steps[-1].get("sync/probe_prob_diff")}
    if not all(0 < step.get("actor/grad_norm", 1.0) < float("inf") for step in steps):
        row |= {"ended with": "wrong", "said": f"===== {name}: a gradient norm is not above 0\n"}
    return row


def launch(work: Path, folder: Path, ranks: int, script: str, flags: list[str]) -> tuple[str, list[int]]:
    """All ranks as processes, as on nodes of one GPU each; the end of their output and their exit codes."""
    rows = "solved/" if script in ("sft.py", "dpo.py") else ""
    flags = [str(work / flag) if flag == "experts" else flag for flag in flags]
    command = [sys.executable, script, "--model", str(work / "tiny"), "--run-dir", str(folder),
               "--train-data", str(work / f"data/{rows}train.parquet"), *flags]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    common = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0",
                           "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                           "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    processes, files = [], []
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        files.append(folder / f"rank{rank}.txt")
        with open(files[-1], "w") as output:
            processes.append(subprocess.Popen(
                command, env=common | {"RANK": str(rank), "NCCL_HOSTID": f"host{rank}"},
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT))
    end = time.monotonic() + 150
    while any(process.poll() is None for process in processes):         # a rank that failed leaves the others waiting
        if time.monotonic() > end or any(process.poll() for process in processes):
            time.sleep(3)
            for process in processes:
                process.kill()
        time.sleep(0.2)
    text = "".join(f"--- rank {rank}\n{file.read_text(errors='replace')[-3500:]}" for rank, file in enumerate(files))
    return text, [process.returncode for process in processes]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default="runs/several_ranks", help="folder of models and runs")
    parser.add_argument("--jobs", type=int, default=4, help="runs at once")
    parser.add_argument("--runs", nargs="+", help="those whose names begin so")
    print(json.dumps(main(parser.parse_args())))
