"""Checkpoints: sharded, atomic, found by scanning; and the Hugging Face folder that a run leaves behind."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import GenerationConfig, PreTrainedTokenizerBase

from common.dist import World
from common.policy import PackedModel, Policy


@dataclass
class SaveConfig:
    every: int = 0
    """Steps between checkpoints; the last step is saved in any case. 0: only that."""
    keep: int = 2
    """Newest checkpoints that stay on disk."""
    hf: bool = True
    """Write the trained model as a Hugging Face folder, RUN_DIR/model, at the end."""
    resume: bool = True
    """Continue from the newest complete checkpoint of the run folder, if there is one."""

    def __post_init__(self):
        if self.every < 0 or self.keep < 1:
            raise ValueError(f"--save.every {self.every} must be at least 0, --save.keep {self.keep} at least 1")


Parts = dict[str, tuple[PackedModel, torch.optim.Optimizer]]  # "policy", and what else is trained


def save(run_dir: str, step: int, parts: Parts, state: dict[str, Any], world: World, keep: int) -> Path:
    """RUN_DIR/checkpoints/step_N: written beside its final name, a manifest last, then renamed; then old ones go."""
    root = Path(run_dir) / "checkpoints"
    final, temporary = root / f"step_{step:06d}", root / f".step_{step:06d}.partial"
    if world.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    dcp.save({name: dict(zip(("model", "optimizer"), get_state_dict(*part))) for name, part in parts.items()},
             checkpoint_id=temporary)
    if world.is_main:
        files = {p.name: p.stat().st_size for p in temporary.iterdir()}
        manifest = {"step": step, "world_size": world.size, "state": state, "files": files}
        with (temporary / "manifest.json").open("w") as file:
            json.dump(manifest, file)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        for old in complete_checkpoints(run_dir)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def complete_checkpoints(run_dir: str) -> list[Path]:
    """Oldest first: folders whose manifest is there and whose files have the sizes it names."""
    found = []
    for folder in sorted((Path(run_dir) / "checkpoints").glob("step_*")):
        manifest = folder / "manifest.json"
        if manifest.is_file():
            files = json.loads(manifest.read_text())["files"]
            if all((folder / n).is_file() and (folder / n).stat().st_size == size for n, size in files.items()):
                found.append(folder)
    return found


def load_latest(run_dir: str, parts: Parts) -> dict[str, Any]:
    """Fill models and optimizers from the newest complete checkpoint, made on any number of ranks; returns the state
    that was saved with it, or {} if there is none."""
    found = complete_checkpoints(run_dir)
    if not found:
        return {}
    states = {name: dict(zip(("model", "optimizer"), get_state_dict(*part))) for name, part in parts.items()}
    settings = {name: [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
                for name, (_, optimizer) in parts.items()}
    dcp.load(states, checkpoint_id=found[-1])
    for name, (model, optimizer) in parts.items():
        set_state_dict(model, optimizer, model_state_dict=states[name]["model"],
                       optim_state_dict=states[name]["optimizer"])
        for group, flags in zip(optimizer.param_groups, settings[name]):
            group.update(flags)  # betas and weight decay are what today's flags say
    return json.loads((found[-1] / "manifest.json").read_text())["state"]


def export(policy: Policy, tokenizer: PreTrainedTokenizerBase, source: str, out: Path, world: World,
           file_gb: float = 4.0) -> None:
    """The trained model as a folder for `from_pretrained` and vLLM: bfloat16 safetensors, config, tokenizer, template.

    Weights are streamed: one bucket unsharded at a time, one output file in memory.
    """
    temporary = out.with_name(f".{out.name}.partial")
    if world.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    shard: dict[str, torch.Tensor] = {}
    files: list[dict[str, torch.Tensor] | list[str]] = []
    size = total = 0

    def name_of(number: int) -> str:
        return f"model-{number:05d}.safetensors"

    for name, tensor in policy.full_tensors(torch.bfloat16, bucket_mb=256):
        if not world.is_main:
            continue
        shard[name] = tensor.cpu().contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
        if size >= file_gb * 2**30:
            save_file(shard, temporary / name_of(len(files)), metadata={"format": "pt"})
            files.append(list(shard))
            shard, size = {}, 0
    if world.is_main:
        if shard:
            save_file(shard, temporary / name_of(len(files)), metadata={"format": "pt"})
            files.append(list(shard))
        weight_map = {name: name_of(i) for i, names in enumerate(files) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (temporary / "model.safetensors.index.json").write_text(json.dumps(index))
        config = policy.lm.config.__class__.from_dict(policy.lm.config.to_dict() | {"dtype": "bfloat16"})
        config.save_pretrained(temporary)
        if (Path(source) / "generation_config.json").is_file():
            GenerationConfig.from_pretrained(source).save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        shutil.rmtree(out, ignore_errors=True)
        temporary.rename(out)
    dist.barrier()
