"""Integers of 4 or 8 bits, packed into words of 32 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def unpack_columns(words: Tensor, bits: int, width: int, order: Sequence[int] | None = None) -> Tensor:
    """Return the integers of words [R, C] as int8 [R, width], less half of their range: 4 bits are -8..7.

    Integer i of a word is in its bits from bits * i, and belongs to column order[i] of the word's; without an order, to
    column i.
    """
    per_word = 32 // bits
    out = torch.empty((words.shape[0], words.shape[1] * per_word), dtype=torch.int8)
    half, mask = 1 << (bits - 1), (1 << bits) - 1
    for at in range(per_word):
        column = at if order is None else order[at]
        out[:, column::per_word] = ((words >> (bits * at)) & mask) - half
    return out[:, :width]


def unpack_nibbles(stored: Tensor) -> Tensor:
    """Return the codes of bytes [R, C] uint8 as uint8 [R, 2 * C]; the first of a byte is in its lower bits."""
    return torch.stack([stored & 15, stored >> 4], dim=-1).flatten(1)


def unpack_rows(words: Tensor, bits: int, height: int) -> Tensor:
    """Return the integers of words [C, N], packed along the first dimension, as int8 [N, height], less half."""
    return unpack_columns(words.T.contiguous(), bits, height)
