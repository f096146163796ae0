"""Checksums and log-probs, which show that the engine holds the trainer's weights."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn

BLOCK = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Number of elements that are cast at a time: the caches of a CPU hold them, and a GPU has few kernels to launch. As
float64 they take 8 and 128 MiB."""
EXPERTS = {
    "w13_weight": "gate_up_proj",
    "w2_weight": "down_proj",
}
"""The experts of a mixture in vLLM and in transformers: [experts, rows, columns], the same rows in the same order."""
COMPUTED = ("A",)
"""Weights that vLLM stores as something else: of Mamba-2's A_log, -exp(A_log)."""
AS_SENT = {torch.float32, torch.bfloat16, torch.float16}
"""Data types of weights that a checksum can compare. What vLLM quantised has another one, and other numbers."""
Checksum = tuple[Tensor, int]
"""Of a tensor, or of the parts that are held of it: the sum (see `checksum`), and the number of elements."""


def checksum(tensor: Tensor, dtype: torch.dtype) -> Checksum:
    """The exact sum of the elements, which are cast to `dtype` and read as one or two integers of 16 bits: float64 []
    on the tensor's device, which the host does not wait for.

    The sum does not depend on the order, so the sums of a tensor's parts add up to the tensor's sum, wherever the parts
    belong. The probe detects elements in wrong places.
    """
    blocks = tensor.detach().reshape(-1).split(BLOCK[tensor.device.type])
    # float64, which is exact up to 2**53 / 2**15 = 2**38 integers, is summed faster than int64
    totals = [block.to(dtype).view(torch.int16).sum(dtype=torch.float64) for block in blocks]
    return reduce(torch.add, totals), tensor.numel()


def as_numbers(checksums: Mapping[str, Checksum]) -> dict[str, tuple[int, int]]:
    """The sums as integers. The host waits for the device once for all of them."""
    if not checksums:
        return {}
    totals = []
    lengths = []
    for total, numel in checksums.values():
        totals.append(total)
        lengths.append(numel)
    sums = map(int, torch.stack(totals).tolist())
    return dict(zip(checksums, zip(sums, lengths)))


def held_checksums(model: nn.Module, sent: dict[str, Checksum], dtype: torch.dtype) -> dict[str, Checksum]:
    """Checksums of vLLM's copy of each tensor in `sent`, by the tensor's name. Tensors with another name than in
    transformers are left out, and tensors that vLLM quantised, rounded or computes: the probe and the step's own tokens
    judge them."""
    held: dict[str, Checksum] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            names = names_of_parts(model, prefix, name)
            if parameter.dtype not in AS_SENT or sent.keys().isdisjoint(names):  # such as the scales of quantised ones
                continue
            if name in COMPUTED or parameter.dtype.itemsize < dtype.itemsize:
                continue
            parts = [parameter]
            if len(names) > 1:
                parts = parts_of(parameter, module.output_partition_sizes, len(names))
            for part_name, part in zip(names, parts, strict=True):
                if part_name in sent:
                    held[part_name] = checksum(part, dtype)
    return held


def engine_name(model: nn.Module) -> Callable[[str], str]:
    """vLLM's own name of a weight of transformers' model, for models where it has another one."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return lambda name: name
    return replace(mapper, orig_to_new_stacked={})._map_name  # what is fused is compared in parts


def parts_of(parameter: Tensor, rows: list[int], count: int) -> list[Tensor]:
    """The matrices that vLLM has in one, cut at these rows. If it cuts more than transformers has matrices, the first
    one is several of them: queries, keys and values of Qwen3.5's delta nets."""
    more = len(rows) - count + 1
    return list(parameter.split([sum(rows[:more]), *rows[more:]]))


def names_of_parts(model: nn.Module, prefix: str, name: str) -> list[str]:
    """What transformers calls the parts of vLLM's parameter `prefix.name`: several where vLLM has matrices in
    one."""
    path, _, own_name = prefix.rpartition(".")
    matrices = getattr(model, "packed_modules_mapping", {}).get(own_name, ())
    if len(matrices) > 1:  # such as qkv_proj, but not a tower's
        return [f"{path}.{matrix}.{name}" for matrix in matrices]
    if name in EXPERTS:
        return [f"{prefix}.{EXPERTS[name]}".replace(".routed_experts", "")]
    return [f"{prefix}.{name}"]


def differing(sent: dict[str, Checksum], held: dict[str, Checksum]) -> set[str]:
    """Names of the tensors whose parts, over the tensor-parallel ranks, differ from the tensor that was sent.

    If all ranks together hold twice the elements of a tensor, they hold it twice. Rows of padding are 0.
    """
    from vllm.distributed import get_tp_group

    names = sorted(held)
    if not names:  # on all ranks: vLLM names every tensor in another way
        return set()
    of_held = as_numbers(held)
    of_sent = as_numbers(sent)
    held_sums = torch.tensor([of_held[name] for name in names], dtype=torch.int64)  # [names, 2]
    dist.all_reduce(held_sums, group=get_tp_group().cpu_group)
    sent_sums = torch.tensor([of_sent[name] for name in names])  # [names, 2]
    copies = held_sums[:, 1] // sent_sums[:, 1]
    differs = held_sums[:, 0] != sent_sums[:, 0] * copies
    return {names[i] for i in differs.nonzero()[:, 0]}


def check_difference(prob_diff: float, limit: float, where: str) -> None:
    """Raises RuntimeError where a mean |p_engine - p_trainer| is above the limit; 0: no limit."""
    if 0 < limit < prob_diff:
        raise RuntimeError(
            f"after the weight sync, mean |p_engine - p_trainer| is {prob_diff:.4f} on {where}, above "
            f"--rollout.max-probe-diff {limit}: the engine does not hold the trainer's weights"
        )
