"""The routers of a mixture of experts: how they spread the tokens, the loss that balances them, their precision.

The loss is that of Switch Transformers (Fedus et al. 2021, arXiv 2101.03961, eq. 4 to 6) as transformers computes it,
over all layers together: E sum_e f_e P_e, where f_e is how many of a token's k choices fall on expert e, P_e is e's
probability, both means over tokens and layers, and E is the number of experts. It is k where all experts are chosen
alike. f has no gradient, so once f is known, the loss is a mean over tokens. Hence f is counted first, over the whole
mini-batch, by a forward pass of its own: counted in each micro-batch, it would depend on how these were cut.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from common.forward.adapted import are_experts, is_router, names_of
from common.parallel.ranks import all_sum


class _AlsoBackward(torch.autograd.Function):
    """The first argument. `loss`, a number, adds its gradient to that of every loss that depends on the result."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


class Mixture:
    """What the routers of a policy say in a pass. It is made before the policy is sharded."""

    def __init__(self, model: PreTrainedModel, coef: float, num_ranks: int):
        """`coef`: the factor of the loss. `num_ranks`: FSDP2 divides gradients by it, which is undone here. Raises
        ValueError for a factor and a family without the loss."""
        self.coef = coef
        self.num_ranks = num_ranks
        self.listens = False
        self.chosen: list[Tensor] = []  # of each layer the experts [t, k] of the tokens that run here
        self.logits: list[Tensor] = []  # of each layer its router's [t, E]
        self.rows: Tensor | None = None  # [N] the tokens that run here and predict a sampled token
        self.frequencies: Tensor | None = None  # f [E] of the mini-batch whose update runs
        self.num_tokens = 0.0  # of that mini-batch
        self.num_unread = 0  # of them those that run here and have not had the loss
        self.counts: Tensor | None = None  # [layers, E] of the tokens in updates, those that went to each expert
        self.reported: dict[str, Tensor] = {}  # numbers [N] of the latest pass
        experts = [module for module in model.get_decoder().modules() if are_experts(module)]
        for module in experts:
            module.register_forward_pre_hook(self._hear_choice)
        self.num_experts = 0
        if experts:
            self.num_experts = len(getattr(experts[0], names_of(experts[0])[1]))
        if coef:
            check_balanced(model.get_decoder(), coef)
        for router, index in balanced_routers(model):
            router.register_forward_hook(partial(self._hear_logits, index))

    def _hear_choice(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.listens:
            self.chosen.append(args[1])

    def _hear_logits(self, index: int, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if self.listens:
            logits = out if isinstance(out, Tensor) else out[index]
            self.logits.append(logits.flatten(0, -2))

    @contextmanager
    def hear(self, rows: Tensor) -> Iterator[None]:
        """During a pass; `rows` [N]: the tokens that run here and predict a sampled token. Layers that are recomputed
        in the backward pass are not heard again."""
        self.chosen = []
        self.logits = []
        self.listens = True
        yield
        self.listens = False
        self.rows = rows

    @torch.no_grad()
    def count_choices(self, passes: Iterable[Any]) -> None:
        """Before the update of a mini-batch: count f. `passes` runs a pass of one micro-batch after the other."""
        frequencies: Any = torch.zeros(self.num_experts)
        num_tokens = 0
        for _ in passes:
            for logits in self.logits:
                num_choices = self.chosen[0].shape[-1]
                choice = logits[self.rows].topk(num_choices, dim=-1).indices                # [N, k]
                frequencies = frequencies.to(choice.device) + count(choice, self.num_experts)
            num_tokens += len(self.rows)
        self.num_unread = num_tokens
        total = all_sum([num_tokens, *(frequencies / len(self.logits)).tolist()])
        self.num_tokens = max(float(total[0]), 1.0)
        self.frequencies = total[1:] / self.num_tokens

    def read(self, logp: Tensor) -> Tensor:
        """After a pass with a gradient; `logp` [N]. Returns it, with the gradient of the loss if there is one. Raises
        ValueError for more such passes than the mini-batch has micro-batches: each would add the loss."""
        self.reported = {}
        if self.frequencies is not None:
            self.num_unread -= len(self.rows)
            if self.num_unread < 0:
                raise ValueError(
                    f"--policy.router-aux-coef {self.coef:g}: a micro-batch had two forward passes with a gradient in "
                    f"an update, and each adds the loss: run all but one under torch.no_grad(), or set it to 0"
                )
        if self.chosen:
            counts = torch.stack([count(chosen[self.rows], self.num_experts) for chosen in self.chosen])
            if self.counts is not None:
                counts = counts + self.counts
            self.counts = counts
        aux = torch.zeros_like(logp)
        entropy = torch.zeros_like(logp)
        for logits in self.logits:
            wide = logits[self.rows].to(torch.promote_types(logits.dtype, torch.float32))
            logp_of_experts = wide.log_softmax(-1)                                          # [N, E]
            probs = logp_of_experts.exp()
            entropy -= (probs * logp_of_experts).detach().sum(-1) / len(self.logits)
            if self.frequencies is not None:
                factors = self.num_experts / len(self.logits) * self.frequencies.to(probs)  # [E]
                aux = aux + probs @ factors
        if self.logits:
            self.reported["router_entropy"] = entropy
        if self.frequencies is not None:
            self.reported["router_aux_loss"] = aux.detach()
            logp = _AlsoBackward.apply(logp, self.coef * self.num_ranks / self.num_tokens * aux.sum())
        self.chosen = []
        self.logits = []
        return logp

    def load(self) -> dict[str, float]:
        """Of the updates since the last call, the largest number of tokens of an expert in shares of the mean, averaged
        over layers: 1 where all have the same. All ranks call it."""
        counts = self.counts
        self.counts = None
        self.frequencies = None
        if counts is None:
            return {}
        shape = counts.shape
        total = all_sum(counts.flatten()).view(shape)
        if not total.sum():
            return {}
        largest = total.amax(1) / total.mean(1)                                             # [layers]
        return {"actor/expert_load_max": float(largest.mean())}


def count(chosen: Tensor, num_experts: int) -> Tensor:
    """How often each expert is among the chosen, float64 [E]."""
    return F.one_hot(chosen.flatten(), num_experts).sum(0, dtype=torch.float64)


def has_loss(module: nn.Module) -> bool:
    """Whether this model, or this block of one, has experts, and transformers a load balancing loss for them."""
    source = sys.modules[type(module).__module__]
    return hasattr(source, "load_balancing_loss_func") and any(map(are_experts, module.modules()))


def check_balanced(module: nn.Module, coef: float) -> None:
    """Raise ValueError for --policy.router-aux-coef where there is no such loss; `module` as in `has_loss`."""
    if not has_loss(module):
        raise ValueError(f"--policy.router-aux-coef {coef:g}: transformers has no load balancing loss for the experts "
                         f"of a {type(module).__name__}, if it has any: set it to 0")


def balanced_routers(model: PreTrainedModel) -> list[tuple[nn.Module, int]]:
    """The routers whose logits transformers' load balancing loss takes, and where these are in what they return."""
    decoder = model.get_decoder()
    recorder = (getattr(decoder, "_can_record_outputs", None) or {}).get("router_logits")
    if not has_loss(decoder) or not isinstance(recorder, OutputRecorder):
        return []
    found = []
    for name, module in decoder.named_modules():
        is_named = recorder.layer_name is None or f".{recorder.layer_name}." in f".{name}."
        if is_named and isinstance(module, recorder.target_class):
            found.append((module, recorder.index))
    return found


class _Float32Linear(TorchFunctionMode):
    """Active while a router runs: linear layers are computed in float32, of weights in any dtype."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.linear:
            args = [x if x is None else x.to(torch.promote_types(x.dtype, torch.float32)) for x in args]
        return function(*args, **(kwargs or {}))


def use_float32_routers(model: nn.Module) -> int:
    """--policy.router-float32: logits, and what routers make of them, in float32. Returns the number of routers. Raises
    ValueError for one that is not known to be a linear layer."""
    found = []
    for module in model.modules():
        if is_router(module):
            kind = type(module)
            is_linear = isinstance(module, nn.Linear) or any(isinstance(part, nn.Linear) for part in module.children())
            if not is_linear and "F.linear(" not in inspect.getsource(kind):
                raise ValueError(f"--policy.router-float32: {kind.__name__} is not known to be a linear layer, leave "
                                 f"it out")
            found.append(module)
    for module in found:
        module.forward = partial(_in_float32, module.forward)
    return len(found)


def _in_float32(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Float32Linear():
        return forward(*args, **kwargs)
