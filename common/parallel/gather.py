"""The weights of a sharded model, whole, for the engine: a block with one collective, and the next one meanwhile."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

Block = tuple[FSDPModule, ...]
"""The modules that are gathered together."""


def gathered_by_block(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its name, in `dtype`, in which the model computes; tied ones once, in the order of
    `named_parameters`.

    FSDP2 gathers a block as in a forward pass, and starts with the next one before this one's weights are used, so at
    most two blocks exist whole. A weight that is a module's only one, and those that no block holds, are gathered by
    themselves: among them are the largest, embedding and head. All ranks iterate to the end, in step.
    """
    block_of = blocks_of(model)
    waiting = list(dict.fromkeys(block_of.values()))    # blocks that were not gathered yet, in their order
    current: Block = ()
    for name, _ in list(model.named_parameters()):
        block = block_of.get(name, ())
        if block != current:
            reshard(current)
            current = block
            unshard(waiting, current)
        yield name, copy_of(model.get_parameter(name).detach(), dtype)
    reshard(current)


def unshard(waiting: list[Block], block: Block) -> None:
    """Gather a block, which leaves those that wait, and start with the next one."""
    if not block:
        return
    waiting.remove(block)
    for module in block:
        module.unshard()                                # waits for it, where it was started
    for following in waiting[:1]:
        for module in following:
            module.unshard(async_op=True)


def reshard(block: Block) -> None:
    for module in block:
        module.reshard()


def blocks_of(model: nn.Module) -> dict[str, Block]:
    """The name of a weight -> the modules that FSDP2 gathers in its block: the block itself and, with expert parallel,
    its experts. Without those that no block holds."""
    found: dict[str, Block] = {}
    for prefix, module in model.named_modules():
        weights = dict(module.named_parameters(prefix))
        inner = [part for part in module.modules() if isinstance(part, FSDPModule)]
        is_block = module in inner and module is not model
        is_inside = not found.keys().isdisjoint(weights)
        if is_block and not is_inside and len(weights) > 1:
            found |= dict.fromkeys(weights, tuple(inner))
    return found


def copy_of(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole weight in memory of its own: who iterates may keep it when FSDP2 frees the block's."""
    copied = weight.to(dtype, copy=True)
    return copied.full_tensor() if isinstance(copied, DTensor) else copied
