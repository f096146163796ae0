"""Proof that a restructuring changes nothing: short runs of all scripts, and what two checkouts compute, byte for byte.

    python -m tests.record_runs record OUT [--only NAME ...] [--root CHECKOUT]
    python -m tests.record_runs compare A B [--only NAME ...] [--ignore KEY ...]

A recording is a folder with one folder a run: its metrics, the state and the tensors of all checkpoints, the exported
model, the tables of responses. Nothing is imported from the checkout; models, tokenizer and data are made here. Only
recordings of the same machine and the same packages can be equal.
"""

import argparse
import fnmatch
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint import shards
from tests.recorded_runs import COMMON, RUNS, Run, make_inputs

ROOT = Path(__file__).resolve().parent.parent
NOT_RECORDED = ("timing_s/", "timing_per_token_ms/", "perf/", "rollout/tokens_per_s", "sleep/")
"""Metrics that begin so are seconds, what is divided by seconds, or memory."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
}
TIMEOUT_S = 900.0


# --------------------------------------------------------------------------- record

def start(run: Run, root: Path, inputs: Path, log: Path, total_steps: int) -> None:
    """Run a script of `root` in the folder `inputs`, whose files it finds by relative paths: no path is in the data."""
    command = [sys.executable]
    if run.ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.ranks)]
    command += [str(root / f"{run.script}.py"), *shlex.split(COMMON), "--total-steps", str(total_steps)]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(root)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LD_PRELOAD"):
        environment.pop(name, None)
    with log.open("a") as file:
        done = subprocess.run(
            [*command, *shlex.split(run.flags)], cwd=inputs, env=environment, stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=False,
        )
    if done.returncode:
        sys.exit(f"{run} ended with {done.returncode}:\n{log.read_text()[-6000:]}")


def checkpoint_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a checkpoint, whole, however its files are cut."""
    yield from sorted(shards.whole(folder).items())


def collect(run_dir: Path) -> tuple[dict[str, dict[str, dict[str, Any]]], dict[str, Tensor]]:
    """What a finished run has computed: {file of the recording: {step or folder: {key: value}}}, and all tensors."""
    found: dict[str, dict[str, dict[str, Any]]] = {"metrics": {}, "rollouts": {}, "state": {}, "hashes": {}}
    tensors = {}
    for number, line in enumerate((run_dir / "metrics.jsonl").read_text().splitlines()):
        row = {key: repr(value) for key, value in json.loads(line).items() if not key.startswith(NOT_RECORDED)}
        found["metrics"][f"line {number}, step {row['step']}"] = row
    for path in sorted((run_dir / "rollouts").glob("step_*.parquet")):
        table = pq.read_table(path)
        found["rollouts"][path.stem] = {
            name: {"type": str(table.schema.field(name).type), "rows": [repr(x) for x in table[name].to_pylist()]}
            for name in table.column_names}
    for folder in sorted((run_dir / "checkpoints").glob("step_*")):
        manifest = json.loads((folder / "manifest.json").read_text())["manifest"]
        found["state"][folder.name] = {key: json.dumps(value) for key, value in manifest["state"].items()}
        tensors |= {f"{folder.name}/{name}": tensor for name, tensor in checkpoint_tensors(folder)}
    for folder in (run_dir / "model", *sorted(run_dir.glob("checkpoints/*/hf"))):
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = str(path.relative_to(run_dir))
            if path.suffix == ".safetensors":
                tensors |= {f"{folder.relative_to(run_dir)}/{key}": value for key, value in load_file(path).items()}
            else:
                found["hashes"][name] = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    for name, tensor in tensors.items():
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found["hashes"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "dtype": str(tensor.dtype),
                                 "shape": str(list(tensor.shape))}
    return found, tensors


def check_alive(found: dict, tensors: dict[str, Tensor]) -> None:
    """A run that learns nothing would prove nothing."""
    tables = found["rollouts"].values()
    lengths = [len(set(table["response_length"]["rows"])) for table in tables]
    advantages = [len(set(table["advantage"]["rows"])) for table in tables]
    assert len(lengths) == 3 and min(lengths) > 1, "three steps, responses of different lengths in each"
    assert min(advantages[1:]) > 1, "advantages differ; the first step may be a warm-up of the critic alone"
    weights = [name for name in tensors if name.startswith("step_000001/") and ".model." in name]
    still = [name for name in weights if torch.equal(tensors[name], tensors[f"step_000003/{name.partition('/')[2]}"])]
    assert weights and not still, f"weights that did not change: {still}"


