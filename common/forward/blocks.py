"""The blocks of a transformer, which are sharded, recomputed and adapted one by one."""

from torch import nn
from transformers import PreTrainedModel


def blocks_of(model: nn.Module, transformer: PreTrainedModel) -> list[nn.Module]:
    """The modules in `model`, in order, whose classes transformers names as those that stay in one piece, but none
    inside another: of mBART it names the layers and their attention too."""
    names = transformer._no_split_modules or ()
    blocks: list[nn.Module] = []
    inner: set[nn.Module] = set()
    for module in model.modules():
        if module not in inner and type(module).__name__ in names:
            blocks.append(module)
            inner.update(module.modules())
    return blocks
