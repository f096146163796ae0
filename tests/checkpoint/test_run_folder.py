"""Two runs cannot share a folder; a finished run is known before anything is loaded or written."""

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from common.checkpoint import files, run_folder
from common.checkpoint.manager import SaveConfig
from common.flags.secrets import flags_of
from common.tracking.logger import LogConfig, Tracker
from tests.checkpoint.faulty import server
from tests.checkpoint.test_faults import note
from tests.conftest import ROOT, TRAIN
from tests.rank_worker import Flags

HOLDER = """
import sys, time
sys.path.insert(0, {root!r})
import os, subprocess
from common.checkpoint.run_folder import lock
lock({run_dir!r})
if os.fork() == 0:                                 # as the reward pool's workers do
    time.sleep(60)
print("locked", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process, with a child, that has locked `tmp_path`."""
    program = HOLDER.format(root=str(ROOT), run_dir=str(tmp_path))
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "locked\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_second_run_in_a_folder_is_refused_until_the_first_is_killed(holder, world, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("{}\n")
    said = rf"is in use by process {holder.pid} on {socket.gethostname()}: choose another --run-dir, or wait"
    for _ in range(2):                                                  # and a refusal does not end the lock
        with pytest.raises(ValueError, match=said) as error:
            run_folder.open_run_folder(str(tmp_path), world)
    note("a second run in the same folder", f"error: {error.value}")
    assert metrics.read_text() == "{}\n"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    run_folder.open_run_folder(str(tmp_path), world)                    # its child does not hold the lock


def test_a_second_run_ends_before_it_loads_anything(holder, tiny_llama, tmp_path):
    log = tmp_path / "log"
    flags = ("--model", tiny_llama, "--train-data", TRAIN, "--run-dir", tmp_path)
    assert server()(log, "none", "grpo.py", *flags) == 2
    assert log.read_text().startswith(f"error: --run-dir {tmp_path} is in use by process {holder.pid} on ")
    assert not (tmp_path / "config.json").exists()


SECOND = """
import os, sys
sys.path.insert(0, {root!r})
from common.checkpoint import run_folder
if {without_locks}:                                # as a file system that gives every process the lock
    run_folder.fcntl.lockf = lambda *_: None
print(os.getpid(), flush=True)
run_folder.lock({run_dir!r})
"""


def second_run(run_dir, without_locks: bool) -> tuple[int, str]:
    """The process id of a run that takes the folder and ends, and what it says."""
    program = SECOND.format(root=str(ROOT), run_dir=str(run_dir), without_locks=without_locks)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return int(done.stdout), done.stderr


@pytest.mark.parametrize("without_locks", [True, False])
def test_a_run_whose_folder_was_taken_ends_at_its_next_step(without_locks, world, tmp_path):
    """Before it logs the step; the later run goes on. With locks that can only happen after .lock was deleted."""
    run_folder.open_run_folder(str(tmp_path), world)
    tracker = Tracker(LogConfig(), str(tmp_path), Flags(SaveConfig()), world, {})
    tracker.log(1, {"x": 1}, "")
    if not without_locks:
        _, refusal = second_run(tmp_path, False)
        assert f"is in use by process {os.getpid()} on" in refusal      # looking at .lock has not ended the lock
        (tmp_path / ".lock").unlink()
        tracker.log(2, {"x": 1}, "")                                    # nobody else is there
    before = (tmp_path / "metrics.jsonl").read_text()
    later, refusal = second_run(tmp_path, without_locks)
    assert refusal == ""
    said = rf"^--run-dir {tmp_path} is in use by process {later} on {socket.gethostname()} too, which started later"
    with pytest.raises(ValueError, match=said) as error:
        tracker.log(3, {"x": 1}, "")
    assert (tmp_path / "metrics.jsonl").read_text() == before
    if without_locks:
        note("a second run in the same folder, on a file system without locks", f"error: {error.value} (the first run)")


