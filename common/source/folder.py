"""A model folder before anything heavy is imported: is all of it there, and which of its files hold the weights?

`weight_files` chooses as `from_pretrained` does, so that whatever else lies beside (pickles, variants, leftovers of an
earlier save, Mistral's consolidated.safetensors) is no other model here than there."""

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTERS = "adapter_config.json"


def check_folder(path: str, flag: str) -> None:
    """Raise ValueError if `path`, which the user gave with `flag`, is no folder from which a model can be loaded."""
    check_config(path, flag)
    try:
        for file in weight_files(Path(path), path):
            check_weights(file)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def check_config(path: str, flag: str) -> None:
    """Raise ValueError if `path` is no folder with the config of one model."""
    folder = Path(path)
    file = folder / "config.json"
    rule = f"{flag} must be a Hugging Face model folder or hub name{hint(folder)}"
    if not file.is_file():
        raise ValueError(f"{path} holds no config.json: {rule}")
    if hint(folder) and "model_type" not in read_object(file):
        raise ValueError(f"{path} is no model, its config.json has no model_type: {rule}")
    if (folder / ADAPTERS).is_file():
        raise ValueError(f"{path} holds a model and adapters ({ADAPTERS}), which transformers would add to it: {flag} "
                         f"must be one model; move the adapters elsewhere, or merge them with peft")


def hint(folder: Path) -> str:
    """Where the model is, if `folder` is what a run has written, or adapters."""
    if (folder / "model/config.json").is_file():
        return f"; {folder / 'model'} is one"
    if (folder / "checkpoints").is_dir() or (folder / "manifest.json").is_file():
        return f"; `python -m tools.checkpoints export {folder} OUT` writes one"
    if (folder / ADAPTERS).is_file():
        return "; these are adapters, which peft merges with their model"
    return ""


def read_object(file: Path) -> dict[str, Any]:
    """A JSON file with an object."""
    try:
        return dict(json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged, it must be a JSON object: {error}") from None


def weight_files(folder: Path, path: str) -> list[Path]:
    """The safetensors files that `from_pretrained` reads: model.safetensors, and only without it those that the index
    names, in whose order a later tensor replaces an earlier one. `path`: what the user calls the folder."""
    index = folder / INDEX
    if (folder / SINGLE).is_file() or not index.is_file():
        names = [SINGLE]
    else:
        names = files_in(index)
    for name in names:
        if os.path.isabs(name) or os.path.normpath(name).startswith(".."):
            raise ValueError(f"{index} names {name}, which must be a file in its own folder")
        if not (folder / name).is_file():
            raise ValueError(f"{path} lacks {name}{reason(folder, names)}")
        if not os.access(folder / name, os.R_OK):  # safetensors would say that there is none
            raise ValueError(f"{folder / name} cannot be read by this user: ask its owner for `chmod a+r`")
    return [folder / name for name in names]


def files_in(index: Path) -> list[str]:
    """The names of files in an index of weights, sorted."""
    named = read_object(index).get("weight_map")
    is_map = isinstance(named, dict) and all(isinstance(name, str) for name in named.values())
    if not named or not is_map:
        raise ValueError(f"{index} has no weight_map of tensors and files: write the model again with "
                         f"save_pretrained, or choose another")
    return sorted(set(named.values()))


def reason(folder: Path, names: list[str]) -> str:
    """Why a folder without one of the files `names` has no weights to read, and what to do."""
    if names != [SINGLE]:
        return f", which {INDEX} names: copy or download the folder again"
    others = []
    for path in sorted(folder.glob("*.safetensors")):
        if path.is_file():
            others.append(path.name)
    if others:
        return f" and {INDEX}, and {', '.join(others[:3])} is not read: write the model again with save_pretrained"
    return (": weights must be safetensors, because reading a pytorch_model.bin can run code; convert the model with "
            "save_pretrained, or choose another")


def check_weights(file: Path) -> None:
    """Raise ValueError if a safetensors file is damaged: its header says how long it must be."""
    try:
        with safe_open(file, "np"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{file} is no complete safetensors file ({error}): copy or download it again (if it is a "
                         f"pointer of git-lfs, `git lfs pull` does)") from None
