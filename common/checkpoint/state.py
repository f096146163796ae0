"""What a checkpoint holds, and the safetensors files in which each rank stores its shards of it.

A file's metadata has {NAME: {"shape" and "dtype" of the whole tensor, "start": where this rank's shard begins in it}}
of all tensors, also of those that another rank stores. Ranks exchange nothing: for torch's distributed checkpoint
rank 0 gathers an entry of every tensor from every rank, which takes minutes with 1,024 ranks (tests/evidence/scale.md).
"""

import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from common.model.policy import saved_buffers
from common.model.sharding import local, shard_slice, stores

FILE = "__{}_{}.safetensors"
"""A file of a rank: its rank and number."""
FILE_BYTES = 2**30
"""About the size of a file of several tensors. All of a file's tensors are copied to the host together."""
Parts = dict[str, tuple[Any, torch.optim.Optimizer]]
"""The models that a run trains: {"policy": (policy, optimizer)}, with a critic {"critic": (critic, optimizer)} too."""


def fingerprint(state: Any) -> tuple[int, float]:
    """Of JSON: a checksum of all but its floats, and the sum of these: ranks on other CPUs may round otherwise."""
    floats: list[float] = []

    def take_out(text: str) -> None:
        floats.append(abs(float(text)))

    rest = json.loads(json.dumps(state, sort_keys=True), parse_float=take_out)
    return zlib.crc32(json.dumps(rest).encode()), sum(floats)


def tensors_of(parts: Parts) -> dict[str, Tensor]:
    """PART.model.NAME, PART.optim.NAME.KEY and PART.buffer.NAME -> every weight (with --lora.rank: of the adapters),
    optimizer tensor and buffer that belongs to a checkpoint: this rank's shards, no copies."""
    found = {}
    for part, (module, optimizer) in parts.items():
        optimizer.state_dict()                                  # its hook brings back moments that are offloaded
        is_trained = any(parameter.requires_grad for parameter in module.parameters())  # else a reference that changes
        for name, parameter in module.named_parameters():
            if parameter.requires_grad == is_trained or parameter in optimizer.state:   # it may be frozen only now
                found[f"{part}.model.{name}"] = parameter.detach()
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{part}.optim.{name}.{key}"] = value
        for name, buffer in saved_buffers(module).items():
            found[f"{part}.buffer.{name}"] = buffer
    return found


def load_parts(parts: Parts, folder: Path, rank: int = 0) -> None:
    """Fills all parts from a checkpoint of any number of ranks. Each optimizer first takes a step on zero gradients,
    which creates its state; this step's weight decay changes weights, but the checkpoint overwrites them."""
    _, stored = next(open_shards(folder, rank))
    with_state = set()
    for name in stored:
        tensor_name, _, _ = name.rpartition(".")
        with_state.add(tensor_name)
    for part, (module, optimizer) in parts.items():
        for name, parameter in module.named_parameters():
            if f"{part}.optim.{name}" in with_state:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    tensors = tensors_of(parts)
    differing = []
    for name in sorted(tensors.keys() ^ stored.keys()):
        if ".optim." in name:
            differing.append(name)
    if differing:
        raise ValueError(f"{folder} and this run have other moments, {differing[0]} for example: --optim.kind (and "
                         f"--critic-optim.kind) and, with adamw-8bit and experts, ranks and --policy.expert-parallel "
                         f"must be those of the run that saved it")
    load_shards(tensors, open_shards(folder, rank))


def save_shards(tensors: dict[str, Tensor], folder: Path, rank: int) -> None:
    """Writes this rank's files. All ranks have the same tensors in the same order."""
    entries = {}
    shards = {}
    num_bytes = 0
    for number, (name, tensor) in enumerate(tensors.items()):
        start = [own.start for own in shard_slice(tensor)]
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries[name] = {"shape": list(tensor.shape), "dtype": dtype, "start": start}
        if stores(number, tensor):
            shards[name] = local(tensor).contiguous()
            num_bytes += shards[name].nbytes
    folder.mkdir(parents=True, exist_ok=True)
    num_files = 1 + num_bytes // FILE_BYTES
    names = [*shards]
    for number in range(num_files):
        part = {}
        for name in names[number::num_files]:
            part[name] = shards[name]
        save_file(part, folder / FILE.format(rank, number), {"entries": json.dumps(entries)})


def open_shards(folder: Path, rank: int = 0) -> Iterator[tuple[safe_open, dict[str, dict[str, Any]]]]:
    """All ranks' files, of which only the slices are read that are asked for, each with the entries of all tensors. The
    files of `rank` come first: they have all that a run with as many ranks and no copies needs."""
    own = []
    others = []
    for path in folder.glob(FILE.format("*", "*")):
        if path.name.startswith(f"__{rank}_"):
            own.append(path)
        else:
            others.append(path)
    for path in own + others:
        shards = safe_open(path, "pt")
        yield shards, json.loads(shards.metadata()["entries"])


def load_shards(tensors: dict[str, Tensor], files: Iterable[tuple[safe_open, dict[str, dict[str, Any]]]]) -> None:
    """Fills tensors, of DTensors this rank's shards, from as many files as are needed. Raises ValueError if they lack a
    tensor of the same shape, or a part of it."""
    left = {}                                                   # elements that no file has given yet
    for name, tensor in tensors.items():
        left[name] = local(tensor).numel()
    for shards, entries in files:
        for name in left.keys() & shards.keys():
            if not left[name]:
                continue
            if entries[name]["shape"] == list(tensors[name].shape):
                left[name] -= copy_common(tensors[name], shards.get_slice(name), entries[name]["start"])
        if not any(left.values()):
            return
    raise ValueError(f"the checkpoint lacks {max(left, key=left.get)} in this run's shape, or a part of it")


def copy_common(tensor: Tensor, stored: Any, start: list[int]) -> int:
    """Copies into this rank's shard of a tensor what it has in common with a stored one, which begins at `start`.
    Returns the number of elements."""
    into: list[slice] = []                                      # in this rank's shard
    taken: list[slice] = []                                     # in the stored one
    for mine, first, size in zip(shard_slice(tensor), start, stored.get_shape(), strict=True):
        begin = max(mine.start, first)
        end = min(mine.stop, first + size)
        if begin >= end:
            return 0
        into.append(slice(begin - mine.start, end - mine.start))
        taken.append(slice(begin - first, end - first))
    target = local(tensor)[tuple(into)]
    target.copy_(stored[tuple(taken)])
    return target.numel()
