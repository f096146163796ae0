"""AdamW whose weights and moments are bfloat16, rounded stochastically.

Rounded to nearest, a weight would lose each update below half of its last digit. A second moment would never shrink,
because a decay rate of 0.999 takes less than that."""

from typing import Any

import torch
from torch import Tensor

from common.model.policy import PackedModel
from common.model.sharding import by_mesh, shard_slice
from common.optim import OptimConfig
from common.parallel.ranks import seed_of

WEIGHTS = {"adamw": torch.float32, "adamw-bf16": torch.bfloat16}
"""--optim.kind -> the dtype of the weights that are trained, their gradients and moments."""
PIECE = 2**20
"""Numbers that are computed in float32 at a time."""


def make_optimizer(model: PackedModel, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over the shards; no weight decay on vectors (norms, biases)."""
    trained = by_mesh(p for p in model.parameters() if p.requires_grad)
    groups = [{"params": [p for p in part if p.ndim >= 2], "weight_decay": config.weight_decay} for part in trained]
    groups += [{"params": [p for p in part if p.ndim < 2], "weight_decay": 0.0} for part in trained]
    adamw = {"adamw": torch.optim.AdamW, "adamw-bf16": BF16AdamW}[config.kind]
    return adamw(groups, lr=config.lr, betas=config.betas, fused=True)


class BF16AdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2), computed in float32. Its random numbers follow from step, weight
    and shard: copies of a shard draw the same, and so does a run that is resumed."""

    @torch.no_grad()
    def step(self) -> None:
        weights = [(weight, group) for group in self.param_groups for weight in group["params"]]
        for number, (weight, group) in enumerate(weights):
            if weight.grad is None:
                continue
            state = self.state[weight]
            for name in ("exp_avg", "exp_avg_sq") if not state else ():
                state[name] = torch.zeros_like(weight)
            state["step"] = state.get("step", torch.tensor(0.0)) + 1
            first = [part.start for part in shard_slice(weight)]
            random = torch.Generator(weight.device)
            random.manual_seed(seed_of("rounding", number, int(state["step"]), *first))
            kept = weight.detach(), state["exp_avg"], state["exp_avg_sq"], weight.grad
            for pieces in zip(*(x.to_local().view(-1).split(PIECE) for x in kept)):
                update(pieces, int(state["step"]), group, random)


def update(pieces: tuple[Tensor, ...], step: int, group: dict[str, Any], random: torch.Generator) -> None:
    """One step of parts [N] of a weight, its moments and its gradient. What is float32 (a critic's head) stays so."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    weight, first, second, grad = (x.float() for x in pieces)
    first = first.lerp(grad, 1 - beta1)
    second = (second * beta2).addcmul_(grad, grad, value=1 - beta2)
    size = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
    weight = (weight * (1 - lr * group["weight_decay"])).addcdiv_(first, size, value=-lr / (1 - beta1**step))
    noise = torch.empty(len(grad), dtype=torch.int64, device=grad.device).random_(-(2**63), None, generator=random)
    for kept, x, bits in zip(pieces, (weight, first, second), noise.view(torch.int16).view(4, -1)):
        kept.copy_(round_stochastically(x, bits) if kept.dtype == torch.bfloat16 else x)


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """Float32 [N] -> one of the two bfloat16 numbers beside each, the nearer the likelier, so that the mean is x.
    `bits` [N]: random int16."""
    return ((x.view(torch.int32) + (bits.int() & 0xFFFF)) & -0x10000).view(torch.float32).bfloat16()
