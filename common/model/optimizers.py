"""AdamW over the shards, and its kinds whose weights are bfloat16, rounded stochastically, and whose moments
are bfloat16 too or codes of 8 bits. And Muon, which has matrices of its own.

Rounded to nearest, a weight would lose each update below half of its last digit. A second moment would never shrink,
because a decay rate of 0.999 subtracts less than that. Codes are those of Dettmers et al. 2021 (arXiv 2110.02861), but
the numbers that share a scale lie within a row: ranks divide codes and scales as they divide the weight."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from common.flags.model import OptimConfig
from common.kernels.logp import compiled
from common.model.policy import PackedModel
from common.model.sharding import by_mesh, shard_slice
from common.parallel.ranks import seed_of

WEIGHTS = {"adamw": torch.float32, "muon": torch.float32, "adamw-bf16": torch.bfloat16, "adamw-8bit": torch.bfloat16}
"""--optim.kind -> the dtype of trained weights, of their gradients and of moments that are no codes."""
PIECE = {"cpu": 2**20, "cuda": 2**22}
"""Number of values that are computed in float32 at a time, a multiple of every block. On GPUs a piece is one compiled
kernel, or a few with moments of 8 bits: uncompiled it takes 33 to 77, which the host launches."""


def make_optimizer(model: PackedModel, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over the shards; no weight decay on vectors (norms, biases). Muon's group is the one with a `momentum`."""
    matrices = []                                                       # that Muon updates
    others = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            list_of_its_kind = matrices if uses_muon(config.kind, name, parameter.shape) else others
            list_of_its_kind.append(parameter)
    decayed = []                                                        # groups, one a mesh
    not_decayed = []
    for part in by_mesh(others):
        decayed.append({
            "params": [p for p in part if p.ndim >= 2],
            "weight_decay": config.weight_decay,
        })
        not_decayed.append({
            "params": [p for p in part if p.ndim < 2],
            "weight_decay": 0.0,
        })
    groups = decayed + not_decayed
    if matrices:
        groups.append({
            "params": matrices,
            "weight_decay": config.weight_decay,
            "momentum": 0.95,
        })
    for group in groups:
        group["kind"] = config.kind
    optimizers = {"adamw": torch.optim.AdamW, "muon": Muon}
    optimizer = optimizers.get(config.kind, BF16AdamW)
    return optimizer(groups, lr=config.lr, betas=config.betas, fused=True)


def uses_muon(kind: str, name: str, shape: torch.Size) -> bool:
    """Whether a weight is a matrix [out, in] in a layer, or a stack of such [experts, out, in], and --optim.kind is
    muon. Names of embedding and head have no layer's number. Stacks of vectors are biases of experts, or a gate's."""
    is_in_layer = any(part.isdigit() for part in name.split(".")) and not name.endswith("bias")
    return kind == "muon" and is_in_layer and len(shape) in (2, 3) and min(shape[-2:]) > 1


def block_size(kind: str, shape: torch.Size, divided: list[int]) -> int:
    """How many numbers of a row share a scale, 16 to 256. 1: the moments are not stored as codes, for example where
    ranks divide rows. `divided`: the dimensions that ranks divide."""
    if kind != "adamw-8bit":
        return 1
    divides_rows = len(shape) - 1 in divided
    block = math.gcd(shape[-1], 256)
    if divides_rows or block < 16:
        return 1
    return block


class Muon(torch.optim.AdamW):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) for matrices, with the learning rates of Liu
    et al. 2025 (arXiv 2502.16982), and AdamW for other weights.

    The iteration is torch's. torch.optim.Muon would run it on shards, and round its sums over ranks to bfloat16: the
    weights would depend on the number of ranks. Here ranks gather one matrix, or stack of experts, at a time."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            if "momentum" not in group:
                continue
            for weight in group["params"]:
                if weight.grad is not None:
                    self.step_matrix(weight, group)
        super().step()                                                  # of weights that still have a gradient

    def step_matrix(self, weight: Tensor, group: dict[str, Any]) -> None:
        """One step of a matrix or stack of experts. Its gradient is used up."""
        momentum = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
        momentum.lerp_(weight.grad, 1 - group["momentum"])
        update = weight.grad.lerp_(momentum, group["momentum"]).bfloat16()                      # Nesterov's
        weight.grad = None
        placements = []
        for part in weight.placements:
            divides_experts = part.is_shard(weight.ndim - 3)
            placements.append(part if divides_experts else Replicate())                  # own experts stay here
        update = update.redistribute(placements=placements)
        for matrix in update.to_local().view(-1, *weight.shape[-2:]):
            orthogonal = _zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)  # of torch
            matrix.copy_(orthogonal)
        lr = _adjust_lr(group["lr"], "match_rms_adamw", weight.shape[-2:])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(update.redistribute(placements=weight.placements), alpha=-lr)


