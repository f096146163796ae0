"""Hugging Face folders, of a run's policy or of a checkpoint.

    python -m common.checkpoint.export list RUN
    python -m common.checkpoint.export export RUN_OR_CHECKPOINT OUT        # no GPU, any number of ranks before
"""

import json
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tyro
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase
from tyro.conf import Positional

from common.checkpoint.files import check_files, find, incomplete, read_manifest
from common.checkpoint.state import Reader
from common.parallel.ranks import World
from common.tracking.console import fail

if TYPE_CHECKING:
    from common.model.policy import Policy

POLICY = "policy.model.lm."
"""A checkpoint stores a policy weight under this prefix and its Hugging Face name."""


def stored_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every policy weight, unsharded and in bfloat16, under its Hugging Face name, one at a time."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # no_dist is meant
    reader = Reader(folder)
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if name.startswith(POLICY):
            full = torch.empty(entry.size, dtype=entry.properties.dtype)
            dcp.load({name: full}, storage_reader=reader, no_dist=True)
            yield name.removeprefix(POLICY), full.bfloat16()


def hf_files(model: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """All of a Hugging Face folder but the weights: config, generation config, tokenizer, chat template.

    `model` is the folder or hub name that generation_config.json comes from. The files are made once, in memory,
    because a tokenizer in use cannot be saved from another thread.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config.__class__.from_dict(config.to_dict() | {"dtype": "bfloat16"}).save_pretrained(folder)
        if not Path(model).is_dir() or (Path(model) / "generation_config.json").is_file():
            GenerationConfig.from_pretrained(model).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_hf(folder: Path, weights: Iterable[tuple[str, Tensor]], files: dict[str, bytes], file_gb: float) -> None:
    """Writes a folder for `from_pretrained` and vLLM. At most one output file of `file_gb` is in memory at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    shard: dict[str, Tensor] = {}
    weight_map: dict[str, str] = {}
    total_size = 0
    shard_size = 0
    file = "model-00000.safetensors"
    for name, tensor in weights:
        shard[name] = tensor.cpu().contiguous()
        weight_map[name] = file
        shard_size += tensor.nbytes
        total_size += tensor.nbytes
        if shard_size >= file_gb * 2**30:
            _save(shard, folder / file)
            shard = {}
            shard_size = 0
            file = f"model-{len(set(weight_map.values())):05d}.safetensors"
    if shard:
        _save(shard, folder / file)
    if weight_map:
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _save(shard: dict[str, Tensor], file: Path) -> None:
    try:
        save_file(shard, file, metadata={"format": "pt"})
    except SafetensorError as error:                            # that is also what a full disk raises
        raise OSError(f"{file}: {error}") from None


def replace_hf(out: Path, weights: Iterable[tuple[str, Tensor]], files: dict[str, bytes], file_gb: float = 4.0) -> None:
    """Writes the folder beside `out` and renames it, so that a kill leaves the old folder or the new one."""
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    write_hf(partial, weights, files, file_gb)
    if out.exists():
        shutil.rmtree(out)
    partial.rename(out)


def export_checkpoint(source: Positional[str], out: Positional[Path]) -> None:
    """Write a policy as a Hugging Face folder. SOURCE: a checkpoint, or a run folder (its newest checkpoint)."""
    folder = find(source)
    if damage := check_files(folder):
        raise ValueError(f"{folder} is damaged: {'; '.join(damage)}")
    names = [path for path in (folder / "hf").rglob("*") if path.is_file() and not path.name.startswith("model")]
    replace_hf(out, stored_weights(folder), {str(path.relative_to(folder / "hf")): path.read_bytes() for path in names})
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


def export(policy: "Policy", files: dict[str, bytes], out: Path, world: World, file_gb: float = 4.0) -> None:
    """Writes the policy as it is now, for `from_pretrained` and vLLM. All ranks call it."""
    weights = policy.full_tensors(torch.bfloat16, bucket_mb=256)
    if world.is_main:
        replace_hf(out, weights, files, file_gb)
    else:
        for _ in weights:                                       # The other ranks take part in unsharding.
            pass
    dist.barrier()


if __name__ == "__main__":
    try:
        tyro.extras.subcommand_cli_from_dict({"export": export_checkpoint, "list": list_checkpoints})
    except ValueError as error:
        fail(error)
