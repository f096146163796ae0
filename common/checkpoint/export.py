"""The policy of a run as a Hugging Face folder. tools/checkpoints.py makes one of a checkpoint."""

import json
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from common.model.policy import Policy
from common.parallel.ranks import World


def hf_files(
    model: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, dtype: str
) -> dict[str, bytes]:
    """All of a Hugging Face folder but the weights: config, generation config, tokenizer, chat template.

    `model` is the folder or hub name that generation_config.json comes from; `dtype`, the one that the run computes in,
    is what weights are exported in. The files are made once, in memory, because a tokenizer in use cannot be saved from
    another thread.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config.__class__.from_dict(config.to_dict() | {"dtype": dtype}).save_pretrained(folder)
        if cached_file(model, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False) is not None:
            GenerationConfig.from_pretrained(model).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def dtype_of(files: dict[str, bytes]) -> torch.dtype:
    """The dtype that config.json names."""
    return getattr(torch, json.loads(files["config.json"])["dtype"])


def write_hf(folder: Path, weights: dict[str, Tensor], files: dict[str, bytes]) -> None:
    """Writes a folder for `from_pretrained` and vLLM.

    Tensors have the names of published checkpoints: transformers fuses the experts of a mixture when it loads one (and
    renames a few tensors of other families), and the function with which its own `save_pretrained` reverts that needs
    all of them. A model whose code comes with it names its tensors itself."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    if not weights:
        return
    config = json.loads(files["config.json"])
    if config["model_type"] in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]].from_dict(config))
        weights = revert_weight_conversion(lm, weights)
        for name, tensor in weights.items():                    # experts are views of one tensor, safetensors refuses
            weights[name] = tensor.clone()
    try:
        save_torch_state_dict(weights, folder)
    except SafetensorError as error:                            # that is also what a full disk raises
        raise OSError(f"{folder}: {error}") from None


def replace_hf(out: Path, weights: dict[str, Tensor], files: dict[str, bytes]) -> None:
    """Writes the folder beside `out` and renames it, so that a kill leaves the old folder or the new one."""
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    write_hf(partial, weights, files)
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


def export(policy: Policy, files: dict[str, bytes], out: Path, world: World) -> None:
    """Writes the policy as it is now, for `from_pretrained` and vLLM. All ranks call it; rank 0 holds the whole model,
    in the dtype that it computes in, in host memory."""
    weights = {}
    for name, tensor in policy.full_tensors(dtype_of(files)):
        if world.is_main:
            weights[name] = tensor.cpu()
    if world.is_main:
        replace_hf(out, weights, files)
    dist.barrier()
