"""Checksums against sums of numpy's integers."""

import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from common.sync import checksums as sync
from common.sync.checksums import Checksum, as_numbers, checksum, differing, held_checksums


def words(tensor: torch.Tensor) -> np.ndarray:
    return np.frombuffer(tensor.contiguous().view(torch.int16).numpy().tobytes(), dtype=np.int16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1,), (35,), (30, 70), (3, 5, 7)])
@pytest.mark.parametrize("block", [1 << 20, 100])
def test_a_checksum_is_the_sum_of_the_words(dtype, shape, block, monkeypatch):
    monkeypatch.setattr(sync, "BLOCK", {"cpu": block})
    some = torch.randint(-(2**15), 2**15, (*shape[:-1], shape[-1] * dtype.itemsize // 2), dtype=torch.int16)
    for data in (some, torch.full_like(some, -(2**15)), torch.full_like(some, 2**15 - 1)):
        tensor = data.view(dtype)
        expected = sum(words(tensor).tolist())
        assert expected and checksum(tensor, dtype) == (expected, tensor.numel())
        assert checksum(tensor.movedim(0, -1), dtype) == checksum(tensor, dtype)
        parts = [checksum(part, dtype) for part in tensor.tensor_split(3)]
        assert tuple(map(sum, zip(*parts))) == checksum(tensor, dtype)


def test_what_is_summed_is_cast():
    values = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    assert checksum(values, torch.bfloat16) == checksum(values.bfloat16(), torch.bfloat16)
    assert checksum(values, torch.bfloat16)[0] == words(values.bfloat16()).astype(np.int64).sum()
    assert checksum(values.bfloat16(), torch.float32)[0] == words(values.bfloat16().float()).astype(np.int64).sum()


def test_many_large_words_are_exact():
    """2**24 words of -2**15 and one of 1: float32 would lose the one."""
    data = torch.full((1 << 24,), -(2**15), dtype=torch.int16)
    data[77] = 1
    assert checksum(data.view(torch.bfloat16), torch.bfloat16)[0] == 1 - 2**15 * (2**24 - 1)


def test_the_host_waits_once_for_all_sums():
    held = {str(n): torch.full((n + 1,), n - 3, dtype=torch.int16).view(torch.bfloat16) for n in range(40)}
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        sums = {name: checksum(tensor, torch.bfloat16) for name, tensor in held.items()}
    assert "aten::_local_scalar_dense" not in {event.name for event in seen.events()}
    assert as_numbers(sums) == {str(n): ((n + 1) * (n - 3), n + 1) for n in range(40)}
    assert as_numbers({}) == {}


def test_one_bit_and_one_step_of_one_element_are_found():
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = checksum(values, torch.bfloat16)
    for row, column in torch.randint(64, (20, 2), generator=torch.Generator().manual_seed(1)).tolist():
        values.view(torch.int16)[row, column] += 1
        assert checksum(values, torch.bfloat16) != expected
        values.view(torch.int16)[row, column] -= 1
    others = [values.where(values < 1, torch.nan), values * 1.01, -values]
    for bit in range(16):
        others.append(values.clone())
        others[-1].view(torch.int16)[2, 2] ^= 1 << bit if bit < 15 else -(1 << 15)
    assert expected not in [checksum(other, torch.bfloat16) for other in others]


def test_parts_on_several_ranks_add_up_to_what_was_sent(monkeypatch):
    """Four ranks with two heads of keys: each is on two ranks. Rows of padding are 0, norms are on all ranks."""
    generator = torch.Generator().manual_seed(0)
    whole = {
        "a.q_proj.weight": torch.randn(16, 12, generator=generator),
        "a.k_proj.weight": torch.randn(4, 12, generator=generator),
        "o_proj.weight": torch.randn(12, 16, generator=generator),
        "norm.weight": torch.randn(12, generator=generator),
        "embed.weight": torch.randn(30, 12, generator=generator),
    }
    sent = {name: checksum(tensor, torch.float32) for name, tensor in whole.items()}
    padded = torch.cat([whole["embed.weight"], torch.zeros(2, 12)])

    def module(weight: torch.Tensor, *sizes: int) -> nn.Module:
        layer = nn.Module()
        layer.weight = nn.Parameter(weight.clone())
        layer.output_partition_sizes = sizes
        return layer

    def held(rank: int) -> dict[str, Checksum]:
        q, k = whole["a.q_proj.weight"].chunk(4)[rank], whole["a.k_proj.weight"].chunk(2)[rank // 2]
        model = nn.ModuleDict({
            "a": nn.ModuleDict({"qk_proj": module(torch.cat([q, k]), 4, 2)}), "norm": module(whole["norm.weight"]),
            "o_proj": module(whole["o_proj.weight"].chunk(4, dim=1)[rank]), "embed": module(padded.chunk(4)[rank]),
        })
        model.packed_modules_mapping = {"qk_proj": ["q_proj", "k_proj"]}
        return held_checksums(model, sent, torch.float32)

    ranks = [held(rank) for rank in range(4)]
    assert all(found.keys() == sent.keys() for found in ranks)

    def all_reduce(sums: torch.Tensor, group: None) -> None:
        sums.copy_(torch.stack([torch.tensor([found[name] for name in sorted(found)]) for found in ranks]).sum(0))

    monkeypatch.setattr("vllm.distributed.get_tp_group", lambda: types.SimpleNamespace(cpu_group=None))
    monkeypatch.setattr(sync.dist, "all_reduce", all_reduce)
    assert differing(sent, ranks[0]) == set()
    for name, spoiled in (("a.k_proj.weight", 2), ("norm.weight", 3), ("embed.weight", 0)):
        right = ranks[spoiled][name]
        ranks[spoiled][name] = right[0] + 1, right[1]
        assert differing(sent, ranks[0]) == {name}
        ranks[spoiled][name] = right


def test_what_is_quantised_is_not_compared():
    """Other numbers in another layout, which even the split into parts does not fit."""
    weights = {f"a.{name}.weight": torch.randn(4, 6) for name in ("q_proj", "k_proj", "o_proj")}
    sent = {name: checksum(tensor, torch.bfloat16) for name, tensor in weights.items()}
    model = nn.ModuleDict({"a": nn.ModuleDict({"qk_proj": nn.Module(), "o_proj": nn.Module()})})
    stacked = torch.cat([weights["a.q_proj.weight"], weights["a.k_proj.weight"]])
    for dtype in (torch.float8_e4m3fn, torch.int8):
        model["a"]["qk_proj"].weight = nn.Parameter(stacked.t().to(dtype), requires_grad=False)
        model["a"]["qk_proj"].weight_scale = nn.Parameter(torch.ones(1))
        model["a"]["qk_proj"].output_partition_sizes = [4, 4]
        model["a"]["o_proj"].weight = nn.Parameter(weights["a.o_proj.weight"].bfloat16())
        model.packed_modules_mapping = {"qk_proj": ["q_proj", "k_proj"]}
        assert held_checksums(model, sent, torch.bfloat16) == {"a.o_proj.weight": sent["a.o_proj.weight"]}
