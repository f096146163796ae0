"""How a step grows with prompts, response length, model size and ranks: measured on tiny models, predicted for others.

    python -m tests.bench.bench_scale [--repeats 3]

1. Constants of this machine, measured first on the middle model (scale_worker's `calibrate`).
2. Measured steps: on one rank the CPU seconds of each phase (vLLM samples); on 1, 2 and 4 gloo ranks the work and bytes
   of each rank (tokens, FLOPs, bytes gathered, reduce-scattered, exchanged, synced). Gloo ranks share the cores, so
   their seconds say nothing and are not taken.
3. simulate.py's prediction of every one of these numbers, as predicted / measured.
4. Its prediction for H100s (h100.py): nothing there was measured on a GPU.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import tyro
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.bench.h100 import ASSUMED, Batch, predict, table
from tests.bench.record import ROOT, report
from tests.bench.simulate import (
    Job,
    Machine,
    Shape,
    rollout_seconds,
    sync_seconds,
    update_seconds,
    update_work,
)
from tests.conftest import MODEL

TINY = {"small": (128, 4), "middle": (256, 6), "large": (512, 8)}       # hidden size, layers
MAX_TOKENS, MAX_NUM_SEQS = 2048, 64

@dataclass
class Args:
    repeats: int = 3
    """Of each measured phase; medians."""
    smoke: bool = False
    """Two cases only: does it work?"""
    h100: Batch = field(default_factory=Batch)


def make_model(folder: Path, hidden: int, layers: int) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=8192, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )).save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return folder


def case(prompts: int = 8, prompt: int = 64, response: int = 64) -> dict:
    return {"prompts": prompts, "samples": 8, "prompt": prompt, "response": response}


def measure(folder: Path, model: str, ranks: int, cases: list[dict], args: Args, calibrate: bool = False) -> dict:
    """`cases` run by `ranks` processes."""
    at = folder / f"{model}_{ranks}"
    if not (folder / model).exists():
        make_model(folder / model, *TINY[model])
    job = {"model": str(folder / model), "max_tokens": MAX_TOKENS, "max_num_seqs": MAX_NUM_SEQS, "cases": cases,
           "repeats": args.repeats, "calibrate": calibrate, "out": f"{at}.out"}
    Path(f"{at}.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m",
               "tests.bench.scale_worker", f"{at}.json"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                          capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr[-4000:]}")
    return json.loads(Path(f"{at}.out").read_text())


def job_of(row: dict, ranks: int) -> Job:
    responses = np.array(row["response_lengths"])
    return Job(np.full(len(responses), row["prompt"]), responses, row["samples"], ranks, max_tokens=MAX_TOKENS,
               max_num_seqs=MAX_NUM_SEQS)


def this_machine(found: dict, shape: Shape) -> Machine:
    """Fixed times and shares, so that the calibrating micro-batches and decode steps come out right."""
    layers, lengths = shape.config.num_hidden_layers, np.array(found["full_lengths"])
    responses = lengths // 2
    ideal = Machine("this CPU", found["flops"], found["bytes_per_s"], 0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    tensor_s = (found["sync_s"] - sync_seconds(ideal, shape, Job(lengths, lengths, 1))) / shape.num_tensors
    moved_s = shape.weights * 24 / found["bytes_per_s"]                  # what update_seconds adds to a micro-batch
    layer_s = max(found["small_s"] - moved_s, 0.0) / layers
    work = update_work(shape, Job(lengths - responses, responses, 1, max_tokens=MAX_TOKENS))["flops"].sum()
    mfu = work / (found["full_s"] - found["small_s"]) / found["flops"]
    ideal = dataclasses.replace(ideal, prefill_mfu=mfu)
    fixed = {}
    for n in (1, 32):                                                   # as `calibrate` asked: 32 tokens after 32
        job = Job(np.full(n, 32), np.full(n, 32), n)
        fixed[n] = found["decode_s"][str(n)] - rollout_seconds(ideal, shape, job, n)["rollout_s"] / 32
    sequence_s = max((fixed[32] - fixed[1]) / 31, 0.0)
    return dataclasses.replace(ideal, update_mfu=mfu, layer_s=layer_s, decode_sequence_s=sequence_s,
                               decode_step_s=fixed[1] - sequence_s, tensor_s=tensor_s)


def compare(row: dict, ranks: int, model: str, shape: Shape, machine: Machine) -> dict:
    """Measured and predicted / measured of one step; of work, the busiest rank's."""
    job = job_of(row, ranks)
    work = update_work(shape, job)
    predicted = {name: float(work[name].sum(0).max()) for name in ("tokens", "flops")}
    predicted |= {name: float(np.max(work[name])) for name in ("all_gather", "reduce_scatter", "exchange", "sync")}
    measured = {name: float(max(rank[name] for rank in row["ranks"])) for name in predicted}
    if row["seconds"]:
        measured |= row["seconds"]
        seconds = update_seconds(machine, shape, job) | {"sync_s": sync_seconds(machine, shape, job)}
        predicted |= seconds | rollout_seconds(machine, shape, job, MAX_NUM_SEQS)
    sizes = {name: row[name] for name in ("prompts", "samples", "prompt", "response", "microbatches")}
    ratios = {name: predicted[name] / value for name, value in measured.items() if value}
    return {"model": model, "ranks": ranks, **sizes, "measured": measured, "predicted_over_measured": ratios}


def main(args: Args) -> None:
    middle = [case()] if args.smoke else [case(), case(prompts=4), case(prompts=16), case(response=32),
                                          case(response=128)]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = measure(folder, "middle", 1, middle, args, calibrate=True)
        calibration = found["calibration"]
        machine = this_machine(calibration, Shape.of(LlamaConfig.from_pretrained(folder / "middle")))
        print(f"constants {json.dumps(dataclasses.asdict(machine))}", flush=True)
        plan = [("middle", 1, found)]
        if not args.smoke:
            plan += [("small", 1, None), ("large", 1, None), ("small", 4, None), ("middle", 4, None)]
        for model, ranks, done in [*plan, ("middle", 2, None)]:
            done = done or measure(folder, model, ranks, [case()], args)
            shape = Shape.of(LlamaConfig.from_pretrained(folder / model))
            for row in done["rows"]:
                rows.append(compare(row, ranks, model, shape, machine))
                print(json.dumps(rows[-1]), flush=True)
    predicted = predict(args.h100)
    table(predicted)
    report("scale", constants=calibration | {"machine": dataclasses.asdict(machine)}, rows=rows,
           h100={"note": "predictions: nothing was measured on a GPU", "assumed": ASSUMED,
                 "batch": dataclasses.asdict(args.h100), "rows": predicted})


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