def record(out: Path, names: list[str], root: Path) -> None:
    for name in names:
        run, folder, begin = RUNS[name], out / name, time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with tempfile.TemporaryDirectory() as inputs:
            make_inputs(Path(inputs))
            for total_steps in (run.again_after, 3) if run.again_after else (3,):
                start(run, root, Path(inputs), folder / "log.txt", total_steps)
            found, tensors = collect(Path(inputs) / "run")
        check_alive(found, tensors)
        for kind, content in found.items():
            (folder / f"{kind}.json").write_text(json.dumps(content, indent=1, sort_keys=True))
        save_file(tensors, folder / "tensors.safetensors")
        print(f"{name}: {len(tensors)} tensors, {time.monotonic() - begin:.1f} s", flush=True)


# --------------------------------------------------------------------------- compare

def largest_difference(a: Path, b: Path, name: str) -> str:
    """How far the two tensors of this name are apart, if they can be subtracted."""
    with safe_open(a / "tensors.safetensors", "pt") as ours, safe_open(b / "tensors.safetensors", "pt") as theirs:
        if name not in set(ours.keys()) & set(theirs.keys()):
            return ""
        left, right = ours.get_tensor(name), theirs.get_tensor(name)
    if left.shape != right.shape:
        return ""
    return f", max abs difference {float((left.double() - right.double()).abs().max()):.3g}"


def show(value: Any, other: Any) -> str:
    """A value for people; of a column, only the first row that differs."""
    if not isinstance(value, dict):
        return "absent" if value is None else str(value)
    rows, others = value["rows"], other["rows"] if other else []
    row = next((i for i, pair in enumerate(zip(rows, others)) if pair[0] != pair[1]), None)
    return f"{value['type']} of {len(rows)} rows" + ("" if row is None else f", row {row}: {rows[row]}")


def differences(a: Path, b: Path, ignore: list[str]) -> Iterator[str]:
    """One line for everything that differs between two recorded runs."""
    for kind in ("metrics", "state", "rollouts", "hashes"):
        ours, theirs = (json.loads((folder / f"{kind}.json").read_text()) for folder in (a, b))
        for place in sorted(ours | theirs):
            left, right = ours.get(place, {}), theirs.get(place, {})
            for key in sorted(left | right):
                ignored = any(fnmatch.fnmatchcase(key if kind != "hashes" else place, pattern) for pattern in ignore)
                if left.get(key) == right.get(key) or ignored:
                    continue
                apart = largest_difference(a, b, place) if key == "sha256" else ""
                values = f"{show(left.get(key), right.get(key))} != {show(right.get(key), left.get(key))}"
                yield f"{a.name} {kind}.json: {place}: {key}: {values}{apart}"


def compare(a: Path, b: Path, only: list[str], ignore: list[str]) -> int:
    """Print all differences; the number of them."""
    names = only or sorted({path.name for folder in (a, b) for path in folder.iterdir() if path.is_dir()})
    total = 0
    for name in names:
        missing = [str(folder) for folder in (a, b) if not (folder / name / "hashes.json").is_file()]
        lines = [f"{name} is not in {where}" for where in missing] or [*differences(a / name, b / name, ignore)]
        total += len(lines)
        print("\n".join(lines or [f"{name}: equal"]))
    print(f"{total} differences in {len(names)} runs")
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("out", type=Path)
    recorder.add_argument("--root", type=Path, default=ROOT, help="the checkout whose scripts are run")
    comparer = commands.add_parser("compare")
    comparer.add_argument("a", type=Path)
    comparer.add_argument("b", type=Path)
    comparer.add_argument("--ignore", nargs="+", default=[], help="keys, or patterns of them, that may differ")
    for command in (recorder, comparer):
        command.add_argument("--only", nargs="+", default=[], choices=RUNS, metavar="NAME", help=", ".join(RUNS))
    options = parser.parse_args()
    if options.command == "record":
        record(options.out, options.only or list(RUNS), options.root.resolve())
    elif compare(options.a, options.b, options.only, options.ignore):
        sys.exit(1)
