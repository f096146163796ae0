"""What a new GPU machine shall tell first: `tests/gpu/first_hour.sh`, or `python -m tests.gpu.first_hour --out FOLDER`.

Each part is a process of its own with a time limit, and a part that fails stops no other: its last lines are kept. The
limits add up to at most 25 minutes (`--minutes` for less: parts for which no time is left are not run). No network is
needed, and vLLM only for the parts that drive it. On a machine without a GPU, `--tiny` runs the same code on tiny
models (`--slower 4` gives all of it four times as long). Written after each part: `first_hour.json` (everything),
`first_hour.md` (tables), `first_hour.log` (all output).

This module imports nothing but Python's own, so that it works where a package is missing. The measurements are in
tests/gpu/first_parts.py.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
LAST_LINES = 30
"""Of a part that fails, in the JSON."""
SHORTEST = 10.0
"""Seconds that must be left for a part to begin."""
STEPS = ["--total-steps", "3", "--prompts-per-step", "4", "--samples-per-prompt", "4",
         "--data.max-prompt-length", "600", "--reward.function", "tools/try_script.py:compute_score",
         "--reward.num-workers", "1", "--save.hf", "never", "--log.rollouts-every", "1"]
SAVES = ["--save.every", "1", "--offload.optimizer", "--offload.params", "--optim.kind", "adamw-8bit"]
GRAPHS = '{"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}'
"""CUDA graphs without torch.compile: the engine starts a minute faster."""


class Part(NamedTuple):
    name: str
    question: str
    seconds: float
    """The limit."""
    commands: tuple[list[str], ...]
    """What is run, one after the other. A last line in JSON is the result."""
    needs: str = ""
    """A module without which the part is not run."""
    alone: bool = True
    """It measures speed or memory: with --jobs, too, nothing else runs beside it."""


def parts(work: Path, is_tiny: bool) -> list[Part]:
    """All parts, in their order: what others rest on comes first."""
    small, large = ("tiny", "tiny") if is_tiny else ("0.6B", "1.7B")
    length, extra = ("8", "{}") if is_tiny else ("128", GRAPHS)
    tiny = ["--tiny"] if is_tiny else []

    def measure(name: str, *flags: str) -> list[str]:
        return ["-m", "tests.gpu.first_parts", name, "--work", str(work), *tiny, *flags]

    def grpo(run: str, *flags: str) -> list[str]:
        return ["grpo.py", "--model", str(work / small), "--train-data", str(work / "data/train.parquet"), *STEPS,
                "--rollout.max-response-length", length, "--run-dir", str(work / run), *flags]

    def result(run: str) -> list[str]:
        return measure("run", "--run", str(work / run))

    hf = ("--rollout.engine", "hf")
    cycles = ["--shapes", "tiny" if is_tiny else "0.5B", "--cycles", "5", "--extra", extra, "--in-process"]
    cycles += ["--prompts", "4", "--max-tokens", "32"] if is_tiny else []   # 8,192 tokens in all, not 524,288
    return [
        Part("environment", "versions, driver, GPUs", 60, (measure("environment"),)),
        Part("models", "random models and data, made here", 100, (
            ["data/word_problems.py", "--out", str(work / "data"), "--solved"], measure("models"))),
        Part("doctor", "tools.doctor with the Hugging Face engine", 90, (
            ["-m", "tools.doctor", "--model", str(work / small), "--engine", "hf"],)),
        Part("kernels", "log-probs, entropies, gradients and 8-bit moments against float64", 90, (
            measure("kernels"),), alone=False),
        Part("attention", "packed attention and its gradients against eager attention in float64", 70, (
            measure("attention"),), alone=False),
        Part("fsdp2", "gradient, step and checkpointed layers under FSDP2, Liger's kernels on and off", 90, (
            measure("fsdp2"),), alone=False),
        Part("grpo", "grpo.py with the Hugging Face engine", 120, (
            grpo("grpo", *hf, "--save.every", "0"), result("grpo")), alone=False),
        Part("offload, 8 bits, resume", "grpo.py offloaded, with 8-bit moments, saved and resumed", 120, (
            grpo("saved", *hf, *SAVES, "--total-steps", "2"), grpo("saved", *hf, *SAVES), result("saved")),
            alone=False),
        Part("scripts", "two steps of each script, of adapters, experts, Muon and offloading", 200, (
            measure("scripts"),), alone=False),
        Part("engine", "vLLM: sleep, wake, weight sync, speed", 130, (["-m", "tests.gpu.check_engine", *cycles],),
             "vllm"),
        Part("grpo with vLLM", "grpo.py with vLLM", 100, (
            grpo("vllm", "--save.every", "0", "--rollout.extra", extra), result("vllm")), "vllm"),
        Part("memory and speed, small", f"{small}: memory against the plan, tokens/s, MFU", 120, (
            measure("speed", "--model", small),)),
        Part("memory and speed, large", f"{large}: memory against the plan, tokens/s, MFU", 130, (
            measure("speed", "--model", large),)),
        Part("profile", "kernels of an update by GPU time", 80, (measure("profile", "--model", small),)),
    ]


def groups(found: list[Part], jobs: int) -> Iterator[list[Part]]:
    """What runs at once: neighbours that do not have to be alone, at most `jobs`."""
    group: list[Part] = []
    for part in found:
        if group and (part.alone or len(group) == jobs):
            yield group
            group = []
        group.append(part)
        if part.alone:
            yield group
            group = []
    if group:
        yield group


def run(part: Part, seconds: float, log: Any) -> dict[str, Any]:
    """The part's outcome: `status` (ok, failed, out of time, not run), `seconds`, and `result` or `last_lines`."""
    if part.needs and importlib.util.find_spec(part.needs) is None:
        return {"status": "not run", "last_lines": [f"{part.needs} is not installed"]}
    if seconds < SHORTEST:
        return {"status": "not run", "last_lines": ["no time was left"]}
    start, output, status = time.monotonic(), "", "ok"
    for command in part.commands:
        left = max(seconds - (time.monotonic() - start), 1.0)
        said, code = run_command([sys.executable, *command], left)
        output += said
        log.write(f"\n===== {part.name}: {' '.join(command)}\n{said}")
        log.flush()
        if code is None or code:
            output += f"ended with {code}\n" if code else f"was ended after {seconds:.0f} s\n"
            status = "failed" if code else "out of time"
            break
    outcome: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - start, 1)}
    lines = output.rstrip().splitlines()
    found = next((line for line in reversed(lines) if line.startswith("{")), None)
    with contextlib.suppress(ValueError):                               # a line that is cut
        outcome["result"] = json.loads(found) if found else {}
    if status != "ok":
        outcome["last_lines"] = lines[-LAST_LINES:]
    return outcome


