"""The answers of a teacher's server on disk, by sequence: what was asked once is not asked again.

A file holds the answers that one rank got in one step, in safetensors: for a key the words int32 [n, k] and log-probs
float32 [n, k]. A key is a hash of the sequence's tokens and of where its response begins; the teacher's name, revision
and k are in the folder's name.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

Answer = tuple[np.ndarray, np.ndarray]  # words and log-probs


def key_of(tokens: Sequence[int], first: int) -> str:
    digest = hashlib.sha256(np.array([first, *tokens], dtype=np.int64).tobytes())
    return digest.hexdigest()


class Cache:
    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.files: set[Path] = set()  # that are known
        self.where: dict[str, Path] = {}  # key -> its file
        self.refresh()

    def refresh(self) -> None:
        """Learn of the files that other ranks and runs wrote."""
        for path in sorted(self.folder.glob("*.safetensors")):
            if path in self.files:
                continue
            self.files.add(path)
            try:
                with safe_open(path, "numpy") as file:
                    names = [*file.keys()]
            except SafetensorError as error:
                raise ValueError(f"--served.cache: {path} cannot be read ({error}): delete it, and its sequences are "
                                 f"asked again") from None
            for name in names:
                self.where.setdefault(name.partition(".")[0], path)

    def __contains__(self, key: str) -> bool:
        return key in self.where

    def put(self, answers: dict[str, Answer]) -> None:
        """All in one file, which is there whole or not at all."""
        if not answers:
            return
        tensors = {}
        for key, (words, logps) in answers.items():
            tensors[f"{key}.words"] = words
            tensors[f"{key}.logps"] = logps
        name = hashlib.sha256("".join(sorted(answers)).encode()).hexdigest()[:32]
        path = self.folder / f"{name}.safetensors"
        part = self.folder / f"{name}.part{os.getpid()}"
        save_file(tensors, part)
        os.replace(part, path)
        self.files.add(path)
        for key in answers:
            self.where.setdefault(key, path)

    def read(self, keys: Iterable[str]) -> dict[str, Answer]:
        """The answers to these keys, which are in the cache."""
        of_files: dict[Path, list[str]] = {}
        for key in keys:
            of_files.setdefault(self.where[key], []).append(key)
        found = {}
        for path, theirs in of_files.items():
            with safe_open(path, "numpy") as file:
                for key in theirs:
                    found[key] = file.get_tensor(f"{key}.words"), file.get_tensor(f"{key}.logps")
        return found
