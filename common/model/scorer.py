"""A backbone with a scalar head as what a run trains and exports: the model of rm.py."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from common.batch import Batch
from common.flags.model import ModelConfig
from common.model.loading import CAUSAL_LM, IMAGE_TEXT, SCORED, load_critic
from common.model.policy import Critic, Policy
from common.model.sharding import shard_slice

LANGUAGE_MODELS = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
"""The class of each family's model, where config.json names none."""


class Scorer(Policy):
    """A backbone with a scalar head as what a run trains, under the names of a *ForSequenceClassification."""

    def __init__(self, critic: Critic):
        super().__init__(critic.backbone)
        self.critic = critic
        self.folder = critic.folder
        self.router_changed = None
        self.num_blocks = critic.num_blocks
        self.num_recomputed = critic.num_recomputed

    def forward(self, batch: Batch) -> Tensor:
        """Rewards [T], 0 where `batch.mask` is False."""
        self.critic.prompts = self.prompts  # which the run sets for the models that it knows
        return self.critic(batch)

    def score(self, batch: Batch) -> Tensor:
        self.critic.prompts = self.prompts
        return self.critic.score(batch)

    def full_tensors(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """The head stays in float32, in which it is applied."""
        for name, tensor in super().full_tensors(dtype):
            yield f"{self.lm.base_model_prefix}.{name}", tensor
        yield "score.weight", self.critic.head.weight.detach().full_tensor()

    def described(self, dtype: torch.dtype) -> dict[str, Tensor]:
        described = {}
        for name, tensor in super().described(dtype).items():
            described[f"{self.lm.base_model_prefix}.{name}"] = tensor
        described["score.weight"] = torch.empty(self.critic.head.weight.shape, device="meta")
        return described


def load_scorer(path: str, config: ModelConfig, *arguments: Any, **options: Any) -> Scorer:
    """The causal LM of a folder with a random head of standard deviation (H + 1)^-1/2 (Stiennon et al. 2020), drawn
    from torch's seed. Raises ValueError for a flag that is of policies alone."""
    if config.router_aux_coef:
        raise ValueError(f"--policy.router-aux-coef {config.router_aux_coef:g}: a reward model has no such loss here, "
                         f"set it to 0")
    critic = load_critic(path, config, *arguments, **options)
    head = critic.head.weight
    generator = torch.Generator().manual_seed(torch.initial_seed())
    first = torch.randn(head.shape, generator=generator) * (head.shape[1] + 1) ** -0.5
    head.detach().to_local().copy_(first[shard_slice(head)])
    config = critic.backbone.config
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    if name is None:  # transformers has no such class; this is the name by which vLLM would take it
        of_lm = (config.architectures or [LANGUAGE_MODELS[config.model_type]])[0]
        name = of_lm.removesuffix(IMAGE_TEXT)
        for ending in CAUSAL_LM:
            name = name.removesuffix(ending)
        name += SCORED[0]
    config.architectures = [name]
    config.num_labels = 1
    return Scorer(critic)
