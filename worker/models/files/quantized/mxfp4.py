"""MXFP4, `quant_method` mxfp4, as gpt-oss stores its experts: 4-bit floating-point numbers with a power of two per 32.

`*_blocks` [..., rows, groups, 16] uint8 has two numbers per byte, the first in the lower bits. `*_scales` [..., rows,
groups] uint8 is the exponent plus 127; 255 is no number. Rows are output channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.weights import GROUP, MXFP4, GroupedWeight
from quire.shared.model.fields import Fields
from quire.worker.models.files.quantized.layout import (
    LayerLayout,
    Load,
    Stored,
    StoredShape,
    StoredType,
    TensorFault,
    matrix_shape,
    refuse_unknown,
    required,
)
from quire.worker.models.files.quantized.weight import StoredCodes

BIAS = 127
LARGEST_SCALE = 125 + BIAS  # 6 times a larger one is no float32 number


def mxfp4_weight(blocks: Tensor, scales: Tensor) -> GroupedWeight:
    """Return weights [rows, groups * 32] as they are stored. blocks [rows, groups, 16], scales [rows, groups].

    Raises ValueError for a scale that is no number, or too large for float32.
    """
    if int(scales.max()) > LARGEST_SCALE:
        raise ValueError(f"has the value {int(scales.max())}, expected at most {LARGEST_SCALE}")
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(1)
    return GroupedWeight(codes, torch.ldexp(torch.ones(scales.shape), scales.int() - BIAS), MXFP4)


@dataclass(frozen=True)
class Mxfp4Layer:
    """A linear layer of compressed-tensors: codes [n, k / 2] and scales [n, k / 32], both uint8."""

    label: str = "MXFP4"
    scale: str = "weight_scale"
    stored_as: str = ""
    integer_bits: int = 0

    def row_unit(self, k: int) -> int:
        return 1

    def shape(self, stored_shape: StoredShape, load: Load) -> tuple[int, int]:
        n, half = matrix_shape(stored_shape, "weight_packed")
        return n, 2 * half

    def tensors(self, n: int, k: int) -> dict[str, Stored]:
        return {
            "weight_packed": Stored(("U8",), ((n, -(-k // 2)),)),
            self.scale: Stored(("U8",), ((n, -(-k // GROUP)),)),
        }

    def weight(self, n: int, k: int, load: Load) -> StoredCodes:
        scales = required(load, self.scale)
        try:
            if k % GROUP:
                raise ValueError(f"is of {k} input features, expected a multiple of {GROUP}")
            return StoredCodes(mxfp4_weight(required(load, "weight_packed").view(n, -1, GROUP // 2), scales))
        except ValueError as error:
            raise TensorFault(self.scale, str(error), "use a checkpoint of another format") from None


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
