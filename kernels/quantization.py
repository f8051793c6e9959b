"""Weights of linear layers as integers of 8 or 4 bits with scales: their rounding, and the product with activations.

8 bits: one scale per output channel, symmetric: weight = value * scale, with values in -128..127 (this module makes
-127..127). 4 bits: one float16 scale per output channel and group of 32 input features: weight = value * scale, with
values in -8..7. Products have the scales of a channel as integers times one float (`group_multipliers`), so that sums
stay exact over all input features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

INT4_GROUP = 32
MAX_INTEGER_FEATURES = 1 << 17  # input features, for which a sum of products of bytes fits 32 bits
# Bounds of multipliers: a value of 4 bits times one fits 16 bits; the sum over groups of |multiplier| * (the largest
# sum of a group, 32 * 8 * 127) fits 32 bits.
MAX_MULTIPLIER = 4095
MAX_MULTIPLIER_SUM = (2**31 - 1) // (INT4_GROUP * 8 * 127)


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """The quantised weights of one linear layer, of `quantize` or of a checkpoint.

    values: [N, K] int8. scales: [N] float32 for 8 bits, [N, ceil(K / 32)] float16 for 4 bits.
    Raises TypeError or ValueError if they do not fit together.
    """

    values: Tensor
    scales: Tensor
    bits: int

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits is {self.bits}: it must be 4 or 8")
        if self.values.dim() != 2 or 0 in self.values.shape:
            raise ValueError(f"values has shape {tuple(self.values.shape)}, not [N, K]")
        n, k = self.values.shape
        if k > MAX_INTEGER_FEATURES:
            raise ValueError(f"values has {k} input features: quantised weights may have {MAX_INTEGER_FEATURES}")
        shape = (n,) if self.bits == 8 else (n, -(-k // INT4_GROUP))
        dtype = torch.float32 if self.bits == 8 else torch.float16
        for name, value, wanted in (("values", self.values, torch.int8), ("scales", self.scales, dtype)):
            if value.dtype is not wanted:
                raise TypeError(f"{name} is {value.dtype}, not {wanted}")
            if not value.is_contiguous():
                raise ValueError(f"{name} is not contiguous")
        if self.scales.shape != shape:
            raise ValueError(f"scales has shape {tuple(self.scales.shape)}, not {shape}")
        if self.bits == 4 and not -8 <= int(self.values.min()) <= int(self.values.max()) <= 7:
            raise ValueError("values of 4 bits must be in -8..7")
        if self.bits == 4 and not bool(self.scales.isfinite().all()):
            raise ValueError("scales of 4 bits must be finite")

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantized(self) -> Tensor:
        """Return the weights [N, K] in float32."""
        values, scales = self.values.float(), self.scales.float()
        if self.bits == 8:
            return values * scales[:, None]
        return values * scales.repeat_interleave(INT4_GROUP, dim=1)[:, : values.shape[1]]


@dataclass(frozen=True, eq=False)
class QuantizedLinear:
    """The quantised weights of a linear layer for `quantized_linear`, not packed."""

    weight: QuantizedWeight  # [N, K]
    bias: Tensor | None

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        quantized = self.weight.values.nbytes + self.weight.scales.nbytes
        return quantized + (self.bias.nbytes if self.bias is not None else 0)


def quantized_part(weight: QuantizedWeight, part: tuple[slice, ...]) -> QuantizedWeight | None:
    """Return the rows and input features of a rank; None if they cut a group of 4-bit weights."""
    if not part:
        return weight
    values, (rows, columns) = weight.values, part if len(part) == 2 else (part[0], slice(None))
    first, last, _ = columns.indices(values.shape[1])
    scales = weight.scales[rows]
    if weight.bits == 4:
        if first % INT4_GROUP or (last % INT4_GROUP and last < values.shape[1]):
            return None
        scales = scales[:, first // INT4_GROUP : -(-last // INT4_GROUP)]
    return QuantizedWeight(values[rows, columns].contiguous(), scales.contiguous(), weight.bits)


def quantized_rows(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return layers of the same bits and input features as one, along their output channels."""
    if len(weights) == 1:
        return weights[0]
    values = torch.cat([weight.values for weight in weights])
    return QuantizedWeight(values, torch.cat([weight.scales for weight in weights]), weights[0].bits)


