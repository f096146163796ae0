"""Router replay: later passes use the experts that an earlier pass chose for a token. The earlier pass is the
trainer's (R2 of arXiv 2507.18071) or the engine's (R3, arXiv 2510.11370).

Where two experts are nearly equal, rounding decides between them, and probabilities jump. Only the choice is
replayed: the router weighs the chosen experts by its own logits, so it is trained as without replay. """

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Router(TorchFunctionMode):
    """Active while a router runs. Its last top-k chooses experts; earlier calls choose among groups of
    experts."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.run = module.forward
        module.forward = self.forward
        self.replayed: Tensor | None = None  # [t, k] experts of the next pass; None or -1: its own choice

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.count = 0
        with self:
            return self.run(*args, **kwargs)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if kwargs is None:
            kwargs = {}
        found = function(*args, **kwargs)
        if function not in (torch.topk, Tensor.topk):
            return found
        self.count += 1
        self.own = found.indices.short()                                                        # [t, k]
        if self.replayed is None:
            self.num_topk = self.count
            return found
        if self.count != self.num_topk:
            return found
        chosen = torch.where(self.replayed < 0, found.indices, self.replayed)                   # [t, k]
        own_set = found.indices.sort(-1).values
        chosen_set = chosen.sort(-1).values
        self.changed = (own_set != chosen_set).any(-1)                                       # [t] other experts
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


def routers_of(model: nn.Module) -> list[Router]:
    """One for each layer that has experts. Raises ValueError if there are none, or their choice is not a
    top-k."""
    found = []
    unknown = set()
    for module in model.modules():
        kind = type(module)
        if kind.__name__.endswith(("Router", "Gate")):
            found.append(module)
            if "topk(" not in inspect.getsource(kind):
                unknown.add(kind.__name__)
    if unknown or not found:
        raise ValueError(
            f"--policy.router-replay: {type(model).__name__} has {', '.join(unknown) or 'no routers'}, "
            f"of which the choice of experts cannot be replayed: set it to none"
        )
    return [Router(module) for module in found]
