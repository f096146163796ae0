"""Seconds a step where one rank samples and one trains, against two ranks that take turns: `python -m
tests.bench.bench_async`. The quickstart's problems, with responses of up to 128 tokens, most of which end much earlier;
on vLLM and the 135M model. Runs alternate; medians over the steps after the second one, when all is under way.
"""

import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

from tests.bench.record import ROOT, report

RUNS = {
    "take turns": ["grpo.py"],
    "split, in turn": ["async_grpo.py", "--max-staleness", "0"],
    "split, at once": ["async_grpo.py", "--max-staleness", "1", "--correction.weights", "token"],
}


@dataclass
class Args:
    model: str = "models/SmolLM2-135M-Instruct"
    data: str = "data/word_problems/train.parquet"
    max_response_length: int = 128
    steps: int = 6
    rounds: int = 1
    flags: str = ""
    """Further flags of all runs, --flags="--rollout.engine hf"."""


def seconds(args: Args, command: list[str], run_dir: Path) -> dict[str, float]:
    """Medians of a run: seconds of a step, of sampling, of waiting for the samplers, of the update, of the weights."""
    flags = {
        "--model": args.model, "--train-data": args.data, "--run-dir": run_dir, "--total-steps": args.steps,
        "--data.max-prompt-length": 160, "--rollout.max-response-length": args.max_response_length,
        "--rollout.max-num-seqs": 64, "--prompts-per-step": 8, "--samples-per-prompt": 8, "--max-tokens-per-gpu": 4096,
        "--optim.lr": 3e-5, "--reward.num-workers": 1, "--save.every": 0, "--save.hf": "never",
        "--log.rollouts-every": 0,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += ["--policy.share-prompt", *shlex.split(args.flags)]
    subprocess.run([*torchrun, *command, *words], cwd=ROOT, check=True)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][2:]
    names = ("step", "gen", "wait", "update_actor", "update_weights")
    return {name: statistics.median(row.get(f"timing_s/{name}", 0.0) for row in rows) for name in names}


def main(args: Args) -> None:
    found = {name: [] for name in RUNS}
    for number in range(args.rounds):
        for name, command in list(RUNS.items())[:: -1 if number % 2 else 1]:
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(seconds(args, command, Path(folder) / "run"))
            print(name, found[name][-1], flush=True)
    steps = {name: statistics.median(row["step"] for row in rows) for name, rows in found.items()}
    # the simulator's rule: a step takes as long as the slower side
    slower = [max(row["gen"], row["step"] - row["gen"]) / row["step"] for row in found["split, in turn"]]
    report("async", seconds=steps, rounds=found, **{
        "split, at once, over take turns": steps["split, at once"] / steps["take turns"],
        "split, at once, over split, in turn": steps["split, at once"] / steps["split, in turn"],
        "the same by the simulator, from the phases in turn": statistics.median(slower),
    })


if __name__ == "__main__":
    main(tyro.cli(Args))
