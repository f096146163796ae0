"""Checkpoints of a run: show them, or write one's policy (of rm.py: the reward model) as a Hugging Face folder.

    python -m tools.checkpoints list RUN
    python -m tools.checkpoints export RUN_OR_CHECKPOINT OUT        # no GPU, any number of ranks before
    python -m tools.checkpoints export RUN_OR_CHECKPOINT OUT --adapter      # its adapters alone, in peft's format
"""

import json
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import tyro
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from tyro.conf import Positional

from common.checkpoint.best import FILE
from common.checkpoint.export import dtype_of, model_of, replace_hf
from common.checkpoint.files import check_files, find, read_checkpoint, read_regular
from common.checkpoint.older_readers import left_out
from common.checkpoint.own import check_replaceable, paths_in
from common.checkpoint.state import FILE as SHARDS
from common.checkpoint.state import load_shards, open_shards
from common.forward.adapted import are_experts
from common.forward.vision import FAMILIES
from common.model.loading import SCORED
from common.model.lora import matrices_of, merge, transposed_experts
from common.source.stored import Experts, fingerprint, is_adapter, open_folder, weights_of
from tools.flags import exit_with_error
from tools.terminal import visible

WEIGHT, BUFFER = "policy.model.lm.", "policy.buffer.lm."
"""A checkpoint stores the policy's tensors under these prefixes and their names in transformers."""
NAMES_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names that peft takes for the experts of a mixture, as transformers 4 had them, wherever they are: dense layers and
shared experts with these names must be parameters for it."""
HEAD, HEAD_NAME = "policy.model.critic.head.weight", "score.weight"
"""The head of a reward model (common/model/scorer.py) in a checkpoint and in transformers."""


def read_best(run_dir: Path) -> dict[str, Any]:
    """What `write_best` wrote; {} if there is no best step. Raises ValueError if the file is damaged."""
    file = run_dir / FILE
    try:
        best = json.loads(read_regular(file)) if os.path.lexists(file) else {}
        return {name: best[name] for name in ("step", "metric", "value") if best != {}}
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{file} is damaged: delete it; the run's next start writes it again") from None


def stored_keys(folder: Path, inside: str) -> dict[str, str]:
    """Name in transformers -> name in the checkpoint of every policy weight (of a run with --lora.rank: of its
    adapters), then of the buffers that belong to a checkpoint, then of a reward model's head. `inside`: what the names
    of a reward model's backbone begin with in transformers; empty for a causal LM."""
    _, stored = next(open_shards(folder))
    found = {inside + key.removeprefix(prefix): key
             for prefix in (WEIGHT, BUFFER) for key in stored if key.startswith(prefix)}
    return found | ({HEAD_NAME: HEAD} if HEAD in stored else {})


