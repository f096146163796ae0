"""Two runs cannot share a folder; a finished run is known before anything is loaded or written."""

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from common.checkpoint import files, run_folder, state
from common.checkpoint.manager import SaveConfig
from common.tracking.logger import LogConfig, Tracker
from tests.checkpoint.faulty import server
from tests.checkpoint.test_faults import note
from tests.conftest import ROOT
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
    flags = ("--model", tiny_llama, "--train-data", "none.parquet", "--run-dir", tmp_path)
    assert server()(log, "none", "grpo.py", *flags) == 2
    assert log.read_text().startswith(f"error: --run-dir {tmp_path} is in use by process {holder.pid} on ")
    assert not (tmp_path / "config.json").exists()


def test_a_finished_run_is_known_without_its_model(tmp_path):
    finished = run_folder.finished
    flags = Flags(SaveConfig(), run_dir=str(tmp_path))
    assert finished(flags) == ""                                        # nothing there yet
    manifest = tmp_path / "finished/manifest.json"
    files.write_manifest(manifest.parent, state.flags_of(flags))
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
