"""What a checkpoint holds and how it lies on disk: manifest, checksums, what is complete; its weights for Hugging Face.

Nothing here needs a process group, a GPU or the number of ranks that wrote the checkpoint.
"""

import dataclasses
import json
import os
import pickle
import random
import shutil
import tempfile
import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase
from tyro.conf import Positional

MANIFEST = "manifest.json"
POLICY = "policy.model.lm."
"""Before a policy weight's Hugging Face name in a checkpoint."""
Parts = dict[str, tuple[nn.Module, torch.optim.Optimizer]]
"""What a run trains: {"policy": (policy, optimizer)}, with a critic {"critic": (critic, optimizer)} too."""


# --------------------------------------------------------------------------- manifest and files

def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """The last file of a checkpoint; it carries its own checksum."""
    text = json.dumps(manifest, sort_keys=True)
    with (folder / MANIFEST).open("w") as file:
        file.write(json.dumps({"crc32": zlib.crc32(text.encode()), "manifest": manifest}, sort_keys=True, indent=1))
    sync(folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises ValueError if it is not what was written."""
    try:
        outer = json.loads((folder / MANIFEST).read_text())
        if zlib.crc32(json.dumps(outer["manifest"], sort_keys=True).encode()) == outer["crc32"]:
            return outer["manifest"]
    except (ValueError, TypeError, KeyError):
        pass
    raise ValueError(f"{folder / MANIFEST} is damaged")


def incomplete(folder: Path) -> str:
    """What a checkpoint lacks, from names and sizes alone; "" if nothing."""
    if not (folder / MANIFEST).is_file():
        return f"{MANIFEST} is missing"
    try:
        files = read_manifest(folder)["files"]
    except ValueError as error:
        return str(error)
    for name, entry in files.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        size = (folder / name).stat().st_size
        if size != entry["size"]:
            return f"{name} has {size} bytes, not {entry['size']}"
    return ""


def complete_checkpoints(run_dir: str | Path) -> list[Path]:
    """Oldest first, by scanning; nothing points to the newest."""
    folders = sorted((Path(run_dir).resolve() / "checkpoints").glob("step_*"))
    return [folder for folder in folders if not incomplete(folder)]


def find(path: str) -> Path:
    """A checkpoint, or the newest complete one of a run folder. Raises ValueError if there is none."""
    folder = Path(path).resolve()
    if folder.name.startswith("step_"):
        if lacks := incomplete(folder):
            raise ValueError(f"{path} is no complete checkpoint: {lacks}")
        return folder
    if found := complete_checkpoints(folder):
        return found[-1]
    raise ValueError(f"{path} holds no complete checkpoint: give a run folder or RUN/checkpoints/step_N")


def check_files(folder: Path, rank: int = 0, size: int = 1) -> list[str]:
    """Files whose content is not what was written; of `size` ranks each reads its share."""
    files = read_manifest(folder)["files"]
    return [f"{name} has another checksum than when it was written" for name in sorted(files)[rank::size]
            if crc32(folder / name) != files[name]["crc32"]]


def crc32(path: Path) -> int:
    """2.2 GiB/s here, more than disks write; blake2b 0.8, sha256 1.3 (xxh3: 14, not in the standard library)."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value


def sync(path: Path) -> None:
    """A file's content, or a folder's names, down to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --------------------------------------------------------------------------- what is in it

def tensors_of(parts: Parts) -> dict[str, Tensor]:
    """PART.model.NAME and PART.optim.NAME.KEY -> every weight and optimizer tensor, this rank's shards, not copied."""
    found = {}
    for part, (module, optimizer) in parts.items():
        for name, parameter in module.named_parameters():
            found[f"{part}.model.{name}"] = parameter.detach()
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{part}.optim.{name}.{key}"] = value
    return found


def make_optimizer_state(parts: Parts, stored: dict[str, Any]) -> None:
    """Empty tensors for the optimizer state that a checkpoint has, which an optimizer only makes in its first step."""
    keys = defaultdict(list)
    for name in stored:
        prefix, _, key = name.rpartition(".")
        keys[prefix].append(key)
    for part, (module, optimizer) in parts.items():
        names = {parameter: name for name, parameter in module.named_parameters()}
        for group in optimizer.param_groups:
            on_device = group.get("fused") or group.get("capturable")      # where such optimizers keep their step count
            for parameter in group["params"]:
                prefix = f"{part}.optim.{names[parameter]}"
                for key in keys[prefix]:
                    size, dtype = stored[f"{prefix}.{key}"].size, stored[f"{prefix}.{key}"].properties.dtype
                    optimizer.state[parameter][key] = (
                        torch.empty_like(parameter.detach(), dtype=dtype) if size == parameter.shape else
                        torch.empty(size, dtype=dtype, device=parameter.device if on_device else "cpu"))


def get_random_state() -> dict[str, Any]:
    """Of torch, numpy and random, as JSON. The loop draws from seeds of its own; a fork of it may not."""
    state = {"torch": torch.get_rng_state().tolist(), "numpy": np.random.get_state(legacy=False),
             "random": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().tolist()
    return json.loads(json.dumps(state, default=lambda array: array.tolist()))


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    np.random.set_state(state["numpy"])
    kind, numbers, gauss = state["random"]
    random.setstate((kind, tuple(numbers), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))


def flags_of(args: Any) -> dict[str, Any]:
    """Nested flag dataclasses -> {"--optim.lr": 1e-6, ...}, plain JSON."""
    flat: dict[str, Any] = {}
    for name, value in dataclasses.asdict(args).items():
        nested = value if isinstance(value, dict) else {}
        flat |= {f"--{name}.{key}": x for key, x in nested.items()} if nested else {f"--{name}": value}
    plain = json.loads(json.dumps(flat, default=str))
    return {name.replace("_", "-").rstrip("-"): value for name, value in plain.items()}  # async_ is --save.async


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [f"{name} was {before.get(name)}, is {now.get(name)}" for name in sorted(before | now)
            if before.get(name) != now.get(name)]


# --------------------------------------------------------------------------- weights

class MetadataUnpickler(pickle.Unpickler):
    """DCP's index of tensors is a pickle: it may make DCP's own records and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        records = ("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
                   "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")
        allowed = {
            "torch.distributed.checkpoint.metadata": records,
            "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
            "torch": ("Size", "float32", "float16", "bfloat16", "uint8", "int32", "int64"),
            "torch.serialization": ("_get_layout",),
            "pathlib": ("PosixPath",),
        }
        if name not in allowed.get(module, ()):
            raise ValueError(f"a checkpoint's .metadata asks for {module}.{name}, which is none of DCP's records")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """DCP's reader, which reads the index of tensors only once."""

    metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.metadata is None:
            with (Path(self.path) / ".metadata").open("rb") as file:
                self.metadata = MetadataUnpickler(file).load()
        return self.metadata


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

    `model`: where generation_config.json comes from. Made in memory, once, because a tokenizer in use cannot be saved
    from another thread.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config.__class__.from_dict(config.to_dict() | {"dtype": "bfloat16"}).save_pretrained(folder)
        if not Path(model).is_dir() or (Path(model) / "generation_config.json").is_file():
            GenerationConfig.from_pretrained(model).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_hf(folder: Path, weights: Iterable[tuple[str, Tensor]], files: dict[str, bytes], file_gb: float) -> None:
    """A folder for `from_pretrained` and vLLM. Weights are streamed: one output file of `file_gb` in memory at most."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    shard: dict[str, Tensor] = {}
    weight_map: dict[str, str] = {}
    total = size = number = 0
    for name, tensor in weights:
        shard[name] = tensor.cpu().contiguous()
        weight_map[name] = f"model-{number:05d}.safetensors"
        size, total = size + tensor.nbytes, total + tensor.nbytes
        if size >= file_gb * 2**30:
            save_file(shard, folder / weight_map[name], metadata={"format": "pt"})
            shard, size, number = {}, 0, number + 1
    if shard:
        save_file(shard, folder / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
    if weight_map:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def replace_hf(out: Path, weights: Iterable[tuple[str, Tensor]], files: dict[str, bytes], file_gb: float = 4.0) -> None:
    """`write_hf` beside `out`, then in its place: a kill leaves the old folder or the new one."""
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
