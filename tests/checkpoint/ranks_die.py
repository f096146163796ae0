"""What happens when a rank of async_grpo.py dies, raises or stands still: one table row for each event.

`python -m tests.checkpoint.ranks_die --events 40` starts tiny runs of trainers and samplers, lets a rank be killed
(SIGKILL), raise an error or stop (SIGSTOP) at an instant chosen at random, measures the seconds from there to the end
of all other processes, starts the run again, and compares what it ends with, byte for byte, with an undisturbed run.
`by hand`: ranks without torchrun. `torchrun`: the parent does what torchrun does (SIGTERM at the first failure, SIGKILL
30 s later). A rank that stands still without torchrun is killed when all others have ended.
"""

import os
import random
import re
import shutil
import signal
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro

from tests.checkpoint import faulty
from tests.checkpoint.test_resume import assert_same_run, steps_on_disk, tiny_run
from tests.conftest import STOPS, make_tiny_llama
from tests.engine.episode_runs import FILE

TOTAL = 3
TIMES = "EVENT_TIME"                                    # of the environment: a file with the time of the event
EPISODES = ["--rollout.episode", f"{FILE}:three_turns", "--rollout.max-response-length", "80", "--rollout.lockstep"]
POINTS = {                                              # instant -> most calls, side
    "rollout": (100, "sampler"), "weights": (TOTAL + 1, "sampler"), "receive": (30, "any"), "send": (20, "any"),
    "reward": (4, "sampler"), "forward": (20, "trainer"), "optimizer": (5, "trainer"), "write": (40, "trainer"),
}


@dataclass
class Events:
    """Which events."""

    events: int = 20
    seed: int = 1
    trainers: int = 1
    samplers: int = 2
    episodes: bool = False
    limit_s: float = 90.0
    """Seconds after which what is left is killed, and the event counts as a hang."""
    only: str = ""
    """Instead of random ones: faults of faulty.py, each with `torchrun ` or `by hand ` before it, joined by ;"""
    again: bool = True
    """Start each run again and compare."""


