"""The weights of one quantised linear layer, as every format stores them: numbers with a scale per block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.grouped_weight import FP8, GROUP, MAX_ZERO, UINT4, GroupedWeight, has_short_scales
from quire.kernels.quantization import INT4_GROUP, MAX_INTEGER_FEATURES, QuantizedWeight

CHUNK = 1 << 22  # values that are float32 at a time


@dataclass(frozen=True, eq=False)
class ScaledWeight:
    """weight[n, k] = (values[n, k] - zeros[i, j]) * scales[i, j], with the block (i, j) that holds (n, k).

    values: [N, K], int8 or a floating type. scales: of a floating type, one per block of `block` = (rows, columns).
    zeros: as many as scales, int16; None: 0. groups: the block column j of each of the K input features, int64; None:
    k // columns.
    """

    values: Tensor
    scales: Tensor
    block: tuple[int, int]
    zeros: Tensor | None = None
    groups: Tensor | None = None

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [N, K]: computed in float32, and rounded to `dtype`."""
        n, k = self.values.shape
        out = torch.empty((n, k), dtype=dtype)
        step = max(1, CHUNK // k)
        for start in range(0, n, step):
            rows = torch.arange(start, min(start + step, n))
            values = self.values[start : start + step].float()
            if self.zeros is not None:
                values -= self._spread(self.zeros, rows)
            out[start : start + step] = values.mul_(self._spread(self.scales, rows))
        return out

    def _spread(self, per_block: Tensor, rows: Tensor) -> Tensor:
        """Return the entry of each weight of these rows in float32; [R, 1] if a block has all input features."""
        of_rows = per_block[rows // self.block[0]].float()
        if of_rows.shape[1] == 1:
            return of_rows
        return of_rows[:, self._columns()]

    def _columns(self) -> Tensor:
        return torch.arange(self.values.shape[1]) // self.block[1] if self.groups is None else self.groups

    def exact(self, bits: int) -> QuantizedWeight | None:
        """Return the same weights in a layout of the kernels, or None if it cannot hold them without rounding."""
        if self.values.dtype is not torch.int8 or self.groups is not None:
            return None
        if self.zeros is not None and bool(self.zeros.any()):
            return None
        return self._int8() if bits == 8 else self._int4()

    def grouped(self) -> GroupedWeight | None:
        """Return the same weights as codes with a scale per group; None if they are not of 4 bits or FP8.

        Blocks must be of whole groups, and scales of 4 bits must leave space for the zero point.
        """
        n, k = self.values.shape
        if self.groups is not None or (self.scales.shape[1] > 1 and self.block[1] % GROUP):
            return None
        rows, columns = torch.arange(n) // self.block[0], torch.arange(0, k, GROUP) // self.block[1]
        scales = self.scales.float()[rows][:, columns].contiguous()
        if self.values.dtype is torch.float8_e4m3fn:
            return GroupedWeight(self.values.contiguous().view(torch.uint8), scales, FP8)
        if self.values.dtype is not torch.int8 or not _fits_4_bits(self.values) or not has_short_scales(scales):
            return None
        zeros = torch.full_like(scales, 8, dtype=torch.int16)
        if self.zeros is not None:
            zeros += self.zeros[rows][:, columns]
        if int(zeros.min()) < 0 or int(zeros.max()) > MAX_ZERO:
            return None
        return GroupedWeight((self.values + 8).view(torch.uint8), scales, UINT4, zeros.to(torch.uint8))

    def _int8(self) -> QuantizedWeight | None:
        n, k = self.values.shape
        if self.scales.shape[1] != 1 or k > MAX_INTEGER_FEATURES:
            return None
        scales = self.scales.float()[torch.arange(n) // self.block[0], 0]
        return QuantizedWeight(self.values.contiguous(), scales.contiguous(), 8)

    def _int4(self) -> QuantizedWeight | None:
        n, k = self.values.shape
        if (self.scales.shape[1] > 1 and self.block[1] % INT4_GROUP) or not _fits_4_bits(self.values):
            return None
        narrow = self.scales.to(torch.float16)
        if k > MAX_INTEGER_FEATURES or not narrow.isfinite().all():
            return None
        if not torch.equal(narrow.float(), self.scales.float()):
            return None
        firsts = torch.arange(0, k, INT4_GROUP) // self.block[1]
        scales = narrow[torch.arange(n) // self.block[0]][:, firsts]
        return QuantizedWeight(self.values.contiguous(), scales.contiguous(), 4)


def _fits_4_bits(values: Tensor) -> bool:
    low, high = values.aminmax()
    return bool(low >= -8 and high <= 7)


def part_of(weight: QuantizedWeight, part: tuple[slice, ...]) -> QuantizedWeight | None:
    """Return the rows and input features of a rank; None if they cut a group of 4-bit weights."""
    if not part:
        return weight
    values, (rows, columns) = weight.values, part
    first, last, _ = columns.indices(values.shape[1])
    scales = weight.scales[rows]
    if weight.bits == 4:
        if first % INT4_GROUP or (last % INT4_GROUP and last < values.shape[1]):
            return None
        scales = scales[:, first // INT4_GROUP : -(-last // INT4_GROUP)]
    return QuantizedWeight(values[part].contiguous(), scales.contiguous(), weight.bits)


def joined(weights: list[QuantizedWeight]) -> QuantizedWeight:
    """Return layers of the same bits and input features as one, along their output channels."""
    values = torch.cat([weight.values for weight in weights])
    return QuantizedWeight(values, torch.cat([weight.scales for weight in weights]), weights[0].bits)
