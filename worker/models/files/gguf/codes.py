"""Blocks of a GGUF file as weights that the kernels expand while they multiply: codes with scales, nothing rounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.kernels.weights import K_QUANT4, K_QUANT6, K_QUANTS, MXFP4, UINT4, UINT8, GroupedWeight, KQuantWeight
from quire.worker.models.files.gguf.blocks import (
    K_BLOCKS,
    half,
    int4_values,
    iq4_nl_values,
    iq4_xs_scales,
    iq4_xs_values,
    mxfp4_codes,
    mxfp4_scales,
    q5_0_codes,
    signed,
)

# The kind of the weights of each type that has one.
KINDS = {
    "Q4_0": UINT4,
    "Q5_0": UINT8,
    "Q8_0": UINT8,
    "Q2_K": K_QUANT4,
    "Q3_K": K_QUANT4,
    "Q4_K": K_QUANT4,
    "Q5_K": K_QUANT6,
    "Q6_K": K_QUANT6,
    "IQ4_NL": UINT8,
    "IQ4_XS": UINT8,
    "MXFP4": MXFP4,
}
_LARGEST_SCALE = 2.0**125  # of MXFP4: 6 times a larger one is no float32 number
# The integers of the types with a scale for each 32 of them.
_INTEGERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": int4_values,
    "Q8_0": lambda blocks: signed(blocks[:, 2:]),
    "IQ4_NL": iq4_nl_values,
    "IQ4_XS": iq4_xs_values,
}


def common_kind(types: Sequence[str]) -> str | None:
    """Return the kind of weights side by side that have these types; None without such a kind."""
    kinds = {KINDS.get(type_name) for type_name in types}
    if len(kinds) == 1:
        return kinds.pop()
    return K_QUANT6 if kinds <= set(K_QUANTS) else None


def codes_of(type_: str, blocks: Tensor, rows: int, kind: str) -> GroupedWeight | KQuantWeight:
    """Return the weights of blocks, uint8 [B, bytes], of some rows. kind: of `common_kind`.

    Raises ValueError for scales that are not finite.
    """
    if type_ in K_BLOCKS:
        parts = K_BLOCKS[type_](blocks)
        minimum = parts.scale * parts.zero if parts.minimum is None else parts.minimum
        offsets = parts.factors if parts.offsets is None else parts.offsets
        codes, scales, minimums, factors, offsets = (
            part.reshape(rows, -1).contiguous() for part in (parts.codes, parts.scale, minimum, parts.factors, offsets)
        )
        return KQuantWeight(codes, scales, minimums, factors, offsets, kind)
    if type_ == "MXFP4":
        codes, scales = mxfp4_codes(blocks), mxfp4_scales(blocks).reshape(rows, -1)
        if float(scales.max()) > _LARGEST_SCALE:
            raise ValueError("scales must be finite, and so must their products with 6")
        return GroupedWeight(codes.reshape(rows, -1).contiguous(), scales.contiguous(), kind)
    if type_ == "Q5_0":
        codes, zero = q5_0_codes(blocks), 16
    else:
        values, zero = _INTEGERS[type_](blocks), 8 if kind == UINT4 else 128
        codes = values.view(torch.uint8) + zero  # modulo 256
    scales = (iq4_xs_scales(blocks) if type_ == "IQ4_XS" else half(blocks, 0)).reshape(rows, -1).contiguous()
    zeros = torch.full(scales.shape, zero, dtype=torch.uint8)
    return GroupedWeight(codes.reshape(rows, -1).contiguous(), scales, kind, zeros)