class BF16AdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2), computed in float32. Its random numbers follow from step, weight
    and shard: copies of a shard draw the same numbers, and so does a resumed run."""

    @torch.no_grad()
    def step(self) -> None:
        weights = [(weight, group) for group in self.param_groups for weight in group["params"]]
        for number, (weight, group) in enumerate(weights):
            if weight.grad is not None:
                self.step_weight(number, weight, group)

    def step_weight(self, number: int, weight: Tensor, group: dict[str, Any]) -> None:
        """`number`: the weight's, from which its random numbers follow."""
        kind = group["kind"]
        if weight.dtype != torch.bfloat16:
            kind = "adamw"
        divided = [part.dim for part in weight.placements if part.is_shard()]
        block = block_size(kind, weight.shape, divided)
        state = self.state[weight]
        if not state:
            state.update(first_state(weight, block))
        state["step"] = state.get("step", torch.tensor(0.0)) + 1
        tensors = {"weight": weight.detach(), "grad": weight.grad, **state}
        step = int(tensors.pop("step"))
        starts = [part.start for part in shard_slice(weight)]
        random = torch.Generator(weight.device).manual_seed(seed_of("rounding", number, step, *starts))
        num_rows = PIECE[weight.device.type] // block
        pieces = {}
        for name, tensor in tensors.items():
            width = block * tensor.shape[-1] // weight.shape[-1]        # a row is a block, or its scale
            pieces[name] = tensor.to_local().view(-1, width).split(num_rows)
        change = update
        factors = factors_of(step, group)
        if weight.device.type == "cuda":
            change = compiled(update)
            # numbers would be compiled anew in each step
            factors = torch.tensor(factors, device=weight.device).unbind()
        for of_tensors in zip(*pieces.values()):
            piece = dict(zip(pieces, of_tensors))
            change(piece, factors, random_bits(piece["grad"], random), tables_of(piece))


def first_state(weight: Tensor, block: int) -> dict[str, Tensor]:
    """Moments of 0: in the weight's dtype, or as codes with a scale a block."""
    state = {}
    for name in ("exp_avg", "exp_avg_sq"):
        if block == 1:
            state[name] = torch.zeros_like(weight)
        else:
            state[name] = torch.zeros_like(weight, dtype=torch.uint8)
            state[f"{name}_scale"] = torch.zeros_like(weight[..., ::block], dtype=torch.float32)
    return state


def factors_of(step: int, group: dict[str, Any]) -> tuple[float, ...]:
    """What the formula multiplies and adds in a step, from 1: the decay of weights, a gradient's part of the first
    moment, the kept and the new part of the second one, its correction, eps, and the size of the step."""
    beta1, beta2 = group["betas"]
    decay = 1 - group["lr"] * group["weight_decay"]
    step_size = group["lr"] / (1 - beta1**step)
    return decay, 1 - beta1, beta2, 1 - beta2, 1 - beta2**step, group["eps"], step_size


def random_bits(like: Tensor, random: torch.Generator) -> Tensor:
    """Random int16 [4, *like.shape]: one for each of three numbers that are rounded."""
    words = torch.empty(like.numel(), dtype=torch.int64, device=like.device)
    return words.random_(-(2**63), None, generator=random).view(torch.int16).view(4, *like.shape)


def tables_of(pieces: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values of the codes of the moments that are stored as codes."""
    return {name: code_values(name, x.device) for name, x in pieces.items() if x.dtype == torch.uint8}


def update(pieces: dict[str, Tensor], factors: Sequence[Any], noise: Tensor, tables: dict[str, Tensor]) -> None:
    """One step of parts [N, block] of a weight, its gradient and state. Float32 weights (a critic's head) stay so.
    `factors`: those of `factors_of`, as numbers or as float32 [] on the device."""
    decay, of_first, kept_second, of_second, correction, eps, step_size = factors
    grad = pieces["grad"].float()
    first = decode(pieces, "exp_avg", tables).lerp(grad, of_first)
    second = torch.addcmul(decode(pieces, "exp_avg_sq", tables) * kept_second, of_second * grad, grad)
    size = (second / correction).sqrt() + eps
    weight = torch.addcdiv(pieces["weight"].float() * decay, -step_size * first, size)
    found = {"weight": weight, "exp_avg": first, "exp_avg_sq": second}
    for (name, x), bits in zip(found.items(), noise):
        if pieces[name].dtype == torch.bfloat16:
            x = round_stochastically(x, bits)
        elif pieces[name].dtype == torch.uint8:
            x = encode(x, tables[name], pieces[f"{name}_scale"])
        pieces[name].copy_(x)


def decode(pieces: dict[str, Tensor], name: str, tables: dict[str, Tensor]) -> Tensor:
    """A moment in float32."""
    if name not in tables:
        return pieces[name].float()
    return tables[name].take(pieces[name].long()) * pieces[f"{name}_scale"]


def encode(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """The nearest codes of a moment. `values` [256]: its table. `scale` [N, 1] becomes the largest size in each
    block."""
    scale.copy_(x.abs().amax(1, keepdim=True))
    shares = x / scale.clamp(min=torch.finfo(torch.float32).tiny)                       # a block may be all 0
    return torch.bucketize(shares, (values[1:] + values[:-1]) / 2, out_int32=True)


@cache
def code_values(name: str, device: torch.device) -> Tensor:
    """The values of the 256 codes in shares of their scale, rising. A code's highest set bit gives its decade, the
    lower bits its place within the decade. No second moment is 0, because the step is divided by it."""
    bits = {"exp_avg": 7, "exp_avg_sq": 8}[name]                        # beside a sign
    number = torch.arange(1, 2**bits, dtype=torch.float64)
    highest = number.log2().floor()
    sizes = 10 ** (highest - bits + 1) * (0.9 * (number + 0.5) / 2**highest - 0.8)      # from 0.1 to 1
    if name == "exp_avg":
        sizes = torch.cat([-sizes.flip(0), torch.zeros(1), sizes])
    return torch.cat([sizes, torch.ones(1)]).float().to(device)


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """Float32 numbers -> one of the two neighbouring bfloat16 numbers, the nearer with the higher probability, so that
    the mean is x. `bits`: one random int16 for each number."""
    return ((x.view(torch.int32) + (bits.int() & 0xFFFF)) & -0x10000).view(torch.float32).bfloat16()
