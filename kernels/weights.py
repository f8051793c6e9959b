"""The kinds of weights that a linear layer may have, given to an implementation at once or a few rows at a time.

Modules outside of kernels import all kinds from here; each kind has a module of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.fp8_rows import FP8_DYNAMIC, Fp8Activations
from quire.kernels.grouped_weight import (
    BITS,
    E2M1,
    FP4,
    FP8,
    GROUP,
    MAX_ZEROS,
    MXFP4,
    NF4,
    SINT8,
    TABLES,
    UINT4,
    UINT8,
    GroupedWeight,
    grouped_part,
    grouped_rows,
    has_short_scales,
    to_fp8,
)
from quire.kernels.k_quant_weight import (
    BLOCK,
    K_QUANT4,
    K_QUANT6,
    K_QUANTS,
    KQuantWeight,
    k_quant_part,
    k_quant_rows,
)
from quire.kernels.nvfp4_weight import NVFP4, NVFP4_GROUP, Nvfp4Weight, nvfp4_part, nvfp4_rows
from quire.kernels.quantization import (
    INT4_GROUP,
    MAX_INTEGER_FEATURES,
    QuantizedWeight,
    quantize,
    quantized_part,
    quantized_rows,
)

__all__ = [
    "BITS", "BLOCK", "E2M1", "FP4", "FP8", "FP8_DYNAMIC", "GROUP", "INT4_GROUP", "K_QUANT4", "K_QUANT6", "K_QUANTS",
    "MAX_INTEGER_FEATURES", "MAX_ZEROS", "MXFP4", "NF4", "NVFP4", "NVFP4_GROUP", "SINT8", "TABLES", "UINT4",
    "UINT8", "CodedWeight", "Fp8Activations", "GroupedWeight", "KQuantWeight", "LinearWeight", "Nvfp4Weight",
    "QuantizedWeight", "Ranges", "RowsDiffer", "WeightRows", "coded_part", "coded_rows", "grouped_part",
    "grouped_rows", "has_short_scales", "k_quant_part", "k_quant_rows", "nvfp4_part", "nvfp4_rows", "quantize",
    "quantized_part", "quantized_rows", "to_fp8", "whole",
]  # fmt: skip


class RowsDiffer(ValueError):
    """The rows of a weight have several dtypes, kinds or orders, so that they cannot be packed as one."""


CodedWeight = GroupedWeight | KQuantWeight | Nvfp4Weight  # codes with scales, of the kinds of `Ops.code_kinds`
LinearWeight = Tensor | QuantizedWeight | CodedWeight
Ranges = Sequence[tuple[int, int]]  # of rows: first, and one after the last


@dataclass(frozen=True, eq=False)
class WeightRows:
    """Weights that are read while they are packed, so that few of them are in memory twice.

    shape: [N, K]. read: returns the rows of some ranges as one weight. All rows have the same dtype or kind.
    """

    shape: torch.Size
    read: Callable[[Ranges], LinearWeight]


def coded_part(weight: CodedWeight, part: tuple[slice, ...]) -> CodedWeight | None:
    """Return rows and input features of a weight; None if they cut a group. part: slices, or empty for all."""
    if isinstance(weight, GroupedWeight):
        return grouped_part(weight, part)
    return nvfp4_part(weight, part) if isinstance(weight, Nvfp4Weight) else k_quant_part(weight, part)


def coded_rows(weights: Sequence[CodedWeight]) -> CodedWeight | None:
    """Return layers of the same input features as one, along their output channels; None if their kinds differ."""
    grouped = [weight for weight in weights if isinstance(weight, GroupedWeight)]
    nvfp4 = [weight for weight in weights if isinstance(weight, Nvfp4Weight)]
    if len(grouped) == len(weights):
        return grouped_rows(grouped)
    if len(nvfp4) == len(weights):
        return nvfp4_rows(nvfp4)
    of_blocks = [weight for weight in weights if isinstance(weight, KQuantWeight)]
    return k_quant_rows(of_blocks) if len(of_blocks) == len(weights) else None


def whole(weight: LinearWeight | WeightRows) -> LinearWeight:
    """Return all rows of a weight."""
    return weight.read([(0, weight.shape[0])]) if isinstance(weight, WeightRows) else weight
