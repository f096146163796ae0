"""Router replay: the experts that one pass has chosen for a token are those of later passes over it.

Where two experts are nearly equal, rounding decides between them, and a token's probability jumps (arXiv 2507.18071,
2510.11370). Only the choice is replayed: the router weighs the chosen experts by its own logits, and is trained.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder


class Router(TorchFunctionMode):
    """Active while a router runs. Its choice is its last top-k; those before it choose among groups of experts."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.run, module.forward = module.forward, self.forward
        self.replayed: Tensor | None = None  # [t, k] the experts of the next passes; None: the router chooses

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.count = 0
        with self:
            return self.run(*args, **kwargs)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk):
            return found
        self.count += 1
        self.own = found.indices.flatten(0, -2).short()                                         # [t, k]
        if self.replayed is None:
            self.num_topk = self.count
        elif self.count == self.num_topk:
            chosen = self.replayed.long().view_as(found.indices)
            return torch.return_types.topk((args[0].gather(-1, chosen), chosen))
        return found


def router_class(family: type[PreTrainedModel], config: PretrainedConfig) -> type[nn.Module]:
    """The class of a family's routers. Raises ValueError if it has none, or some whose choice is not a top-k."""
    recorder = (family._can_record_outputs or {}).get("router_logits")
    router = recorder.target_class if isinstance(recorder, OutputRecorder) else nn.Module
    if not router.__name__.endswith(("Router", "Gate")) or "topk(" not in inspect.getsource(router):
        raise ValueError(f"--policy.router-replay: a {config.model_type} has no routers, or none that can be replayed "
                         f"({router.__name__}): set it to none")
    return router


def routers_of(model: PreTrainedModel) -> list[Router]:
    """Of each layer that has one, in order. Raises ValueError if none has."""
    kind = router_class(type(model), model.config)
    routers = [Router(module) for module in model.modules() if isinstance(module, kind)]
    if not routers:
        raise ValueError("--policy.router-replay: no layer of the model has a router: set it to none")
    return routers


def replay(routers: list[Router], routing: Tensor | None) -> None:
    """Give routers the experts of the next passes, [t, layers * k] of the tokens that run. None: they choose."""
    start = 0
    for router in routers:
        router.replayed = None if routing is None else routing[:, start : start + router.own.shape[1]]
        start += router.own.shape[1] if routing is not None else 0


def changed_share(routers: list[Router]) -> Tensor:
    """The share of layers [t] whose router itself would have chosen other experts than were replayed."""
    pairs = [(router.own.sort(1).values, router.replayed.sort(1).values) for router in routers]
    return torch.stack([(own != replayed).any(1) for own, replayed in pairs]).float().mean(0)
