"""Weights of linear layers in NVFP4: codes of 4 bits, with an E4M3 scale per 16 and a float32 scale per output channel.

Activations are not rounded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.grouped_weight import E2M1

NVFP4 = "nvfp4"
NVFP4_GROUP = 16  # input features with a scale
_BLOCK = 64  # input features of a packed block


@dataclass(frozen=True, eq=False)
class Nvfp4Weight:
    """The weights of one linear layer. weight[n, k] = E2M1[codes[n, k]] * (scales[n, k // 16] * channels[n]).

    Both products are rounded to float32. codes: [N, K] uint8 in 0..15, with K a multiple of 16. scales: [N, K / 16]
    float8_e4m3fn numbers. channels: [N] float32, finite. Raises TypeError or ValueError if they do not fit together.
    """

    codes: Tensor
    scales: Tensor
    channels: Tensor
    kind: str = NVFP4

    def __post_init__(self) -> None:
        if self.kind != NVFP4:
            raise ValueError(f"kind is {self.kind!r}: it must be {NVFP4}")
        if self.codes.dim() != 2 or 0 in self.codes.shape or self.codes.shape[1] % NVFP4_GROUP:
            raise ValueError(f"codes has shape {tuple(self.codes.shape)}, not [N, K], K a multiple of {NVFP4_GROUP}")
        n, k = self.codes.shape
        for name, value, dtype, shape in (
            ("codes", self.codes, torch.uint8, (n, k)),
            ("scales", self.scales, torch.float8_e4m3fn, (n, k // NVFP4_GROUP)),
            ("channels", self.channels, torch.float32, (n,)),
        ):
            if value.dtype is not dtype:
                raise TypeError(f"{name} is {value.dtype}, not {dtype}")
            if value.shape != shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, not {shape}")
        if int(self.codes.max()) > 15:
            raise ValueError("codes must be in 0..15")
        if bool(((self.scales.view(torch.uint8) & 127) == 127).any()) or not bool(self.channels.isfinite().all()):
            raise ValueError("scales and channels must be finite")

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return 4

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights [N, K]: computed in float32, and rounded to `dtype`."""
        scales = self.scales.float() * self.channels[:, None]
        values = torch.tensor(E2M1, device=self.codes.device)[self.codes.int()]
        return (values * scales.repeat_interleave(NVFP4_GROUP, dim=1)).to(dtype)


def nvfp4_part(weight: Nvfp4Weight, part: tuple[slice, ...]) -> Nvfp4Weight | None:
    """Return rows and input features of a weight; None if they cut a group. part: slices, or empty for all."""
    if not part:
        return weight
    rows, columns = part if len(part) == 2 else (part[0], slice(None))
    first, last, _ = columns.indices(weight.codes.shape[1])
    if first % NVFP4_GROUP or last % NVFP4_GROUP:
        return None
    groups = slice(first // NVFP4_GROUP, last // NVFP4_GROUP)
    return Nvfp4Weight(
        weight.codes[rows, first:last].contiguous(), weight.scales[rows, groups].contiguous(), weight.channels[rows]
    )


def nvfp4_rows(weights: Sequence[Nvfp4Weight]) -> Nvfp4Weight:
    """Return layers of the same input features as one, along their output channels."""
    if len(weights) == 1:
        return weights[0]
    scales = torch.cat([weight.scales.view(torch.uint8) for weight in weights]).view(torch.float8_e4m3fn)
    return Nvfp4Weight(
        torch.cat([weight.codes for weight in weights]), scales, torch.cat([weight.channels for weight in weights])
    )


def nvfp4_words(weight: Nvfp4Weight) -> Tensor:
    """Return [N, 1, 1 + 9 * blocks] int32: the words of each row.

    The bits of the scale of the channel; then of each 64 weights a word with the bits of four scales, the first in the
    lowest bits, and 8 words of 8 codes each. A block after the last weight is filled with zeros.
    """
    n, k = weight.codes.shape
    blocks = -(-k // _BLOCK)
    out = torch.empty((n, 1 + blocks * (1 + _BLOCK // 8)), dtype=torch.int32)
    out[:, 0] = weight.channels.view(torch.int32)
    of_blocks = out[:, 1:].view(n, blocks, 1 + _BLOCK // 8)
    scales = F.pad(weight.scales.view(torch.uint8), (0, (blocks * _BLOCK - k) // NVFP4_GROUP))
    of_blocks[..., 0] = scales.view(n, blocks, 4).view(torch.int32)[..., 0]
    codes = F.pad(weight.codes, (0, blocks * _BLOCK - k)).view(n, blocks, _BLOCK // 8, 8)
    words = of_blocks[..., 1:]
    words.copy_(codes[..., 0])
    for at in range(1, 8):
        words |= codes[..., at].int() << (4 * at)
    return out[:, None]
