"""What users see when something goes wrong: damaged checkpoints, full disks, folders that do not fit, ranks that die or
hang. With FAULTS_TABLE=FILE pytest tests/checkpoint/test_faults.py writes a row for each into FILE, of which
tests/evidence/faults.md is a summary."""

# ruff: noqa: F811  (fixtures that are imported)

import contextlib
import errno
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.checkpoint import files, manager, run_folder, signals
from common.checkpoint.export import export
from tests.checkpoint.faulty import Server, server
from tests.checkpoint.test_checkpoint import model, save, trained, watch  # noqa: F401 (fixtures)
from tests.checkpoint.test_resume import flags  # noqa: F401
from tests.conftest import ROOT, launch
from tests.rank_worker import STATE, checkpoints_of, start


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def set_manifest(folder: Path, **entries) -> None:
    files.write_manifest(folder, files.read_manifest(folder) | entries)


def set_model(folder: Path, **entries) -> None:
    """Another model in the checkpoint."""
    set_manifest(folder, model=files.read_manifest(folder)["model"] | entries)


def set_flags(folder: Path, **flags) -> None:
    set_manifest(folder, flags=files.read_manifest(folder)["flags"] | flags)


DAMAGE = {  # what is done to the newest of two checkpoints: what is said (a regular expression), the step resumed from
    "a shard cut short": (
        lambda new: cut(new / "__0_0.safetensors"),
        r"step_000002 is damaged: __0_0.safetensors is missing or has another .*. Renamed to damaged_", 1),
    "a shard gone": (
        lambda new: (new / "__0_0.safetensors").unlink(),
        r"step_000002 is damaged: __0_0.safetensors is missing or has another .*. Renamed to damaged_", 1),
    "the manifest gone": (
        lambda new: (new / "manifest.json").unlink(), r"step_000002 is damaged: manifest.json is missing or", 1),
    "a byte of the manifest flipped": (
        lambda new: flip(new / "manifest.json"), r"step_000002 is damaged: manifest.json is missing or", 1),
    "a byte of a shard flipped": (
        lambda new: flip(new / "__0_0.safetensors"),
        r"step_000002 is damaged: __0_0.safetensors is missing or has another checksum .*. Renamed to damaged_", 1),
    "another rank's shards": (
        lambda new: (new / "__0_0.safetensors").rename(new / "__1_0.safetensors"),
        r"step_000002 is damaged: __0_0.safetensors is missing .* damaged_", 1),
    "the checkpoint of another step under its name": (
        lambda new: (shutil.rmtree(new), shutil.copytree(new.with_name("step_000001"), new)),
        r"step_000002 is damaged: it is the checkpoint of step 1 under another name. Renamed to damaged_", 1),
    "another model, other shapes": (
        lambda new: set_model(new, hidden_size=32),
        r"error: .*does not fit this run: hidden_size was 32, is 24: choose another --run-dir or --save.resume", None),
    "another model, the same shapes": (
        lambda new: set_model(new, rms_norm_eps=0.5),
        r"error: .*does not fit this run: rms_norm_eps was 0.5, is 1e-06: choose", None),
    "another algorithm": (
        lambda new: set_model(new, **{"trained parts": ["critic", "policy"]}),
        r"does not fit this run: trained parts was \['critic', 'policy'\], is \['policy'\]: choose another", None),
    "another script": (
        lambda new: set_flags(new, script="dapo.py"),
        r"error: .* was trained with other flags: script was dapo.py, is grpo.py: give the old ones", None),
    "a flag that changes the results": (
        lambda new: set_flags(new, **{"--lr": 0.5}),
        r"error: .* was trained with other flags: --lr was 0.5, is 0.01: give the old ones, or another", None),
    "flags that change no result": (
        lambda new: set_flags(new, **{"--save.keep": 7, "--max-tokens-per-gpu": 1}),
        r"resumed after step 2 .*; other flags: --max-tokens-per-gpu was 1, is None; --save.keep was 7, is 2", 2),
}


def note(fault: str, text: str) -> None:
    """One row of the table of faults, with paths as users would have them."""
    if "FAULTS_TABLE" in os.environ:
        text = re.sub(r"/tmp/[^ ;:|]*?/(?=checkpoints|other)|/tmp/[^ ;:|']*", "RUN/", text.strip())
        text = text.replace("|", " ").replace("\n", "<br>")
        with open(os.environ["FAULTS_TABLE"], "a") as file:
            file.write(f"| {fault} | {text} |\n")


