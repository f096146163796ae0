"""The weights of a sharded model, whole, for the engine: a block with one collective, and the next one meanwhile."""

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def gathered_by_block(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its name, in `dtype`, in which the model computes; tied ones once, in the order of
    `named_parameters`.

    FSDP2 gathers a block as in a forward pass, and starts with the next one before this one's weights are used, so at
    most two blocks exist whole. A weight that is a module's only one, and those that no block holds, are gathered by
    themselves: among them are the largest, embedding and head. All ranks iterate to the end, in step.
    """
    blocks = blocks_of(model)
    names = [name for name, _ in model.named_parameters()]
    parts = [(block, list(of_block)) for block, of_block in groupby(names, key=blocks.get)]
    following = [block for block, _ in parts if block]
    for block, of_block in parts:
        if block:
            following.remove(block)
            for module in block:
                module.unshard()  # waits for it, where it was started
        if block and following:
            for module in following[0]:
                module.unshard(async_op=True)
        for name in of_block:
            yield name, copy_of(model.get_parameter(name).detach(), dtype)
        if block:
            for module in block:
                module.reshard()


def blocks_of(model: nn.Module) -> dict[str, tuple[FSDPModule, ...]]:
    """The name of a weight -> the modules that FSDP2 gathers in its block: the block itself and, with expert parallel,
    its experts. Without those that no block holds."""
    found: dict[str, tuple[FSDPModule, ...]] = {}
    for prefix, module in model.named_modules():
        names = [name for name, _ in module.named_parameters(prefix)]
        if not isinstance(module, FSDPModule) or module is model or len(names) < 2 or names[0] in found:
            continue
        modules = tuple(inner for inner in module.modules() if isinstance(inner, FSDPModule))
        found |= dict.fromkeys(names, modules)
    return found


def copy_of(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole weight in memory of its own: who iterates may keep it when FSDP2 frees the block's."""
    if isinstance(weight, DTensor):
        return weight.to(dtype).full_tensor()
    return weight.to(dtype, copy=True)
