"""A checkpoint on disk: its manifest, its checksums, and whether it is complete."""

import json
import os
import zlib
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes the last file of a checkpoint, with a checksum of its own. Makes the folder if it is not there."""
    folder.mkdir(exist_ok=True)
    checksum = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
    (folder / MANIFEST).write_text(json.dumps({"crc32": checksum, "manifest": manifest}))
    sync(folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads what `write_manifest` wrote; {} if the file is missing or damaged."""
    try:
        outer = json.loads((folder / MANIFEST).read_text())
        is_sound = zlib.crc32(json.dumps(outer["manifest"], sort_keys=True).encode()) == outer["crc32"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}
    return outer["manifest"] if is_sound else {}


def check_files(folder: Path, rank: int = 0, size: int = 1) -> list[str]:
    """What is wrong with a checkpoint: its manifest, or files whose content differs from what was written. Each of
    `size` ranks reads its share of the files."""
    manifest = read_manifest(folder)
    if not manifest:
        return [f"{MANIFEST} is missing or damaged"]
    return [
        f"{name} is missing or has another checksum than when it was written"
        for name in sorted(manifest["files"])[rank::size]
        if not (folder / name).is_file() or crc32(folder / name) != manifest["files"][name]["crc32"]
    ]


def complete_checkpoints(path: str | Path) -> list[Path]:
    """All complete checkpoints of a run, oldest first; if `path` is a checkpoint, only that. A checkpoint is complete
    if it has a manifest, which is written last. They are found by scanning; no file names the newest."""
    path = Path(path).resolve()
    return [folder for folder in (path, *sorted(path.glob("checkpoints/step_*"))) if read_manifest(folder)]


def find(path: str) -> Path:
    """A checkpoint, or the newest complete one of a run folder. Raises ValueError if there is none."""
    found = complete_checkpoints(path)
    if not found:
        raise ValueError(f"{path} holds no complete checkpoint: give a run folder or RUN/checkpoints/step_N")
    return found[-1]


def crc32(path: Path) -> int:
    """CRC-32 of a file. It is fast enough for any disk: 2.2 GiB/s here, where blake2b has 0.8 and sha256 1.3."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value


def sync(path: Path) -> None:
    """Flushes a file's content, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