def described(folder: Path, keys: dict[str, str], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Every weight in `dtype` (None: as stored), and buffers and a head as stored, without memory."""
    (_, stored), found = next(open_shards(folder)), {}
    for name, key in keys.items():
        kind = dtype if dtype and key.startswith(WEIGHT) else getattr(torch, stored[key]["dtype"])
        found[name] = torch.empty(stored[key]["shape"], dtype=kind, device="meta")
    return found


def read_stored(folder: Path, keys: dict[str, str], wanted: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Reads what `wanted` describes, one tensor at a time."""
    files = list(open_shards(folder))
    for name, meta in wanted.items():
        tensor = torch.empty_like(meta, device="cpu")
        load_shards({keys[name]: tensor}, files)                            # It casts what it reads.
        yield name, tensor


def merged_with_base(adapters: dict[str, Tensor], scale: float, base: dict[str, Tensor | Experts],
                     wanted: dict[str, Tensor], transposed: set[str]) -> Iterator[tuple[str, Tensor]]:
    """The weights of the run's --model with these adapters merged in their dtype, one at a time. `transposed`: from
    `transposed_experts`."""
    for name, meta in wanted.items():
        name_of_a, name_of_b = matrices_of(name)
        tensor = base[name][tuple(slice(0, size) for size in meta.shape)]
        if name_of_a in adapters:
            a, b = adapters[name_of_a], adapters[name_of_b]
            tensor = merge(tensor.to(a.dtype), a, b, scale, name in transposed)
        yield name, tensor.to(meta.dtype)


def merged(folder: Path, keys: dict[str, str], flags: dict[str, Any], files: dict[str, bytes]
           ) -> tuple[dict[str, Tensor], Iterator[tuple[str, Tensor]]]:
    """What a run with --lora.rank exports, on the meta device and then one at a time: the run's --model with the
    adapters merged, and of a reward model its backbone and the head."""
    lm = model_of(files)
    base = weights_of(lm, flags["--model"], open_folder(flags["--model"]))
    found = dict(read_stored(folder, keys, described(folder, keys, getattr(torch, flags["--policy.compute-dtype"]))))
    head = {name: found.pop(name) for name in (HEAD_NAME,) if name in keys}
    if head:
        base = {name: tensor for name, tensor in base.items() if name.startswith(f"{lm.base_model_prefix}.")}
    wanted = {name: lm.state_dict()[name] for name in base}
    scale = flags["--lora.alpha"] / flags["--lora.rank"]
    tensors = merged_with_base(found, scale, base, wanted, transposed_experts(lm))
    return wanted | {name: tensor.to("meta") for name, tensor in head.items()}, chain(tensors, head.items())


def peft_files(adapters: dict[str, Tensor], flags: dict[str, Any], lm: PreTrainedModel | None) -> dict[str, bytes]:
    """Adapters in peft's format, file name -> content. Those of experts are read by peft since 0.19, and by vLLM, which
    calls this layout 3D: A of all experts is one matrix [experts * rank, in], B [out, rank * experts]. The tensor of
    the first product is called EXPERTS.base_layer, of the second EXPERTS, because peft wraps one around the other.
    `lm`: from `model_of`."""
    is_mixture = lm is not None and any(map(are_experts, lm.modules()))
    layers = set()
    parameters = set()
    tensors = {}
    for name, tensor in adapters.items():
        layer, _, kind = name.rpartition(".")
        if tensor.ndim == 2:
            above, own_name = layer.split(".")[-2:]
            if is_mixture and own_name in NAMES_OF_EXPERTS:
                parameters.add(f"{above}.{own_name}.weight")
            else:
                layers.add(own_name)
        else:
            own_name, _, kind = kind.partition("_lora_")
            kind = f"lora_{kind}"
            parameters.add(".".join([*layer.split(".")[-2:], own_name]))
            if own_name != "down_proj":
                layer += ".base_layer"
            if kind == "lora_A":
                tensor = tensor.flatten(0, 1)
            else:
                tensor = tensor.permute(1, 2, 0).flatten(1)
        tensors[f"base_model.model.{layer}.{kind}.weight"] = tensor.contiguous()
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": flags["--model"],
        "r": flags["--lora.rank"], "lora_alpha": flags["--lora.alpha"], "lora_dropout": 0.0, "bias": "none",
        "inference_mode": True, "target_modules": sorted(layers),
    }
    if parameters:
        config["target_parameters"] = sorted(parameters)
    if lm is not None and lm.config.model_type in FAMILIES:     # its tower has layers of these names, too
        config["exclude_modules"] = r"(?!.*\blanguage_model\.).*"
    content = save(tensors, {"format": "pt"})
    return {"adapter_config.json": json.dumps(config, indent=2).encode(), "adapter_model.safetensors": content}


def check_names(lm: PreTrainedModel, adapters: Iterable[str]) -> None:
    """Raises ValueError if transformers, with which peft reads names, would take an adapter's layer for another one: of
    Laguna's `shared_experts` it reads `shared_expert`, and any letter after it, as published."""
    renamings = [entry for entry in get_model_conversion_mapping(lm) if isinstance(entry, WeightRenaming)]
    known = lm.state_dict()
    for name in adapters:
        layer = name.rpartition(".")[0]
        read = rename_source_key(f"{layer}.weight", renamings, [], lm.base_model_prefix, known)[0]
        if read != f"{layer}.weight":
            raise ValueError(f"peft would read the adapter of {layer} as one of {read.removesuffix('.weight')}: leave "
                             f"out --adapter, and the adapters are merged")


def check_out(out: Path, flags: dict[str, Any]) -> None:
    """Raises ValueError if what is at `out` was not made by an export: it would be replaced. `flags`: of the run, whose
    models stay where they are."""
    check_replaceable(out, reads_all=False)
    for flag, value in flags.items():
        if any(os.path.realpath(out) in (str(path), *map(str, path.parents)) for path in paths_in(value)):
            raise ValueError(f"{out} is the run's {flag}, which would be replaced: name another folder")


