"""Checks that the engine holds the trainer's weights: checksums, and a search for weights that a load did not write."""

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROW = 2048
"""Number of elements that a checksum adds in 32 bits."""


def checksum(tensor: Tensor) -> int:
    """Sum of the elements, each read as its bytes, signed: exact; adds up over the parts of a tensor in any order."""
    size = tensor.element_size()
    data = tensor.detach().contiguous().view(-1).view(torch.int8).view(-1, size)
    rows = len(data) // ROW
    whole, rest = data[: rows * ROW].view(rows, ROW * size), data[rows * ROW :]
    if tensor.device.type == "cpu":  # as a product of matrices: torch widens before it adds, 9 times slower
        sums = torch._int_mm(whole, torch.eye(size, dtype=torch.int8).repeat(ROW, 1)).sum(0, dtype=torch.int64)
    else:
        sums = whole.sum(0, dtype=torch.int64).view(ROW, size).sum(0)
    sums += rest.sum(0, dtype=torch.int64)
    return sum(x << 8 * i for i, x in enumerate(sums.tolist()))


def compare_checksums(
    model: nn.Module, sent: dict[str, int], packed: dict[str, int], dtype: torch.dtype
) -> dict[str, tuple[int, int]]:
    """Checksums of what was sent and of what the engine's tensors hold, summed over its tensor-parallel ranks.

    Where vLLM fuses tensors (q, k, v; gate, up), the sum over the parts must agree. `packed`: taken before packing.
    Left out: quantised tensors, and keys and values where heads are repeated over ranks.
    """
    from vllm.distributed import get_tp_group

    fused = {part: whole for whole, parts in model.packed_modules_mapping.items() for part in parts}
    want: dict[str, int] = {}
    for name, value in sent.items():
        path = [fused.get(part, part) for part in name.split(".")]
        want[".".join(path)] = want.get(".".join(path), 0) + value
    held, ranks = dict(packed), get_tp_group().world_size
    for name in {*want, *packed}:
        path, _, of = name.rpartition(".")
        with contextlib.suppress(AttributeError):  # the engine has no such module
            module = model.get_submodule(path)
            parameter = getattr(module, of, None)
            if name not in packed and parameter is not None and parameter.dtype == dtype and parameter.numel():
                held[name] = checksum(parameter)
            if getattr(module, "num_kv_head_replicas", 1) > 1:
                held.pop(name, None)
    names = sorted(held)
    total = torch.tensor([held[name] for name in names], dtype=torch.int64)
    dist.all_reduce(total, group=get_tp_group().cpu_group)
    # whole copies on every rank (norms, some biases) add up to `ranks` times the sum
    return {n: (want[n], want[n] if have == ranks * want[n] else have) for n, have in zip(names, total.tolist())}


@torch.no_grad()
def fill_with_nan(model: nn.Module) -> None:
    """Every floating-point parameter becomes NaN: after a load, `nan_parameters` are those that it did not write."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.fill_(torch.nan)


def nan_parameters(module: nn.Module) -> set[str]:
    """Names of the parameters that hold a NaN."""
    return {name for name, parameter in module.named_parameters() if parameter.isnan().any()}
