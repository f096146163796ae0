"""AdamW in float64, and the codes of its moments in plain Python, for test_bf16_adamw.py and its ranks."""

import torch
from torch import Tensor

from common.checkpoint.state import tensors_of


def dynamic_map(has_sign: bool) -> list[float]:
    """The numbers of the 256 bytes by Dettmers et al. 2021, section 2, rising. Behind the sign each 0 divides by ten;
    behind the first 1 come the digits of an even cut of 0.1 to 1, whose middles count. A first moment's byte of zeros
    is 0, and what is left (in a second moment too, where no number is 0) is 1."""
    found = []
    width = 7 if has_sign else 8
    for byte in range(1, 2**width):
        digits = f"{byte:b}"[1:]
        zeros = width - 1 - len(digits)
        place = (int(digits or "0", 2) + 0.5) / 2 ** len(digits)
        found.append((0.1 + 0.9 * place) / 10**zeros)
    if has_sign:
        found += [-x for x in found] + [0.0]
    return sorted([*found, 1.0])


def ulp(x: Tensor) -> Tensor:
    """The distance of bfloat16 numbers at x, float64: 8 bits of significand."""
    return 2.0 ** (x.double().abs().log2().floor() - 7)


def moment(state: dict[str, Tensor], name: str, weight: Tensor) -> Tensor:
    """This rank's shard of a moment in float64; before the first step 0."""
    if not state:
        return torch.zeros_like(weight.to_local(), dtype=torch.float64)
    stored = state[name].to_local()
    if stored.dtype != torch.uint8:
        return stored.double().clone()
    values = torch.tensor(dynamic_map(name == "exp_avg"), dtype=torch.float64)
    scale = state[f"{name}_scale"].to_local().double()
    block = weight.shape[-1] // scale.shape[-1] if scale.numel() else 1
    return values[stored.long()] * scale.repeat_interleave(block, -1)


def before_step(policy, optimizer) -> dict[str, list[Tensor]]:
    """Weight, moments and gradient of each trained weight, as they are stored."""
    return {name: [p.detach().to_local().double().clone(),
                   *(moment(optimizer.state.get(p, {}), key, p) for key in ("exp_avg", "exp_avg_sq")),
                   p.grad.to_local().double().clone()]
            for name, p in policy.named_parameters() if p.requires_grad}


def check_step(policy, optimizer, before: dict[str, list[Tensor]], step: int, lr: float) -> dict[str, int]:
    """Each number after a step is beside that of AdamW in float64: bfloat16 within a last digit, codes the nearest in
    their block, up to the rounding of float32. Returns how many codes and how many other numbers were looked at, and
    how many of these are not the nearest bfloat16 number."""
    seen = {"codes": 0, "bfloat16": 0, "not nearest": 0}
    for name, p in policy.named_parameters():
        if name not in before:
            continue
        w, m, v, g = before[name]
        old, decay = (w, m, v), 0.1 * (p.ndim >= 2)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w * (1 - lr * decay) - lr * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
        state = optimizer.state[p]
        assert state["step"] == step
        kept = p.detach(), state["exp_avg"], state["exp_avg_sq"]
        for key, want, found, was in zip(("weight", "exp_avg", "exp_avg_sq"), (w, m, v), kept, old):
            if found.dtype == torch.uint8:
                seen["codes"] += check_codes(state, key, want, p)
                continue
            error = (found.to_local().double() - want).abs()
            of_float32 = 1e-6 * (was.abs() + (want - was).abs())
            assert found.dtype == torch.bfloat16 and (error <= ulp(want) + of_float32).all(), (name, key)
            seen["bfloat16"] += error.numel()
            seen["not nearest"] += int((found.to_local() != want.bfloat16()).sum())
    return seen


def check_codes(state: dict[str, Tensor], name: str, want: Tensor, weight: Tensor) -> int:
    """The codes and scales of a moment `want`, in float64. Returns how many there are."""
    scale = state[f"{name}_scale"].to_local().double()
    if not want.numel():
        return 0
    blocks = want.reshape(*scale.shape, -1)
    largest = blocks.abs().amax(-1)
    assert ((scale - largest).abs() <= 1e-6 * largest).all(), name
    found = moment(state, name, weight).view_as(blocks)
    values = torch.tensor(dynamic_map(name == "exp_avg"), dtype=torch.float64)
    middles = (values[1:] + values[:-1]) / 2
    nearest = values[torch.searchsorted(middles, blocks / largest.clamp(min=1e-300)[..., None])] * largest[..., None]
    slack = 1e-6 * largest[..., None]
    assert ((found - blocks).abs() <= (nearest - blocks).abs() + slack).all(), name
    assert name == "exp_avg" or (found[blocks > 0] > 0).all()
    return want.numel()


def bytes_of_moments(optimizer) -> int:
    return sum(x.to_local().nbytes for state in optimizer.state.values() for name, x in state.items() if name != "step")


def whole(policy, optimizer) -> dict[str, Tensor]:
    """All that a checkpoint holds, unsharded."""
    return {name: tensor.full_tensor().clone() if hasattr(tensor, "full_tensor") else tensor.clone()
            for name, tensor in tensors_of({"policy": (policy, optimizer)}).items()}
