"""The blocks of GGUF's quantised types: their weights in float32, and their parts, by the format's definition.

Each function takes blocks as bytes, uint8 [B, bytes]. A block holds one or two float16 scales and the integers that
they multiply: one scale per 32 weights in the older types; in K-quants, scales of 6 or 4 bits per 16 or 32 weights,
which the float16 scales multiply. The integers of IQ4_NL and IQ4_XS are entries of a table. MXFP4 has numbers of
E2M1, and a power of two per 32 weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.weights import E2M1

GROUP = 32  # weights with one scale in the older types
# The integers that the codes of IQ4_NL and IQ4_XS stand for.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E8M0_BIAS = 127


def half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 number at a byte of each block, as float32 [B, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def signed(values: Tensor) -> Tensor:
    """Return bytes as signed integers."""
    return values.contiguous().view(torch.int8)


def nibbles(packed: Tensor) -> Tensor:
    """Return the low halves of bytes [..., n], and then the high halves: [..., 2 n]."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def int4_values(blocks: Tensor) -> Tensor:
    """Return the integers of Q4_0, int8 [B, 32], in -8..7."""
    return nibbles(blocks[:, 2:]).to(torch.int8) - 8


def q4_0(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * int4_values(blocks)


def q4_1(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * nibbles(blocks[:, 4:]) + half(blocks, 2)


def q5_0_codes(blocks: Tensor) -> Tensor:
    """Return the integers of Q5_0, plus 16, uint8 [B, 32]."""
    return nibbles(blocks[:, 6:]) | (_bits(blocks[:, 2:6]) << 4)


def q5_0(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * (q5_0_codes(blocks).to(torch.int8) - 16)


def q5_1(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * (nibbles(blocks[:, 8:]) | (_bits(blocks[:, 4:8]) << 4)) + half(blocks, 2)


def q8_0(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * signed(blocks[:, 2:])


def iq4_nl_values(blocks: Tensor) -> Tensor:
    """Return the integers of IQ4_NL, int8 [B, 32]."""
    return _iq4(nibbles(blocks[:, 2:]))


def iq4_nl(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * iq4_nl_values(blocks)


def iq4_xs_values(blocks: Tensor) -> Tensor:
    """Return the integers of IQ4_XS, int8 [B, 256]."""
    return _iq4(nibbles(blocks[:, 8:].reshape(-1, 8, 16)).flatten(1))


def iq4_xs_scales(blocks: Tensor) -> Tensor:
    """Return the scales of IQ4_XS, float32 [B, 8]: one of 6 bits less 32 per 32 weights, times that of the block."""
    low = (blocks[:, 4:8, None] >> _shifts(4, 2).flatten()) & 15
    high = (blocks[:, 2:4, None] >> _shifts(2, 4).flatten()) & 3
    factors = low.flatten(1) | (high.flatten(1) << 4)
    return half(blocks, 0) * (factors.to(torch.int8) - 32)


def iq4_xs(blocks: Tensor) -> Tensor:
    return (iq4_xs_scales(blocks)[..., None] * iq4_xs_values(blocks).view(-1, 8, GROUP)).flatten(1)


def mxfp4_codes(blocks: Tensor) -> Tensor:
    """Return the codes of MXFP4, uint8 [B, 32]: entries of E2M1."""
    return nibbles(blocks[:, 1:])


def mxfp4_scales(blocks: Tensor) -> Tensor:
    """Return the scales of MXFP4, float32 [B, 1]: powers of two; the largest is infinite."""
    return _powers_of_two(blocks[:, :1].int() - _E8M0_BIAS)


def mxfp4(blocks: Tensor) -> Tensor:
    halves = _powers_of_two(blocks[:, :1].int() - _E8M0_BIAS - 1)  # finite
    return halves * (2 * torch.tensor(E2M1))[mxfp4_codes(blocks).int()]


@dataclass(frozen=True, eq=False)
class KBlocks:
    """Blocks of 256 weights: (code - zero) * (scale * factor), or code * (scale * factor) - minimum * offset.

    codes: [B, 256] uint8. scale, minimum: [B, 1] float32. factors, offsets: [B, 16] int8, of 16 weights each.
    """

    codes: Tensor
    scale: Tensor
    factors: Tensor
    zero: int = 0
    minimum: Tensor | None = None
    offsets: Tensor | None = None

    def expanded(self) -> Tensor:
        """Return the weights, float32 [B, 256]."""
        codes = self.codes.view(-1, 16, 16).to(torch.int8) - self.zero
        weights = (self.scale * self.factors)[..., None] * codes
        if self.minimum is not None and self.offsets is not None:
            weights -= (self.minimum * self.offsets)[..., None]
        return weights.flatten(1)


def q2_k(blocks: Tensor) -> KBlocks:
    scales = blocks[:, :16]
    codes = _pairs_of_bits(blocks[:, 16:80])
    return KBlocks(codes, half(blocks, 80), signed(scales & 15), 0, half(blocks, 82), signed(scales >> 4))


def q3_k(blocks: Tensor) -> KBlocks:
    low = _pairs_of_bits(blocks[:, 32:96]).reshape(-1, 8, 32)
    high = (blocks[:, None, :32] >> _shifts(1, 8)) & 1
    packed = blocks[:, 96:108]
    top = (packed[:, None, 8:] >> _shifts(2, 4)) & 3
    scales = (nibbles(packed[:, :8]) | (top.flatten(1) << 4)).to(torch.int8) - 32
    return KBlocks((low | (high << 2)).flatten(1), half(blocks, 108), scales, 4)


def q4_k(blocks: Tensor) -> KBlocks:
    factors, offsets = _factors(blocks)
    codes = nibbles(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1)
    return KBlocks(codes, half(blocks, 0), factors, 0, half(blocks, 2), offsets)


def q5_k(blocks: Tensor) -> KBlocks:
    low = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = (blocks[:, None, 16:48] >> _shifts(1, 8)) & 1
    factors, offsets = _factors(blocks)
    return KBlocks((low | (high << 4)).flatten(1), half(blocks, 0), factors, 0, half(blocks, 2), offsets)


def q6_k(blocks: Tensor) -> KBlocks:
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _shifts(2, 4)) & 3
    codes = (low | (high.reshape(-1, 8, 32) << 4)).flatten(1)
    return KBlocks(codes, half(blocks, 208), signed(blocks[:, 192:208]), 32)


K_BLOCKS: dict[str, Callable[[Tensor], KBlocks]] = {
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}


def _expands(parts_of: Callable[[Tensor], KBlocks]) -> Callable[[Tensor], Tensor]:
    return lambda blocks: parts_of(blocks).expanded()


EXPANSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
    "MXFP4": mxfp4,
    **{kind: _expands(parts_of) for kind, parts_of in K_BLOCKS.items()},
}


def _powers_of_two(exponents: Tensor) -> Tensor:
    return torch.ldexp(torch.ones(exponents.shape), exponents)


def _iq4(codes: Tensor) -> Tensor:
    return torch.tensor(IQ4_VALUES, dtype=torch.int8)[codes.int()]


def _shifts(width: int, count: int) -> Tensor:
    """Return the shifts to `count` fields of `width` bits, as uint8 [count, 1]."""
    return (torch.arange(count, dtype=torch.uint8) * width)[:, None]


def _bits(packed: Tensor) -> Tensor:
    """Return the bits of 4 bytes, the lowest of the first byte first: [B, 32]."""
    return ((packed[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1)


def _pairs_of_bits(packed: Tensor) -> Tensor:
    """Return the numbers of 2 bits of 64 bytes [B, 256]: of each 32 bytes, first all lowest pairs of bits."""
    return ((packed.reshape(-1, 2, 1, 32) >> _shifts(2, 4)) & 3).flatten(1)


def _factors(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors and offsets of Q4_K and Q5_K, int8 [B, 16]: one of 6 bits per 32 weights."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    offsets = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    twice = [signed(values).repeat_interleave(2, dim=1) for values in (scales, offsets)]
    return twice[0], twice[1]
