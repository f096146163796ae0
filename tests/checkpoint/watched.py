"""Run by test_watch.py, a process a rank: ranks that report their phases, and what happens to the last of them."""

import ctypes
import os
import signal
import subprocess
import sys
import time

import torch.distributed as dist

from common.checkpoint.signals import Watchdog
from common.parallel import ranks


def shell(command: str) -> None:
    subprocess.Popen(["sh", "-c", command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main(case: str) -> None:
    watch = Watchdog(0.0 if case == "stopped, no limit" else 200.0)
    world = ranks.init()
    watch.watch(world.job_store)
    is_last = world.rank == world.size - 1
    if case == "ends at once":
        if is_last:
            os._exit(2)
        watch.phase("first round")
        time.sleep(100)
    pids = ranks.all_gather_objects(os.getpid())
    everyone = " ".join(map(str, pids))
    watch.phase(f"work of {world.rank}")
    pair = dist.new_group([1, 2]) if case == "waited for" else None
    end = time.monotonic() + 18                         # before the pause: the others may be stopped at its end
    time.sleep(3)                                       # all of them have reported it
    if case == "suspended":                             # by Slurm, or the lid of a laptop
        if is_last:
            shell(f"kill -STOP {everyone}; sleep 12; kill -CONT {everyone}")
        time.sleep(max(end - time.monotonic(), 0))      # perhaps stopped before this line
    elif case == "imports" and is_last:                 # as torch does, which keeps Python's lock for so long
        watch.phase("setup of models")
        time.sleep(2)
        ctypes.PyDLL(None).sleep(9)
    elif case == "imports":
        time.sleep(12)
    elif case == "stopped, no limit":
        if is_last:
            shell(f"kill -STOP {pids[-1]}; sleep 12; kill -CONT {pids[-1]}")
        time.sleep(max(end - time.monotonic(), 0))
    elif case == "busy" and is_last:                    # one call, in which other threads run
        time.sleep(12)
    elif case == "busy" and world.rank == 0:            # Python alone
        until = time.monotonic() + 12
        while time.monotonic() < until:
            pass
    elif case == "fails" and is_last:
        raise ArithmeticError("asked to fail")
    elif case == "waited for" and world.rank == 1:
        dist.barrier(pair)
    elif (case in ("killed", "waited for") and is_last) or (case == "first killed" and world.rank == 0):
        os.kill(os.getpid(), signal.SIGKILL)
    elif case == "stopped" and is_last:
        others = " || ".join(f"kill -0 {pid}" for pid in pids[:-1])
        shell(f"while {others}; do sleep 0.1; done; kill -KILL {pids[-1]}")
        os.kill(os.getpid(), signal.SIGSTOP)
    if case in ("killed", "first killed", "waited for", "fails", "stopped"):
        time.sleep(100)
    if case == "late" and is_last:
        time.sleep(4)
    print(f"rank {world.rank} leaves\n", end="", flush=True)     # one write: lines of ranks do not mix
    watch.leave()
    print(f"rank {world.rank} has left\n", end="", flush=True)
    ranks.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