@pytest.mark.parametrize(("function", "number"), [("fcntl.lockf", errno.ENOLCK), ("os.write", errno.ENOSPC)])
def test_a_folder_that_cannot_be_locked_is_an_error(function, number, world, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(function, fail)
    with pytest.raises(ValueError, match=rf"/\.lock cannot be written or locked: .*{os.strerror(number)}"):
        run_folder.lock(str(tmp_path))


def test_a_finished_run_is_known_without_its_model(tmp_path):
    finished = run_folder.finished
    flags = Flags(SaveConfig(), run_dir=str(tmp_path))
    assert finished(flags) == ""                                        # nothing there yet
    manifest = tmp_path / "finished/manifest.json"
    files.write_manifest(manifest.parent, flags_of(flags))
    said = f"{tmp_path} is finished. Nothing was changed"
    assert finished(flags) == said
    assert finished(replace(flags, total_steps=3)) == ""                # --total-steps was raised
    assert finished(replace(flags, total_epochs=0.5)) == ""             # other lengths
    text = finished(replace(flags, lr=0.5))
    assert text == f"{said}; other flags now: --lr was 0.01, is 0.5"
    note("a finished run, started again", text)
    manifest.write_text(manifest.read_text()[:100])                     # killed while it was written
    assert finished(flags) == ""


@pytest.mark.parametrize("damage", [b'{"step": 3, "re', b"\0" * 512 + b"\n", b'\xff\xfe\n', b"[]\n"])
def test_damaged_lines_of_metrics_do_not_block_a_resumed_run(damage, world, tmp_path, capsys):
    log = LogConfig()
    tracker = Tracker(log, str(tmp_path), Flags(SaveConfig()), world, {})
    for step in (1, 2):
        tracker.log(step, {"x": step}, "")
    metrics = tmp_path / "metrics.jsonl"
    want, state = metrics.read_text(), tracker.state_dict(2)
    metrics.write_bytes(want.encode() + damage)
    capsys.readouterr()
    for said in (f"{metrics}: its last {len(damage)} bytes, later than the checkpoint, are dropped\n", ""):
        Tracker(log, str(tmp_path), Flags(SaveConfig()), world, state)
        assert metrics.read_text() == want
        assert capsys.readouterr().out == said


def test_metrics_reach_the_disk_before_a_checkpoint_does(world, tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("common.tracking.logger.sync", synced.append)
    tracker = Tracker(LogConfig(), str(tmp_path), Flags(SaveConfig()), world, {})
    tracker.log(1, {"x": 1}, "")
    assert synced[-1] == tmp_path / "metrics.jsonl"


ONE = '{"step": 1, "x": 1}\n'


@pytest.mark.parametrize(("left", "kept"), [
    ("", ""), (ONE + '{"step": 2, ', ONE), ("\0" * 19 + "\n" + ONE, ONE), (ONE + '{"stfp": 2, "x": 2}\n', ONE),
    (ONE + "7\n", ONE),
])
def test_lines_that_metrics_has_lost_are_said(left, kept, world, tmp_path, capsys):
    """Half lines and damaged ones go too: the next step's would be a part of the one, no tool reads the other."""
    tracker = Tracker(LogConfig(), str(tmp_path), Flags(SaveConfig()), world, {})
    for step in (1, 2):
        tracker.log(step, {"x": step}, "")
    metrics, state = tmp_path / "metrics.jsonl", tracker.state_dict(2)
    metrics.write_text(left)
    capsys.readouterr()
    again = Tracker(LogConfig(), str(tmp_path), Flags(SaveConfig()), world, state)
    assert capsys.readouterr().out.startswith(f"{metrics} has lost {40 - len(kept)} bytes to damage: the steps of")
    again.log(3, {"x": 3}, "")
    assert metrics.read_text() == kept + '{"step": 3, "x": 3}\n'


def test_files_that_a_user_removes_or_adds_stop_no_start(world, tmp_path):
    """A record of an earlier start that is gone; a file among those of responses."""
    def start(state: dict) -> Tracker:
        return Tracker(LogConfig(), str(tmp_path), Flags(SaveConfig()), world, state)

    start({})
    start({}).log(1, {"x": 1}, "")
    shutil.rmtree(tmp_path / "start_1")
    mine, later = (tmp_path / "rollouts" / name for name in ("my_notes.parquet", "step_000002.parquet"))
    mine.parent.mkdir()
    for path in (mine, later):
        path.touch()
    start({"step": 1, "size": 20})
    assert sorted(path.name for path in tmp_path.glob("start_*")) == ["start_2", "start_3"]
    assert mine.exists() and not later.exists()
