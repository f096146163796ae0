"""The weights of a sharded model, whole, for the engine: a block with one collective, and the next one meanwhile."""

from collections.abc import Iterator
from itertools import groupby, pairwise

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def gathered_by_block(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its name, in the data type in which the model computes; tied ones once.

    FSDP2 gathers a block as in a forward pass, and starts with the next one before this one's weights are used, so at
    most two blocks exist whole. A weight that is a module's only one, and those that no block holds, are gathered by
    themselves: among them are the largest, embedding and head. All ranks iterate to the end, in step.
    """
    owners = find_owners(model)
    names = [name for name, _ in model.named_parameters()]
    parts = [(module, list(of_module)) for module, of_module in groupby(names, key=owners.__getitem__)]
    blocks = [module for module, of_module in parts if len(of_module) > 1 and module is not model]
    next_block = dict(pairwise(blocks))
    for module, of_module in parts:
        if module in blocks:
            module.unshard()  # waits for it, where it was started
        if module in next_block:
            next_block[module].unshard(async_op=True)
        for name in of_module:
            yield name, copy_of(model.get_parameter(name).detach())
        if module in blocks:
            module.reshard()


def find_owners(model: nn.Module) -> dict[str, FSDPModule]:
    """The name of a weight -> the module with which FSDP2 gathers it."""
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, FSDPModule):
            for name, _ in module.named_parameters(prefix):
                found[name] = module  # the innermost comes last
    return found


def copy_of(weight: Tensor) -> Tensor:
    """The whole weight in memory of its own: who iterates may keep it when FSDP2 frees the block's."""
    if isinstance(weight, DTensor):
        return weight.full_tensor()
    return weight.clone()
