"""Runs a script as `python SCRIPT FLAGS` does, with one fault at a chosen instant: `faulty.py FAULT SCRIPT FLAGS`.

FAULT is POINT:COUNT:RANK:ACTION[:DELAY_S]; `write:3:0:kill`: as rank 0 writes its third file of shards, it is killed.
Several are joined by commas, at most one a rank. `rollout:9:1:slow:2`: from the ninth on each call takes 2 s more, and
prints that.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent.parent
LIKE_TORCHRUN = {"TORCHELASTIC_RUN_ID": "warm"}  # with this in `env` of a warm start, its server stands for torchrun
POINTS = {
    "rollout": "common.engine.hf HFEngine._sample",
    "decode": "common.engine.vllm VLLMEngine.step",
    "episode": "envs.runtime.processes EpisodeProcesses.tell",
    "validation": "common.evaluation.sampled evaluate",
    "send": "common.engine.remote Bridge.send",
    "receive": "common.engine.remote Bridge.receive",
    "weights": "common.engine.remote receive_weights",
    "reward": "rewards.runtime.pool RewardPool.results",
    "forward": "common.model.policy Policy.forward",
    "optimizer": "torch.optim AdamW.step",
    "log": "common.tracking.logger Tracker.log",
    "save": "common.checkpoint.manager Checkpoints._save",
    "write": "common.checkpoint.state save_file",
    "checksum": "common.checkpoint.files crc32",
    "manifest": "common.checkpoint.manager write_manifest",
    "rename": "pathlib Path.rename",
    "prune": "shutil rmtree",
    "export": "common.checkpoint.export replace_hf",
}
NOTED_S = 0.5  # for the watchdog's thread to note a signal: a tiny model's step may end in less


def ranks() -> list[int]:
    """Process ids of all ranks of this machine, this one last."""
    peers = psutil.Process(os.getppid()).children() if "TORCHELASTIC_RUN_ID" in os.environ else []
    return [p.pid for p in peers if p.pid != os.getpid()] + [os.getpid()]


def act(action: str) -> None:
    if "EVENT_TIME" in os.environ:
        Path(os.environ["EVENT_TIME"]).write_text(str(time.time()))
    launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "killall":
        for pid in ranks():
            os.kill(pid, signal.SIGKILL)
    elif action in ("term", "int"):                     # what a user or a cluster sends to the command it started
        os.kill(launcher, getattr(signal, f"SIG{action.upper()}"))
        time.sleep(NOTED_S)
    elif action == "usr1":                              # what Slurm sends to all processes of a step
        for pid in ranks():
            os.kill(pid, signal.SIGUSR1)
        time.sleep(NOTED_S)
    elif action == "raise":
        raise ArithmeticError("asked to fail")
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "hang":
        time.sleep(600)
    elif action == "freeze":                            # the other ranks, until this one has ended, or for 3 s
        others = " ".join(str(p.pid) for p in psutil.Process(os.getppid()).children() if p.pid != os.getpid())
        until = f"for i in $(seq 30); do kill -0 {os.getpid()} || break; sleep 0.1; done"
        subprocess.Popen(["sh", "-c", f"kill -STOP {others}; {until}; kill -CONT {others}"])
    else:
        raise ValueError(action)


def set_fault(point: str, count: int, rank: int, action: str, delay_s: float) -> None:
    """`point` is one of POINTS, or one with " after": when the call returns instead of when it begins. Where torchrun
    restarts a job, only in its first start."""
    if int(os.environ.get("RANK", "0")) != rank or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    module, path = POINTS[point.removesuffix(" after")].split()
    owner = importlib.import_module(module)
    *outer, name = path.split(".")
    for attribute in outer:
        owner = getattr(owner, attribute)
    original, calls = getattr(owner, name), 0

    def faulty(*args, **kwargs):
        nonlocal calls
        calls += 1
        mine = calls
        result = original(*args, **kwargs) if point.endswith(" after") else None
        if action == "slow" and mine >= count:
            print(f"slow {point}", flush=True)
            time.sleep(delay_s)
        elif mine == count:
            if delay_s:
                threading.Timer(delay_s, act, [action]).start()
            else:
                act(action)
        return result if point.endswith(" after") else original(*args, **kwargs)

    setattr(owner, name, faulty)


def record_draws(path: str) -> None:
    """After each logged step, a line with what a fork of the script would draw from the global generators."""
    tracker = importlib.import_module("common.tracking.logger").Tracker
    log = tracker.log

    def logged(self, step, *args):
        log(self, step, *args)
        with open(path, "a") as file:
            file.write(f"{step} {random.random()} {np.random.rand()} {torch.rand(1).item()}\n")

    tracker.log = logged


def record_phases(path: str) -> None:
    """A line for each phase that the watchdog is told of."""
    watchdog = importlib.import_module("common.checkpoint.signals").Watchdog
    begin = watchdog.phase

    def phase(self, name: str) -> None:
        begin(self, name)
        with open(path, "a") as file:
            file.write(f"{name}\n")

    watchdog.phase = phase


def run(fault: str, script: str, *flags: str) -> None:
    if "SILENT_S" in os.environ:                        # a test need not wait for as long as users do
        importlib.import_module("common.checkpoint.signals").SILENT_S = float(os.environ["SILENT_S"])
    if "DRAWS" in os.environ:
        record_draws(os.environ["DRAWS"])
    if "PHASES" in os.environ:
        record_phases(os.environ["PHASES"])
    for one in fault.split(",") if fault != "none" else []:
        point, count, rank, action, delay_s = [*one.split(":"), "0"][:5]
        set_fault(point, int(count), int(rank), action, float(delay_s))
    sys.argv[:] = [script, *flags]
    runpy.run_path(str(ROOT / script), run_name="__main__")


def import_all(*more: str) -> None:
    """All that is slow to import."""
    for name in ("common.run", "common.losses", "common.correction", "variants.losses", "common.engine.hf",
                 "pandas", "torch._dynamo", "transformers.models.llama.modeling_llama", *more):
        importlib.import_module(name)
    fill_caches()
    freeze()                                            # or the end of each fork copies and visits all of these objects


def fill_caches() -> None:
    """What tyro reads from the files of the flags, and transformers' table of the names of weights."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    tyro.cli(importlib.import_module("common.run").RunArgs, args=["--model", "any", "--train-data", "any"])
    get_checkpoint_conversion_mapping("llama")


