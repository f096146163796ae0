"""A user's reward file in verl's signature; the response chooses how the function misbehaves."""

import asyncio
import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time


def score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    if solution_str == "loop":
        while True:
            pass
    if solution_str == "regex":  # holds the interpreter in C code
        re.match(r"(a+)+$", "a" * 60 + "b")
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "segfault":
        ctypes.string_at(0)
    if solution_str == "memory":  # all that it may have: MemoryError
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        bytearray(2 << 30)
    if solution_str == "oom killer":  # what the kernel sends when the machine has no more
        os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "sys.exit":
        sys.exit(1)
    if solution_str == "interrupt":
        raise KeyboardInterrupt
    if solution_str == "long":
        raise ValueError("x" * (20 << 20))
    if solution_str == "daemon":  # leaves its process group, and would write a file later
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(2); open({extra_info['file']!r}, 'w')"],
                         start_new_session=True)
    if solution_str == "temporary":
        tempfile.mkdtemp(prefix="left_by_a_reward_")
        os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "raise":
        raise KeyError("no such answer")
    if solution_str == "other":
        raise ArithmeticError("another kind")
    if solution_str == "child":  # leaves a process behind that would write a file later
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(2); open({extra_info['file']!r}, 'w')"])
        time.sleep(60)
    if solution_str == "slow":
        time.sleep(0.3)
    if solution_str == "forge":  # writes into the worker's own pipes
        for descriptor in range(3, 20):
            with contextlib.suppress(OSError):
                os.write(descriptor, b"{forged}\n")
    if solution_str == "print":
        print("{" * 100, flush=True)
        os.write(1, b"raw bytes")
        assert sys.stdin.read() == ""
    if solution_str.startswith("return "):
        return eval(solution_str.removeprefix("return "))
    return float(ground_truth) + bonus


async def later(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.01)
    return {"score": len(solution_str), "acc": True, "pred": ground_truth}


running = 0


async def together(data_source, solution_str, ground_truth, extra_info=None, pause=0.05):
    global running
    running += 1
    try:
        await asyncio.sleep(pause)
        if solution_str == "block":
            time.sleep(60)
        if solution_str == "hang":
            await asyncio.sleep(60)
        if solution_str == "raise":
            raise KeyError("late")
        return running
    finally:
        running -= 1


def batched(data_sources, solution_strs, ground_truths, extra_infos):
    return [len(text) for text in solution_strs]


def whole_batch(data_sources, solution_strs, ground_truths, extra_infos, factor=1):
    assert all(type(x) is list for x in (data_sources, solution_strs, ground_truths, extra_infos))
    time.sleep(0.1)
    if "segfault" in solution_strs:
        ctypes.string_at(0)
    if "loop" in solution_strs:
        time.sleep(60)
    if "raise" in solution_strs:
        raise KeyError("one of them")
    scores = [{"score": float(truth) * factor, "size": len(solution_strs), "source": source, "extra": extra["i"]}
              for truth, source, extra in zip(ground_truths, data_sources, extra_infos)]
    return scores[1:] if "short" in solution_strs else scores


def environment(data_source, solution_str, ground_truth, extra_info=None):
    heavy = [name for name in ("torch", "numpy", "vllm", "transformers") if name in sys.modules]
    with open("/proc/self/status") as file:
        kilobytes = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
    with open("/proc/self/oom_score_adj") as file:
        first_to_go = file.read().strip()
    return {"score": kilobytes, "heavy": ",".join(heavy), "pid": os.getpid(), "oom": first_to_go}
