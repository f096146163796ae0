"""The names under which vLLM's loader takes the trainer's weights."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from common.engine.vllm_changes import LATENT
from common.forward.vision import FAMILIES, auto_class

AS_HELD = {"glm4_moe", "nemotron_h", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", *FAMILIES}
"""Families that vLLM also loads under transformers' own names. Experts then come joined, in two tensors a layer, and
their checksums are compared."""


def published_form(hf_config: PretrainedConfig) -> tuple[PreTrainedModel, dict[str, Tensor]] | None:
    """For `common.source.published`: the model and its published tensors, both without memory. None: vLLM takes
    transformers' own names, or the model's code comes with its folder."""
    family = hf_config.model_type
    if family in AS_HELD or family not in CONFIG_MAPPING:
        return None
    with torch.device("meta"):
        lm = auto_class(hf_config).from_config(hf_config.from_dict(hf_config.to_dict()))
    own = lm.state_dict()
    plan = revert_weight_conversion(lm, dict(own))
    if plan.keys() == own.keys():
        return None
    return lm, plan


def loadable(model: nn.Module) -> list[set[str]]:
    """The names of each weight of vLLM's model that a sync must fill, those by which modules share it too."""
    names: dict[int, set[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if type(module).__name__ == LATENT:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            names.setdefault(id(parameter), set()).add(_plain(f"{prefix}.{name}"))
    return [*names.values()]


def not_loaded(names: Iterable[set[str]], loaded: Iterable[str]) -> set[str]:
    """Of each weight that was not filled one name."""
    filled = {_plain(name) for name in loaded}
    return {min(own) for own in names if own.isdisjoint(filled)}


def _plain(name: str) -> str:
    """vLLM 0.26 tells experts' names without the module that holds them."""
    return name.replace(".routed_experts", "").removeprefix(".")