def serve(*more: str) -> None:
    """Commands as JSON lines on stdin, exit codes on stdout; each runs in forks of this process, one a rank, which has
    imported all that is slow to import and done nothing else."""
    import_all(*more)
    for line in sys.stdin:
        command = json.loads(line)
        open(command["log"], "w").close()
        children = [fork(command, env) for env in command["environments"]]
        codes = codes_of(children, LIKE_TORCHRUN.items() <= command["environments"][0].items())
        print(json.dumps([codes[pid] for pid in children]), flush=True)


def codes_of(children: list[int], like_torchrun: bool) -> dict[int, int]:
    """The exit codes of all children. Like torchrun, if asked: after the first failure, and at a signal to this
    process, those that are left get a signal, and 30 s later SIGKILL."""
    codes: dict[int, int] = {}

    def send(number: int) -> None:
        for pid in set(children) - codes.keys():
            os.kill(pid, number)

    def end(number: int) -> None:
        send(number)
        signal.alarm(signal.alarm(30) or 30)

    handlers = {signal.SIGTERM: lambda number, _: end(number), signal.SIGINT: lambda number, _: end(number),
                signal.SIGALRM: lambda *_: send(signal.SIGKILL)}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items() if like_torchrun}
    while len(codes) < len(children):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if like_torchrun and codes[pid]:
            end(signal.SIGTERM)
    signal.alarm(0)
    for number, handler in before.items():
        signal.signal(number, handler)
    return codes


def freeze() -> None:
    """What is there now is never visited by garbage collection again; vLLM thaws it at the end of each engine."""
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def fork(command: dict, env: dict[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in ((1, "log"), (2, "errors")):
        os.dup2(os.open(command[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.update(env)
    tempfile.tempdir = None                             # TMPDIR may be another one
    signal.set_wakeup_fd(-1)
    run(*command["arguments"])
    sys.exit(0)


def python_path(*folders: Path | str) -> str:
    """PYTHONPATH of a child: these folders, then what this process was given, where packages may lie."""
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))


class Server:
    """`start(log, fault, script, *flags)` without the seconds that imports take, and without torchrun."""

    def __init__(self, *modules: str):
        ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "serve", *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=ROOT, env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(ROOT)})

    def __call__(
        self, log: Path, *arguments: str, ranks: int = 1, errors: Path | None = None, env: dict | None = None
    ) -> int:
        """The exit code of the first rank, in the order of ranks, that failed, 0 if none did; minus the signal's number
        for one that was killed. `codes` then has those of all ranks. `errors`: stderr, else it is in the log."""
        environments = [env or {}]
        if ranks > 1:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            group = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environments = [
                (env or {}) | {name: str(value) for name, value in (group | {"RANK": rank, "LOCAL_RANK": rank}).items()}
                for rank in range(ranks)
            ]
        command = {"log": str(log), "errors": str(errors or log), "arguments": [str(x) for x in arguments],
                   "environments": environments}
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        self.codes = json.loads(self.process.stdout.readline())
        return next((code for code in self.codes if code), 0)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


@functools.cache
def server(*modules: str) -> Server:
    """One for all tests of this process that want the same modules imported beside ours."""
    shared = Server(*modules)
    atexit.register(shared.close)
    return shared


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    else:
        run(*sys.argv[1:])
