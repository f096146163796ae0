"""The names under which engines load the trainer's weights."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from common.forward.vision import auto_class
from common.source.published import published, published_form

AS_HELD = {"glm4_moe", "internvl", "nemotron_h", "qwen2_5_vl", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl"}
"""Families that vLLM also loads under transformers' own names. Experts then come joined, in two tensors a layer, and
their checksums are compared."""


class PublishedNames:
    """Gives a model's tensors the names, and the form, that they have in published checkpoints."""

    def __init__(self, hf_config: PretrainedConfig):
        self.lm = None  # None: the names are the same, or the model's code comes with its folder
        if hf_config.model_type not in CONFIG_MAPPING:
            return
        with torch.device("meta"):
            lm = auto_class(hf_config).from_config(hf_config.from_dict(hf_config.to_dict()))
        own = lm.state_dict()
        self.plan = published_form(lm, dict(own))
        if shapes(self.plan) != shapes(own):
            self.lm = lm

    def of(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        if self.lm is None:
            return iter(tensors)
        return published(self.lm, tensors, self.plan)


def shapes(tensors: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}
