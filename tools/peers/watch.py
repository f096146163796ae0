"""Sees what a loss is made of while a script computes it: the loss of each token, and the factor that each one has in
what `backward` is called on. It also keeps float64 numbers in float64 where a script would round them to float32."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

LINEAR = {"mul", "rmul", "imul", "div", "truediv", "itruediv", "sum", "mean", "neg", "getitem", "masked_select",
          "where", "masked_fill", "nansum", "double", "to", "float", "reshape", "view", "flatten", "squeeze",
          "unsqueeze", "add", "radd", "sub", "nan_to_num"}
"""Operations that keep a loss a weighted sum of its tokens' losses, if one of their inputs alone has a gradient."""
SCALED = {"mul", "rmul", "imul", "div", "truediv", "where", "masked_fill", "getitem", "masked_select"}
"""Those that give each token its factor."""


class Watch(TorchFunctionMode):
    """Remembers how each tensor with a gradient was made, and each number that `backward` is called on, from `begin` to
    `end`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on = False
        self.made: dict[int, tuple[str, list[Tensor], Tensor]] = {}  # id of a tensor -> operation, inputs, itself
        self.losses: list[tuple[Tensor, Tensor | None, Tensor | None]] = []
        """Of each `backward`: the number, and the losses of its tokens and their factors if it is a sum of them."""
        self.shape: tuple[int, ...] = ()

    def begin(self, shape: tuple[int, ...]) -> None:
        """`shape`: of the tensors that have one number for each token."""
        self.is_on = True
        self.shape = shape
        self.made = {}

    def end(self) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
        """The losses since the last `end`."""
        found, self.losses = self.losses, []
        self.is_on = False
        self.made = {}
        return found

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        if rounds_to_float32(func, args, kwargs):
            return args[0]
        if not self.is_on:
            return func(*args, **kwargs)
        if name == "backward":
            self.losses.append((args[0].detach(), *token_losses(self, args[0])))
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.requires_grad:
            self.made[id(result)] = name, tensors_in((*args, *kwargs.values())), result
        return result


def rounds_to_float32(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    if func not in (Tensor.float, Tensor.to) or args[0].dtype != torch.float64:
        return False
    return func is Tensor.float or any(value is torch.float32 for value in (*args[1:], *kwargs.values()))


def tensors_in(values: Any) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


def token_losses(watch: Watch, loss: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The losses of the tokens, of `watch.shape`, and d loss / d each of them; None if `loss` is no weighted sum of
    such a tensor.

    From the loss back, as long as one input alone has a gradient: the tensor before the last operation that gives each
    token a factor of its own."""
    at = loss
    while at is not None and tuple(at.shape) != watch.shape:
        at = before(watch, at, LINEAR)
    if at is None:
        return None, None
    scaled = before(watch, at, SCALED, watch.shape)
    if scaled is not None:
        at = scaled
    (weight,) = torch.autograd.grad(loss, at, retain_graph=True)
    return at.detach(), weight


def before(watch: Watch, tensor: Tensor, operations: set[str], shape: tuple[int, ...] | None = None) -> Tensor | None:
    """The one input with a gradient of the operation that made `tensor`; None if that is none of `operations`, has
    several of them, or has one of another `shape`."""
    name, inputs, _ = watch.made.get(id(tensor), ("", [], tensor))
    with_gradient = [one for one in inputs if one.requires_grad]
    if name not in operations or len(with_gradient) != 1:
        return None
    if shape is not None and tuple(with_gradient[0].shape) != shape:
        return None
    return with_gradient[0]
