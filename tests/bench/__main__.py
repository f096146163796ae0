"""Runs measurements of this folder and keeps the line that each prints in tests/evidence/bench.jsonl: `make bench`, or

    python -m tests.bench                              # all, 1 hour; nothing else should run on the machine
    python -m tests.bench update step
    python -m tests.bench step --rounds 2 --steps 3    # flags of bench_step, in place of those in FLAGS
"""

import os
import subprocess
import sys

from tests.bench.record import ROOT

LINES = ROOT / "tests/evidence/bench.jsonl"
FLAGS = {
    "packing": [], "kernels": [], "divergence": [], "logging": [], "data": ["--rows", "200000"],
    "rewards": ["--samples", "1024", "--gen-s", "30"], "checkpoint": [], "sync": [], "rollout": [], "episodes": [],
    "endpoint": [], "slow_tool": [], "async": [], "loading": [], "in_flight": [], "update": [], "scale": [], "step": [],
    "sft": [], "stored": [], "growth": ["--picture", "tests/evidence/scale.png"], "many_ranks": [],
    "states": [], "decode": [], "prefixes": [], "servers": [],
}


def parse(arguments: list[str]) -> dict[str, list[str]]:
    """Names of measurements and then flags, as typed -> the flags of each measurement."""
    first_flag = next((i for i, argument in enumerate(arguments) if argument.startswith("-")), len(arguments))
    names, flags = arguments[:first_flag], arguments[first_flag:]
    for name in names:
        if name not in FLAGS:
            raise ValueError(f"there is no measurement {name}; there are {', '.join(FLAGS)}")
    if flags and len(names) != 1:
        raise ValueError(f"flags {' '.join(flags)} belong to one measurement, and {len(names)} are named")
    return {name: flags or FLAGS[name] for name in names or FLAGS}


def run(name: str, flags: list[str]) -> str | None:
    """Run bench_NAME, everything it prints to the terminal too. Its JSON line; None if it failed or printed none."""
    print(f"== bench_{name}", flush=True)
    command = [sys.executable, "-m", f"tests.bench.bench_{name}", *flags]
    found = None
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith(f'{{"bench": "{name}"'):
                found = line
    return found if process.returncode == 0 else None


def keep(name: str, line: str) -> None:
    """Put `line` in the place of the one that the measurement printed the last time."""
    lines = LINES.read_text().splitlines(keepends=True) if LINES.exists() else []
    others = [other for other in lines if not other.startswith(f'{{"bench": "{name}"')]
    partial = LINES.with_suffix(".jsonl.partial")
    partial.write_text("".join([*others, line]))
    os.replace(partial, LINES)


def main(arguments: list[str]) -> None:
    failed = []
    for name, flags in parse(arguments).items():
        line = run(name, flags)
        if line is None:
            failed.append(name)
        else:
            keep(name, line)
    if failed:
        raise ValueError(f"no line from {', '.join(failed)}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
