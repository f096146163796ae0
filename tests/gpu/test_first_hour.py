"""The first hour's report: complete, whatever fails. The parts themselves run with `tests/gpu/first_hour.sh --tiny`."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.cuda.fake_cuda import WHY_NOT
from tests.gpu import first_hour
from tests.gpu.first_hour import Part
from tests.scripts.test_style import ALONE, OFFLINE, SCRIPTS

FAILS = "print('before'); print('{\"rows\": [{\"a\": 1.5}]}'); raise ValueError('broken')"
MARK = f"time.sleep(77.{os.getpid()})"  # of this test process alone
HANGS = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; {MARK}']); " \
        "print('begun', flush=True); time.sleep(60)"
GOOD = "print('{\"rows\": [{\"a\": 1.5}, {\"b\": 2}], \"c\": 3}')"
PARTS = [
    Part("fails", "what fails", 60, (["-c", FAILS], ["-c", "raise SystemExit('not reached')"])),
    Part("dies", "what is killed", 60, (["-c", "import os; os.kill(os.getpid(), 9)"],)),
    Part("hangs", "what takes too long", 6.0, (["-c", HANGS],)),
    Part("lacks", "what needs a package", 60, (["-c", "raise SystemExit(1)"],), "no_such_package"),
    Part("good", "what works", 60, (["-c", "print(1)"], ["-c", GOOD])),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> tuple[int, dict, str]:
    """Exit status, JSON and table of five parts."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_hour, "SHORTEST", 0.5)
        code = first_hour.main(["--out", str(folder)], PARTS)
    return code, json.loads((folder / "first_hour.json").read_text()), (folder / "first_hour.md").read_text()


def test_a_part_that_fails_stops_no_other(report):
    code, found, table = report
    assert code == 1
    assert {name: part["status"] for name, part in found["parts"].items()} == {
        "fails": "failed", "dies": "failed", "hangs": "out of time", "lacks": "not run", "good": "ok"}
    assert found["parts"]["good"]["result"] == {"rows": [{"a": 1.5}, {"b": 2}], "c": 3}
    assert "ValueError: broken" in found["parts"]["fails"]["last_lines"]
    assert "not reached" not in json.dumps(found)
    assert found["parts"]["fails"]["result"] == {"rows": [{"a": 1.5}]}
    assert found["parts"]["dies"]["last_lines"] == ["ended with -9"]
    assert found["parts"]["hangs"]["last_lines"][0] == "begun"
    assert found["parts"]["lacks"]["last_lines"] == ["no_such_package is not installed"]
    assert "| hangs | out of time |" in table and "    ValueError: broken" in table and "| 1.5 |  |" in table


def test_what_a_part_started_ends_with_it(report):
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert MARK not in listed and "ps -eo args" in listed


def test_parts_for_which_no_time_is_left_are_in_the_report(tmp_path):
    code = first_hour.main(["--out", str(tmp_path), "--minutes", "0.1"], PARTS)
    found = json.loads((tmp_path / "first_hour.json").read_text())["parts"]
    assert code == 0 and found.keys() == {part.name for part in PARTS}
    assert all(part["status"] == "not run" and part["last_lines"] for part in found.values())


def test_with_jobs_parts_that_measure_no_speed_run_at_once(tmp_path):
    """`one` and `two` each wait for the other; `three` would see it if one of them still ran."""
    def meets(own: str, other: str) -> tuple[list[str], ...]:
        code = f"from pathlib import Path; import time; p = Path({str(tmp_path)!r}); (p / {own!r}).touch()\n" \
               f"while not (p / {other!r}).exists(): time.sleep(0.05)\n" \
               f"time.sleep(0.5); (p / {own + ' ended'!r}).touch()"
        return (["-c", code],)

    ended = f"from pathlib import Path; p = Path({str(tmp_path)!r}); assert len(list(p.glob('* ended'))) == 2"
    parts = [Part("one", "", 60, meets("1", "2"), alone=False), Part("two", "", 60, meets("2", "1"), alone=False),
             Part("three", "", 60, (["-c", ended],))]
    assert first_hour.main(["--out", str(tmp_path), "--jobs", "2"], parts) == 0


def test_parts_that_are_alone_begin_a_group():
    parts = [Part(str(number), "", 1, (), alone=number in (0, 4)) for number in range(6)]
    assert [[part.name for part in group] for group in first_hour.groups(parts, 2)] == [
        ["0"], ["1", "2"], ["3"], ["4"], ["5"]]


def test_every_script_that_trains_runs_in_the_first_hour():
    """async_grpo.py needs two GPUs. Those that are parts themselves need no second run."""
    from tests.gpu.first_parts import RUNS

    scripts = {*SCRIPTS, *OFFLINE, *ALONE} - {"async_grpo.py", "evaluate.py"}
    assert {script for script, _ in RUNS.values()} == scripts


@pytest.mark.parametrize("is_tiny", [True, False])
def test_the_limits_are_25_minutes_and_names_are_unique(tmp_path, is_tiny):
    found = first_hour.parts(tmp_path, is_tiny)
    assert sum(part.seconds for part in found) <= 25 * 60
    assert len({part.name for part in found}) == len(found)
    files = {command[0] for part in found for command in part.commands if command[0] != "-m"}
    assert all((ROOT / file).is_file() for file in files) and files == {"grpo.py", "data/word_problems.py"}


def test_it_needs_nothing_but_python():
    """-S: without site-packages."""
    done = subprocess.run([sys.executable, "-S", "-m", "tests.gpu.first_hour", "--help"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_an_engine_that_is_there_is_in_the_report():
    """Its build for CPUs is another distribution of the same module."""
    from tests.gpu.first_parts import installed

    assert installed("vllm")[0].isdigit() and installed("no-such-package") == "not installed"


@pytest.mark.slow                                                      # an H100 has run them: tests/evidence/h100.md
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_parts_measure_on_a_gpu(tmp_path):
    """On the stand-in for CUDA, whose memory is counted: the branches for GPUs run, and a phase takes no more than is
    planned."""
    code = f"""
import argparse, json
from pathlib import Path
from tests.cuda import fake_cuda
device = fake_cuda.install(num_gpus=1)
from tests.gpu import first_parts
args = argparse.Namespace(tiny=True, work=Path({str(tmp_path)!r}), model="tiny")
with device:
    parts = first_parts.environment, first_parts.attention, first_parts.fsdp2, first_parts.speed
    print(json.dumps([part(args) for part in parts]))
"""
    make = ["-m", "tests.gpu.first_parts", "models", "--tiny", "--work", str(tmp_path)]
    subprocess.run([sys.executable, *make], cwd=ROOT, check=True, capture_output=True)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    environment, attention, fsdp2, speed = json.loads(done.stdout.splitlines()[-1])
    assert "H100" in environment["GPU 0"] and "H100" in speed["device"]
    assert {row["function"] for row in attention["rows"]} == {"packed_sdpa", "packed_varlen"}
    assert fsdp2["device"].startswith("cuda") and len(fsdp2["rows"]) == 4
    for row in fsdp2["rows"]:                                           # the part itself bounds each gradient's error
        assert row["log-prob of all"] == pytest.approx(row["in float64"], rel=0.01) and row["norm"] > 0
    assert [(row["tokens"], row["phase"]) for row in speed["rows"]] == [
        (256, "log-probs"), (256, "update"), (512, "log-probs"), (512, "update")]
    for row in speed["rows"]:
        assert 0.5 * row["allocated, planned"] < row["allocated, measured"] <= row["allocated, planned"]
        assert ("MFU" in row) == (row["phase"] == "update")
