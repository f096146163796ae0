"""Nothing that this project did not write is replaced or removed, and no model that a run reads."""

# ruff: noqa: F811  (fixtures that are imported)

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common.checkpoint import files, own, run_folder
from common.checkpoint.export import replace_hf
from common.checkpoint.manager import SaveConfig
from common.model.reward_model import RewardModelConfig
from common.tracking.logger import LogConfig, Tracker
from tests.checkpoint.faulty import server
from tests.checkpoint.test_checkpoint import model, save, trained, watch  # noqa: F401 (fixtures)
from tests.conftest import TRAIN


@dataclass
class Args:
    run_dir: str
    model: str = "some/hub-name"
    critic_model: str = ""
    teacher: tuple[str, ...] = ()
    train_data: tuple[str, ...] = ()
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    save: SaveConfig = field(default_factory=SaveConfig)


def export_to(folder) -> None:
    replace_hf(folder, {}, (), {"config.json": b"{}"})


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run folder with a model of its own, and links to it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run/.lock").parent.mkdir()
    (tmp_path / "run/.lock").write_text("process 7 on here\n")
    (tmp_path / "run/config.json").touch()
    export_to(tmp_path / "run/model")
    (tmp_path / "link").symlink_to("run/model")
    (tmp_path / "runs").symlink_to("run")
    return tmp_path / "run"


def test_a_run_goes_on_in_its_own_folder(run, tmp_path):
    own.check_run_folder(Args("run", model="elsewhere", train_data=("run/rollouts", '{"a": "\0"}', "x" * 10_000)))
    own.check_run_folder(Args("new"))
    (tmp_path / "prepared/checkpoints").mkdir(parents=True)             # a link to a larger disk
    (tmp_path / "prepared/notes.md").touch()
    own.check_run_folder(Args("prepared"))


@pytest.mark.parametrize("flags", [
    {"model": "run/model"}, {"model": "link"}, {"model": "runs/model"}, {"model": "run/../run/./model/"},
    {"model": "{tmp}/run/model"}, {"critic_model": "run/model"}, {"teacher": ("sql=run/model", "other")},
    {"teacher": ("other", "link")}, {"reward_model": RewardModelConfig("runs/model")},
    {"train_data": ("run/model/train.parquet",)}, {"run_dir": "runs", "model": "run/model"},
])
def test_a_run_replaces_no_model_that_it_reads(flags, run, tmp_path):
    if "model" in flags:
        flags["model"] = flags["model"].format(tmp=tmp_path)
    args = Args(**{"run_dir": "run"} | flags)
    with pytest.raises(ValueError, match=r"is in runs?/model, which this run replaces with its own model: choose anot"):
        own.check_run_folder(args)
    args.save.hf = "never"
    own.check_run_folder(args)


@pytest.mark.parametrize(("name", "rule"), [
    ("notes.md", "run/model would be replaced, and has notes.md, which was not written with it: move it away"),
    ("plainrl.json", "has no plainrl.json, in which this version names the files"),                     # older ones
])
def test_a_model_that_would_be_replaced_is_refused_at_the_start(name, rule, run):
    file = run / "model" / name
    file.unlink() if file.exists() else file.touch()
    with pytest.raises(ValueError, match=rule):
        own.check_run_folder(Args("run"))
    (run / "model").rename("kept")
    own.check_run_folder(Args("run"))


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "best.json", "now.json", "skipped_train.jsonl",
                                  "finished", "rollouts/step_000001.parquet", "tensorboard/events",
                                  "start_1/start.json"])
