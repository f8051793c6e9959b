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
from quire.kernels.lora import (
    ENDS,
    LINEARS,
    OWN_NORMS,
    AdapterBatch,
    LoraLayer,
    LoraPart,
    NormsOfLayer,
    changed_ends,
    norm_bytes,
)

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
        ("gains", c_void_p),
        ("shifts", c_void_p),
    ]


class _Linear(Structure):
    """`AdapterLinear` in lora.h."""

    _fields_ = [("parts", POINTER(_Part)), ("count", c_int64)]


class _Rows(Structure):
    """`AdapterRows` in lora.h."""

    _fields_ = [
        ("rows", c_void_p),
        ("starts", c_void_p),
        ("adapters", c_void_p),
        ("units", c_int64),
        ("index", c_void_p),
    ]


class _Adapters(Structure):
    """`Adapters` in lora.h."""

    _fields_ = [("adapters", c_void_p), ("tokens", _Rows), ("wanted", _Rows), ("norms", c_void_p)]


class CpuAdapter:
    """An adapter of all layers of a decoder.

    address: of a table of `AdapterLinear` of all layers. ends: that of such a table of ENDS. norms_address: of a table
    of OWN_NORMS of all layers, or None.
    """

    def __init__(self, layers: Sequence[LoraLayer], inner: int, norms: Sequence[NormsOfLayer] = ()) -> None:
        """inner: columns of the gate, which come before those of the up projection."""
        self.changes, self.norms = changed_ends(layers), norms
        # All factors are one stream, in the order in which a step reads them.
        parts = [(name, part) for layer in layers for name in (*LINEARS, *ENDS) for part in layer.get(name, ())]
        size = sum(_packed_bytes(name, part) for name, part in parts)
        # Large pages for a large adapter; they are freed with it.
        self._memory = Arena().take(size) if size >= _LARGE else torch.empty(size, dtype=torch.uint8)
        self._used = 0
        self._arrays: list[ctypes.Array[_Part]] = []
        self._gains: list[Tensor] = []
        self._table = self._pack_all(layers, LINEARS, inner)
        self._ends = self._pack_all(layers[-1:], ENDS, 0)
        self.address, self.ends = ctypes.addressof(self._table), ctypes.addressof(self._ends)
        own = (c_void_p * (len(norms) * len(OWN_NORMS)))()
        for number, of_layer in enumerate(norms):
            for name, weight in of_layer.items():
                own[number * len(OWN_NORMS) + OWN_NORMS.index(name)] = weight.data_ptr()
        self._own = own
        self.norms_address = ctypes.addressof(own) if norms else None
        self.nbytes = size + sum(gains.nbytes for gains in self._gains) + norm_bytes(norms)

    def _pack_all(self, layers: Sequence[LoraLayer], names: Sequence[str], inner: int) -> ctypes.Array[_Linear]:
        table = (_Linear * (len(layers) * len(names)))()
        for number, layer in enumerate(layers):
            for at, name in enumerate(names):
                own = [self._pack(name, part, inner if name == "gate_up" else 0) for part in layer.get(name, ())]
                array = (_Part * len(own))(*own)
                self._arrays.append(array)
                table[number * len(names) + at] = _Linear(array, len(own))
        return table

    def _pack(self, name: str, part: LoraPart, inner: int) -> _Part:
        width, rank = part.b.shape
        a = self._keep(part.a.T if name == "embedding" else _groups(part.a))
        b = self._keep(_chunks(part.b))
        offset, stride = part.offset, _LANES
        if inner:  # gates and ups alternate, 16 columns each
            offset, stride = (_LANES if part.offset >= inner else 0), _PANEL
        gains, shifts = (
            (None, None) if part.gains is None else (self._columns(part.gains[0], 1), self._columns(part.gains[1], 0))
        )
        return _Part(a, b, rank, width, FORMATS[part.a.dtype], offset, stride, part.scale, gains, shifts)

    def _columns(self, values: Tensor, neutral: float) -> int | None:
        """Keep a value per column, and return the address; None if all are neutral, so that a step reads less."""
        if bool((values == neutral).all()):
            return None
        self._gains.append(F.pad(values.float(), (0, -len(values) % _LANES)).contiguous())
        return self._gains[-1].data_ptr()

    def _keep(self, factors: Tensor) -> int:
        """Copy factors to the end of the stream, and return their address."""
        size = factors.numel() * factors.element_size()
        to = self._memory[self._used : self._used + size]
        to.view(factors.dtype).view(factors.shape).copy_(factors)
        self._used += _up(size, _LINE)
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


def _packed_bytes(name: str, part: LoraPart) -> int:
    """Return the bytes of both factors with their padding. The start of each is a multiple of a line."""
    rank, inputs = part.a.shape
    size = part.a.element_size()
    line = _LINE // size
    a = rank * inputs if name == "embedding" else _up(rank, _RANKS) * _up(inputs, line)
    return _up(a * size, _LINE) + _up(len(part.b), _LANES) * _up(rank, line // _LANES) * size


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


# The factors keep these types; words are float32.
FORMATS = {torch.float32: 0, torch.bfloat16: int(FLOAT_FORMATS[torch.bfloat16])}


class CpuAdapters:
    """The adapters of one step, as the library reads them at `address`."""

    def __init__(self, batch: AdapterBatch, of_ends: bool = False) -> None:
        """of_ends: for the functions of embeddings and logits, not for the layers."""
        adapters = [adapter for adapter in batch.adapters if isinstance(adapter, CpuAdapter)]
        assert len(adapters) == len(batch.adapters)
        addresses = (c_void_p * len(adapters))(*(one.ends if of_ends else one.address for one in adapters))
        norms = (c_void_p * len(adapters))(*(one.norms_address for one in adapters))
        self._kept: list[object] = [batch, addresses, norms]
        rows = [self._rows(index) for index in (batch.tokens, batch.wanted)]
        has_norms = any(one.norms_address for one in adapters)
        self._step = _Adapters(ctypes.addressof(addresses), *rows, ctypes.addressof(norms) if has_norms else None)
        self.address = ctypes.addressof(self._step)

    def _rows(self, index: np.ndarray) -> _Rows:
        kept = np.ascontiguousarray(index, dtype=np.int32)
        arrays = units(kept)
        self._kept += (*arrays, kept)
        return _Rows(*(array.ctypes.data for array in arrays), len(arrays[2]), kept.ctypes.data)


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
