"""Checkpoints of a run: show them, or write one's policy as a Hugging Face folder.

    python -m tools.checkpoints list RUN
    python -m tools.checkpoints export RUN_OR_CHECKPOINT OUT        # no GPU, any number of ranks before
"""

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import tyro
from torch import Tensor
from tyro.conf import Positional

from common.checkpoint.export import dtype_of, replace_hf
from common.checkpoint.files import check_files, find, incomplete, read_manifest
from common.checkpoint.state import Reader
from common.tracking.console import exit_with_error

WEIGHT, BUFFER = "policy.model.lm.", "policy.buffer.lm."
"""A checkpoint stores the policy's tensors under these prefixes and their names in transformers."""


def stored_weights(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every policy weight, unsharded and in `dtype`, under its name in transformers; then the buffers that belong to a
    checkpoint, as stored."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # no_dist is meant
    reader = Reader(folder)
    full = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if name.startswith((WEIGHT, BUFFER)):
            full[name] = torch.empty(entry.size, dtype=dtype if name.startswith(WEIGHT) else entry.properties.dtype)
    dcp.load(full, storage_reader=reader, no_dist=True)         # It casts what it reads.
    return {name.removeprefix(WEIGHT).removeprefix(BUFFER): tensor for name, tensor in full.items()}


def export_checkpoint(source: Positional[str], out: Positional[Path]) -> None:
    """Write a policy as a Hugging Face folder. SOURCE: a checkpoint, or a run folder (its newest checkpoint)."""
    folder = find(source)
    if damage := check_files(folder):
        raise ValueError(f"{folder} is damaged: {'; '.join(damage)}")
    files = {}
    for path in [folder / "hf", *(folder / "hf").rglob("*")]:
        if path.is_symlink():
            raise ValueError(f"{path} is a symbolic link, which no run writes: its target would be copied to {out}")
        if path.is_file() and not path.name.startswith("model"):
            files[str(path.relative_to(folder / "hf"))] = path.read_bytes()
    replace_hf(out, stored_weights(folder, dtype_of(files)), files)
    print(f"{folder} -> {out}")


def list_checkpoints(run: Positional[str]) -> None:
    """Show the checkpoints of a run folder, and read them all to find damage."""
    for folder in sorted((Path(run).resolve() / "checkpoints").glob("*step_*")):
        if lacks := incomplete(folder):
            print(f"{folder.name}  incomplete: {lacks}")
            continue
        manifest, damage = read_manifest(folder), check_files(folder)
        gb = sum(entry["size"] for entry in manifest["files"].values()) / 2**30
        print(f"{folder.name}  {gb:.2f} GiB  {manifest['world_size']} rank(s)  score {manifest['score']}  "
              f"{'damaged: ' + '; '.join(damage) if damage else 'complete'}")


if __name__ == "__main__":
    try:
        tyro.extras.subcommand_cli_from_dict({"export": export_checkpoint, "list": list_checkpoints})
    except ValueError as error:
        exit_with_error(error)
