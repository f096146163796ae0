"""What a checkpoint holds, and how DCP reads and writes it."""

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from common.model.policy import saved_buffers

Parts = dict[str, tuple[Any, torch.optim.Optimizer]]
"""The models that a run trains: {"policy": (policy, optimizer)}, with a critic {"critic": (critic, optimizer)} too."""


def tensors_of(parts: Parts) -> dict[str, Tensor]:
    """PART.model.NAME, PART.optim.NAME.KEY and PART.buffer.NAME -> every weight (with --lora.rank: of the adapters),
    optimizer tensor and buffer that belongs to a checkpoint: this rank's shards, no copies."""
    found = {}
    for part, (module, optimizer) in parts.items():
        optimizer.state_dict()                                  # its hook brings back moments that are offloaded
        is_trained = any(parameter.requires_grad for parameter in module.parameters())  # else a reference that changes
        for name, parameter in module.named_parameters():
            if parameter.requires_grad == is_trained:
                found[f"{part}.model.{name}"] = parameter.detach()
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{part}.optim.{name}.{key}"] = value
        for name, buffer in saved_buffers(module).items():
            found[f"{part}.buffer.{name}"] = buffer
    return found


def load_parts(parts: Parts, folder: Path) -> None:
    """Fills all parts from a checkpoint of any number of ranks. Each optimizer first takes a step on zero gradients,
    which creates its state; this step's weight decay changes weights, but the checkpoint overwrites them."""
    reader = Reader(folder)
    stored = reader.read_metadata().state_dict_metadata
    with_state = {name.rpartition(".")[0] for name in stored}
    for part, (module, optimizer) in parts.items():
        for name, parameter in module.named_parameters():
            if f"{part}.optim.{name}" in with_state:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    tensors = tensors_of(parts)
    if differing := sorted(name for name in tensors.keys() ^ stored.keys() if ".optim." in name):
        raise ValueError(f"{folder} and this run have other moments, {differing[0]} for example: --optim.kind (and "
                         f"--critic-optim.kind) and, with adamw-8bit and experts, ranks and --policy.expert-parallel "
                         f"must be those of the run that saved it")
    dcp.load(tensors, storage_reader=reader)


class MetadataUnpickler(pickle.Unpickler):
    """DCP's index of tensors is a pickle. Only DCP's own records may be unpickled from it."""

    def find_class(self, module: str, name: str) -> Any:
        records = ("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
                   "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")
        allowed = {
            "torch.distributed.checkpoint.metadata": records,
            "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
            "torch": ("Size", "float64", "float32", "float16", "bfloat16", "uint8", "int32", "int64"),
            "torch.serialization": ("_get_layout",),
            "pathlib": ("PosixPath",),
        }
        if name not in allowed.get(module, ()):
            raise ValueError(f"a checkpoint's .metadata asks for {module}.{name}, which is none of DCP's records")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """DCP's reader, which reads the index of tensors safely."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            return MetadataUnpickler(file).load()


class ShardWriter(dcp.FileSystemWriter):
    """DCP's writer, which reports why the disk refused; torch.save says `unexpected pos 704 vs 598`."""

    def write_data(self, *args: Any) -> Any:
        try:
            return super().write_data(*args)
        except RuntimeError as error:
            raise (error.__context__ or error) from None