def said(run_dir, model, world, watch, **flags) -> tuple[str, int | None]:
    """What a start prints, errors too, and the step it resumes from."""
    out, trained = io.StringIO(), start(model, world)
    with contextlib.redirect_stdout(out):
        try:
            state = checkpoints_of(run_dir, world, *trained, watch, **flags).resume()
        except ValueError as error:
            print(f"error: {error}")
            state = {}
    return out.getvalue(), state.get("step")


@pytest.mark.parametrize("fault", DAMAGE)
def test_a_damaged_checkpoint(fault, save, model, world, watch, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["grpo.py"])
    save(1)
    save(2)
    damage, message, step = DAMAGE[fault]
    damage(tmp_path / "checkpoints/step_000002")
    text, resumed = said(tmp_path, model, world, watch)
    assert re.search(message, text), text
    assert resumed == step
    note(f"{fault} (the newest of two)" if step == 1 else fault, text)
    if step == 1:
        text, resumed = said(tmp_path / "other", model, world, watch, resume=str(tmp_path / "checkpoints/step_000002"))
        assert resumed is None and re.search(r"error: .*(is damaged|no complete checkpoint).*", text), text


def test_a_file_that_cannot_be_read(save, model, world, watch, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["grpo.py"])
    save(1)
    save(2)
    broken, crc32 = tmp_path / "checkpoints/step_000002/__0_0.safetensors", files.crc32

    def read(path: Path) -> int:
        if path == broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return crc32(path)

    monkeypatch.setattr(files, "crc32", read)
    text, resumed = said(tmp_path, model, world, watch)
    assert "step_000002 is damaged: __0_0.safetensors cannot be read: Input/output error. Renamed" in text
    assert resumed == 1


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew(save, model, world, watch, tmp_path, monkeypatch):
    """It would drop the metrics of all steps. Nothing is renamed, so the next start, by Slurm too, says the same."""
    monkeypatch.setattr("sys.argv", ["grpo.py"])
    save(1)
    save(2)
    for folder in files.complete_checkpoints(tmp_path):
        (folder / "__0_0.safetensors").write_bytes(b"")
    for _ in range(2):
        text, _ = said(tmp_path, model, world, watch)
        line = (r"error: \S+step_000002 is damaged: __0_0.*; \S+step_000001 is damaged: __0_0.* when it was written: "
                r"choose another --run-dir, or move its checkpoints away to start anew\n")
        assert re.fullmatch(line, text), text
    note("all checkpoints damaged", text)


def test_a_checkpoint_damaged_twice_has_two_names(save, model, world, watch, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["grpo.py"])
    for name in ("damaged_step_000002", "damaged_step_000002_2"):
        save(1)
        save(2)
        flip(tmp_path / "checkpoints/step_000002/__0_0.safetensors")
        text, resumed = said(tmp_path, model, world, watch)
        assert text.splitlines()[0].endswith(f"Renamed to {name}") and resumed == 1
        assert (tmp_path / "checkpoints" / name / "manifest.json").is_file()
        shutil.rmtree(tmp_path / "checkpoints/step_000001")


