"""Tensors under the names of published checkpoints, which transformers changes when it reads them."""

from collections.abc import Iterable, Iterator

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def published(lm: PreTrainedModel | None, tensors: Iterable[tuple[str, Tensor]], plan: dict[str, Tensor],
              ) -> Iterator[tuple[str, Tensor]]:
    """The tensors under the names of published checkpoints, each as soon as its parts are there, as `plan` says.

    When transformers loads a mixture, it fuses the experts (and renames a few tensors of other families). This uses the
    function with which its own `save_pretrained` reverts that. A model whose code comes with it (None) names its
    tensors itself."""
    waiting: dict[str, Tensor] = {}
    for name, tensor in tensors:
        waiting[name] = tensor
        made = waiting
        if lm:
            made = revert_weight_conversion(lm, waiting)
        if all(part.shape == plan[key].shape for key, part in made.items()):
            yield from made.items()
            waiting = {}
