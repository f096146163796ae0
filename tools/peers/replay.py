"""Runs a script's own loop for one step on a recorded batch, in float64, and gets its numbers.

The script runs as it is, on the tiny model of tools/try_script.py and in a fork of this process. Only what feeds it
numbers is replaced, by tools/peers/stage.py.
"""

import json
import os
import runpy
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tools.peers.numbers import Numbers, Refused
from tools.peers.recorded import Recorded
from tools.peers.stage import Stage
from tools.try_script import TINY, make_tiny_model

MODEL, DATA = "model", "prompts.parquet"


def replay(script: str, flags: list[str], recorded: Recorded) -> Numbers:
    """The script's numbers, from a fork of this process, which must have started nothing but imports. Raises
    ValueError with the script's last line where it ends with an error."""
    with tempfile.TemporaryDirectory(prefix="same_as_") as folder:
        out, log = Path(folder) / "numbers.pt", Path(folder) / "log"
        pid = os.fork()
        if not pid:
            run_in_fork(script, flags, recorded, out, log)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if out.is_file() and not code:
            return torch.load(out, weights_only=False)
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        last = next((line for line in reversed(said) if line.startswith("error: ")), said[-1] if said else "")
        raise ValueError(f"{script} cannot be compared: {last.removeprefix('error: ') or f'exit code {code}'}")


def run_in_fork(script: str, flags: list[str], recorded: Recorded, out: Path, log: Path) -> None:
    """Does not return."""
    code = 1
    try:
        with open(log, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        write_inputs(recorded, out.parent)
        sys.argv[:] = [script, *own_arguments(recorded, out.parent), *flags]
        Stage(recorded, out).install()
        runpy.run_path(script, run_name="__main__")
        print(f"error: {script} ended before run.finish(...) of its first step", file=sys.stderr)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except Refused as refused:
        print(f"error: {refused}", file=sys.stderr)
    except BaseException as error:                                      # the last line is what the parent says
        print(f"error: {type(error).__name__}: {' '.join(str(error).split())[:300]}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def write_inputs(recorded: Recorded, folder: Path) -> None:
    """A model and data that a run can start with. The model takes sequences of any length, as none runs through it."""
    if not (TINY / "config.json").is_file():
        make_tiny_model()
    (folder / MODEL).mkdir()
    for file in TINY.iterdir():
        (folder / MODEL / file.name).symlink_to(file)
    config = json.loads((TINY / "config.json").read_text()) | {"max_position_embeddings": 2**24}
    (folder / MODEL / "config.json").unlink()
    (folder / MODEL / "config.json").write_text(json.dumps(config))
    row = {"prompt": [{"role": "user", "content": "p"}], "data_source": "same_as", "reward_model": {"ground_truth": ""}}
    pq.write_table(pa.Table.from_pylist([row] * recorded.num_groups), folder / DATA)


def own_arguments(recorded: Recorded, folder: Path) -> list[str]:
    """What the script is started with, before the flags that are compared."""
    return [
        "--model", str(folder / MODEL), "--train-data", str(folder / DATA), "--run-dir", str(folder / "run"),
        "--total-steps", "1",
        "--prompts-per-step", str(recorded.num_groups), "--samples-per-prompt", str(recorded.samples_per_prompt),
        "--data.max-prompt-length", "200", "--rollout.max-response-length", "512", "--rollout.engine", "hf",
        "--policy.compute-dtype", "float32",
        "--reward.function", f"{Path(__file__).parent.parent}/try_script.py:compute_score", "--reward.num-workers", "0",
        "--log.rollouts-every", "0", "--save.resume", "none", "--save.hf", "never", "--run-zero-advantage",
    ]
