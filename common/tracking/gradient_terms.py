"""What the policy's gradient is made of: how many tokens and responses it comes from, and, with --log.signal, which
terms of the loss and which parts of the reward.

In the first mini-batch of such a step the script computes its loss from copies of what the policy returns, log-probs
and entropies, which are cut off from the model: its backward pass ends there, and leaves the gradient of each named
term by these outputs. `after_backward` then runs the model backward once for each term, and last once for the whole
loss, from the same numbers as without the flag, so that the update is the same to the bit.

Of a term with the gradient g_k, and g = sum g_k: share |g_k| / sum |g_j|, cosine <g_k, g> / (|g_k| |g|).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint, checkpoint_activation

from common.batch import Batch
from common.flags.record import LogConfig
from common.metrics import Meter
from common.model.policy import PackedModel
from common.model.sharding import local
from common.parallel.ranks import all_names, all_sum
from common.segments import segment_sum

POLICY = "policy"
"""The term that is proportional to the advantage."""
OTHER = "other"
"""What no name was given to."""
REWARD = "reward "
"""How the names of parts of the reward begin among those of the terms."""


class GradientTerms:
    """Of the policy that it watches."""

    def __init__(self, config: LogConfig):
        self.every = config.signal
        self.rewards = config.signal_rewards
        self.is_open = False                                            # the mini-batch that runs is measured
        self.strength: Tensor | None = None                             # [T] of the micro-batch that ran last
        self.factors: dict[str, Tensor] = {}                            # part of the score -> [S], by reward_parts.py

    def watch(self, model: PackedModel) -> None:
        """Follow the training of `model`. Raises ValueError for copies of it that are summed once in a mini-batch."""
        model.gradient_terms = self
        self.parameters: list[Any] = [p for p in model.parameters() if p.requires_grad]
        if self.every and any(place.is_replicate() for p in self.parameters for place in p.placements):
            raise ValueError(f"--log.signal {self.every}: the copies of the model sum their gradients once in a "
                             f"mini-batch: it needs --policy.replicas 1")
        if self.every:
            checkpoint_activation._no_hook = WithoutHook  # type: ignore[assignment]
        model.register_forward_hook(self._after_forward)                # FSDP2's own was registered before

    def is_due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def begin(self, step: int) -> None:
        """Before the first mini-batch of the step's update."""
        self.is_open = self.is_due(step)
        self.sums: dict[str, list[Tensor | None]] = {}                  # name -> this rank's part of its gradient
        self._forget()

    def _forget(self) -> None:
        self.passes: list[tuple[Tensor, Tensor]] = []                   # an output of the model, and its copy
        self.found: dict[str, list[Tensor | None]] = {}                 # term -> gradient by each of the copies
        self.unused: set[str] = set()                                   # terms that no backward pass has come to
        self.inside = ""                                                # the term whose gradient is being found

    # ----------------------------------------------------------------------- during forward and backward passes

    def _after_forward(self, model: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        self.strength = None
        for output in outputs:
            if output.requires_grad:
                output.register_hook(self._hear)
        if not self.is_open:
            return None
        copies = []
        for output in outputs:
            copies.append(output.detach().requires_grad_(output.requires_grad))
            if output.requires_grad:
                self.passes.append((output, copies[-1]))
        return tuple(copies)

    def _hear(self, gradient: Tensor) -> None:
        size = gradient.abs()
        self.strength = size if self.strength is None else self.strength + size

    def term(self, name: str, values: Tensor) -> Tensor:
        """`values` of any shape, as they are added to the loss; to be used in their place."""
        if name == OTHER:
            raise ValueError(f"update.term({name!r}): this is the name of what no name is given to")
        if not self.is_open:
            return values
        self.found.setdefault(name, [])
        if not values.requires_grad:
            return values
        self.unused.add(name)
        marked = values.clone()                                         # its gradient is that of this term alone
        marked.register_hook(partial(self._find, name, values))
        return marked

    def _find(self, name: str, values: Tensor, gradient: Tensor) -> None:
        """In the script's backward pass, before it goes on from `values`: the gradient of this term."""
        if self.inside:
            raise ValueError(f"update.term({name!r}) is a part of update.term({self.inside!r}): name parts that are "
                             f"added to each other")
        self.inside = name
        self.unused.discard(name)
        copies = [copy for _, copy in self.passes]
        gradients = torch.autograd.grad(values, copies, gradient, retain_graph=True, allow_unused=True)
        self.inside = ""
        if all(found is None for found in gradients):
            raise ValueError(f"update.term({name!r}) does not depend on what the policy returned for this micro-batch")
        self.found[name] = added(self.found[name], gradients)

    def after_backward(self, microbatch: Batch, meter: Meter) -> None:
        """After the script's backward pass of a micro-batch. All ranks call it."""
        if self.is_open:
            self._run_backward(microbatch)
        if self.strength is not None:
            measure_strength(self.strength, microbatch, meter)
        self.strength = None

    def _run_backward(self, microbatch: Batch) -> None:
        if all(copy.grad is None for _, copy in self.passes):
            raise RuntimeError("--log.signal: no output of the policy has a gradient yet, and update.done(...) must "
                               "follow the backward pass of its micro-batch")
        if self.unused:
            raise ValueError(f"update.term({min(self.unused)!r}) is not in the loss of this micro-batch: use what it "
                             f"returns, loss = loss + update.term(...)")
        if POLICY in self.found:
            for name, factor in self.factors.items():
                per_token = microbatch.to_tokens(factor)                                        # [T]
                self.found[f"{REWARD}{name}"] = [x if x is None else x * per_token for x in self.found[POLICY]]
        outputs = [output for output, _ in self.passes]
        before = [parameter.grad for parameter in self.parameters]
        for name in all_names({*self.found}):                           # some ranks may have a term that others lack
            gradients = self.found.get(name) or [None] * len(outputs)
            for parameter in self.parameters:
                parameter.grad = None
            filled = [torch.zeros_like(x) if found is None else found for x, found in zip(outputs, gradients)]
            torch.autograd.backward(outputs, filled, retain_graph=True)
            self.sums[name] = added(self.sums.get(name, []), self._gradient())
        for parameter, gradient in zip(self.parameters, before):
            parameter.grad = gradient
        self.strength = None                                            # of the whole loss, which comes now
        used = [(output, copy.grad) for output, copy in self.passes if copy.grad is not None]
        torch.autograd.backward([output for output, _ in used], [gradient for _, gradient in used])
        self._forget()

    def _gradient(self) -> list[Tensor | None]:
        """This rank's part, a copy on the host."""
        found: list[Tensor | None] = []
        for parameter in self.parameters:
            gradient = parameter.grad
            found.append(None if gradient is None else local(gradient).to("cpu", torch.float32, copy=True))
        return found

    # ----------------------------------------------------------------------- before the optimizer step

    def close(self) -> dict[str, float]:
        """The metrics of the mini-batch, {} of one that was not measured. All ranks call it."""
        if not self.is_open:
            return {}
        self.is_open = False
        if not self.sums:
            raise ValueError(f"--log.signal {self.every}: this script names no term of its loss; write "
                             f"loss = loss + update.term('mine', args.mine_coef * mine)")
        if self.rewards and not (self.factors and POLICY in self.sums):
            raise ValueError(f"--log.signal-rewards {' '.join(self.rewards)}: this script has no rewards, or does not "
                             f"name the term of its loss that their advantages are in, update.term({POLICY!r}, ...)")
        whole = self._gradient()
        terms = {name: part for name, part in self.sums.items() if not name.startswith(REWARD)}
        rest = whole
        for part in terms.values():
            rest = added(rest, [x if x is None else -x for x in part])
        terms[OTHER] = rest
        metrics = shares(terms, whole, "signal/share")
        parts = {name.removeprefix(REWARD): part for name, part in self.sums.items() if name.startswith(REWARD)}
        if parts:
            metrics |= shares(parts, self.sums[POLICY], "signal/reward_share")
        self.sums = {}
        return metrics


class WithoutHook:
    """torch's `_no_hook`, in which a block is recomputed; torch's can be entered once, so with
    --policy.gradient-checkpointing a second backward pass of the same graph would fail (torch 2.13)."""

    def __init__(self, module: nn.Module):
        self.module = module

    def __enter__(self) -> None:
        state = checkpoint.state(self.module)
        self.before = state.enable_hook
        state.enable_hook = False

    def __exit__(self, *_: Any) -> None:
        checkpoint.state(self.module).enable_hook = self.before


def added(sums: Sequence[Tensor | None], more: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The sums of two lists, of which the first may be empty; None counts as 0."""
    if not sums:
        return [*more]
    total: list[Tensor | None] = []
    for a, b in zip(sums, more, strict=True):
        if a is not None and b is not None:
            total.append(a + b)
        elif a is None:
            total.append(b)
        else:
            total.append(a)
    return total


def product(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> float:
    return sum(float(torch.dot(x.flatten(), y.flatten())) for x, y in zip(a, b) if x is not None and y is not None)


def shares(parts: dict[str, list[Tensor | None]], whole: list[Tensor | None], prefix: str) -> dict[str, float]:
    """PREFIX/NAME, and PREFIX/NAME_cosine with the whole; nothing of a gradient that is 0. All ranks call it."""
    here = [product(whole, whole)]
    for part in parts.values():
        here += [product(part, part), product(part, whole)]
    whole_sq, *numbers = all_sum(here).tolist()
    sizes = [size_sq**0.5 for size_sq in numbers[0::2]]
    metrics = {}
    for name, size, with_whole in zip(parts, sizes, numbers[1::2]):
        if size > 0:
            metrics[f"{prefix}/{name}"] = size / sum(sizes)
        if size > 0 and whole_sq > 0:
            metrics[f"{prefix}/{name}_cosine"] = with_whole / (size * whole_sq**0.5)
    return metrics


def measure_strength(strength: Tensor, microbatch: Batch, meter: Meter) -> None:
    """`strength` [T]: the size of the loss's gradient by what the policy returned for each token."""
    of_tokens = torch.where(microbatch.mask, strength, 0).double()                              # [T]
    has_tokens = segment_sum(microbatch.mask.double(), microbatch.cu_seqlens) > 0               # [S]
    of_sequences = segment_sum(of_tokens, microbatch.cu_seqlens)                                # [S]
    for kind, sizes, count in (("tokens", of_tokens, microbatch.mask), ("sequences", of_sequences, has_tokens)):
        meter.total(f"_signal/{kind}_all", count.sum())
        meter.total(f"_signal/{kind}_used", (sizes > 0).sum())
        meter.total(f"_signal/{kind}_sum", sizes.sum())
        meter.total(f"_signal/{kind}_square", sizes.square().sum())
        names = [f"_signal/{kind}_{what}" for what in ("all", "used", "sum", "square")]
        meter.derive(f"signal/{kind}_frac", share_used, *names[:2])
        meter.derive(f"signal/effective_{kind}_frac", share_effective, names[0], *names[2:])


def share_used(count: float, used: float) -> float:
    return used / count if count else 0.0


def share_effective(count: float, total: float, square: float) -> float:
    """Kish's effective sample size over the number."""
    return total**2 / square / count if count and square else 0.0
