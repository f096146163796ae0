"""Checkpoints of a run: show them, or write one's policy as a Hugging Face folder.

    python -m tools.checkpoints list RUN
    python -m tools.checkpoints export RUN_OR_CHECKPOINT OUT        # no GPU, any number of ranks before
    python -m tools.checkpoints export RUN_OR_CHECKPOINT OUT --adapter      # its adapters alone, in peft's format
"""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import tyro
from safetensors.torch import save
from torch import Tensor
from transformers import AutoModelForCausalLM
from tyro.conf import Positional

from common.checkpoint.export import dtype_of, replace_hf
from common.checkpoint.files import check_files, find, read_manifest
from common.checkpoint.state import Reader
from common.model.lora import merge
from common.model.policy import saved_buffers
from common.tracking.console import exit_with_error

WEIGHT, BUFFER = "policy.model.lm.", "policy.buffer.lm."
"""A checkpoint stores the policy's tensors under these prefixes and their names in transformers."""


def stored_weights(folder: Path, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Every policy weight (of a run with --lora.rank: of its adapters), unsharded and in `dtype` (None: as stored),
    under its name in transformers; then the buffers that belong to a checkpoint, as stored."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # no_dist is meant
    reader = Reader(folder)
    full = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if name.startswith((WEIGHT, BUFFER)):
            cast = dtype is not None and name.startswith(WEIGHT)
            full[name] = torch.empty(entry.size, dtype=dtype if cast else entry.properties.dtype)
    dcp.load(full, storage_reader=reader, no_dist=True)         # It casts what it reads.
    return {name.removeprefix(WEIGHT).removeprefix(BUFFER): tensor for name, tensor in full.items()}


def merged_with_base(adapters: dict[str, Tensor], flags: dict[str, Any]) -> dict[str, Tensor]:
    """The weights of the run's --model with these adapters merged, in the adapters' dtype."""
    dtype = next(iter(adapters.values())).dtype
    lm = AutoModelForCausalLM.from_pretrained(flags["--model"], dtype=dtype)
    weights = {name: p.detach() for name, p in lm.named_parameters()} | saved_buffers(lm)
    for name, a in adapters.items():
        layer, _, kind = name.rpartition(".")
        if kind == "lora_A":
            weights[f"{layer}.weight"] = merge(
                weights[f"{layer}.weight"], a, adapters[f"{layer}.lora_B"], flags["--lora.alpha"] / flags["--lora.rank"]
            )
    return weights


def peft_files(adapters: dict[str, Tensor], flags: dict[str, Any]) -> dict[str, bytes]:
    """Adapters in peft's format, file name -> content."""
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": flags["--model"],
        "r": flags["--lora.rank"], "lora_alpha": flags["--lora.alpha"], "lora_dropout": 0.0, "bias": "none",
        "inference_mode": True, "target_modules": sorted({name.split(".")[-2] for name in adapters}),
    }
    tensors = {f"base_model.model.{name}.weight": tensor for name, tensor in adapters.items()}
    content = save(tensors, {"format": "pt"})
    return {"adapter_config.json": json.dumps(config, indent=2).encode(), "adapter_model.safetensors": content}


def export_checkpoint(source: Positional[str], out: Positional[Path], adapter: bool = False) -> None:
    """Write a policy as a Hugging Face folder. SOURCE: a checkpoint, or a run folder (its newest checkpoint).

    `adapter`: of a run with --lora.rank, write the adapters alone in peft's format; without it they are merged."""
    folder = find(source)
    if damage := check_files(folder):
        raise ValueError(f"{folder} is damaged: {'; '.join(damage)}")
    files = {}
    for path in [folder / "hf", *(folder / "hf").rglob("*")]:
        if path.is_symlink():
            raise ValueError(f"{path} is a symbolic link, which no run writes: its target would be copied to {out}")
        if path.is_file() and not path.name.startswith("model"):
            files[str(path.relative_to(folder / "hf"))] = path.read_bytes()
    flags = read_manifest(folder)["flags"]
    has_adapters = flags.get("--lora.rank")
    if adapter and not has_adapters:
        raise ValueError(f"{folder} has no adapters: --adapter is for runs with --lora.rank")
    if adapter:
        weights, files = {}, peft_files(stored_weights(folder, None), flags)
    else:
        weights = stored_weights(folder, dtype_of(files))
        if has_adapters:
            weights = merged_with_base(weights, flags)
    replace_hf(out, weights, files)
    print(f"{folder} -> {out}")


def list_checkpoints(run: Positional[str]) -> None:
    """Show the checkpoints of a run folder, and read them all to find damage."""
    for folder in sorted((Path(run).resolve() / "checkpoints").glob("*step_*")):
        manifest, damage = read_manifest(folder), "; ".join(check_files(folder))
        gb = sum(entry["size"] for entry in manifest.get("files", {}).values()) / 2**30
        ranks, score = manifest.get("world_size"), manifest.get("state", {}).get("score")
        print(f"{folder.name}  {gb:.2f} GiB  {ranks} rank(s)  score {score}  "
              f"{f'damaged: {damage}' if damage else 'complete'}")


if __name__ == "__main__":
    try:
        tyro.extras.subcommand_cli_from_dict({"export": export_checkpoint, "list": list_checkpoints})
    except ValueError as error:
        exit_with_error(error)
