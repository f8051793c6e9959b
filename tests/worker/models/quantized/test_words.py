"""Integers in words of 32 bits."""

from __future__ import annotations

import pytest
import torch

from quire.worker.models.quantized.words import unpack_columns, unpack_rows


def test_the_lowest_bits_are_the_first_column():
    words = torch.tensor([[0x76543210, -0x01234568]], dtype=torch.int32)  # the second is 0xFEDCBA98
    assert unpack_columns(words, 4, 16).tolist() == [[at - 8 for at in range(16)]]


def test_bytes_are_less_half_of_their_range():
    words = torch.tensor([[-0x7F00_0100]], dtype=torch.int32)  # 0x80FFFF00
    assert unpack_columns(words, 8, 3).tolist() == [[-128, 127, 127]]


def test_an_order_moves_the_columns():
    words = torch.tensor([[0x76543210]], dtype=torch.int32)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    assert unpack_columns(words, 4, 8, order).tolist() == [[at - 8 for at in (0, 4, 1, 5, 2, 6, 3, 7)]]


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_packed_along_the_first_dimension(bits):
    words = torch.arange(6, dtype=torch.int32).view(2, 3)
    unpacked = unpack_rows(words, bits, 32 // bits + 1)
    half = 1 << (bits - 1)
    assert unpacked.shape == (3, 32 // bits + 1)
    assert (unpacked[:, 0] + half).tolist() == [0, 1, 2]
    assert (unpacked[:, -1] + half).tolist() == [3, 4, 5]
