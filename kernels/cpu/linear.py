"""The packed weights of one linear layer for the C++ kernels. gemm.h has the layouts."""

import ctypes
from collections.abc import Callable, Iterator
from ctypes import Structure, c_int64, c_void_p
from enum import IntEnum

import torch
from torch import Tensor

from quire.kernels.checks import address
from quire.kernels.cpu import library
from quire.kernels.cpu.memory import Arena
from quire.kernels.grouped_weight import BITS, GROUP, GroupedWeight, packed_words
from quire.kernels.k_quant_weight import BLOCK, K_QUANTS, k_quant_words
from quire.kernels.moe import CLAMPED, GELU, SILU
from quire.kernels.nvfp4_weight import Nvfp4Weight, nvfp4_words
from quire.kernels.quantization import INT4_GROUP, QuantizedWeight, group_multipliers
from quire.kernels.weights import CodedWeight, LinearWeight, Ranges, RowsDiffer, WeightRows

_PANEL = 32  # columns, `kPanel` in gemm.h
_UNIT = 128  # bytes, [32 columns][4 bytes]
_CHUNK = 1 << 18  # weights of `WeightRows` that are read at a time


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
    UINT8 = 8
    K_QUANT4 = 9
    K_QUANT6 = 10
    NF4 = 11
    FP4 = 12
    SINT8 = 13
    NVFP4 = 14


# The formats of embedding tables and of weights that are not quantised, for float activations.
FLOAT_FORMATS = {torch.float32: Format.WORDS, torch.bfloat16: Format.BFLOAT16, torch.float16: Format.FLOAT16}


GROUPED_FORMATS = {kind: Format[kind.upper()] for kind in BITS}
K_QUANT_FORMATS = {kind: Format[kind.upper()] for kind in K_QUANTS}

# The activations of gates: `Output` in gemm.h.
GATES = {SILU: 2, GELU: 3, CLAMPED: 4}


class LinearWeights(Structure):
    """`Weights` in gemm.h."""

    _fields_ = [
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("order", c_void_p),
        ("format", c_int64),
    ]


