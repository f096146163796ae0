"""Tensors under the names, and in the form, of published checkpoints, which transformers changes when it reads them."""

from collections.abc import Iterable, Iterator

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

TRANSPOSED = {"qwen3_vl_moe"}
"""Families whose joined experts are published as [experts, in, out]. transformers reads both forms and writes [experts,
out, in], which vLLM does not read."""


def published_form(lm: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """When transformers loads a mixture, it fuses the experts (and renames a few tensors of other families). This uses
    the function with which its own `save_pretrained` reverts that."""
    made = revert_weight_conversion(lm, tensors)
    if lm.config.model_type in TRANSPOSED:
        for name, tensor in made.items():
            if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
                made[name] = tensor.transpose(-1, -2)
    return made


def published(lm: PreTrainedModel | None, tensors: Iterable[tuple[str, Tensor]], plan: dict[str, Tensor],
              ) -> Iterator[tuple[str, Tensor]]:
    """The tensors in their published form, each as soon as its parts are there, as `plan` says. A model whose code
    comes with it (None) names its tensors itself."""
    waiting: dict[str, Tensor] = {}
    for name, tensor in tensors:
        waiting[name] = tensor
        made = waiting
        if lm:
            made = published_form(lm, dict(waiting))
        if all(part.shape == plan[key].shape for key, part in made.items()):
            yield from made.items()
            waiting = {}