def test_a_folder_of_something_else_is_no_run_folder(name, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    first = name.partition("/")[0]
    with pytest.raises(ValueError, match=rf"has {first}, which a run would overwrite, and no .lock.*`touch {tmp_path}"):
        own.check_run_folder(Args(str(tmp_path)))
    (tmp_path / ".lock").touch()
    own.check_run_folder(Args(str(tmp_path)))


@pytest.mark.parametrize(("name", "make", "rule"), [
    ("config.json", lambda path: path.symlink_to("/etc/hostname"), "config.json is a symbolic link, whose target"),
    ("metrics.jsonl", lambda path: path.symlink_to("/none"), "metrics.jsonl is a symbolic link"),
    (".lock", lambda path: path.symlink_to("/etc/hostname"), ".lock is a symbolic link"),
    (".lock", lambda path: path.write_text("alias ls=rm"), ".lock is not of a run"),
    (".lock", os.mkfifo, ".lock is a folder, a pipe or a device"),
])
def test_a_run_writes_through_no_link(name, make, rule, tmp_path):
    make(tmp_path / name)
    with pytest.raises(ValueError, match=rule):
        own.check_run_folder(Args(str(tmp_path)))


@pytest.mark.parametrize(("make", "rule"), [
    (lambda path: path.symlink_to(path.with_name("notes")), ".lock is a symbolic link, whose target"),
    (lambda path: path.write_text("alias ls=rm"), ".lock is not of a run: choose another --run-dir"),
    (lambda path: path.write_text("process 1 on here\nalias ls=rm\n"), ".lock is not of a run"),
    (lambda path: path.write_bytes(b"\xff\x00"), ".lock is not of a run"),
    (os.mkdir, ".lock cannot be written or locked"),
])
def test_the_lock_of_something_else_stays(make, rule, tmp_path):
    """Also where `check_run_folder` is not called: by evaluate.py."""
    (tmp_path / "notes").write_text("mine")
    make(tmp_path / ".lock")
    before = (tmp_path / ".lock").read_bytes() if (tmp_path / ".lock").is_file() else b""
    with pytest.raises(ValueError, match=rule):
        run_folder.lock(str(tmp_path))
    assert (tmp_path / "notes").read_text() == "mine"
    assert not before or (tmp_path / ".lock").read_bytes() == before


def test_what_a_user_put_into_a_checkpoint_stays(save, tmp_path, capsys):
    root = tmp_path / "checkpoints"
    (root / ".step_notes").mkdir(parents=True)                          # no name of a run's
    save(1)
    for name in ("eval.json", "hf/notes.md", "plots/a.png"):
        (root / "step_000001" / name).parent.mkdir(exist_ok=True)
        (root / "step_000001" / name).write_text(name)
    (root / "step_000001/link").symlink_to("/etc")
    for step in (2, 3):
        save(step, keep=1)
    kept = root / "other_files_000001"
    assert sorted(path.name for path in root.iterdir()) == [".step_notes", kept.name, "step_000003"]
    assert sorted(str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_symlink() or path.is_file()) == [
        "eval.json", "hf/notes.md", "link", "plots/a.png"]
    assert capsys.readouterr().out.count("which no run wrote, was in a checkpoint that is removed") == 4


def test_a_checkpoint_that_names_files_elsewhere_removes_none(save, tmp_path):
    save(1)
    folder, mine = tmp_path / "checkpoints/step_000001", tmp_path / "mine"
    mine.write_text("mine")
    manifest = files.read_manifest(folder)
    manifest["files"] |= {"../../mine": {"size": 4, "crc32": 0}, str(mine): {"size": 4, "crc32": 0}}
    files.write_manifest(folder, manifest)
    own.remove_checkpoint(folder)
    assert mine.read_text() == "mine" and not folder.exists()


@pytest.mark.parametrize(("to", "stay", "gone"), [
    ((), ["rollouts/mine_000009.parquet", "rollouts/step_9.parquet", "tensorboard/events.out.tfevents.1"],
     ["rollouts/step_000009.parquet", "rollouts/val_000000.parquet"]),
    (("tensorboard",), ["tensorboard/notes.md", "tensorboard/other/events"], ["tensorboard/events.out.tfevents.1.h"]),
])
def test_a_new_run_removes_its_own_files_alone(to, stay, gone, world, tmp_path):
    """Of an earlier run in the same folder, whose checkpoints were moved away."""
    for name in to:
        pytest.importorskip(name)
    for name in stay + gone:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    Tracker(LogConfig(to=to), str(tmp_path), Args(str(tmp_path)), world, {}).close()
    assert [name for name in stay + gone if (tmp_path / name).exists()] == stay


def test_a_start_is_refused_before_anything_is_written(tiny_llama, tmp_path):
    shutil.copytree(tiny_llama, tmp_path / "run/model")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    log, flags = tmp_path / "log", ("--train-data", TRAIN, "--run-dir", tmp_path / "run")
    assert server()(log, "none", "grpo.py", "--model", tmp_path / "run/model", *flags) == 2
    model = tmp_path / "run/model"
    assert log.read_text() == (f"error: --model {model} is in {model}, which this run replaces with its own model: "
                               f"choose another --run-dir, or set --save.hf never\n")
    log.unlink()
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before
