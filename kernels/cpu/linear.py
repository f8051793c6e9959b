"""The packed weights of one linear layer for the C++ kernels. gemm.h has the layouts."""

import ctypes
from ctypes import Structure, c_int64, c_void_p
from enum import IntEnum

import torch
from torch import Tensor

from quire.kernels.cpu import library
from quire.kernels.cpu.memory import Arena
from quire.kernels.grouped_weight import FP8, GROUP, MXFP4, UINT4, GroupedWeight, LinearWeight, packed_words
from quire.kernels.moe import CLAMPED, GELU, SILU
from quire.kernels.quantization import INT4_GROUP, QuantizedWeight, group_multipliers

_PANEL = 32  # columns, `kPanel` in gemm.h
_UNIT = 128  # bytes, [32 columns][4 bytes]


class Format(IntEnum):
    """`Format` in gemm.h."""

    WORDS = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    INT8 = 3
    INT4 = 4
    UINT4 = 5
    MXFP4 = 6
    FP8 = 7


# The formats of embedding tables and of weights that are not quantised, for float activations.
FLOAT_FORMATS = {torch.float32: Format.WORDS, torch.bfloat16: Format.BFLOAT16, torch.float16: Format.FLOAT16}


GROUPED_FORMATS = {UINT4: Format.UINT4, MXFP4: Format.MXFP4, FP8: Format.FP8}


# The activations of gates: `Output` in gemm.h.
GATES = {SILU: 2, GELU: 3, CLAMPED: 4}


class LinearWeights(Structure):
    """`Weights` in gemm.h."""

    _fields_ = [("panels", c_void_p), ("bias", c_void_p), ("scales", c_void_p), ("format", c_int64)]


class CpuLinear:
    """Weights in panels of 32 columns (16 gates and 16 ups for `pack_gate_up`).

    Bias, and the scales of columns of quantised weights, are in the same order, in float32.
    """

    __slots__ = ("address", "bias", "dtype", "format", "gate_up", "in_features", "nbytes", "out_features", "scales",
                 "weight", "weights")  # fmt: skip

    def __init__(
        self, weight: LinearWeight, bias: Tensor | None, gate_up: bool, dtype: torch.dtype, arena: Arena
    ) -> None:
        """dtype: of activations. The weights are of a type that `CpuOps.weight_dtypes` has, or quantised."""
        n, k = weight.shape
        self.in_features, self.out_features = k, n
        self.dtype, self.gate_up = dtype, gate_up
        width, columns = (_PANEL // 2, n // 2) if gate_up else (_PANEL, n)
        scales = multipliers = None
        if isinstance(weight, QuantizedWeight):
            self.format, scales = Format.INT8, weight.scales
            if weight.bits == 4:
                self.format = Format.INT4
                multipliers, scales = group_multipliers(weight.scales)
        elif isinstance(weight, GroupedWeight):
            self.format = GROUPED_FORMATS[weight.kind]
        else:
            self.format = Format.WORDS if weight.dtype is dtype else FLOAT_FORMATS[weight.dtype]
        panel_bytes = _panel_bytes(self.format, k, dtype)
        self.weight = arena.take(-(-columns // width) * panel_bytes)
        self._pack(weight, multipliers, panel_bytes)
        self.scales = None if scales is None else _panels(scales, width, gate_up)
        self.bias = None if bias is None else _panels(bias.float(), width, gate_up)
        self.weights = LinearWeights(
            self.weight.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            None if self.scales is None else self.scales.data_ptr(),
            self.format,
        )
        self.address = ctypes.addressof(self.weights)
        self.nbytes = sum(part.nbytes for part in (self.weight, self.bias, self.scales) if part is not None)

    def _pack(self, weight: LinearWeight, multipliers: Tensor | None, panel_bytes: int) -> None:
        common, out = library.load().common, self.weight.data_ptr()
        n, k = weight.shape
        if isinstance(weight, GroupedWeight):
            self.weight.view(torch.int32).copy_(_group_panels(packed_words(weight), self.gate_up).flatten())
            return
        if not isinstance(weight, QuantizedWeight):
            word_bytes = 2 if self.format is Format.FLOAT16 else 4
            row_bytes = k * weight.element_size()
            common.pack(weight.data_ptr(), n, row_bytes, word_bytes, self.gate_up, panel_bytes, out)
            return
        offset = 128 if weight.bits == 8 else 8
        values = (weight.values.short() + offset).to(torch.uint8)
        if multipliers is None:
            common.pack(values.data_ptr(), n, k, 4, self.gate_up, panel_bytes, out)
        else:
            common.pack_nibbles(values.data_ptr(), multipliers.data_ptr(), n, k, self.gate_up, out)


def _panel_bytes(format_: Format, k: int, dtype: torch.dtype) -> int:
    if format_ is Format.INT4:
        return -(-k // INT4_GROUP) * _PANEL * (2 + INT4_GROUP // 2)
    if format_ in GROUPED_FORMATS.values():
        return -(-k // GROUP) * (1 + GROUP * (8 if format_ is Format.FP8 else 4) // 32) * _UNIT
    value_bytes = {Format.INT8: 1, Format.WORDS: dtype.itemsize}.get(format_, 2)
    return -(-k * value_bytes // 4) * _UNIT


def _panels(values: Tensor, width: int, gate_up: bool) -> Tensor:
    """Return a value per row of the weights in the order of packed columns, padded with zeros."""
    parts = values.reshape(2 if gate_up else 1, -1)
    padded = torch.nn.functional.pad(parts, (0, -parts.shape[1] % width))
    return padded.view(len(parts), -1, width).transpose(0, 1).flatten().contiguous()


def _group_panels(words: Tensor, gate_up: bool) -> Tensor:
    """Return the words of rows, [N, groups, words], in panels: [panels, groups, words, 32], padded with zeros."""
    width = _PANEL // 2 if gate_up else _PANEL
    parts = words.view(2 if gate_up else 1, -1, *words.shape[1:])
    padded = torch.nn.functional.pad(parts, (0, 0, 0, 0, 0, -parts.shape[1] % width))
    columns = padded.view(len(parts), -1, width, *words.shape[1:])  # [halves, panels, width, groups, words]
    return columns.permute(1, 3, 4, 0, 2).flatten(-2)
