"""AdamW with bfloat16 weights, whose two moments are bfloat16 too, or codes of 8 bits.

A step is computed in float32 and its result rounded stochastically: to nearest, a weight would lose each update below its
last digit, and a second moment would never shrink. The codes are those of Dettmers et al. 2021 (arXiv 2110.02861), as in
torchao, but for two things. A block of numbers with one scale lies within a row, so that ranks can divide it as they
divide the weight. And a second moment above 0 has a code above 0, because the step is divided by it."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import zeros

from common.model.sharding import shard_slice
from common.parallel.ranks import seed_of

WEIGHTS = {"adamw": torch.float32, "adamw-bf16": torch.bfloat16, "adamw-8bit": torch.bfloat16}
"""The dtype of weights that are trained and of their gradients."""
MOMENT_BYTES = {"adamw": 8.0, "adamw-bf16": 4.0, "adamw-8bit": 2.1}
"""Of the two moments of a weight."""
PIECE = 2**20
"""Numbers that are computed in float32 at a time, a multiple of every block."""
BLOCK, SMALLEST_BLOCK = 256, 16
"""Numbers that share a scale. Where rows allow no block of SMALLEST_BLOCK, moments have the dtype of the weight."""


class CompactAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2). Its random numbers follow from step, weight and shard: copies of a
    shard draw the same, and so does a run that is resumed."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], kind: str):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": 1e-8})
        device = self.param_groups[0]["params"][0].device
        self.has_codes = kind == "adamw-8bit"
        self.codes = {"exp_avg": code_values(True).to(device), "exp_avg_sq": code_values(False).to(device)}
        self.random = torch.Generator(device)

    @torch.no_grad()
    def step(self) -> None:
        weights = [(weight, group) for group in self.param_groups for weight in group["params"]]
        for number, (weight, group) in enumerate(weights):
            if weight.grad is None:
                continue
            state = self.state[weight]
            state.update(state or self._new_state(weight))
            state["step"] += 1
            first = [part.start for part in shard_slice(weight)]
            self.random.manual_seed(seed_of("rounding", number, int(state["step"]), *first))
            sharded = {"weight": weight.detach(), "grad": weight.grad} | state
            flat = {key: x.to_local().view(-1) for key, x in sharded.items() if key != "step"}
            size = max(len(flat["weight"]), 1)
            for piece in zip(*(x.split(max(PIECE * len(x) // size, 1)) for x in flat.values())):
                self._update(dict(zip(flat, piece)), int(state["step"]), **group)

    def _new_state(self, weight: nn.Parameter) -> dict[str, Tensor]:
        state = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
        rows_are_whole = not any(placement.is_shard(weight.ndim - 1) for placement in weight.placements)
        block = math.gcd(weight.shape[-1], BLOCK)
        if self.has_codes and rows_are_whole and block >= SMALLEST_BLOCK:
            scales = (*weight.shape[:-1], weight.shape[-1] // block)
            for name in self.codes:
                state[name] = torch.zeros_like(weight, dtype=torch.uint8)
                state[f"{name}_scale"] = zeros(scales, device_mesh=weight.device_mesh, placements=weight.placements)
        return state

    def _update(self, piece: dict[str, Tensor], step: int, lr: float, betas: tuple[float, float], eps: float,
                weight_decay: float, **_: Any) -> None:
        """`piece`: parts [N] of a weight, its gradient and its state."""
        grad = piece["grad"].float()
        first = self._read(piece, "exp_avg").lerp_(grad, 1 - betas[0])
        second = self._read(piece, "exp_avg_sq").mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
        weight = piece["weight"].float() * (1 - lr * weight_decay)
        size = (second / (1 - betas[1] ** step)).sqrt_().add_(eps)
        weight.addcdiv_(first, size, value=-lr / (1 - betas[0] ** step))
        noise = torch.empty(len(grad), dtype=torch.int64, device=grad.device).random_(-(2**63), None, generator=self.random)
        found = {"weight": weight, "exp_avg": first, "exp_avg_sq": second}
        for (name, x), bits in zip(found.items(), noise.view(torch.int16).view(4, -1)):
            if f"{name}_scale" in piece:
                x = self._encode(x, name, piece[f"{name}_scale"])
            elif piece[name].dtype == torch.bfloat16:
                x = round_stochastically(x, bits)
            piece[name].copy_(x)

    def _read(self, piece: dict[str, Tensor], name: str) -> Tensor:
        """The moment [N] in float32."""
        if f"{name}_scale" not in piece:
            return piece[name].float()
        scale = piece[f"{name}_scale"][:, None]
        return (self.codes[name][piece[name].int()].view(len(scale), -1) * scale).view(-1)

    def _encode(self, x: Tensor, name: str, scale: Tensor) -> Tensor:
        """The nearest codes [N] of a moment. `scale` [N / block] becomes the largest size in each block."""
        blocks, values = x.view(len(scale), -1), self.codes[name]
        scale.copy_(blocks.abs().amax(1))
        shares = blocks / scale.clamp(min=1e-38)[:, None]
        nearest = torch.bucketize(shares, (values[1:] + values[:-1]) / 2, out_int32=True).view(-1)
        return nearest if name == "exp_avg" else nearest.clamp_(min=1)


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """Float32 [N] -> one of the two bfloat16 numbers beside each, the nearer the likelier, so that its mean is x. `bits`
    [N]: random int16."""
    return ((x.view(torch.int32) + (bits.int() & 0xFFFF)) & -0x10000).view(torch.float32).bfloat16()


def code_values(signed: bool) -> Tensor:
    """What the 256 codes mean in shares of their scale, rising: 7 decades, the larger ones with more of them."""
    parts = [torch.tensor([0.0, 1.0])]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (power + (not signed)) + 1)
        centres = 10.0 ** (power - 6) * (edges[:-1] + edges[1:]) / 2
        parts += [centres, -centres] if signed else [centres]
    return torch.cat(parts).sort().values
