"""Supervised fine-tuning against TRL's SFTTrainer with packing: same model, rows, tokens, masks, machine.

    tools/setup.sh trl && python -m tests.bench.bench_sft [--rounds 3] [--steps 12] [--rows-per-step 32]

Each round runs sft.py and then TRL on the quickstart's solved problems. TRL gets the token ids and the trained tokens
that sft.py made of them, packs them into sequences of --max-tokens, and takes as many of these in a step as hold the
tokens of --rows-per-step rows; so which rows meet in a step differs, and the curves agree but for that. Both write a
line a step; from outside, each line's moment, and the CPU seconds and peak memory of the processes then: set-up and the
first step are not counted. Ratios are taken within a round, then their median.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import tyro
from transformers import AutoTokenizer

import sft
from common.curriculum.sampler import PromptSampler
from common.dataset.conversations import ConversationSet, RowParser, load_conversations
from common.engine.make import stop_tokens
from tests.bench.bench_step import run
from tests.bench.record import ROOT, report

TASK = "data/word_problems/solved/train.parquet"


@dataclass
class Args:
    rounds: int = 3
    steps: int = 12
    """Of each program in each round; the first one is not counted."""
    rows_per_step: int = 32
    max_tokens: int = 4096
    """sft.py: tokens of a micro-batch; TRL: of a packed sequence."""
    lr: float = 1e-5
    threads: int = 0
    """OMP_NUM_THREADS of both programs. 0: as set outside, else all cores."""
    model: str = "models/SmolLM2-135M-Instruct"
    trl_python: str = ".venv-trl/bin/python"


def load(args: Args) -> ConversationSet:
    """The rows as sft.py reads them."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    config = sft.SFTConfig()
    columns = {"messages": config.messages_column, "prompt": config.prompt_column, "response": config.response_column}
    parser = RowParser(columns, sft.parse)
    return load_conversations([TASK], tokenizer, stop_tokens(args.model, tokenizer), config, parser)


def write_rows(file: Path, data: ConversationSet, rows: list[int]) -> None:
    with file.open("w") as out:
        for row in rows:
            tokens, mask = data.tokens[row].as_py(), data.mask[row].as_py()
            labels = [token if trained else -100 for token, trained in zip(tokens, mask)]
            out.write(json.dumps({"input_ids": tokens, "labels": labels}) + "\n")


def summary(rows: list[dict], loss: str, tokens: list[float]) -> dict[str, float]:
    """Medians over the steps after the first; `tokens`: of each step."""
    steps = [{"step_s": row["clock"] - before["clock"], "step_cpu_s": row["cpu"] - before["cpu"],
              "cpu_ms_per_token": 1000 * (row["cpu"] - before["cpu"]) / count, "tokens_per_step": count}
             for (before, row), count in zip(pairwise(rows), tokens[1:], strict=True)]
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]} | {
        "peak_gb": rows[-1]["peak_gb"], "first_loss": rows[0][loss], "last_loss": rows[-1][loss]}


def main(args: Args) -> None:
    if not (ROOT / args.trl_python).exists():
        raise SystemExit(f"error: --trl-python {args.trl_python} does not exist: run tools/setup.sh trl")
    os.chdir(ROOT)
    threads = args.threads or int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1",
                                "TOKENIZERS_PARALLELISM": "false", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    data = load(args)
    drawn = PromptSampler(len(data), "", seed=0).take(args.rows_per_step * args.steps)
    num_tokens = int(data.sequence_lengths[drawn].sum()) / args.steps
    ours = [sys.executable, "sft.py", "--model", args.model, "--train-data", TASK, "--total-steps", args.steps,
            "--rows-per-step", args.rows_per_step, "--max-tokens-per-gpu", args.max_tokens, "--optim.lr", args.lr,
            "--save.hf", "never", "--save.every", 0, "--run-dir"]
    rounds, curves = [], {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", data, drawn)
        for number in range(args.rounds):
            at = folder / f"ours{number}"
            mine = run([*map(str, ours), str(at)], at, environment)
            at = folder / f"trl{number}"
            job = {"model": args.model, "rows": str(folder / "rows.jsonl"), "run_dir": str(at), "steps": args.steps,
                   "max_tokens": args.max_tokens, "lr": args.lr,
                   "sequences_per_step": max(1, round(num_tokens / args.max_tokens))}
            at.with_suffix(".json").write_text(json.dumps(job))
            trls = run([str(ROOT / args.trl_python), "-m", "tests.bench.sft_trl", str(at.with_suffix(".json"))], at,
                       environment)
            so_far = [0.0, *(row["num_tokens"] for row in trls)]
            results = {
                "ours": summary(mine, "train/loss", [row["perf/total_num_tokens"] for row in mine]),
                "trl": summary(trls, "loss", [b - a for a, b in pairwise(so_far)]),
            }
            for kind, found in results.items():
                print(f"round {number} {kind:5}", json.dumps(found), flush=True)
            rounds.append(results)
            curves = {"ours": [row["train/loss"] for row in mine], "trl": [row["loss"] for row in trls]}

    def median(kind: str, figure: str, over: str | None = None) -> float:
        return statistics.median(r[kind][figure] / (r[over][figure] if over else 1) for r in rounds)

    ask = "from importlib.metadata import version; print(version('trl'))"
    version = subprocess.run([args.trl_python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    report("sft", trl_version=version, threads=threads, rows_per_step=args.rows_per_step, max_tokens=args.max_tokens,
           counted_steps=args.rounds * (args.steps - 1),
           trl_over_ours={name: median("trl", name, "ours") for name in
                          ("step_s", "step_cpu_s", "cpu_ms_per_token", "peak_gb", "last_loss")},
           **{kind: {name: median(kind, name) for name in rounds[0]["ours"]} for kind in ("ours", "trl")},
           loss_curves=curves, rounds=rounds)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
