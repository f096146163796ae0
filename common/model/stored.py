"""The weights of a model in its safetensors files, which are mapped: only the slices that a rank takes are read."""

import json
import os
from copy import deepcopy
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import MergeModulelist, WeightConverter, WeightRenaming, dot_natural_key
from transformers.core_model_loading import rename_source_key as rename

from common.model.lora import is_adapter


class Experts:
    """The experts of a layer as one tensor [experts, rows, columns]. `parts`: the matrix of each expert, whole or in
    two parts, one above the other (gate and up). Indexing with three slices reads only these slices."""

    def __init__(self, parts: list[list[Tensor]]):
        self.parts = parts
        rows = sum(len(matrices[0]) for matrices in parts)
        self.shape = torch.Size([len(parts[0]), rows, parts[0][0].shape[1]])

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        experts, rows, columns = index
        found, above = [], 0
        for matrices in self.parts:
            part = slice(max(rows.start - above, 0), max(rows.stop - above, 0))
            found.append(torch.stack([matrix[part, columns] for matrix in matrices[experts]]))
            above += len(matrices[0])
        return torch.cat(found, 1)


def open_folder(path: str) -> dict[str, Tensor]:
    """The tensors in the safetensors files of a model folder or hub name. Raises ValueError if there are none: a pickle
    (pytorch_model.bin) is never read."""
    here = Path(path) if Path(path).is_dir() else Path(snapshot_download(path, allow_patterns="model*.safetensors*"))
    index = here / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    found = {}
    for name in sorted(names):
        if not (here / name).is_file():
            raise ValueError(f"{path} lacks {name}: weights must be safetensors, because reading a pytorch_model.bin "
                             f"can run code; convert the model with save_pretrained, or choose another")
        if not os.access(here / name, os.R_OK):  # safetensors would say that there is none
            raise ValueError(f"{here / name} cannot be read by this user: ask its owner for `chmod a+r`")
        found |= load_file(here / name)
    return found


def weights_of(model: PreTrainedModel, path: str, stored: dict[str, Tensor]) -> dict[str, Tensor | Experts]:
    """Every weight and saved buffer under its name in `model`, tied ones once.
    Raises ValueError if one is missing, or has another shape."""
    stored, weights = _named_as_in(model, stored), {}
    names: dict[Tensor, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not is_adapter(name):
            names.setdefault(tensor, []).append(name)
    for tensor, (name, *others) in names.items():
        found = [stored[key] for key in (name, *others) if key in stored]
        if not found:
            raise ValueError(f"{path} lacks weights, {name} among them: choose a complete model")
        if found[0].shape != tensor.shape:
            raise ValueError(f"{path}: {name} is {list(found[0].shape)}, must be {list(tensor.shape)} by config.json")
        weights[name] = found[0]
    return weights


def _named_as_in(model: PreTrainedModel, stored: dict[str, Tensor]) -> dict[str, Tensor | Experts]:
    """Like `from_pretrained`: the tensors of a published model, named and joined as in `model`. Tensors that are joined
    or cut in another way than experts (in one family with full attention, hrm_text) are read now."""
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    converter_of = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    wanted, prefix = model.state_dict(), model.base_model_prefix
    found, joined = {}, {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = name, None
        if target in wanted and pattern is None:
            found[target] = stored[name]
        elif target in wanted:
            joined.setdefault(target, deepcopy(converter_of[pattern])).add_tensor(target, name, pattern, stored[name])
    for target, converter in joined.items():
        if isinstance(converter.operations[0], MergeModulelist):
            found[target] = Experts([converter.collected_tensors[pattern] for pattern in converter.source_patterns])
        else:
            found |= converter.convert(target, model=model, config=model.config)
    return found