def test_checkpoints_that_may_not_be_read(model, world, watch, tmp_path, monkeypatch):
    """The run does not start anew."""
    def fail(path: Path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(os, "listdir", fail)
    text, _ = said(tmp_path, model, world, watch)
    assert text.startswith(f"error: --run-dir {tmp_path}: its checkpoints cannot be read: [Errno 13] Permission denied")
    note("a folder of checkpoints that may not be read", text)


def test_other_flags_when_they_are_meant(save, model, world, watch, tmp_path):
    save(2)
    set_flags(tmp_path / "checkpoints/step_000002", **{"--lr": 0.5})
    text, resumed = said(tmp_path, model, world, watch, allow_changes=True)
    assert resumed == 2 and "other flags: --lr was 0.5, is 0.01" in text
    text, resumed = said(tmp_path / "other", model, world, watch, resume=str(tmp_path))     # a run of its own
    assert resumed == 2 and "other flags: --lr was 0.5, is 0.01" in text


@pytest.mark.parametrize(("before", "now", "named"), [
    ({"reference": "1"}, {"reference": "2"}, "reference"),
    ({"a": "1", "b": "1", "c": "1"}, {"a": "2", "b": "1", "c": "2"}, "a, c"),
    ({"reference": "1"}, {"reference": "1"}, ""), ({}, {"reference": "2"}, ""), ({"reference": "1"}, {}, ""),
    ({"policy": "1"}, {"policy": "2"}, ""),                             # the checkpoint has all of its weights
])
def test_weights_that_no_checkpoint_holds_must_be_the_same(before, now, named, trained, model, world, watch, tmp_path,
                                                           monkeypatch):
    """What an earlier start did not load is not compared. A run that starts from this one's checkpoint may have other
    frozen models."""
    monkeypatch.setattr(manager, "fingerprints", lambda folders: folders)
    old, new = ({name: SimpleNamespace(folder=folder) for name, folder in of.items()} for of in (before, now))
    run = checkpoints_of(tmp_path, world, *trained, watch, models=old)
    run.after_step(STATE | {"step": 2})
    text, resumed = said(tmp_path, model, world, watch, models=new)
    if named:
        rule = f"step_000002 does not hold the weights of {named}, and those that are loaded now are not those that it"
        assert resumed is None and rule in text and "or set --save.allow-changes" in text
        text, resumed = said(tmp_path, model, world, watch, models=new, allow_changes=True)
    assert resumed == 2 and ("; the weights of " in text) == bool(named)
    text, resumed = said(tmp_path / "other", model, world, watch, models=new, resume=str(tmp_path))
    assert resumed == 2


@pytest.mark.parametrize("flag", ["--eval-temperature", "--rollout.val-top-p", "--rollout.val-top-k"])
def test_flags_of_validation_alone_may_change(flag, save, model, world, watch, tmp_path):
    save(2)
    set_flags(tmp_path / "checkpoints/step_000002", **{flag: 0.5})
    text, resumed = said(tmp_path, model, world, watch)
    assert resumed == 2 and f"other flags: {flag} was 0.5" in text


def test_what_another_script_keeps_in_a_checkpoint_is_dropped_and_said(save, model, world, watch, tmp_path):
    """Else it would be in all later checkpoints: the first script would train on old rollouts when it comes back."""
    save(2)
    folder = tmp_path / "checkpoints/step_000002"
    state = files.read_manifest(folder)["state"] | {"script": {"ahead": [{}, {}], "surplus": [], "kl_coef": 0.1}}
    set_manifest(folder, state=state)
    run = checkpoints_of(tmp_path, world, *start(model, world), watch)
    assert run.resume()["script"] == state["script"]
    set_flags(folder, script="async_grpo.py")
    run = checkpoints_of(tmp_path, world, *start(model, world), watch, allow_changes=True)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run.resume()["script"] == {}
    assert "dropped what only async_grpo.py can use of the checkpoint: 2 ahead, kl_coef\n" in out.getvalue()


@contextlib.contextmanager
def small_disk(mb: int):
    """A file system of its own; needs root."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", f"size={mb}m", "tmpfs", folder]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no small disk here: {done.stderr.strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_a_disk_that_cannot_be_written(how, trained, model, world, watch, capsys):
    """The save fails on all ranks, and the earlier checkpoint stays."""
    with small_disk(1) as disk:
        run = checkpoints_of(disk / "run", world, *trained, watch, async_=True)
        run.after_step(STATE | {"step": 1})
        run.wait()
        if how == "full":
            free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
            (disk / "filler").write_bytes(bytes(free - 8192))
        else:
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        run.after_step(STATE | {"step": 2})
        message = "No space left on device" if how == "full" else "Read-only file system"
        said = rf"step_000002 could not be written: (OSError|SafetensorError): .*{message}"
        with pytest.raises(OSError, match=said) as error:
            run.wait()
        note(f"a {how} disk", str(error.value))
        assert [folder.name for folder in (disk / "run/checkpoints").iterdir()] == ["step_000001"]
        if how == "full":
            stops = checkpoints_of(disk / "run", world, *trained, watch)
            with pytest.raises(OSError, match=message):
                stops.after_step(STATE | {"step": 2})
            (disk / "filler").unlink()
            stops = checkpoints_of(disk / "run", world, *trained, watch)
            stops.after_step(STATE | {"step": 2})
            assert len(files.complete_checkpoints(disk / "run")) == 2
        else:
            with pytest.raises(ValueError, match=r"--run-dir .* cannot be written or locked: .*Read-only") as error:
                run_folder.open_run_folder(str(disk / "run"), world)
            note("a read-only run folder at the start", f"error: {error.value}")


def test_a_full_disk_is_named_where_torch_hides_it(world, watch):
    """torch.save says `unexpected pos 704 vs 598`."""
    large = torch.nn.Linear(1 << 10, 1 << 9)
    with small_disk(1) as disk:
        run = checkpoints_of(disk, world, large, torch.optim.SGD(large.parameters()), watch, {"config.json": b"{}"})
        said = r"step_000001 could not be written: .*No space left on device"
        with pytest.raises(OSError, match=said) as error:
            run.after_step(STATE | {"step": 1})
        note("a full disk: a tensor that does not fit", str(error.value))
        assert list((disk / "checkpoints").iterdir()) == []


def test_a_full_disk_at_the_export_is_named(trained, world):
    """As the weights are written (safetensors' own error) and before (Python's); neither says a path."""
    config = {"config.json": json.dumps({"dtype": "float32", "model_type": "llama"}).encode()}
    for files_of_model, said in ((config, "SafetensorError"), (config | {"a": bytes(1 << 21)}, "OSError")):
        with small_disk(1) as disk:
            (disk / "filler").write_bytes(bytes((1 << 20) - 24576))
            with pytest.raises(OSError, match=rf"^{disk}/model could not be written: {said}.*No space left") as error:
                export(trained[0], files_of_model, disk / "model", world)
            assert "the last step is saved, and the same command writes" in str(error.value)


def test_a_run_folder_that_is_not_shared(model, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    assert server()(tmp_path / "log", "none", "tests/rank_worker.py", "not_shared", tmp_path, ranks=2) == 1
    message = "--run-dir run is another folder for rank(s) [1] than for rank 0: it must be on a file system"
    assert (tmp_path / "log").read_text().count(message) == 2
    note("a run folder that not all machines share", f"error: {message} that all machines share")


# --------------------------------------------------------------------------- ranks that die or hang

def test_a_failed_ranks_traceback_is_last(flags, tmp_path):
    done = launch("tests/checkpoint/faulty.py", "reward:3:1:raise", "grpo.py", *flags, "--run-dir", tmp_path, ranks=2,
                  check=False, timeout=170)
    assert done.returncode == 1
    root = done.stderr[done.stderr.rindex("Root Cause (first observed failure)") :]
    assert "rank      : 1 " in root and "Traceback (most recent call last)" in root
    lines = [line.strip() for line in root.splitlines() if line.strip(" =")]
    assert lines[-1] == "ArithmeticError: asked to fail", root[-600:]
    note("a rank fails", f"torchrun ends both; the last lines are that rank's traceback ... {lines[-1]}")


@pytest.mark.sweep
def test_a_hang_shows_all_stacks(flags, tmp_path):
    """Rank 1 hangs before the update of the first step, rank 0 waits for it: both say where. The one that leaves second
    may then see a closed connection before its own time is over, and end with 1."""
    log = tmp_path / "log"
    start = server()
    start(log, "reward:3:1:hang", "grpo.py", *flags, "--run-dir", tmp_path / "run", "--save.timeout-s", "15", ranks=2)
    text = log.read_text()
    assert signals.HANG_EXIT_CODE in start.codes and 0 not in start.codes, (start.codes, text[-3000:])
    for rank, where in ((0, "all_reduce"), (1, "faulty.py")):
        report = text[text.index(f"[rank {rank}] phase ") :].partition("\n[rank ")[0]
        said = rf"\[rank {rank}\] phase '[a-z ]+' takes longer than --save.timeout-s 15; all Python stacks:"
        assert re.match(said, report), report[:3000]
        assert where in report and "grpo.py" in report, report[:3000]
    note("a rank hangs (here in its reward)", text[text.index("[rank ") :].splitlines()[0] + " ...")


PROGRAM = """
import sys, threading, time
sys.path.insert(0, {root!r})
from common.checkpoint.signals import Watchdog
watch = Watchdog({timeout_s})
watch.phase("update")
print("ready", flush=True)
lock = threading.Lock(); lock.acquire()
while not watch.signal: time.sleep(0.01)
print("signal", watch.signal, flush=True)
lock.acquire()                                     # waits for ever, as in a collective
"""


def program(timeout_s: float = 0, **environment: str) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM.format(root=str(ROOT), timeout_s=timeout_s)], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | environment)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", signals.STOP_SIGNALS)
def test_a_signal_is_noted_and_a_second_interrupt_ends_it(number):
    process = program()
    process.send_signal(number)
    assert process.stdout.readline() == f"signal {int(number)}\n"
    time.sleep(0.3)
    process.send_signal(number)
    if number != signal.SIGINT:                                         # Slurm and torchrun may both send it
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.kill()
    assert process.wait(60) == (130 if number == signal.SIGINT else -signal.SIGKILL)


@pytest.mark.parametrize("num_ranks", [1, 999])
def test_a_rank_that_is_left_says_that_another_one_ended(num_ranks):
    """torchrun, here this process, sends SIGTERM to the ranks that are left. With fewer children than ranks, one has
    ended with an error; with as many, somebody asks the run to stop."""
    process = program(TORCHELASTIC_RUN_ID="none", LOCAL_WORLD_SIZE=str(num_ranks), RANK="1")
    process.send_signal(signal.SIGTERM)
    if num_ranks == 1:
        assert process.stdout.readline() == f"signal {int(signal.SIGTERM)}\n"
        process.kill()
    _, stderr = process.communicate(timeout=60)
    said = "[rank 1] another rank ended, in phase 'update'\n"
    assert (process.returncode, stderr) == ((1, said) if num_ranks > 1 else (-signal.SIGKILL, ""))


def test_a_phase_without_end_is_reported():
    process = program(timeout_s=1)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == signals.HANG_EXIT_CODE
    assert stderr.startswith("[rank 0] phase 'update' takes longer than --save.timeout-s 1; all Python stacks:\n")
    assert 'File "<string>", line 9, in <module>' in stderr


@pytest.mark.sweep
def test_a_suspended_process_does_not_hang():
    """Stopped for longer than a phase may take, as Slurm does to make room: the phase goes on afterwards."""
    process = program(timeout_s=4)
    process.send_signal(signal.SIGSTOP)
    time.sleep(6)
    process.send_signal(signal.SIGCONT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    assert process.wait(60) == signals.HANG_EXIT_CODE


@pytest.mark.parametrize(("timeout_s", "seconds"), [(0, 24 * 86400), (7200, 7500)])
def test_collectives_wait_longer_than_a_phase_may_take(timeout_s, seconds, tmp_path):
    """Of every group that a run makes: the default one, the mesh's, the checkpoint writers'."""
    log = tmp_path / "log"
    assert server()(log, "none", "tests/rank_worker.py", "timeouts", tmp_path, timeout_s, ranks=2) == 0, log.read_text()
    assert json.loads((tmp_path / "timeouts").read_text()) == [seconds] * 8


LAUNCHER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, *sys.argv[1:]])
time.sleep(600)
"""


def test_a_rank_that_waits_for_others_ends_with_its_launcher(flags, tmp_path):
    """kill -9 of torchrun while a rank joins the process group, which another rank never will."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none", "RANK": "1", "LOCAL_RANK": "1",
                                "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as store, (tmp_path / "log").open("w+") as log:
        store.bind(("127.0.0.1", 0))
        store.listen()
        environment["MASTER_PORT"] = str(store.getsockname()[1])
        command = [sys.executable, "-c", LAUNCHER, "grpo.py", *flags, "--run-dir", str(tmp_path / "run")]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        store.settimeout(170)
        connection, _ = store.accept()                                  # the rank has begun to join
        process.kill()
        process.wait()
        deadline = time.monotonic() + 60
        while "[rank 1] torchrun is gone, in phase 'setup'" not in (tmp_path / "log").read_text():
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.05)
        connection.close()
    note("kill -9 of torchrun before all ranks are there", (tmp_path / "log").read_text().splitlines()[-1])


@pytest.mark.sweep
def test_ranks_end_with_their_launcher(flags, tmp_path):
    """kill -9 of torchrun itself must not leave ranks that write into the run folder of its successor."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
               "tests/checkpoint/faulty.py", "reward:3:0:hang", "grpo.py", *flags, "--run-dir", str(tmp_path / "run")]
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in ours} | {"OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 170
        while "validation before training" not in (tmp_path / "log").read_text():
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.05)
        process.kill()
        process.wait()
        while "torchrun is gone" not in (tmp_path / "log").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    note("kill -9 of torchrun", (tmp_path / "log").read_text().splitlines()[-1])


def test_packages_of_the_tests_may_lie_in_pythonpath(tmp_path, monkeypatch):
    """As on a machine whose Python lacks some of them. Whatever PYTHONPATH a test itself wants is beside them."""
    for name in ("theirs", "ours"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"only_{name}.py").write_text("")
    (tmp_path / "script.py").write_text("import only_theirs\n")
    (tmp_path / "both.py").write_text("import only_theirs, only_ours\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "theirs"))
    with contextlib.closing(Server()) as start:
        assert start(tmp_path / "log", "none", tmp_path / "script.py") == 0, (tmp_path / "log").read_text()
    launch(tmp_path / "both.py", env={"PYTHONPATH": str(tmp_path / "ours")})
