"""Run folders and checkpoints that somebody else made: pipes and devices in them, manifests that no run writes."""

import errno
import json
import os

import pytest

from common.checkpoint import export, files, own, run_folder
from tests.checkpoint.test_own import Args
from tools import checkpoints
from tools.flags import exit_with_error


@pytest.mark.parametrize(("kind", "why"), [
    ("pipe", "is a folder, a pipe or a device"), ("device", "is a folder, a pipe or a device"),
    ("folder", "is a folder, a pipe or a device"), ("large", "has more than 8 bytes"),
    ("missing", "cannot be read: No such file or directory"), ("loop", "cannot be read: Too many levels"),
])
def test_what_never_ends_is_not_read(kind, why, tmp_path):
    file = tmp_path / files.MANIFEST
    {"pipe": lambda: os.mkfifo(file), "device": lambda: file.symlink_to("/dev/zero"), "folder": file.mkdir,
     "large": lambda: file.write_bytes(b"123456789"), "missing": lambda: None,
     "loop": lambda: file.symlink_to(file)}[kind]()
    with pytest.raises(ValueError, match=f"^{file} {why}"):
        files.read_regular(file, 8)
    assert files.read_manifest(tmp_path) == {}


def test_a_link_to_a_file_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"12345678")
    (tmp_path / "link").symlink_to("file")
    assert files.read_regular(tmp_path / "link", 8) == b"12345678"


SOUND = {"files": {"a": {"size": 1, "crc32": 0}}, "world_size": 1, "flags": {}, "model": {}, "state": {"step": 1}}
DEEP = {"a": None}
for _ in range(200):
    DEEP = {"a": [DEEP]}
SAMPLER = {"epoch": 0, "position": 0, "data_hash": "", "num_prompts": 1}


@pytest.mark.parametrize("manifest", [
    [], "text", None, 1, {}, SOUND | {"files": []}, SOUND | {"files": {"a": 1}}, SOUND | {"files": {"a": {"size": 1}}},
    SOUND | {"files": {"a": {"size": "1", "crc32": 0}}}, SOUND | {"files": {"a": {"size": -1, "crc32": 0}}},
    SOUND | {"state": {}}, SOUND | {"state": []}, SOUND | {"state": {"step": "1"}}, SOUND | {"state": {"step": True}},
    SOUND | {"state": {"step": 1.5}}, SOUND | {"state": {"step": -1}}, SOUND | {"state": {"step": None}},
    SOUND | {"state": {"step": 1, "sampler": {}}}, SOUND | {"state": {"step": 1, "sampler": SAMPLER | {"epoch": "0"}}},
    SOUND | {"state": {"step": 1, "tracker": {"size": []}}}, SOUND | {"state": {"step": 1, "tracker": 3}},
    SOUND | {"state": {"step": 1, "best": []}}, SOUND | {"state": {"step": 1, "best": {"step": "../.."}}},
    SOUND | {"state": {"step": 1, "script": []}}, SOUND | {"state": {"step": 1, "not_validated": {"loss": "x"}}},
    SOUND | {"flags": []}, SOUND | {"flags": None}, SOUND | {"model": []}, SOUND | {"world_size": "2"},
    SOUND | {"model": DEEP}, SOUND | {"flags": {"--model": DEEP}}, SOUND | {"state": {"step": 1, "script": DEEP}},
    {name: value for name, value in SOUND.items() if name != "flags"},
])
def test_a_manifest_that_no_run_writes_is_a_damaged_one(manifest, tmp_path, capsys):
    """Its checksum is right."""
    folder = tmp_path / "checkpoints/step_000001"
    folder.mkdir(parents=True)
    (folder / "a").write_text("a")
    files.write_manifest(folder, manifest)
    files.write_manifest(tmp_path / "model", manifest, own.MARK)
    assert files.check_files(folder) == ["manifest.json is missing or damaged"]
    assert files.complete_checkpoints(tmp_path) == []
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        checkpoints.export_checkpoint(str(tmp_path), tmp_path / "out")
    checkpoints.list_checkpoints(str(tmp_path))
    assert "damaged: manifest.json is missing or damaged" in capsys.readouterr().out
    files.write_manifest(tmp_path / "finished", manifest)
    run_folder.finished(Args(str(tmp_path)))                            # no error
    said = own.not_as_written(tmp_path / "model")
    assert said == "" or "has no plainrl.json" in said


def test_a_config_with_too_many_layers_ends_at_once():
    config = {"model_type": "llama", "num_hidden_layers": 10**7}
    with pytest.raises(ValueError, match=r"config.json names 10,000,000 layers, more than the 1,000 of any model"):
        export.model_of({"config.json": json.dumps(config).encode()})


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.ESTALE])
def test_a_broken_disk_is_one_line_that_names_the_file(number, tmp_path, capsys):
    path, said = tmp_path / "metrics.jsonl", os.strerror(number)
    with pytest.raises(OSError, match=said) as raised, files.naming(path):
        raise OSError(number, said)                                     # as a write or a sync of an open file says it
    with pytest.raises(SystemExit) as end:
        exit_with_error(raised.value)
    full = "the disk is full: " if number == errno.ENOSPC else ""
    assert end.value.code == 2
    assert capsys.readouterr().err == f"error: {full}[Errno {number}] {said}: '{path}'\n"


def test_a_full_disk_names_no_file_itself(tmp_path):
    named = files.naming(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match=r"metrics\.jsonl"), named, open("/dev/full", "w") as file:
        file.write("a line")
