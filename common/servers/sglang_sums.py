"""SGLang's checksums of weights on a CPU, computed from the trainer's: the first 8 bytes of SHA-256, in hex, of the
bytes of each of its tensors (SGLang 0.5.23: sglang/srt/managers/mm_utils.py, `tensor_hash`)."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""SGLang's matrices that are several of transformers', in this order of their rows."""
VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
ROWS = 64
"""SGLang fills tensors of the vocabulary up with rows of zeros to a multiple of this."""


def checksums_of(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Checksums of the tensors in a folder of `WeightFolder`, under SGLang's names for them. Those that the folder has
    not under this name, or as parts of it, are left out."""
    place: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    checksums = {}
    for name in names:
        parts = parts_of(name)
        if all(part in place for part in parts):
            digest = hashlib.sha256()
            for part in parts:
                add(digest, part, folder / place[part])
            checksums[name] = digest.digest()[:8].hex()
    return checksums


def parts_of(name: str) -> list[str]:
    """What transformers calls the parts of SGLang's tensor."""
    path, _, kind = name.rpartition(".")
    path, _, module = path.rpartition(".")
    if module in FUSED:
        return [f"{path}.{part}.{kind}" for part in FUSED[module]]
    return [name]


def add(digest: "hashlib._Hash", name: str, file: Path) -> None:
    with safe_open(file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
    digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    if name.endswith(VOCABULARY):
        num_missing = -len(tensor) % ROWS
        digest.update(bytes(num_missing * tensor[0].nbytes))
