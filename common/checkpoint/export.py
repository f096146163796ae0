"""The policy of a run as a Hugging Face folder. tools/checkpoints.py makes such a folder from a checkpoint."""

import json
import os
import shutil
import tempfile
from collections import ChainMap
from collections.abc import Iterable
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import cached_file

from common.checkpoint.files import entry_of, remove, sync, write_manifest
from common.checkpoint.older_readers import CONFIG as TOKENIZER_CONFIG
from common.checkpoint.older_readers import set_template, tokenizer_files, with_floats, with_old_keys
from common.checkpoint.own import MARK, check_replaceable, hidden
from common.forward.vision import FAMILIES, auto_class
from common.model.policy import Policy
from common.parallel.ranks import World, all_gather_objects, together
from common.source.published import published, published_form
from rewards.runtime.cleaner import own_folder

INDEX = "model.safetensors.index.json"
MOST_LAYERS = 1000
FILE_BYTES = 2**30
"""Largest size of a file of weights (unless one tensor is larger): a rank holds one file in host memory."""


def hf_files(model: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase,
             dtype: str, template_file: str = "") -> dict[str, bytes]:
    """All of a Hugging Face folder except the weights: config, generation config, tokenizer, chat template.

    `model` is the folder or hub name that generation_config.json comes from; `dtype` is the run's compute dtype, in
    which weights are exported; `template_file`: --data.chat-template-file, which is then the exported chat template.
    Files of a tokenizer stay as they were. The files are made once, in memory, because a tokenizer in use cannot be
    saved from another thread.
    """
    with tempfile.TemporaryDirectory(dir=own_folder()) as name:
        folder = Path(name)
        content = config.to_dict() | {"dtype": dtype}
        for part in content.values():
            if isinstance(part, dict) and "dtype" in part:      # of a model that also reads images
                part["dtype"] = dtype
        config.__class__.from_dict(content).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for kind in ("generation", "processor", "preprocessor", "video_preprocessor"):      # they stay as they were
            found = cached_file(model, f"{kind}_config.json", _raise_exceptions_for_missing_entries=False)
            if found:
                shutil.copy(found, folder)
        files = {}
        for path in folder.rglob("*"):
            if path.is_file():
                files[str(path.relative_to(folder))] = path.read_bytes()
    files |= tokenizer_files(tokenizer)
    if template_file:
        set_template(files, Path(template_file).read_text())
    published_config = cached_file(model, "config.json", _raise_exceptions_for_missing_entries=False)
    source = {}
    if published_config:
        source = json.loads(Path(published_config).read_bytes())
        if "auto_map" in source or b'"auto_map"' in files.get(TOKENIZER_CONFIG, b""):
            files |= code_beside(Path(published_config).parent)
    made = with_old_keys(json.loads(files["config.json"]), source, config.__class__)
    return files | {"config.json": json.dumps(made, indent=2, sort_keys=True).encode() + b"\n"}


def code_beside(folder: Path) -> dict[str, bytes]:
    """The Python files of a folder whose model or tokenizer comes with code. They are copied, and not run."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        found[path.name] = path.read_bytes()
    return found


def dtype_of(files: dict[str, bytes]) -> torch.dtype:
    """The dtype that config.json names."""
    return getattr(torch, json.loads(files["config.json"])["dtype"])


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def model_of(files: dict[str, bytes]) -> PreTrainedModel | None:
    """The model of config.json, without memory. None: its code comes with the model's folder."""
    config = with_floats(json.loads(files["config.json"]))
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    layers = max(part.get(key) or 0 for part in parts for key in ("num_hidden_layers", "depth"))
    if layers > MOST_LAYERS:
        raise ValueError(f"config.json names {layers:,} layers, more than the {MOST_LAYERS:,} of any model")
    if config["model_type"] not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | FAMILIES:
        return None
    hf_config = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    with torch.device("meta"):
        return auto_class(hf_config).from_config(hf_config)


def replace_hf(out: Path, described: dict[str, Tensor], tensors: Iterable[tuple[str, Tensor]], files: dict[str, bytes],
               rank: int = 0, size: int = 1) -> None:
    """Writes a folder for `from_pretrained` and vLLM beside `out`, then renames it. A kill leaves the old folder or the
    new one; between the two renames it leaves both, under hidden names. Raises ValueError, on all ranks, if something
    is at `out` that no export wrote. `described`: `tensors` on the meta device. Each of `size` ranks writes some of the
    files, and holds one or two of them; the index is written last."""
    partial = hidden(out)[0]

    def begin_on_main() -> None:
        if rank == 0:
            begin(out, files)

    together(begin_on_main, (OSError, ValueError))
    lm = None
    if described:
        lm = model_of(files)
    plan = described
    if lm:
        plan = published_form(lm, dict(described))
    split = split_state_dict_into_shards_factory(
        dict(published(lm, described.items(), plan)), get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors", max_shard_size=FILE_BYTES,
    )
    own = sorted(split.filename_to_tensors)[rank::size]
    parts: dict[str, dict[str, Tensor]] = {file: {} for file in own}
    for name, tensor in published(lm, tensors, plan):
        file = split.tensor_to_filename[name]
        if file in parts:
            parts[file][name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
            if len(parts[file]) == len(split.filename_to_tensors[file]):
                save_file(parts.pop(file), partial / file, {"format": "pt"})
                (partial / file).chmod(partial.stat().st_mode & 0o666)  # of safetensors only its owner may read
    if rank == 0:
        own += files
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (partial / INDEX).write_text(json.dumps(index, indent=2))
            own.append(INDEX)
    entries = {}
    for name in own:
        entries[name] = entry_of(partial / name)
    entries_of_ranks = all_gather_objects(entries)

    def publish_on_main() -> None:
        if rank == 0:
            publish(partial, out, dict(ChainMap(*entries_of_ranks)))

    together(publish_on_main, (OSError, ValueError))


def begin(out: Path, files: dict[str, bytes]) -> None:
    """Makes the hidden folder for what will be at `out`, with all but the weights. The mark is first, so that a kill
    leaves nothing that the next export would not know as its own."""
    check_replaceable(out, reads_all=False)
    partial = hidden(out)[0]
    remove(partial)
    write_manifest(partial, {}, MARK)
    write_files(partial, files)


def publish(partial: Path, out: Path, entries: dict[str, dict[str, int]]) -> None:
    """Gives a complete folder its name, if what has it now was made by an export and not changed since."""
    write_manifest(partial, {"files": entries}, MARK)
    for path in (*partial.rglob("*"), partial):                 # or a crash of the machine leaves empty files
        sync(path)
    check_replaceable(out)
    old = hidden(out)[1]
    if os.path.lexists(out):
        remove(old)
        out.rename(old)
    partial.rename(out)
    sync(out.parent)
    remove(old)


def export(policy: Policy, files: dict[str, bytes], out: Path, world: World) -> None:
    """Writes the policy as it is, in the dtype that `files` name, for `from_pretrained` and vLLM. All ranks call it.
    Raises OSError, naming `out`, if it cannot be written."""
    dtype = dtype_of(files)
    try:
        replace_hf(out, policy.described(dtype), policy.full_tensors(dtype), files, world.rank, world.size)
    except ValueError as error:                             # what is at `out` is not an export
        raise ValueError(f"{error}. The last step is saved, and the same command writes {out}") from error
    except (OSError, SafetensorError) as error:             # a full disk's says no path
        raise OSError(f"{out} could not be written: {type(error).__name__}: {error}; the last step is saved, and the "
                      f"same command writes {out} again") from error
