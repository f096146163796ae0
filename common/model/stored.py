"""Tensors that lie in files and are not read yet. A rank reads those parts of them that its shards need.

transformers renames the tensors of a published model when it loads one, and joins some: the experts of a mixture become
one tensor. Its own conversions run here, forwards and backwards, on descriptions of tensors.
"""

import json
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""Of safetensors' names. Other tensors, which no model here has as a weight, are passed over."""
Index = tuple[slice, ...]
"""The part of a tensor that is read: start and stop in each of its dimensions."""


class Stored:
    """A tensor of which `read(index)` gives a part."""

    def __init__(self, shape: Any, dtype: torch.dtype, read: Callable[[Index], Tensor]):
        self.shape, self.dtype, self.read = torch.Size(shape), dtype, read

    def whole(self) -> Tensor:
        return self.read(tuple(slice(0, size) for size in self.shape))

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """What torch's functions make of stored tensors is stored too. Of a stack or a row of tensors the parts are
        read; all else is made of the whole tensors."""
        kwargs = kwargs or {}
        described = tree_map_only(cls, lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), (args, kwargs))
        result = function(*described[0], **described[1])
        read = partial(_read_made, function, args, kwargs)
        if function is torch.stack and kwargs == {"dim": 0}:
            read = partial(_read_stacked, args[0])
        elif function is torch.cat and kwargs.keys() == {"dim"}:
            read = partial(_read_joined, args[0], kwargs["dim"])
        if isinstance(result, tuple):                                   # of chunk: each has a number
            return tuple(cls(x.shape, x.dtype, partial(read, number=number)) for number, x in enumerate(result))
        return cls(result.shape, result.dtype, read)

    def contiguous(self) -> Self:
        return self

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of tensors: squeeze, reshape, transpose, ..."""
        method = getattr(Tensor, name)
        return lambda *args, **kwargs: Stored.__torch_function__(method, (), (self, *args), kwargs)


def _read_made(function: Callable, args: tuple, kwargs: dict, index: Index, number: int | None = None) -> Tensor:
    args, kwargs = tree_map_only(Stored, Stored.whole, (args, kwargs))
    result = function(*args, **kwargs)
    return (result if number is None else result[number])[index]


def _read_stacked(parts: list[Stored], index: Index) -> Tensor:
    return torch.stack([part.read(index[1:]) for part in parts[index[0]]])


def _read_joined(parts: list[Stored], dim: int, index: Index) -> Tensor:
    pieces, begin = [], 0
    for part in parts:
        start, stop = max(index[dim].start - begin, 0), min(index[dim].stop - begin, part.shape[dim])
        if start < stop:
            pieces.append(part.read((*index[:dim], slice(start, stop), *index[dim + 1 :])))
        begin += part.shape[dim]
    return torch.cat(pieces, dim)


class Folder:
    """The safetensors files of a model folder or hub name. `bytes_read` is counted."""

    def __init__(self, path: str):
        """Raises ValueError where there are none: a pickle (pytorch_model.bin) is never read."""
        self.path, self.bytes_read = path, 0
        here = Path(path) if Path(path).is_dir() else Path(snapshot_download(path, allow_patterns="model*.safetensors*"))
        index = here / "model.safetensors.index.json"
        names = {"model.safetensors"}
        if index.is_file():
            names = set(json.loads(index.read_text())["weight_map"].values())
        lacking = sorted(name for name in names if not (here / name).is_file())
        if lacking:
            raise ValueError(f"{path} lacks {lacking[0]}: weights must be safetensors files (a pytorch_model.bin can run "
                             f"code when it is read, so it is not); convert the model with save_pretrained")
        self.tensors: dict[str, Stored] = {}
        for name in sorted(names):
            file = safe_open(here / name, "pt")
            for key in file.keys():
                part = file.get_slice(key)
                if part.get_dtype() in DTYPES:
                    dtype = DTYPES[part.get_dtype()]
                    self.tensors[key] = Stored(part.get_shape(), dtype, partial(self._read, part))

    def _read(self, part: Any, index: Index) -> Tensor:
        tensor = part[index]
        self.bytes_read += tensor.nbytes
        return tensor

    def weights_of(self, model: PreTrainedModel) -> dict[str, Stored]:
        """Every weight and saved buffer under its name in `model` (on the meta device, not sharded), tied ones once.
        Raises ValueError if one is missing, or has another shape."""
        found, weights = _named_as_in(model, self.tensors), {}
        tied: dict[Tensor, list[str]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            tied.setdefault(tensor, []).append(name)
        tied = {tensor: names for tensor, names in tied.items() if not names[0].endswith(("lora_A", "lora_B"))}
        if missing := sorted(names[0] for names in tied.values() if not any(name in found for name in names)):
            raise ValueError(f"{self.path} lacks weights, {', '.join(missing[:3])} among them: choose a complete model")
        for tensor, names in tied.items():
            weights[names[0]] = next(found[name] for name in names if name in found)
            if weights[names[0]].shape != tensor.shape:
                raise ValueError(f"{self.path}: {names[0]} is {list(weights[names[0]].shape)} in the file, must be "
                                 f"{list(tensor.shape)} by its config.json")
        return weights


def _named_as_in(model: PreTrainedModel, stored: dict[str, Stored]) -> dict[str, Stored]:
    """As `from_pretrained`: tensors of a published model under the names that `model` has, and joined as in it."""
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    converter_of = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    wanted, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, WeightConverter | WeightRenaming] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = rename_source_key(name, [], [], prefix, wanted)
        if target in wanted:
            if target not in found:
                found[target] = WeightRenaming(name, target) if pattern is None else deepcopy(converter_of[pattern])
            found[target].add_tensor(target, name, pattern or name, stored[name])
    made = [transform.convert(name, model=model, config=model.config) for name, transform in found.items()]
    return {name: x[0] if isinstance(x, list) else x for part in made for name, x in part.items()}