def export_checkpoint(source: Positional[str], out: Positional[Path], adapter: bool = False) -> None:
    """Write a policy as a Hugging Face folder. SOURCE: a checkpoint, or a run folder (its newest checkpoint).

    `adapter`: of a run with --lora.rank, write the adapters alone in peft's format; without it they are merged."""
    folder = find(source)
    if damage := check_files(folder):
        raise ValueError(f"{folder} is damaged: {'; '.join(damage)}")
    flags = read_checkpoint(folder)["flags"]
    out = Path(os.path.abspath(out))                                    # "." has no name
    check_out(out, flags)
    files = {}
    for path in [folder / "hf", *(folder / "hf").rglob("*")]:
        if path.is_symlink():
            raise ValueError(f"{path} is a symbolic link, which no run writes: its target would be copied to {out}")
        if path.is_file() and not path.name.startswith(("model.", "model-")):
            files[str(path.relative_to(folder / "hf"))] = path.read_bytes()
    has_adapters = flags.get("--lora.rank")
    is_scorer = any(name.endswith(SCORED) for name in json.loads(files["config.json"]).get("architectures") or ())
    if adapter and not has_adapters:
        raise ValueError(f"{folder} has no adapters: --adapter is for runs with --lora.rank")
    if adapter and is_scorer:
        raise ValueError(f"{folder} is of a reward model, whose head is trained beside the adapters: without --adapter "
                         f"both are written, the adapters merged")
    if (is_scorer or (has_adapters and not adapter)) and model_of(files) is None:
        raise ValueError(f"{folder}: the code of {flags['--model']} comes with it, and is not run here: what the run "
                         f"writes at its end (--save.hf) is complete, and of a policy --adapter writes the adapters")
    stored_as = read_checkpoint(folder)["model"].get("checkpoint format")
    if stored_as != SHARDS:
        raise ValueError(f"{folder} has the format {stored_as}, must have {SHARDS}: export it with the version that "
                         f"wrote it")
    keys = stored_keys(folder, f"{model_of(files).base_model_prefix}." if is_scorer else "")
    if adapter:
        keys = {name: key for name, key in keys.items() if is_adapter(name)}     # without routers' biases
        adapters = dict(read_stored(folder, keys, described(folder, keys, None)))
        lm = model_of(files)
        if lm is not None:
            check_names(lm, adapters)
        replace_hf(out, {}, (), peft_files(adapters, flags, lm))
    else:
        base = read_checkpoint(folder).get("outside", {}).get("policy") if has_adapters else None
        if base and base != fingerprint(flags["--model"]):
            raise ValueError(f"{flags['--model']} does not hold the weights that {folder} was trained with, to which "
                             f"its adapters belong: put them back, or write the adapters alone with --adapter")
        wanted = described(folder, keys, dtype_of(files))
        tensors = read_stored(folder, keys, wanted)
        if has_adapters:
            wanted, tensors = merged(folder, keys, flags, files)
        replace_hf(out, wanted, tensors, files)
    print(f"{folder} -> {out}")
    if said := left_out(flags):
        print(said)


def list_checkpoints(run: Positional[str]) -> None:
    """Show the checkpoints of a run folder, and read them all to find damage."""
    folders = sorted((Path(run).resolve() / "checkpoints").glob("*step_*"))
    if not folders:
        raise ValueError(f"{run} holds no checkpoints/step_N: give the folder of a run that has saved")
    try:
        best = read_best(Path(run)) or {"step": -1, "metric": "", "value": 0.0}
        kept, shown = f"step_{best['step']:06d}", f"best: {best['metric']} {best['value']:.4g}"
    except (ValueError, KeyError, TypeError):
        kept = ""
        print("best.json is damaged: which checkpoint is the best is not known")
    for folder in folders:
        manifest, damage = read_checkpoint(folder), "; ".join(check_files(folder))
        gb = sum(entry["size"] for entry in manifest.get("files", {}).values()) / 2**30
        state = f"damaged: {damage}" if damage else "complete"
        if folder.name == kept:
            state += f"  {shown}"
        print(visible(f"{folder.name}  {gb:.2f} GiB  {manifest.get('world_size')} rank(s)  {state}"))


if __name__ == "__main__":
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"export": export_checkpoint, "list": list_checkpoints}, description=__doc__,
        )
    except ValueError as error:
        exit_with_error(error)
