"""The models that evaluate.py takes beside folders and hub names: checkpoints of runs, and adapters in peft's format.
Both are written as a Hugging Face folder first, because the engine reads one."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from common.checkpoint.export import hf_files, model_of, replace_hf
from common.checkpoint.files import complete_checkpoints
from common.checkpoint.own import MARK
from common.flags.model import ModelConfig
from common.forward.adapted import are_experts, names_of
from common.model.loading import read_config, read_tokenizer
from common.model.lora import matrices_of, transposed_experts
from common.source.folder import check_weights
from common.source.stored import open_folder, weights_of
from tools.checkpoints import export_checkpoint, merged_with_base
from tools.model_name import ADAPTER
from tools.model_name import resolve as resolve

PREFIX = "base_model.model."
NOT_MERGED = {"use_dora": False, "bias": "none", "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
              "fan_in_fan_out": False, "layer_replication": None}
"""Settings of peft that change more than W + scale B A -> the value that changes nothing."""


def write_model(source: str, out: Path, config: ModelConfig) -> str:
    """The folder or hub name to load, for `source` from `resolve`. What is no Hugging Face folder is written to `out`,
    unless an earlier start has done it."""
    path = Path(source)
    is_adapter = (path / ADAPTER).is_file()
    if not is_adapter and not complete_checkpoints(path):
        return source
    if not (out / MARK).is_file():
        if is_adapter:
            merge_adapter(path, out, config)
        else:
            export_checkpoint(source, out)
    return str(out)


def fingerprint(source: str) -> str:
    """The sizes and times of the weights in a folder: whether it is still the model of an earlier start."""
    files = sorted(Path(source).glob("*.safetensors"))
    return str([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files])


def read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The settings of adapters, and LAYER.lora_A, LAYER.lora_B. Raises ValueError for adapters of another kind."""
    try:
        settings = dict(json.loads((folder / ADAPTER).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{folder / ADAPTER} is damaged: {error}") from None
    other = [f"{name} {settings[name]}" for name, plain in NOT_MERGED.items() if settings.get(name, plain) != plain]
    kind = settings.get("peft_type")
    if kind != "LORA" or other:
        raise ValueError(f"{folder}: adapters must be plain LoRA, these are {kind} {', '.join(other)}: merge them with "
                         f"peft, and give the merged model")
    if not (folder / "adapter_model.safetensors").is_file():
        raise ValueError(f"{folder} lacks adapter_model.safetensors: a pickle (adapter_model.bin) is not read")
    lacking = [name for name in ("base_model_name_or_path", "r", "lora_alpha") if not settings.get(name)]
    if lacking:
        raise ValueError(f"{folder / ADAPTER} has no {' and no '.join(lacking)}: merge the adapters with peft, and "
                         f"give the merged model")
    check_weights(folder / "adapter_model.safetensors")
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
    names = {name: name.removeprefix(PREFIX).removesuffix(".weight") for name in tensors}
    foreign = [name for name, own in names.items() if not own.endswith((".lora_A", ".lora_B"))]
    if foreign:
        raise ValueError(f"{folder}: {foreign[0]} is no weight of a LoRA adapter: merge them with peft")
    return settings, {names[name]: tensor for name, tensor in tensors.items()}


def with_experts(lm: nn.Module, adapters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The adapters with those of experts in their own names and shapes: what `peft_files` of tools/checkpoints.py does,
    backwards. Raises ValueError where they do not fit, as those of peft below 0.19."""
    found = dict(adapters)
    for layer, experts in lm.named_modules():
        if not are_experts(experts) or f"{layer}.lora_A" not in adapters:
            continue
        first, second = names_of(experts)
        for inner, own_name in ((f"{layer}.base_layer", first), (layer, second)):
            a, b = found.pop(f"{inner}.lora_A", None), found.pop(f"{inner}.lora_B", None)
            count, outputs, inputs = getattr(experts, own_name).shape
            if experts.is_transposed:
                inputs, outputs = outputs, inputs
            if a is None or b is None or (a.shape[1], b.shape[0]) != (inputs, outputs) or len(a) % count:
                raise ValueError(f"the adapters of {layer}.{own_name} must be [experts * rank, {inputs}] and [{outputs}"
                                 f", rank * experts], as peft writes them since 0.19 if both {first} and {second} have "
                                 f"some: merge them with peft, and give the merged model")
            name_of_a, name_of_b = matrices_of(f"{layer}.{own_name}")
            found[name_of_a] = a.unflatten(0, (count, -1))
            found[name_of_b] = b.unflatten(1, (-1, count)).permute(2, 0, 1)
    return found


def merge_adapter(folder: Path, out: Path, config: ModelConfig) -> None:
    """Write the base model with these adapters merged, in the compute dtype, as a run's own engine gets them."""
    settings, adapters = read_adapter(folder)
    base_path, dtype = settings["base_model_name_or_path"], getattr(torch, config.compute_dtype)
    hf_config = read_config(base_path, config, f"the base model of {folder}")
    tokenizer_path = str(folder) if (folder / "tokenizer_config.json").is_file() else base_path
    tokenizer = read_tokenizer(tokenizer_path, config)
    files = hf_files(base_path, hf_config, tokenizer, config.compute_dtype)
    lm = model_of(files)
    if lm is None:
        raise ValueError(f"{folder}: the code of {base_path} comes with it: merge the adapters with peft")
    base = weights_of(lm, base_path, open_folder(base_path))
    adapters = with_experts(lm, adapters)
    known = {name for weight in base for name in matrices_of(weight)}
    if unknown := sorted(adapters.keys() - known):
        raise ValueError(f"{folder} has an adapter of {unknown[0].rpartition('.')[0]}, which {base_path} lacks")
    rank = settings["r"]
    scale = settings["lora_alpha"] / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    wanted = {name: lm.state_dict()[name].to(dtype) for name in base}
    rounded = {name: tensor.to(dtype) for name, tensor in adapters.items()}
    replace_hf(out, wanted, merged_with_base(rounded, scale, base, wanted, transposed_experts(lm)), files)
    print(f"{base_path} with the adapters of {folder} -> {out}", flush=True)