def run_command(command: list[str], seconds: float) -> tuple[str, int | None]:
    """Its output and exit status, None if it was ended at its limit, together with all that it started."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        child = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                                 stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)                    # workers may outlive a process that died
            child.wait()
        output.seek(0)
        return output.read(), code


def write(folder: Path, name: str, text: str) -> None:
    """A reader never sees half of it."""
    (folder / f"{name}.part").write_text(text)
    os.replace(folder / f"{name}.part", folder / name)


def table(report: dict[str, Any]) -> str:
    """Markdown: a row a part, then the numbers of each."""
    lines = ["# The first hour on this machine", "", "| part | status | seconds | what it asks |"]
    lines.append("| --- |" + " --- |" * 3)
    for name, part in report["parts"].items():
        lines.append(f"| {name} | {part['status']} | {part.get('seconds', '')} | {part['question']} |")
    for name, part in report["parts"].items():
        result = part.get("result") or {}
        rows = result.pop("rows", None) if isinstance(result, dict) else None
        if result:
            lines += ["", f"## {name}", "", *(f"* {key}: {shown(value)}" for key, value in result.items())]
        if rows:
            lines += ["", f"## {name}, measured", "", *rows_table(rows)]
            result["rows"] = rows
        if part["status"] in ("failed", "out of time"):
            lines += ["", f"## {name}: {part['status']}", "", *(f"    {line}" for line in part["last_lines"])]
    return "\n".join(lines) + "\n"


def rows_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    yield "| " + " | ".join(columns) + " |"
    yield "| --- |" + " --- |" * (len(columns) - 1)
    for row in rows:
        yield "| " + " | ".join(shown(row.get(column, "")) for column in columns) + " |"


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def main(arguments: list[str] | None = None, all_parts: list[Part] | None = None) -> int:
    """Exit status 1 if a part failed. `all_parts`: others than those of `parts`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/first_hour", help="folder of the results")
    parser.add_argument("--minutes", type=float, default=25.0, help="of all parts together")
    parser.add_argument("--slower", type=float, default=1.0, help="factor of all limits, for a machine that is busy")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="these alone; environment and models always run")
    parser.add_argument("--jobs", type=int, default=1, help="parts that measure no speed run at once, this many")
    parser.add_argument("--tiny", action="store_true", help="tiny models: what a machine without a GPU can run")
    options = parser.parse_args(arguments)
    folder = Path(options.out).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"started": time.strftime("%Y-%m-%d %H:%M:%S"), "tiny": options.tiny, "parts": {}}
    end = time.monotonic() + 60 * options.minutes * options.slower
    with tempfile.TemporaryDirectory() as work, open(folder / "first_hour.log", "w") as log:
        os.environ["FIRST_HOUR_OUT"] = str(folder)
        found = all_parts or parts(Path(work), options.tiny)
        names = [part.name for part in found]
        if unknown := set(options.parts or ()) - set(names):
            parser.error(f"--parts {', '.join(sorted(unknown))}: must be of {', '.join(names)}")
        for part in found:
            report["parts"][part.name] = {"status": "not run", "question": part.question}
        asked = {"environment", "models", *(options.parts or names)}
        for part in found:
            if part.name not in asked:
                report["parts"][part.name]["last_lines"] = ["--parts does not name it"]

        def limited(part: Part) -> dict[str, Any]:
            return run(part, min(part.seconds * options.slower, end - time.monotonic()), log)

        for group in groups([part for part in found if part.name in asked], options.jobs):
            with ThreadPoolExecutor(len(group)) as pool:
                running = {pool.submit(limited, part): part.name for part in group}
                for done in as_completed(running):
                    report["parts"][running[done]] |= done.result()
                    outcome = report["parts"][running[done]]
                    print(f"{running[done]:28} {outcome['status']:12} {outcome.get('seconds', '')}", flush=True)
                    write(folder, "first_hour.json", json.dumps(report, indent=1) + "\n")
                    write(folder, "first_hour.md", table(report))
    print(f"{folder}/first_hour.md")
    return int(any(part["status"] in ("failed", "out of time") for part in report["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
