"""Checksums against their definition in Python's integers."""

import pytest
import torch

from common.engine import sync
from common.engine.sync import checksum


def checksum_by_hand(matrix: torch.Tensor) -> int:
    """The definition, one word of 16 bits at a time in Python's integers."""
    words = matrix.view(torch.int16).tolist()
    row_weights = random_by_hand(len(words))
    column_weights = [x >> 48 for x in random_by_hand(len(words[0]))]
    rows = [sum(word * weight for word, weight in zip(row, column_weights)) for row in words]
    return signed(sum(row * weight for row, weight in zip(rows, row_weights)))


def signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def random_by_hand(count: int) -> list[int]:
    return [(x := signed(i * 0x9E3779B97F4A7C15)) ^ (x >> 32) for i in range(1, count + 1)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (35, 1), (1, 35), (30, 70)])
@pytest.mark.parametrize("block", [1 << 20, 100])
def test_checksum_weights_each_word_by_its_place(dtype, shape, block, monkeypatch):
    monkeypatch.setattr(sync, "BLOCK", block)
    some = torch.randint(-(2**15), 2**15, (shape[0], shape[1] * dtype.itemsize // 2), dtype=torch.int16)
    for data in (some, torch.full_like(some, -(2**15)), torch.full_like(some, 2**15 - 1)):
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


def test_long_rows_are_exact():
    """2**20 columns with the largest words: what is added in float64 stays below 2**53."""
    matrix = torch.full((1, 1 << 20), -(2**15), dtype=torch.int16).view(torch.bfloat16)
    assert checksum(matrix, torch.bfloat16) == checksum_by_hand(matrix)
    assert 2**15 * 2**15 * 2**23 <= 2**53


def test_one_step_of_one_element_is_found():
    values = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = checksum(values, torch.bfloat16)
    for row, column in torch.randint(1024, (20, 2), generator=torch.Generator().manual_seed(1)).tolist():
        values.view(torch.int16)[row, column] += 1
        assert checksum(values, torch.bfloat16) != expected
        values.view(torch.int16)[row, column] -= 1
    assert checksum(values, torch.bfloat16) == expected


def test_checksum_sees_one_bit_and_every_other_order():
    values = torch.randn(40, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    gate, up = values.chunk(2)
    others = [values.t(), values.flip(0), values.flip(1), values.roll(1, 0), values.roll(1, 1), torch.cat([up, gate]),
              torch.cat([values[:1], values[2:3], values[1:2], values[3:]]), values.where(values < 1, torch.nan)]
    for bit in range(16):
        others.append(values.clone())
        others[-1].view(torch.int16)[2, 2] ^= 1 << bit if bit < 15 else -(1 << 15)
    sums = {checksum(other, torch.bfloat16) for other in others}
    assert len(sums) == len(others) and checksum(values, torch.bfloat16) not in sums
