"""Weights of linear layers as codes of 4 or 8 bits with a scale per group, for activations that are not rounded.

The field's term is weight-only quantisation (W4A16, W8A16). Weights of `quantization.py` are multiplied with
activations of 8 bits instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # input features with a scale
UINT4, UINT8, MXFP4, FP8, NF4, FP4, SINT8 = "uint4", "uint8", "mxfp4", "fp8", "nf4", "fp4", "sint8"
BITS = {UINT4: 4, MXFP4: 4, FP8: 8, UINT8: 8, NF4: 4, FP4: 4, SINT8: 8}
KINDS = tuple(BITS)
MAX_ZEROS = {UINT4: 16, UINT8: 255}  # GPTQ stores zero points less one in 4 bits
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# The values of codes. NF4 and FP4 are those of bitsandbytes (QLoRA, https://arxiv.org/abs/2305.14314, appendix E).
TABLES = {
    MXFP4: E2M1,
    NF4: (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
          -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
          0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
          0.7229568362236023, 1.0),
    FP4: tuple(twelfths / 12 for twelfths in
               (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0, -0.0, -0.0625, -8.0, -12.0, -4.0, -6.0, -2.0, -3.0)),
}  # fmt: skip
LARGEST_E4M3 = 448.0
_HEADER_MASK = 255  # the lowest bits of a scale, in which the kernels keep the zero point


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """The weights of one linear layer. weight[n, order[k]] = (value - zeros[n, k // 32]) * scales[n, k // 32].

    codes: [N, K] uint8. kind: what a code stands for. UINT4: 0..15. UINT8: 0..255. SINT8: the bits of an int8 number.
    MXFP4, NF4, FP4: an entry of TABLES. FP8: the bits of a float8_e4m3fn number. scales: [N, ceil(K / 32)] float32,
    finite; with zeros their lowest 8 bits are 0, as those of float16 and bfloat16 numbers. zeros: as scales, uint8 in
    0..16 or 0..255; only of UINT4 and UINT8.
    order: [K] int32, the input feature of each code of a row, a permutation; None: that of the same number.
    Raises TypeError or ValueError if they do not fit together.
    """

    codes: Tensor
    scales: Tensor
    kind: str
    zeros: Tensor | None = None
    order: Tensor | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}: it must be one of {', '.join(KINDS)}")
        if self.codes.dim() != 2 or 0 in self.codes.shape:
            raise ValueError(f"codes has shape {tuple(self.codes.shape)}, not [N, K]")
        if (self.zeros is not None) != (self.kind in MAX_ZEROS):
            raise ValueError(f"zeros are for {' and '.join(MAX_ZEROS)} alone, which need them")
        n, k = self.codes.shape
        wanted: list[tuple[str, Tensor, torch.dtype, tuple[int, ...]]] = [
            ("codes", self.codes, torch.uint8, (n, k)),
            ("scales", self.scales, torch.float32, (n, -(-k // GROUP))),
        ]
        if self.zeros is not None:
            wanted.append(("zeros", self.zeros, torch.uint8, (n, -(-k // GROUP))))
        if self.order is not None:
            wanted.append(("order", self.order, torch.int32, (k,)))
        for name, value, dtype, shape in wanted:
            if value.dtype is not dtype:
                raise TypeError(f"{name} is {value.dtype}, not {dtype}")
            if value.shape != shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, not {shape}")
        if not bool(self.scales.isfinite().all()):
            raise ValueError("scales must be finite")
        if self.kind == FP8 and bool(((self.codes & 127) == 127).any()):
            raise ValueError("codes must be numbers")
        if self.bits == 4 and int(self.codes.max()) > 15:
            raise ValueError("codes of 4 bits must be in 0..15")
        if self.zeros is not None and int(self.zeros.max()) > MAX_ZEROS[self.kind]:
            raise ValueError(f"zeros must be in 0..{MAX_ZEROS[self.kind]}")
        if self.kind in MAX_ZEROS and not has_short_scales(self.scales):
            raise ValueError(f"scales of {self.kind} must have zeros in their lowest 8 bits")
        if self.order is not None:
            each = torch.arange(k, dtype=torch.int32, device=self.order.device)
            if not torch.equal(self.order.sort().values, each):
                raise ValueError(f"order must have each of 0..{k - 1} once")

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return BITS[self.kind]

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights [N, K]: computed in float32, and rounded to `dtype`."""
        k = self.codes.shape[1]
        if self.kind == FP8:
            values = self.codes.view(torch.float8_e4m3fn).float()
        elif self.kind == SINT8:
            values = self.codes.view(torch.int8).float()
        elif self.kind in TABLES:
            values = torch.tensor(TABLES[self.kind], device=self.codes.device)[self.codes.int()]
        else:
            assert self.zeros is not None
            values = self.codes.float() - self.zeros.float().repeat_interleave(GROUP, dim=1)[:, :k]
        weights = (values * self.scales.repeat_interleave(GROUP, dim=1)[:, :k]).to(dtype)
        return weights if self.order is None else weights[:, self.order.argsort()]


def grouped_part(weight: GroupedWeight, part: tuple[slice, ...]) -> GroupedWeight | None:
    """Return rows and input features of a weight; None if they cut a group. part: slices, or empty for all.

    None also for some of the input features of a weight with an order.
    """
    if not part:
        return weight
    rows, columns = part if len(part) == 2 else (part[0], slice(None))
    k = weight.codes.shape[1]
    first, last, _ = columns.indices(k)
    if first % GROUP or (last % GROUP and last < k) or (weight.order is not None and last - first < k):
        return None
    groups = slice(first // GROUP, -(-last // GROUP))
    zeros = None if weight.zeros is None else weight.zeros[rows, groups].contiguous()
    codes, scales = weight.codes[rows, columns].contiguous(), weight.scales[rows, groups].contiguous()
    return GroupedWeight(codes, scales, weight.kind, zeros, weight.order)


def grouped_rows(weights: Sequence[GroupedWeight]) -> GroupedWeight | None:
    """Return layers of the same input features as one, along their output channels; None if kinds or orders differ."""
    kind, order = weights[0].kind, weights[0].order
    for other in weights:
        if other.kind != kind or (other.order is None) != (order is None):
            return None
        if order is not None and other.order is not None and not torch.equal(other.order, order):
            return None
    if len(weights) == 1:
        return weights[0]
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    codes, scales = (
        torch.cat(parts) for parts in zip(*((weight.codes, weight.scales) for weight in weights), strict=True)
    )
    return GroupedWeight(codes, scales, kind, torch.cat(zeros) if zeros else None, order)


def has_short_scales(scales: Tensor) -> bool:
    """Return whether scales, float32, leave space for a zero point: all of float16 or bfloat16 do."""
    return not bool((scales.view(torch.int32) & _HEADER_MASK).any())


def to_fp8(weight: Tensor) -> GroupedWeight:
    """Round weight [N, K], of any floating type and finite, to float8_e4m3fn with a scale per output channel."""
    wide = weight.float()
    scales = (wide.abs().amax(dim=1) / LARGEST_E4M3).clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    values = (wide / scales).clamp_(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)
    groups = -(-weight.shape[1] // GROUP)
    return GroupedWeight(values.view(torch.uint8), scales.expand(-1, groups).contiguous(), FP8)


def packed_words(weight: GroupedWeight) -> Tensor:
    """Return [N, groups, 1 + words] int32: the header of each group of a row, and then its codes.

    A header is the bits of the scale, with the zero point in the lowest 8 of them. The first code of a word is in its
    lowest bits. Codes after the last are zeros.
    """
    n, k = weight.codes.shape
    per_word = 32 // weight.bits
    groups = -(-k // GROUP)
    codes = F.pad(weight.codes, (0, groups * GROUP - k)).view(n, groups, GROUP // per_word, per_word)
    out = torch.empty((n, groups, 1 + GROUP // per_word), dtype=torch.int32, device=weight.codes.device)
    out[..., 0] = weight.scales.view(torch.int32)
    if weight.zeros is not None:
        out[..., 0] |= weight.zeros.int()
    words = out[..., 1:]
    words.copy_(codes[..., 0])
    for at in range(1, per_word):
        words |= codes[..., at].int() << (weight.bits * at)
    return out


def unpacked_words(words: Tensor, kind: str, in_features: int) -> GroupedWeight:
    """Return the weight whose `packed_words` these are: int32 [N, groups, 1 + words]."""
    bits = BITS[kind]
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    codes = ((words[..., 1:, None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8)
    headers, zeros = words[..., 0], None
    if kind in MAX_ZEROS:
        zeros, headers = (headers & _HEADER_MASK).to(torch.uint8), headers & ~_HEADER_MASK
    return GroupedWeight(
        codes.flatten(1)[:, :in_features].contiguous(), headers.contiguous().view(torch.float32), kind, zeros
    )
