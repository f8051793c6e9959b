"""The weights of one quantised linear layer, as every format stores them: numbers with a scale per block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from quire.kernels.weights import (
    FP8,
    GROUP,
    INT4_GROUP,
    MAX_INTEGER_FEATURES,
    MAX_ZEROS,
    SINT8,
    UINT4,
    UINT8,
    CodedWeight,
    GroupedWeight,
    QuantizedWeight,
    has_short_scales,
)

CHUNK = 1 << 22  # values that are float32 at a time


class StoredWeight(Protocol):
    """The weights [N, K] of a layer, or some rows of them."""

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weights: computed in float32, and rounded to `dtype`."""

    def exact(self, bits: int) -> QuantizedWeight | None:
        """Return the same weights in a layout of the kernels, or None if it cannot hold them without rounding."""

    def grouped(self) -> CodedWeight | None:
        """Return the same weights as codes with scales; None if that would round them."""


@dataclass(frozen=True, eq=False)
class StoredCodes:
    """Weights that are stored as the kernels have them."""

    weight: CodedWeight

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return self.weight.dequantized(dtype)

    def exact(self, bits: int) -> QuantizedWeight | None:
        return None

    def grouped(self) -> CodedWeight:
        return self.weight


@dataclass(frozen=True, eq=False)
class ScaledWeight:
    """weight[n, k] = (values[n, k] - zeros[i, j]) * scales[i, j], with the block (i, j) that holds (n, k).

    values: [N, K], int8 or a floating type. scales: of a floating type, one per block of `block` = (rows, columns).
    zeros: as many as scales, int16; None: 0. groups: the block column j of each of the K input features, int64; None:
    k // columns. bits: of the stored numbers.
    """

    values: Tensor
    scales: Tensor
    block: tuple[int, int]
    zeros: Tensor | None = None
    groups: Tensor | None = None
    bits: int = 8

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
        """Return the same weights as codes with a scale per group; None if that would round them.

        Blocks must be of whole groups. Scales of integers must leave space for the zero point, unless they have 8 bits
        and no zero points. Input features in another order than their groups are put in the order of the groups.
        """
        n, k = self.values.shape
        if self.scales.shape[1] > 1 and self.block[1] % GROUP:
            return None
        if self.groups is not None:
            return self._in_order()
        rows, columns = torch.arange(n) // self.block[0], torch.arange(0, k, GROUP) // self.block[1]
        scales = self.scales.float()[rows][:, columns].contiguous()
        if self.values.dtype is torch.float8_e4m3fn:
            return GroupedWeight(self.values.contiguous().view(torch.uint8), scales, FP8)
        if self.values.dtype is not torch.int8:
            return None
        if not has_short_scales(scales):
            is_plain = self.bits == 8 and self.zeros is None
            return GroupedWeight(self.values.contiguous().view(torch.uint8), scales, SINT8) if is_plain else None
        kind, half = (UINT4, 8) if self.bits == 4 else (UINT8, 128)
        if kind == UINT4 and not _fits_4_bits(self.values):
            return None
        zeros = torch.full_like(scales, half, dtype=torch.int16)
        if self.zeros is not None:
            zeros += self.zeros[rows][:, columns]
        if int(zeros.min()) < 0 or int(zeros.max()) > MAX_ZEROS[kind]:
            return None
        codes = self.values.contiguous().view(torch.uint8) + half  # modulo 256
        return GroupedWeight(codes, scales, kind, zeros.to(torch.uint8))

    def _in_order(self) -> GroupedWeight | None:
        """Return the weights with the input features of a group as neighbours; None if groups differ in size."""
        assert self.groups is not None
        order = self.groups.argsort(stable=True)
        k = self.values.shape[1]
        if not torch.equal(self.groups[order], torch.arange(k) // self.block[1]):
            return None
        grouped = replace(self, values=self.values[:, order].contiguous(), groups=None).grouped()
        return None if grouped is None else replace(grouped, order=order.int())

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
