"""The weights of a model in its safetensors files, which are mapped: only the slices that a rank takes are read."""

import hashlib
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

from common.source.folder import check_weights, weight_files
from common.source.published import TRANSPOSED

SAMPLES = 8
"""Parts of a tensor that its checksum covers, from the first to the last bytes: 32 KB a tensor, to be cheap."""
SAMPLE_BYTES = 4096


class Experts:
    """The experts of a layer as one tensor [experts, rows, columns]. `parts`: the matrix of each expert, whole or in
    two parts, one above the other (gate and up). Indexing with three slices reads only these slices."""

    def __init__(self, parts: list[list[Tensor]]):
        self.parts = parts
        self.dtype = parts[0][0].dtype
        rows = 0
        for matrices in parts:
            rows += len(matrices[0])
        self.shape = torch.Size([len(parts[0]), rows, parts[0][0].shape[1]])

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        experts, rows, columns = index
        found = []
        above = 0                                       # rows of the parts before
        for matrices in self.parts:
            part = slice(max(rows.start - above, 0), max(rows.stop - above, 0))
            taken = []
            for matrix in matrices[experts]:
                taken.append(matrix[part, columns])
            found.append(torch.stack(taken))
            above += len(matrices[0])
        return torch.cat(found, 1)


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of an adapter's matrices, which no folder of a model holds."""
    return name.endswith(("lora_A", "lora_B"))


def open_folder(path: str) -> dict[str, Tensor]:
    """The tensors in the safetensors files of a model folder or hub name. Raises ValueError if there are none: a pickle
    (pytorch_model.bin) is never read."""
    here = Path(path)
    if not here.is_dir():
        here = Path(snapshot_download(path, allow_patterns="model*.safetensors*"))
    found = {}
    for file in weight_files(here, path):
        check_weights(file)
        found |= load_file(file)
    return found


def fingerprint(path: str) -> str:
    """A checksum of the weights in a folder or of a hub name: of name, dtype and shape of every tensor and of SAMPLES
    parts of its bytes (all of a small tensor's). Whatever trains or merges a model changes it; another order of the
    tensors in other files, or a copy elsewhere, does not."""
    total = hashlib.sha256()
    for name, tensor in sorted(open_folder(path).items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        content = tensor.flatten().view(torch.uint8)
        last = max(len(content) - SAMPLE_BYTES, 0)
        num_samples = 1
        if last:
            num_samples = SAMPLES
        for number in range(num_samples):
            start = last * number // (SAMPLES - 1)
            total.update(content[start : start + SAMPLE_BYTES].numpy())
    return total.hexdigest()[:16]


def fingerprints(paths: dict[str, str]) -> dict[str, str]:
    """The same of several models, by their names."""
    found = {}
    for name, path in paths.items():
        found[name] = fingerprint(path)
    return found


def weights_of(model: PreTrainedModel, path: str, stored: dict[str, Tensor]) -> dict[str, Tensor | Experts]:
    """Every weight and saved buffer under its name in `model`, tied ones once.
    Raises ValueError if one is missing, has another shape or is quantized, if tied ones differ, or if the experts of a
    family that transformers transposes are square."""
    available = _named_as_in(model, stored)
    names: dict[Tensor, list[str]] = {}                 # tied weights are one tensor with several names
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not is_adapter(name):
            names.setdefault(tensor, []).append(name)
    weights = {}
    for tensor, tied in names.items():
        name = tied[0]
        found = []
        for key in tied:
            if key in available:
                found.append(available[key])
        if not found:
            raise ValueError(f"{path} lacks weights, {name} among them: choose a complete model")
        first, *others = found
        if model.config.model_type in TRANSPOSED and tensor.ndim == 3 and tensor.shape[1] == tensor.shape[2]:
            raise ValueError(f"{path}: {name} is {list(tensor.shape)}, and vLLM and transformers take such experts for "
                             f"[experts, in, out] and [experts, out, in]: choose other sizes than these")
        if first.shape != tensor.shape:
            raise ValueError(f"{path}: {name} is {list(first.shape)}, must be {list(tensor.shape)} by config.json")
        is_quantized = not first.dtype.is_floating_point or first.dtype.itemsize < 2
        if is_quantized and tensor.is_floating_point():
            raise ValueError(f"{path}: {name} is {first.dtype}, so the model is quantized, and what is trained is "
                             f"not: choose the model that it was made from")
        for other in others:
            if not torch.equal(first, other):
                raise ValueError(f"{path}: {' and '.join(tied)} are two tensors, and config.json ties them: "
                                 f"transformers would keep both, vLLM one; set tie_word_embeddings to false in it")
        weights[name] = first
    return weights


def _named_as_in(model: PreTrainedModel, stored: dict[str, Tensor]) -> dict[str, Tensor | Experts]:
    """Like `from_pretrained`: the tensors of a published model, named and joined as in `model`. Tensors that are joined
    or cut in another way than experts (in one family with full attention, hrm_text) are read now."""
    transforms = get_model_conversion_mapping(model)
    renamings: list[WeightRenaming] = []
    converters: list[WeightConverter] = []
    converter_of: dict[str, WeightConverter] = {}       # by each pattern of names that it joins
    for entry in transforms:
        if isinstance(entry, WeightRenaming):
            renamings.append(entry)
        elif isinstance(entry, WeightConverter):
            converters.append(entry)
            converter_of |= dict.fromkeys(entry.source_patterns, entry)
    wanted = model.state_dict()
    prefix = model.base_model_prefix
    found = {}
    joined: dict[str, WeightConverter] = {}             # name in `model` -> what has collected its parts
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = rename(name, [], [], prefix, wanted)
        if target not in wanted:
            continue
        if pattern is None:
            found.setdefault(target, stored[name])      # of two with one name, from_pretrained takes the first
            continue
        if target not in joined:
            joined[target] = deepcopy(converter_of[pattern])
        joined[target].add_tensor(target, name, pattern, stored[name])
    for target, converter in joined.items():
        if isinstance(converter.operations[0], MergeModulelist):
            parts = []
            for pattern in converter.source_patterns:
                parts.append(converter.collected_tensors[pattern])
            found[target] = Experts(parts)
        else:
            found |= converter.convert(target, model=model, config=model.config)
    return found
