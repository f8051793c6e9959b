"""Low-rank adapters for the C++ kernels: their factors in the layout of lora.h, and the rows of a step by adapter."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_int64, c_void_p

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.cpu.linear import FLOAT_FORMATS
from quire.kernels.cpu.memory import Arena
from quire.kernels.lora import LINEARS, AdapterBatch, LoraLayer, LoraPart

UNIT_ROWS = 4  # `kAdapterRows` in lora.h
_LANES = 16
_RANKS = 4  # rows of A that are stored together: `kRankGroup` in lora.h
_LINE = 64  # bytes of a row of A that are stored together: `kFactorLine` in lora.h
_LARGE = 1 << 20
_PANEL = 32  # columns, 16 gates and 16 ups: `kPanel` in gemm.h


class _Part(Structure):
    """`AdapterPart` in lora.h."""

    _fields_ = [
        ("a", c_void_p),
        ("b", c_void_p),
        *((name, c_int64) for name in ("rank", "width", "format", "offset", "stride")),
        ("scale", c_double),
    ]


class _Linear(Structure):
    """`AdapterLinear` in lora.h."""

    _fields_ = [("parts", POINTER(_Part)), ("count", c_int64)]


class _Rows(Structure):
    """`AdapterRows` in lora.h."""

    _fields_ = [("rows", c_void_p), ("starts", c_void_p), ("adapters", c_void_p), ("units", c_int64)]


class _Adapters(Structure):
    """`Adapters` in lora.h."""

    _fields_ = [("adapters", c_void_p), ("tokens", _Rows), ("wanted", _Rows)]


class CpuAdapter:
    """An adapter of all layers of a decoder. `address` is that of a table of `AdapterLinear`."""

    def __init__(self, layers: Sequence[LoraLayer], inner: int) -> None:
        """inner: columns of the gate, which come before those of the up projection."""
        # All factors are one stream, in the order in which a step reads them.
        parts = [part for layer in layers for name in LINEARS for part in layer.get(name, ())]
        self.nbytes = sum(rows * columns * part.a.element_size() for part in parts for rows, columns in _padded(part))
        # Large pages for a large adapter; they are freed with it.
        self._memory = (
            Arena().take(self.nbytes) if self.nbytes >= _LARGE else torch.empty(self.nbytes, dtype=torch.uint8)
        )
        self._used = 0
        self._arrays: list[ctypes.Array[_Part]] = []
        table = (_Linear * (len(layers) * len(LINEARS)))()
        for number, layer in enumerate(layers):
            for at, name in enumerate(LINEARS):
                own = [self._pack(part, inner if name == "gate_up" else 0) for part in layer.get(name, ())]
                array = (_Part * len(own))(*own)
                self._arrays.append(array)
                table[number * len(LINEARS) + at] = _Linear(array, len(own))
        self._table = table
        self.address = ctypes.addressof(table)

    def _pack(self, part: LoraPart, inner: int) -> _Part:
        width, rank = part.b.shape
        a = self._keep(_groups(part.a))
        b = self._keep(_chunks(part.b))
        offset, stride = part.offset, _LANES
        if inner:  # gates and ups alternate, 16 columns each
            offset, stride = (_LANES if part.offset >= inner else 0), _PANEL
        return _Part(a, b, rank, width, FORMATS[part.a.dtype], offset, stride, part.scale)

    def _keep(self, factors: Tensor) -> int:
        """Copy factors to the end of the stream, and return their address."""
        size = factors.numel() * factors.element_size()
        to = self._memory[self._used : self._used + size]
        to.view(factors.dtype).view(factors.shape).copy_(factors)
        self._used += size
        return to.data_ptr()


def _groups(a: Tensor) -> Tensor:
    """Return A [rank, K] as [groups of ranks, lines, _RANKS, inputs of a line], padded with zeros."""
    line = _LINE // a.element_size()
    a = F.pad(a, (0, -a.shape[1] % line, 0, -a.shape[0] % _RANKS))
    return a.view(-1, _RANKS, a.shape[1] // line, line).transpose(1, 2)


def _chunks(b: Tensor) -> Tensor:
    """Return B [width, rank] in chunks of columns, with as many ranks together as fit into a line, padded with zeros.

    For bfloat16, the pairs of two ranks: [chunks, pairs, _LANES, 2]; for float32 [chunks, rank, _LANES, 1].
    """
    ranks = _LINE // b.element_size() // _LANES
    b = F.pad(b, (0, -b.shape[1] % ranks, 0, -b.shape[0] % _LANES))
    return b.view(-1, _LANES, b.shape[1] // ranks, ranks).transpose(1, 2)


def _padded(part: LoraPart) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of both factors with their padding."""
    rank, inputs = part.a.shape
    line = _LINE // part.a.element_size()
    return (_up(rank, _RANKS), _up(inputs, line)), (_up(len(part.b), _LANES), _up(rank, line // _LANES))


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


# The factors keep these types; words are float32.
FORMATS = {torch.float32: 0, torch.bfloat16: int(FLOAT_FORMATS[torch.bfloat16])}


class CpuAdapters:
    """The adapters of one step, as the library reads them at `address`."""

    def __init__(self, batch: AdapterBatch) -> None:
        addresses = (c_void_p * len(batch.adapters))()
        for at, adapter in enumerate(batch.adapters):
            assert isinstance(adapter, CpuAdapter)
            addresses[at] = adapter.address
        self._kept: list[object] = [batch, addresses]
        rows = [self._rows(index) for index in (batch.tokens, batch.wanted)]
        self._step = _Adapters(ctypes.addressof(addresses), *rows)
        self.address = ctypes.addressof(self._step)

    def _rows(self, index: np.ndarray) -> _Rows:
        arrays = units(index)
        self._kept += arrays
        return _Rows(*(array.ctypes.data for array in arrays), len(arrays[2]))


def units(index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Group rows by adapter, in units of at most UNIT_ROWS rows.

    index int32 [T]: of `AdapterBatch`. Returns the rows that have an adapter in the order of the units, the start of
    each unit among them, with the end of the last one, and the adapter of each unit; all int32.
    """
    rows = np.flatnonzero(index >= 0)
    rows = rows[np.argsort(index[rows], kind="stable")]
    adapters = index[rows]
    changes = np.flatnonzero(np.diff(adapters, prepend=-1))
    first = np.repeat(changes, np.diff(np.append(changes, len(rows))))
    starts = np.flatnonzero((np.arange(len(rows)) - first) % UNIT_ROWS == 0)
    ends = np.append(starts, len(rows))
    return rows.astype(np.int32), ends.astype(np.int32), adapters[starts].astype(np.int32)
