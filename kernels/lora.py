"""Low-rank adapters (LoRA) of a decoder's linear layers: their factors, and the rows of a batch that use them.

An adapter adds scale * (x A^T) B^T to some columns of a linear layer (Hu et al., 2021). The rows of one batch may use
different adapters, or none. `apply` is the definition; `kernels/cpu/lora.h` computes the same in C++.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

# The linear layers of a decoder layer that an adapter may change: fields of `DecoderLayer`.
LINEARS = ("qkv", "o", "gate_up", "down")
MAX_RANK = 512  # `kMaxRank` in cpu/lora.h
FACTOR_DTYPES = (torch.float32, torch.bfloat16)
# The index of a row without adapter.
NO_ADAPTER = -1


@dataclass(frozen=True, slots=True, eq=False)
class LoraPart:
    """The factors of some columns of a linear layer.

    a [rank, K] and b [width, rank], both of one of FACTOR_DTYPES. offset: the first of the columns, in the order of the
    weights that were packed; gates come before ups.
    """

    a: Tensor
    b: Tensor
    scale: float
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


# The parts of each changed linear layer of a decoder layer, by name.
LoraLayer = Mapping[str, Sequence[LoraPart]]


class PackedAdapter(Protocol):
    """An adapter as `Ops.pack_adapter` returns it."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class TorchAdapter:
    """An adapter whose products torch computes."""

    layers: Sequence[LoraLayer]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for layer in self.layers for parts in layer.values() for part in parts)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterBatch:
    """The adapters of a step.

    tokens int32 [T] and wanted int32 [R]: for each token, and for each token whose output is wanted, an index into
    `adapters`, or NO_ADAPTER.
    """

    adapters: Sequence[PackedAdapter]
    tokens: np.ndarray
    wanted: np.ndarray


def pack_adapter(layers: Sequence[LoraLayer], device: torch.device) -> TorchAdapter:
    """Copy an adapter to a device, for `apply`."""
    return TorchAdapter(
        [
            {
                name: [LoraPart(part.a.to(device), part.b.to(device), part.scale, part.offset) for part in parts]
                for name, parts in layer.items()
            }
            for layer in layers
        ]
    )


class RowsWithAdapters(Protocol):
    """The rows of some tokens that use each adapter, as `AdaptedRows` defines it."""

    def __init__(self, adapters: Sequence[PackedAdapter], index: np.ndarray, device: torch.device) -> None: ...

    def apply(self, layer: int, name: str, x: Tensor, y: Tensor) -> None: ...


class AdaptedRows:
    """The rows of some tokens that use each adapter, on a device."""

    def __init__(self, adapters: Sequence[PackedAdapter], index: np.ndarray, device: torch.device) -> None:
        """index int32 [T]: of `AdapterBatch`."""
        self._groups: list[tuple[TorchAdapter, Tensor]] = []
        for number, adapter in enumerate(adapters):
            assert isinstance(adapter, TorchAdapter)
            if len(rows := np.flatnonzero(index == number)):
                self._groups.append((adapter, torch.from_numpy(rows).to(device)))

    def apply(self, layer: int, name: str, x: Tensor, y: Tensor) -> None:
        """Add to the rows of y [T, N] what their adapters make of the rows of x [T, K].

        layer, name: the linear layer. Products are computed in float32 and rounded once.
        """
        for adapter, rows in self._groups:
            for part in adapter.layers[layer].get(name, ()):
                update = (x[rows].float() @ part.a.float().T * part.scale) @ part.b.float().T
                columns = y[:, part.offset : part.offset + update.shape[1]]
                columns[rows] = (columns[rows].float() + update).to(y.dtype)
