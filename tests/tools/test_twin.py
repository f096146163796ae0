"""Twin runs: the commands that continue a run twice, and what is said of the two."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import ROOT, launch
from tests.scripts.test_grpo import REWARD, TINY
from tools import twin


def write_twin(folder: Path, scores: list[list[float | None]], metrics: list[dict], prompts: str = "p") -> Path:
    """A finished run whose last validation has these scores by prompt."""
    (folder / "rollouts").mkdir(parents=True)
    rows = [{"group": group, "prompt": f"{prompts} {group}", "score": score}
            for group, of_prompt in enumerate(scores) for score in of_prompt]
    rows = [{"index": i, **row} for i, row in enumerate(rows)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rollouts/val_000006.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:1]), folder / "rollouts/val_000003.parquet")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return folder


def test_flags_replace_those_of_the_run():
    flags = twin.flags_in(["--a", "1", "-2", "--b_c=3", "--policy.no-share", "--a", "4", "--d"])
    assert flags == {"--b-c": ["3"], "--policy.no-share": [], "--a": ["4"], "--d": []}
    changes = twin.flags_in(["--policy.share", "--d", "x", "y", "--new=1"])
    assert twin.merged(flags, changes) == ["--b-c", "3", "--a", "4", "--policy.share", "--d", "x", "y", "--new", "1"]
    with pytest.raises(ValueError, match=r"^x is no flag"):
        twin.flags_in(["x"])


def test_pairs_by_hand(tmp_path):
    """Three prompts of two responses; one score is missing on one side, so that response counts on neither."""
    a = write_twin(tmp_path / "a", [[0.0, 1.0], [0.0, 0.0], [1.0, None]], [
        {"step": 5, "x": 1.0, "timing_s/step": 1.0, "perf/throughput": 3.0}, {"step": 6, "x": 2.0, "y": 1.0, "z": 4.0}])
    b = write_twin(tmp_path / "b", [[1.0, 1.0], [0.0, 1.0], [0.0, 1.0]], [
        {"step": 5, "x": 1.0, "timing_s/step": 2.0, "perf/throughput": 5.0}, {"step": 6, "x": 2.2, "y": 1.0, "z": 8.0}])
    (pair,) = twin.report([(a, b)])["pairs"]
    assert twin.by_prompt(a, b).tolist() == [[0.5, 0.0, 1.0], [1.0, 0.5, 0.0]]
    assert pair["first_difference"] == "step 6: 2 metrics, most z 4 and 8; x 2 and 2.2"
    assert (pair["mean_original"], pair["mean_changed"], pair["difference"]) == (0.5, 0.5, 0.0)
    assert pair["p_value"] == 1.0 and pair["low"] < 0 < pair["high"]
    assert pair["unpaired_half"] == pytest.approx(1.96 * math.sqrt((0.25 + 0.25) / 3))
    other = write_twin(tmp_path / "c", [[1.0, 1.0], [0.0, 1.0], [0.0, 1.0]], [], prompts="q")
    with pytest.raises(ValueError, match=r"are not of the same prompts"):
        twin.by_prompt(a, other)


def test_seeds_in_pairs_and_unpaired(tmp_path):
    """Three seeds with means 0.2, 0.4, 0.6 and 0.3, 0.5, 0.8: their differences vary less than they do."""
    pairs = []
    for seed, means in enumerate([(0.2, 0.3), (0.4, 0.5), (0.6, 0.8)]):
        pairs.append(tuple(write_twin(tmp_path / f"{side}{seed}", [[mean]] * 2, [{"step": 6}])
                           for side, mean in zip("ab", means)))
    seeds = twin.report(pairs)["seeds"]
    a, b, apart = np.array([0.2, 0.4, 0.6]), np.array([0.3, 0.5, 0.8]), np.array([0.1, 0.1, 0.2])
    assert seeds["difference"] == pytest.approx(apart.mean())
    assert seeds["paired_half"] == pytest.approx(4.302653 * apart.std(ddof=1) / 3 ** 0.5, rel=1e-5)
    assert seeds["runs_for_the_same"] == pytest.approx(3 * (a.var(ddof=1) + b.var(ddof=1)) / apart.var(ddof=1))
    lines = twin.described(twin.report(pairs))
    assert lines[-2].startswith("over 3 seeds: +0.1333 \u00b1 0.1434 in pairs") and "runs of each side" in lines[-1]


@pytest.mark.parametrize(("arguments", "rule"), [
    (["--at", "2"], "nothing is changed"),
    (["--at", "2", "--seeds", "0", "--lr", "1"], "--seeds 0 must be at least 1"),
    (["--at", "2", "--script", "none.py"], "--script none.py is no file"),
    (["--at", "2", "--lr", "1"], r"--at 2: .* has checkpoints of the steps \(none\), and 0 starts anew"),
    (["--at", "0", "--seed", "1"], "--seed is the same on both sides"),
    (["--at", "0", "--run-dir", "x"], "--run-dir is the same on both sides"),
    (["--at", "0", "--total-epochs", "1"], "--total-epochs is the same on both sides"),
    (["--at", "9", "--lr", "1"], "--steps 0: .* has --total-steps 9, so say how many follow --at 9"),
])
def test_what_cannot_be_twinned_is_said_at_once(arguments, rule, tmp_path, capsys):
    start = {"command": ["grpo.py", "--total-steps", "9"], "flags": {"total_steps": 9}, "ranks": 1}
    (tmp_path / "start_1").mkdir()
    (tmp_path / "start_1/start.json").write_text(json.dumps(start))
    (tmp_path / "start_1/grpo.py").write_text("")
    with pytest.raises(ValueError, match=rule):
        twin.main(*twin.tyro.cli(twin.Args, args=[str(tmp_path), *arguments], return_unknown_args=True))
    start["command"] += ["--reward.kwargs", "***"]
    (tmp_path / "start_1/start.json").write_text(json.dumps(start))
    with pytest.raises(ValueError, match=r"was started with a secret in --reward.kwargs"):
        twin.commands(twin.Args(tmp_path, at=0), ["--lr", "1"])


@pytest.mark.sweep
def test_a_run_and_its_twins(tiny_llama, small_train, tmp_path):
    """The original side is the run's own continuation to the digit. A change of nothing changes nothing; another
    learning rate first changes the rate. Finished sides are not run again."""
    base = tmp_path / "base"
    launch("grpo.py", "--model", tiny_llama, "--train-data", small_train, "--val-data", small_train, *TINY[:-2],
           "--total-steps", "3", "--save.every", "1", "--save.keep", "5", "--eval-every", "3", "--eval-prompts", "4",
           "--eval-n", "2", "--reward.function", f"{REWARD}:compute_score", "--run-dir", base, warm=True)

    def start(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "tools.twin", base, "--at", "1", "--out", tmp_path / "twins", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    done = start("--policy.compute-dtype", "float32")                   # as it is
    assert done.returncode == 0, done.stderr
    assert "first difference  none: all metrics are equal" in done.stdout and "difference        +0.0000" in done.stdout
    assert twin.first_difference(base, tmp_path / "twins/original_1") == ""
    assert (tmp_path / "twins/curves.png").is_file() and (tmp_path / "twins/report.html").is_file()
    done = start("--policy.compute-dtype", "float32")
    assert done.stdout.count("is finished") == 2
    printed = start("--policy.compute-dtype", "float32", "--print").stdout.splitlines()
    assert len(printed) == 2 and "--save.resume auto" in printed[0]     # it has begun
    for change in (["--optim.lr", "1e-2"], ["--script", "dapo.py", "--policy.compute-dtype", "float32"]):
        done = start(*change)                                           # the old numbers are of another change
        assert done.returncode == 2 and "changed_1 was begun with another" in done.stderr, done.stdout
    printed = start("--script", "dapo.py", "--print", "--out", str(tmp_path / "others")).stdout.splitlines()
    assert len(printed) == 2 and "dapo.py" in printed[1]