def start(log: Path, fault: str, arguments: list[str], num_ranks: int, like_torchrun: bool, limit_s: float) -> dict:
    """Forks a process a rank, which does `faulty.run`; returns codes and the seconds after the event."""
    log.write_text("")
    moment = log.with_suffix(".time")
    moment.unlink(missing_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
           TIMES: moment, **(faulty.LIKE_TORCHRUN if like_torchrun else {})}
    children = []
    for rank in range(num_ranks):
        command = {"log": str(log), "errors": str(log), "arguments": [fault, *arguments]}
        environment = {name: str(value) for name, value in (env | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        children.append(faulty.fork(command, environment))
    codes: dict[int, int] = {}
    ends: dict[int, float] = {}
    stopped = 0.0
    hangs = False
    while len(codes) < num_ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        now = time.time()
        if pid in children:
            codes[pid], ends[pid] = os.waitstatus_to_exitcode(status), now
            if like_torchrun and codes[pid] and not stopped:
                stopped = now
                send(children, codes, signal.SIGTERM)
            continue
        if stopped and now > stopped + 30:
            send(children, codes, signal.SIGKILL)
        if moment.exists() and now > float(moment.read_text() or now) + limit_s:
            hangs = True
            send(children, codes, signal.SIGKILL)
        left = [child for child in children if child not in codes]
        if not like_torchrun and all(psutil.Process(child).status() == psutil.STATUS_STOPPED for child in left):
            for child in left:                          # nobody else is there who could
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                codes[child] = -signal.SIGSTOP
        time.sleep(0.02)
    began = float(moment.read_text()) if moment.exists() else 0.0
    return {"codes": [codes[child] for child in children], "hangs": hangs,
            "seconds": max(ends.values()) - began if began else None}


def send(children: list[int], codes: dict[int, int], number: int) -> None:
    for pid in children:
        if pid not in codes:
            os.kill(pid, number)


def said(log: Path) -> str:
    """What names a rank or ends a process, in the log."""
    lines = [line for line in log.read_text().splitlines()
             if re.match(r"\[rank \d+\]|\w+(\.\w+)*(Error|Exception)\b", line) and "Traceback" not in line]
    return " / ".join(dict.fromkeys(line[:220] for line in lines)) or "nothing"


def random_event(numbers: random.Random, events: Events) -> tuple[bool, str]:
    point = numbers.choice(list(POINTS))
    most, side = POINTS[point]
    trainers, samplers = range(events.trainers), range(events.trainers, events.trainers + events.samplers)
    rank = numbers.choice({"sampler": samplers, "trainer": trainers, "any": [*trainers, *samplers]}[side])
    if point in ("weights", "reward"):
        most = min(most, TOTAL)
    action = numbers.choice(["kill", "raise", "stop"])
    delay = round(numbers.uniform(0, 0.5), 2) if numbers.random() < 0.5 and action != "raise" else 0
    return numbers.random() < 0.5, f"{point}:{numbers.randint(1, most)}:{rank}:{action}:{delay}"


def main(events: Events) -> None:
    numbers = random.Random(events.seed)
    faulty.import_all()
    num_ranks = events.trainers + events.samplers
    name = tempfile.mkdtemp()                            # no context: forks leave through it, too
    folder = Path(name)
    model = make_tiny_llama(folder / "model")
    flags = [*tiny_run(model, folder), "--total-steps", str(TOTAL), "--save.every", "1", "--save.keep", "9",
             "--log.rollouts-every", "1", "--correction.weights", "token", *STOPS,
             "--samplers", str(events.samplers), *(EPISODES if events.episodes else [])]
    want = folder / "undisturbed"
    done = start(folder / "log", "none", ["async_grpo.py", *flags, "--run-dir", str(want)], num_ranks, True, 600)
    assert not any(done["codes"]), (folder / "log").read_text()[-6000:]
    chosen = [(one.startswith("torchrun"), one.split()[-1]) for one in events.only.split(";") if one]
    chosen = chosen or [random_event(numbers, events) for _ in range(events.events)]
    print("| started | instant | rank | what happens | s to the end of all others | exit codes | what is printed | "
          "started again |\n| --- | --- | --- | --- | --- | --- | --- | --- |")
    for number, (like_torchrun, fault) in enumerate(chosen):
        run, log = folder / f"run{number}", folder / f"log{number}"
        arguments = ["async_grpo.py", *flags, "--run-dir", str(run)]
        done = start(log, fault, arguments, num_ranks, like_torchrun, events.limit_s)
        point, count, rank, action, delay = [*fault.split(":"), "0"][:5]
        seconds = "no event" if done["seconds"] is None else f"{done['seconds']:.1f}"
        seconds = f"**hangs** (> {events.limit_s:g})" if done["hangs"] else seconds
        outcome = ""
        if events.again and any(done["codes"]):
            saved = steps_on_disk(run) if (run / "checkpoints").is_dir() else []
            later = start(folder / "log_again", "none", arguments, num_ranks, like_torchrun, 600)
            text = (folder / "log_again").read_text()
            assert not any(later["codes"]), text[-6000:]
            assert not saved or f"resumed after step {saved[-1]}" in text, text
            assert_same_run(run, want, TOTAL)
            outcome = f"after step {saved[-1] if saved else 0}: the same"
        if os.environ.get("KEEP_LOGS"):
            Path(os.environ["KEEP_LOGS"]).mkdir(exist_ok=True)
            (Path(os.environ["KEEP_LOGS"]) / f"{number}_{fault}".replace(":", "_")).write_text(log.read_text())
        print(f"| {'torchrun' if like_torchrun else 'by hand'} | {point} {count}"
              f"{f' + {delay} s' if delay != '0' else ''} | {rank} | {action} | {seconds} | {done['codes']} | "
              f"{said(log)} | {outcome} |".replace(name, "RUN"), flush=True)
    shutil.rmtree(name)


if __name__ == "__main__":
    main(tyro.cli(Events, description=__doc__))
