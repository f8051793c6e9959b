"""Weights of linear layers in the arithmetic of K-quants, the types of GGUF files that have blocks of 256 weights.

A scale and a minimum belong to 256 weights, and integers that multiply them belong to 16 weights. Activations are not
rounded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.grouped_weight import GROUP

BLOCK, PART = 256, 16  # input features with a scale and a minimum; with a factor and an offset
K_QUANT4, K_QUANT6 = "k_quant4", "k_quant6"
K_QUANTS = {K_QUANT4: 4, K_QUANT6: 6}  # bits of a code


@dataclass(frozen=True, eq=False)
class KQuantWeight:
    """The weights of one linear layer, in blocks b = k // 256 and parts p = k // 16 of input features.

    weight[n, k] = codes[n, k] * (scales[n, b] * factors[n, p]) - minimums[n, b] * offsets[n, p], in float32: the
    products are exact if scales and minimums have at most 16 bits, and the difference is rounded once.
    codes: [N, K] uint8 in 0..15 or 0..63, with K a multiple of 256. scales, minimums: [N, K / 256] float32, finite.
    factors, offsets: [N, K / 16] int8. Raises TypeError or ValueError if they do not fit together.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor
    factors: Tensor
    offsets: Tensor
    kind: str

    def __post_init__(self) -> None:
        if self.kind not in K_QUANTS:
            raise ValueError(f"kind is {self.kind!r}: it must be one of {', '.join(K_QUANTS)}")
        if self.codes.dim() != 2 or 0 in self.codes.shape or self.codes.shape[1] % BLOCK:
            raise ValueError(f"codes has shape {tuple(self.codes.shape)}, not [N, K] with K a multiple of {BLOCK}")
        n, k = self.codes.shape
        for name, value, dtype, width in (
            ("codes", self.codes, torch.uint8, k),
            ("scales", self.scales, torch.float32, k // BLOCK),
            ("minimums", self.minimums, torch.float32, k // BLOCK),
            ("factors", self.factors, torch.int8, k // PART),
            ("offsets", self.offsets, torch.int8, k // PART),
        ):
            if value.dtype is not dtype:
                raise TypeError(f"{name} is {value.dtype}, not {dtype}")
            if value.shape != (n, width):
                raise ValueError(f"{name} has shape {tuple(value.shape)}, not {(n, width)}")
        if not bool(self.scales.isfinite().all() and self.minimums.isfinite().all()):
            raise ValueError("scales and minimums must be finite")
        if int(self.codes.max()) >= 1 << self.bits:
            raise ValueError(f"codes of {self.bits} bits must be in 0..{(1 << self.bits) - 1}")

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return K_QUANTS[self.kind]

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights [N, K]: computed in float32, and rounded to `dtype`."""
        per_block = BLOCK // PART
        factors = self.scales.repeat_interleave(per_block, dim=1) * self.factors
        offsets = self.minimums.repeat_interleave(per_block, dim=1) * self.offsets
        codes = self.codes.view(len(self.codes), -1, PART).float()
        return (codes * factors[..., None] - offsets[..., None]).flatten(1).to(dtype)


def k_quant_part(weight: KQuantWeight, part: tuple[slice, ...]) -> KQuantWeight | None:
    """Return rows and input features of a weight; None if they cut a block. part: slices, or empty for all."""
    if not part:
        return weight
    rows, columns = part if len(part) == 2 else (part[0], slice(None))
    first, last, _ = columns.indices(weight.codes.shape[1])
    if first % BLOCK or last % BLOCK:
        return None
    blocks, parts = slice(first // BLOCK, last // BLOCK), slice(first // PART, last // PART)
    return KQuantWeight(
        weight.codes[rows, first:last].contiguous(),
        weight.scales[rows, blocks].contiguous(),
        weight.minimums[rows, blocks].contiguous(),
        weight.factors[rows, parts].contiguous(),
        weight.offsets[rows, parts].contiguous(),
        weight.kind,
    )


def k_quant_rows(weights: Sequence[KQuantWeight]) -> KQuantWeight:
    """Return layers of the same input features as one, along their output channels, in the kind with the most bits."""
    kind = max((weight.kind for weight in weights), key=K_QUANTS.__getitem__)
    if len(weights) == 1:
        return replace(weights[0], kind=kind)

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(weight, name) for weight in weights])

    return KQuantWeight(
        joined("codes"), joined("scales"), joined("minimums"), joined("factors"), joined("offsets"), kind
    )


def k_quant_words(weight: KQuantWeight) -> Tensor:
    """Return [N, blocks, 2 + 8 * (1 + bits)] int32: the words of each block of a row.

    The bits of scale and minimum; then of each 32 weights: factor, offset, factor and offset as bytes, the first in the
    lowest bits; the lowest 4 bits of the codes, 8 in a word; and of codes of 6 bits the highest 2 bits, 16 in a word.
    """
    n, k = weight.codes.shape
    out = torch.empty((n, k // BLOCK, 2 + BLOCK // GROUP * (1 + weight.bits)), dtype=torch.int32)
    out[..., 0], out[..., 1] = weight.scales.view(torch.int32), weight.minimums.view(torch.int32)
    groups = out[..., 2:].view(n, k // BLOCK, BLOCK // GROUP, 1 + weight.bits)
    integers = torch.stack([weight.factors, weight.offsets], dim=-1).view(*groups.shape[:-1], 4)
    groups[..., 0] = integers.view(torch.int32)[..., 0]
    codes = weight.codes.view(*groups.shape[:-1], GROUP)
    groups[..., 1:5] = _words(codes & 15, 4)
    if weight.bits == 6:
        groups[..., 5:] = _words(codes >> 4, 2)
    return out


def _words(codes: Tensor, bits: int) -> Tensor:
    """Return codes [..., C] uint8 in words [..., C * bits / 32] int32, the first in the lowest bits."""
    per_word = 32 // bits
    parts = codes.view(*codes.shape[:-1], -1, per_word)
    words = parts[..., 0].int()
    for at in range(1, per_word):
        words |= parts[..., at].int() << (bits * at)
    return words
