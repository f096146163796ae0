"""Checksums against their definition in Python's integers, and the search for weights that a load did not write."""

import pytest
import torch

from common.engine import sync
from common.engine.sync import checksum, fill_with_nan, nan_parameters


def checksum_by_hand(matrix: torch.Tensor) -> int:
    """The definition, one byte at a time in Python's integers."""
    size = matrix.element_size()
    row_weights = [x | 1 for x in mixed_by_hand(len(matrix))]
    column_weights = [2 * (x >> 57) + 1 for x in mixed_by_hand(matrix.shape[1])]
    total = 0
    for i, row in enumerate(matrix.view(torch.int8).tolist()):
        for k, byte in enumerate(row):
            total += (byte << 8 * (k % size)) * column_weights[k // size] * row_weights[i]
    return signed(total)


def signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def mixed_by_hand(count: int) -> list[int]:
    """splitmix64 with arithmetic shifts."""
    found = []
    for i in range(1, count + 1):
        x = signed(i * 0x9E3779B97F4A7C15)
        x = signed((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9)
        x = signed((x ^ (x >> 27)) * 0x94D049BB133111EB)
        found.append(x ^ (x >> 31))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("shape", [(1, 1), (35, 1), (1, 35), (30, 70)])
@pytest.mark.parametrize("block", [1 << 22, 100])
def test_checksum_weights_each_byte_by_its_place(dtype, shape, block, monkeypatch):
    monkeypatch.setattr(sync, "BLOCK", block)
    monkeypatch.setattr(sync, "MAX_COLUMNS", block)
    some = torch.randint(-128, 128, (shape[0], shape[1] * dtype.itemsize), dtype=torch.int8)
    for data in (some, torch.full_like(some, -128), torch.full_like(some, 127)):
        matrix = data.view(dtype)
        whole = checksum(matrix, dtype)
        assert whole == checksum_by_hand(matrix)
        above, below = matrix.split([len(matrix) // 3, len(matrix) - len(matrix) // 3])
        assert whole == signed(checksum(above, dtype) + checksum(below, dtype, first_row=len(above)))
        if shape[1] == 1:
            assert whole == checksum(matrix[:, 0], dtype)
        else:
            left, right = matrix[:, :17], matrix[:, 17:]
            assert whole == signed(checksum(left, dtype) + checksum(right, dtype, first_column=17))


def test_checksum_in_32_bits_does_not_overflow():
    """The most columns that are added in 32 bits, with the largest products."""
    matrix = torch.full((1, sync.MAX_COLUMNS), -128, dtype=torch.int8)
    weights = ((sync._mixed(0, sync.MAX_COLUMNS, torch.device("cpu")) >> 57) * 2 + 1).sum().item()
    assert checksum(matrix, torch.int8) == signed(-128 * weights * (mixed_by_hand(1)[0] | 1))
    assert 128 * 127 * sync.MAX_COLUMNS < 2**31


def test_checksum_sees_one_bit_and_every_other_order():
    values = torch.randn(40, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    gate, up = values.chunk(2)
    others = [values.t(), values.flip(0), values.flip(1), values.roll(1, 0), values.roll(1, 1), torch.cat([up, gate]),
              torch.cat([values[:1], values[2:3], values[1:2], values[3:]])]
    for bit in range(16):
        others.append(values.clone())
        others[-1].view(torch.int16)[2, 2] ^= 1 << bit if bit < 15 else -(1 << 15)
    sums = {checksum(other, torch.bfloat16) for other in others}
    assert len(sums) == len(others) and checksum(values, torch.bfloat16) not in sums


class Loader(torch.nn.Module):
    """A model whose load is what the test says, in the place of vLLM's."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 6)
        self.norm = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.counts = torch.nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)


@pytest.mark.parametrize(("change", "missing"), [
    (lambda model: None, {"linear.weight", "linear.bias", "norm"}),
    (lambda model: model.norm.data.fill_(2), {"linear.weight", "linear.bias"}),
    (lambda model: model.linear.load_state_dict({"weight": torch.ones(6, 4), "bias": torch.ones(6)}), {"norm"}),
    (lambda model: [p.data.fill_(0) for p in model.parameters()], set()),
    (lambda model: [p.data[:-1].fill_(0) for p in model.parameters()], {"linear.weight", "linear.bias", "norm"}),
])
def test_what_a_load_did_not_write_is_found(change, missing):
    model = Loader()
    fill_with_nan(model)
    change(model)
    assert nan_parameters(model) == missing