class CpuLinear:
    """Weights in panels of 32 columns (16 gates and 16 ups for `pack_gate_up`).

    Bias, and the scales of columns of quantised weights, are in the same order, in float32.
    """

    __slots__ = ("address", "bias", "dtype", "format", "gate_up", "in_features", "nbytes", "order", "out_features",
                 "scales", "weight", "weights")  # fmt: skip

    def __init__(
        self,
        weight: LinearWeight | WeightRows,
        bias: Tensor | None,
        gate_up: bool,
        dtype: torch.dtype,
        arena: Arena,
        check: Callable[[LinearWeight], None] = lambda rows: None,
    ) -> None:
        """dtype: of activations. The weights are of a type that `CpuOps.weight_dtypes` has, or quantised.

        check: called with the weights, or with some rows of them; raises for weights that cannot be packed.
        """
        n, k = weight.shape
        self.in_features, self.out_features = k, n
        self.dtype, self.gate_up = dtype, gate_up
        width, columns = (_PANEL // 2, n // 2) if gate_up else (_PANEL, n)
        scales: list[Tensor] = []
        self.order: Tensor | None = None
        panel_bytes = panel = 0
        for rows in _chunks(weight, width, columns, gate_up):
            check(rows)
            if panel == 0:
                self.format = _format(rows, dtype)
                self.order = rows.order if isinstance(rows, GroupedWeight) else None
                panel_bytes = _panel_bytes(self.format, k, dtype)
                self.weight = arena.take(-(-columns // width) * panel_bytes)
            self._check_same(rows)
            count = -(-rows.shape[0] // _PANEL)
            packed = self._pack(rows, self.weight[panel * panel_bytes : (panel + count) * panel_bytes], panel_bytes)
            if packed is not None:
                scales.append(_panels(packed, width, gate_up))
            panel += count
        self.scales = torch.cat(scales) if scales else None
        self.bias = None if bias is None else _panels(bias.float(), width, gate_up)
        self.weights = LinearWeights(
            self.weight.data_ptr(),
            *(None if part is None else part.data_ptr() for part in (self.bias, self.scales, self.order)),
            self.format,
        )
        self.address = ctypes.addressof(self.weights)
        self.nbytes = sum(part.nbytes for part in (self.weight, self.bias, self.scales, self.order) if part is not None)

    def _check_same(self, rows: LinearWeight) -> None:
        """Raise RowsDiffer for rows of another format or order than the first rows."""
        order = rows.order if isinstance(rows, GroupedWeight) else None
        same = order is self.order if order is None or self.order is None else torch.equal(order, self.order)
        if _format(rows, self.dtype) is not self.format or not same:
            raise RowsDiffer("the rows of a weight differ in their type, kind or order")

    def _pack(self, weight: LinearWeight, out: Tensor, panel_bytes: int) -> Tensor | None:
        """Write the panels of some rows to `out`. Returns the scales of these rows, if the format has one per row."""
        n, k = weight.shape
        if isinstance(weight, CodedWeight):
            address(weight.codes)
            words = _words(weight)
            out.view(torch.int32).copy_(_group_panels(words, self.gate_up).flatten())
            return None
        common, to = library.load().common, out.data_ptr()
        if not isinstance(weight, QuantizedWeight):
            word_bytes = 2 if self.format is Format.FLOAT16 else 4
            common.pack(address(weight), n, k * weight.element_size(), word_bytes, self.gate_up, panel_bytes, to)
            return None
        values = weight.values.view(torch.uint8) + (128 if weight.bits == 8 else 8)  # modulo 256
        if weight.bits == 8:
            common.pack(address(values), n, k, 4, self.gate_up, panel_bytes, to)
            return weight.scales
        multipliers, scales = group_multipliers(weight.scales)
        common.pack_nibbles(address(values), address(multipliers), n, k, self.gate_up, to)
        return scales


def _chunks(weight: LinearWeight | WeightRows, width: int, columns: int, gate_up: bool) -> Iterator[LinearWeight]:
    """Yield the rows of whole panels, some at a time. width: rows of a panel, of each half with `gate_up`."""
    if not isinstance(weight, WeightRows):
        yield weight
        return
    step = max(1, _CHUNK // (weight.shape[1] * _PANEL)) * width
    for first in range(0, columns, step):
        last = min(first + step, columns)
        ranges: Ranges = [(first, last), (columns + first, columns + last)] if gate_up else [(first, last)]
        yield weight.read(ranges)


def _words(weight: CodedWeight) -> Tensor:
    """Return the words of each row, [N, groups, words] int32."""
    if isinstance(weight, GroupedWeight):
        return packed_words(weight)
    return nvfp4_words(weight) if isinstance(weight, Nvfp4Weight) else k_quant_words(weight)


def _format(weight: LinearWeight, dtype: torch.dtype) -> Format:
    """Return the format of weights for activations of `dtype`."""
    if isinstance(weight, QuantizedWeight):
        return Format.INT8 if weight.bits == 8 else Format.INT4
    if isinstance(weight, CodedWeight):
        return Format[weight.kind.upper()]
    return Format.WORDS if weight.dtype is dtype else FLOAT_FORMATS[weight.dtype]


def _panel_bytes(format_: Format, k: int, dtype: torch.dtype) -> int:
    if format_ is Format.INT4:
        return -(-k // INT4_GROUP) * _PANEL * (2 + INT4_GROUP // 2)
    for kind, grouped in GROUPED_FORMATS.items():
        if format_ is grouped:
            return -(-k // GROUP) * (1 + GROUP * BITS[kind] // 32) * _UNIT
    for kind, of_blocks in K_QUANT_FORMATS.items():
        if format_ is of_blocks:
            return k // BLOCK * (2 + BLOCK // GROUP * (1 + K_QUANTS[kind])) * _UNIT
    if format_ is Format.NVFP4:
        return (1 + -(-k // 64) * 9) * _UNIT
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
