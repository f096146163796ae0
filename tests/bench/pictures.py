"""The pictures of the report in docs/metrics.md, of real runs of a tiny model (CPU minutes: about 6):

    python -m tests.bench.pictures FOLDER                    # runs in FOLDER are continued, and finished ones are kept
    python -m tests.bench.pictures FOLDER runs/seed1 runs/seed2 runs/seed3      # three seeds of yours (make seeds)

docs/page_steps.png: 2,000 steps; docs/page_runs.png: three seeds; docs/page_running.png: a run that goes on, as
`--watch` shows it; docs/page_phone.png: the same in 390 pixels.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from tests.tools.browser import Browser

ROOT = Path(__file__).resolve().parents[2]
MODEL = ["--model", "models/tiny", "--policy.compute-dtype", "float32", "--save.every", "0", "--save.hf", "never"]
SUPERVISED = [
    "sft.py", *MODEL, "--train-data", "data/word_problems/solved/train.parquet", "--val-data",
    "data/word_problems/solved/test.parquet", "--data.max-length", "512", "--rows-per-step", "8", "--total-steps",
    "2000", "--eval-every", "200", "--eval-prompts", "32", "--optim.lr", "1e-3", "--optim.warmup-steps", "50",
    "--optim.schedule", "cosine",
]
SAMPLED = [
    "grpo.py", *MODEL, "--train-data", "data/word_problems/train.parquet", "--val-data",
    "data/word_problems/test.parquet", "--data.max-prompt-length", "500", "--rollout.engine", "hf",
    "--rollout.max-response-length", "8", "--prompts-per-step", "4", "--samples-per-prompt", "4", "--eval-n", "1",
    "--eval-prompts", "2", "--eval-every", "5", "--optim.lr", "3e-3", "--kl-loss-coef", "0.05", "--entropy-coef",
    "0.002", "--log.signal", "4", "--reward.num-workers", "1", "--reward.function",
    "tests/scripts/reward_by_length.py:compute_score",
]
PORT = 8391


def start(command: Sequence[str], folder: Path, *flags: str) -> subprocess.Popen:
    script, *own = command
    return subprocess.Popen([sys.executable, script, "--run-dir", str(folder), *own, *flags], cwd=ROOT)


def train(command: Sequence[str], folder: Path, *flags: str) -> None:
    code = start(command, folder, *flags).wait()
    if code:
        raise RuntimeError(f"{folder} ended with exit code {code}")


def picture(address: str, file: Path, width: int, height: int) -> None:
    with Browser(width, height) as browser:
        browser.call("Page.navigate", url=address)
        time.sleep(4)                                                   # until all is drawn
        browser.screenshot(file)
    Image.open(file).quantize(64).save(file, optimize=True)
    print(f"{file.relative_to(ROOT)}: {file.stat().st_size / 1000:.0f} KB", flush=True)


def page_of(runs: Sequence[Path], folder: Path) -> str:
    subprocess.run([sys.executable, "-m", "tools.report", *map(str, runs), "--out", str(folder / "page.html")],
                   cwd=ROOT, check=True)
    return (folder / "page.html").resolve().as_uri()


def has_steps(run: Path, count: int) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.exists() and metrics.read_text().count("\n") >= count


def main(folder: Path, *given: str) -> None:
    docs = ROOT / "docs"
    folder.mkdir(parents=True, exist_ok=True)
    supervised = folder / "supervised"
    train(SUPERVISED, supervised)
    picture(page_of([supervised], folder), docs / "page_steps.png", 1300, 620)
    seeds = [folder / f"seed_{seed}" for seed in (1, 2, 3)]
    if given:
        seeds = [*map(Path, given)]
    else:
        for seed, run in enumerate(seeds, start=1):
            train(SAMPLED, run, "--total-steps", "20", "--seed", str(seed))
    picture(page_of(seeds, folder), docs / "page_runs.png", 1300, 760)
    picture(page_of(seeds, folder), docs / "page_phone.png", 390, 800)
    picture_of_a_running_one(folder / "running", docs / "page_running.png")


def picture_of_a_running_one(running: Path, file: Path) -> None:
    """The page of --watch, while the run goes on."""
    shutil.rmtree(running, ignore_errors=True)
    processes = [start(SAMPLED, running, "--total-steps", "400")]
    try:
        while not has_steps(running, 12):
            time.sleep(1)
            if processes[0].poll() is not None:
                raise RuntimeError(f"{running} ended with exit code {processes[0].returncode}")
        watch = [sys.executable, "-m", "tools.report", str(running), "--watch", "--port", str(PORT)]
        processes.append(subprocess.Popen(watch, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        processes[1].stdout.readline()                                  # it says its address when it serves
        picture(f"http://localhost:{PORT}/", file, 1300, 560)
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
