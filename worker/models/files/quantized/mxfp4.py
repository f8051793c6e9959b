"""MXFP4, `quant_method` mxfp4, as gpt-oss stores its experts: 4-bit floating-point numbers with a power of two per 32.

`*_blocks` [..., rows, groups, 16] uint8 has two numbers per byte, the first in the lower bits. `*_scales` [..., rows,
groups] uint8 is the exponent plus 127; 255 is no number. Rows are output channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.weights import E2M1, GROUP, MXFP4, GroupedWeight
from quire.worker.models.files.fields import Fields
from quire.worker.models.files.quantized.layout import LayerLayout, StoredType, refuse_unknown

BIAS, NO_NUMBER = 127, 255
LARGEST_SCALE = 125 + BIAS  # 6 times a larger one is no float32 number


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return weights [..., rows, groups * 32], exact in float32 and bfloat16 unless they are below the normal numbers.

    Raises ValueError for other types or shapes, and for a scale that is no number.
    """
    for name, tensor in (("blocks", blocks), ("scales", scales)):
        if tensor.dtype is not torch.uint8:
            raise ValueError(f"{name} has the type {tensor.dtype}, expected torch.uint8")
    if blocks.shape != (*scales.shape, GROUP // 2):
        raise ValueError(f"blocks has the shape {list(blocks.shape)}, expected {[*scales.shape, GROUP // 2]}")
    if bool((scales == NO_NUMBER).any()):
        raise ValueError(f"scales has the value {NO_NUMBER}, which is no number")
    out = torch.empty((*scales.shape, GROUP), dtype=dtype)
    values = torch.tensor(E2M1)
    exponents = scales.to(torch.int32)[..., None] - BIAS
    out[..., 0::2] = torch.ldexp(values[(blocks & 15).int()], exponents)
    out[..., 1::2] = torch.ldexp(values[(blocks >> 4).int()], exponents)
    return out.flatten(-2)


def mxfp4_weight(blocks: Tensor, scales: Tensor) -> GroupedWeight:
    """Return weights [rows, groups * 32] as they are stored. blocks [rows, groups, 16], scales [rows, groups].

    Raises ValueError for a scale that is no number, or too large for float32.
    """
    if int(scales.max()) > LARGEST_SCALE:
        raise ValueError(f"scales has the value {int(scales.max())}, expected at most {LARGEST_SCALE}")
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(1)
    return GroupedWeight(codes, torch.ldexp(torch.ones(scales.shape), scales.int() - BIAS), MXFP4)


@dataclass(frozen=True)
class Mxfp4:
    """A checkpoint whose stacked experts are MXFP4. All linear layers are plain."""

    label: str = "MXFP4"
    stored_as: str = ""
    rounds_activations: bool = False

    def layer(self, name: str, stored_type: StoredType) -> LayerLayout | None:
        """Return None: only experts are quantised."""


def read_mxfp4(fields: Fields) -> Mxfp4:
    """Parse the fields of a `quantization_config`. Raises CheckpointError."""
    refuse_unknown(fields, ("quant_method", "modules_to_not_convert", "dequantize"))
    return Mxfp4()
