"""Run folders and checkpoints that somebody else made: pipes and devices in them, manifests that no run writes."""

import os

import pytest

from common.checkpoint import files


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
