"""Weights in a folder that trainers and servers see: safetensors, and the checksums of their tensors."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 2 << 30
"""Of a file: what the writer holds in the host's memory at a time."""
CHECKSUMS = "checksums.json"


class WeightFolder:
    """A folder of folders, one a version, of which the last one that is complete is kept."""

    def __init__(self, path: Path, run: str, dtype: torch.dtype):
        """`run`: a name that no other run has. `dtype`: of the tensors that are written."""
        self.dtype = dtype
        self.path = path / run
        self.run = run
        self.version = -1

    @property
    def folder(self) -> Path:
        return self.path / f"{self.version:06d}"

    @property
    def last(self) -> Path:
        """What the servers are given."""
        return self.folder

    @property
    def name(self) -> str:
        """Of the version, at the servers."""
        return f"{self.run}-{self.version:06d}"

    def write(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Write the tensors of the next version."""
        self.version += 1
        folder = self.folder
        folder.mkdir(parents=True)
        shard: dict[str, Tensor] = {}
        place: dict[str, str] = {}
        size = 0
        for name, tensor in tensors:
            copy = tensor.detach().to("cpu", self.dtype, copy=True).contiguous()
            if shard and size + copy.nbytes > SHARD_BYTES:
                place |= save_shard(folder, shard)
                shard = {}
                size = 0
            shard[name] = copy
            size += copy.nbytes
        place |= save_shard(folder, shard)
        index = {"metadata": {}, "weight_map": place}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def complete(self, sums: dict[str, tuple[int, int]]) -> None:
        """Write the checksums of its tensors, as `as_numbers` gives them."""
        written = {"run": self.run, "version": self.version, "sums": sums}
        (self.folder / CHECKSUMS).write_text(json.dumps(written))

    def remove_older(self) -> None:
        """Remove all versions but the last one: all servers that are there have it."""
        for folder in self.path.iterdir():
            if folder != self.folder:
                shutil.rmtree(folder, ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def save_shard(folder: Path, shard: dict[str, Tensor]) -> dict[str, str]:
    """Returns the file of each tensor."""
    file = f"model-{len(list(folder.glob('*.safetensors'))) + 1:05d}.safetensors"
    save_file(shard, folder / file, metadata={"format": "pt"})
    return dict.fromkeys(shard, file)


def read_checksums(folder: Path) -> tuple[str, int, dict[str, tuple[int, int]]]:
    """The run, the version, and the checksum of each tensor that was written."""
    written = json.loads((folder / CHECKSUMS).read_text())
    sums = {name: (total, numel) for name, (total, numel) in written["sums"].items()}
    return written["run"], written["version"], sums