def quantize(weight: Tensor, bits: int) -> QuantizedWeight:
    """Round weight [N, K], of any floating type and finite, to 8 or 4 bits."""
    return _to_int8(weight) if bits == 8 else _to_int4(weight)


def _to_int8(weight: Tensor) -> QuantizedWeight:
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / 127
    values = (wide / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_().clamp_(-127, 127)
    return QuantizedWeight(values.to(torch.int8), scales, 8)


def _to_int4(weight: Tensor) -> QuantizedWeight:
    """Map the value of largest magnitude of a group to -8: the range -8..7 has one value more below zero."""
    n, k = weight.shape
    groups = torch.nn.functional.pad(weight.float(), (0, -k % INT4_GROUP)).view(n, -1, INT4_GROUP)
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    scales = (largest / -8).to(torch.float16).clamp_(-65504, 65504)
    inverse = torch.where(scales == 0, 0.0, 1 / scales.float())
    values = (groups * inverse).round_().clamp_(-8, 7)
    flat = values.view(n, -1)[:, :k].to(torch.int8).contiguous()
    return QuantizedWeight(flat, scales.squeeze(2).contiguous(), 4)


def group_multipliers(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales of 4-bit weights as integers: scales[n, g] is about multipliers[n, g] * columns[n].

    scales: [N, groups] float16, finite. Returns multipliers [N, groups] int16 and columns [N] float32. Equal scales of
    a channel are kept to the precision of float32. With 4096 input features an average multiplier is about 500, which
    moves a weight by 0.1 % of itself at most: far less than the rounding to 4 bits.
    """
    wide = scales.double()
    sums = wide.abs().sum(dim=1)  # exact: float16 values are multiples of 2^-24
    # Rounding to integers adds at most half of the number of groups to the sum of the multipliers.
    step = torch.maximum(sums / (MAX_MULTIPLIER_SUM - scales.shape[1]), wide.abs().amax(dim=1) / MAX_MULTIPLIER)
    multipliers = torch.where(step[:, None] > 0, wide / step[:, None], 0.0).round_()
    columns = torch.where(step > 0, sums / multipliers.abs().sum(dim=1), 0.0)
    return multipliers.to(torch.int16), columns.float()


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of x [T, K] float32 to 8 bits. Returns values [T, K] int8 and the scales of the rows [T].

    scale = max |x| / 127. A row whose largest value is below 2^-100 counts as zero and has the scale 0; a row with NaN
    or infinity has the scale NaN and values 0.
    """
    largest = x.abs().amax(dim=1)
    finite = x.isfinite().all(dim=1)
    counts = finite & (largest >= 2.0**-100)
    inverse = torch.where(counts, 127 / largest, 0.0)
    values = torch.where(counts[:, None], x * inverse[:, None], 0.0).round()
    scales = torch.where(finite, torch.where(counts, largest / 127, 0.0), float("nan"))
    return values.to(torch.int8), scales


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Return the product of x [T, K] float32, rounded by `quantize_rows`, and the weights, [T, N] float32.

    The definition of the arithmetic: sums of products of integers over K are exact. With 4 bits each value is first
    multiplied with the multiplier of its group. All further operations are in float32: sum * row scale * column scale.
    The bias is added last.
    """
    rows, scales = quantize_rows(x)
    values, columns = weight.values, weight.scales
    if weight.bits == 4:
        multipliers, columns = group_multipliers(weight.scales)
        values = values * multipliers.repeat_interleave(INT4_GROUP, dim=1)[:, : values.shape[1]]
    out = _exact_product(rows, values) * scales[:, None] * columns
    return out if bias is None else out + bias.float()


def _exact_product(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the products of integers, [T, N] float32: exact in float64 and rounded once."""
    return (rows.double() @ columns.double().T).float()
