"""Low-rank adapters (LoRA) of a decoder's linear layers: their factors, and the rows of a batch that use them.

An adapter adds scale * (x A^T) B^T to some columns of a linear layer (Hu et al., 2021). It may then multiply these
columns by a gain, as DoRA does (Liu et al., 2024), and add a shift. It may also have norms of its own, and change
embeddings and logits. The rows of one batch may use different adapters, or none. The classes here are the definition;
`kernels/cpu/lora.h` computes the same in C++.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

# The linear layers of a decoder layer that an adapter may change: fields of `DecoderLayer`.
LINEARS = ("qkv", "o", "gate_up", "down")
# The ends of a decoder that an adapter may change, too, in an entry after those of all layers.
ENDS = ("embedding", "head")
# The norms of a decoder layer that an adapter may have of its own. The final norm is the input norm of a last entry.
OWN_NORMS = ("input_norm", "mlp_norm", "q_norm", "k_norm", "post_attention_norm", "post_mlp_norm")
MAX_RANK = 512  # `kMaxRank` in cpu/lora.h
FACTOR_DTYPES = (torch.float32, torch.bfloat16)
# The index of a row without adapter.
NO_ADAPTER = -1


@dataclass(frozen=True, slots=True, eq=False)
class LoraPart:
    """The factors of some columns of a linear layer.

    a [rank, K] and b [width, rank], both of one of FACTOR_DTYPES. offset: the first of the columns, in the order of the
    weights that were packed; gates come before ups. gains float32 [2, width]: factors of the columns after the
    product is added, and shifts that are added then; or None. For an embedding, K is the vocabulary.
    """

    a: Tensor
    b: Tensor
    scale: float
    offset: int = 0
    gains: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes + (0 if self.gains is None else self.gains.nbytes)

    def to(self, device: torch.device) -> LoraPart:
        gains = None if self.gains is None else self.gains.to(device)
        return LoraPart(self.a.to(device), self.b.to(device), self.scale, self.offset, gains)


# The parts of each changed linear layer of a decoder layer, by name; in a last entry those of ENDS.
LoraLayer = Mapping[str, Sequence[LoraPart]]
# The norms of a decoder layer, of OWN_NORMS, that an adapter has of its own: act [hidden], or [D] of heads.
NormsOfLayer = Mapping[str, Tensor]


class PackedAdapter(Protocol):
    """An adapter as `Ops.pack_adapter` returns it. norms: empty, or an entry per layer and a last one."""

    @property
    def norms(self) -> Sequence[NormsOfLayer]: ...

    @property
    def changes(self) -> frozenset[str]:
        """The ENDS that the adapter has factors of."""

    @property
    def nbytes(self) -> int: ...


def changed_ends(layers: Sequence[LoraLayer]) -> frozenset[str]:
    """Return the ENDS that an adapter has factors of."""
    return frozenset(layers[-1]) & frozenset(ENDS) if layers else frozenset()


def norm_bytes(norms: Sequence[NormsOfLayer]) -> int:
    return sum(weight.nbytes for of_layer in norms for weight in of_layer.values())


@dataclass(frozen=True, slots=True, eq=False)
class TorchAdapter:
    """An adapter whose products torch computes."""

    layers: Sequence[LoraLayer]
    norms: Sequence[NormsOfLayer]

    @property
    def changes(self) -> frozenset[str]:
        return changed_ends(self.layers)

    @property
    def nbytes(self) -> int:
        factors = sum(part.nbytes for layer in self.layers for parts in layer.values() for part in parts)
        return factors + norm_bytes(self.norms)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterBatch:
    """The adapters of a step.

    tokens int32 [T] and wanted int32 [R]: for each token, and for each token whose output is wanted, an index into
    `adapters`, or NO_ADAPTER.
    """

    adapters: Sequence[PackedAdapter]
    tokens: np.ndarray
    wanted: np.ndarray


def pack_adapter(layers: Sequence[LoraLayer], device: torch.device, norms: Sequence[NormsOfLayer] = ()) -> TorchAdapter:
    """Copy an adapter to a device, for `AdaptedRows`."""
    return TorchAdapter(
        [{name: [part.to(device) for part in parts] for name, parts in layer.items()} for layer in layers],
        [{name: weight.to(device) for name, weight in of_layer.items()} for of_layer in norms],
    )


class RowsWithAdapters(Protocol):
    """The rows of some tokens that use each adapter, as `AdaptedRows` defines it."""

    def __init__(self, adapters: Sequence[PackedAdapter], index: np.ndarray, device: torch.device) -> None: ...

    def apply(self, layer: int, name: str, x: Tensor, y: Tensor) -> None: ...

    def embed(self, token_ids: Tensor, y: Tensor) -> None: ...

    def head(self, x: Tensor, y: Tensor) -> None: ...


def rows_of(number: int, index: np.ndarray, device: torch.device) -> Tensor:
    """Return the rows whose entry of `index` is `number`, int64."""
    return torch.from_numpy(np.flatnonzero(index == number)).to(device)


class AdaptedRows:
    """The rows of some tokens that use each adapter, on a device."""

    def __init__(self, adapters: Sequence[PackedAdapter], index: np.ndarray, device: torch.device) -> None:
        """index int32 [T]: of `AdapterBatch`."""
        self._groups: list[tuple[TorchAdapter, Tensor]] = []
        for number, adapter in enumerate(adapters):
            assert isinstance(adapter, TorchAdapter)
            if len(rows := rows_of(number, index, device)):
                self._groups.append((adapter, rows))

    def apply(self, layer: int, name: str, x: Tensor, y: Tensor) -> None:
        """Change the rows of y [T, N] by what their adapters make of the rows of x [T, K].

        layer, name: the linear layer. All is computed in float32 and rounded once.
        """
        for adapter, rows in self._groups:
            for part in adapter.layers[layer].get(name, ()):
                _change(part, x[rows].float() @ part.a.float().T * part.scale, y, rows)

    def embed(self, token_ids: Tensor, y: Tensor) -> None:
        """Change the embeddings y [T, H] of tokens [T] like `apply`, with the column of A of each token as x A^T."""
        for adapter, rows in self._groups:
            for part in adapter.layers[-1].get("embedding", ()):
                _change(part, part.a[:, token_ids[rows].long()].float().T * part.scale, y, rows)

    def head(self, x: Tensor, y: Tensor) -> None:
        """Change logits y float32 [R, V] of the rows of x [R, H] like `apply`."""
        self.apply(-1, "head", x, y)


def _change(part: LoraPart, reduced: Tensor, y: Tensor, rows: Tensor) -> None:
    """Change columns of rows of y. reduced float32 [rows, rank]: scale * x A^T."""
    columns = y[:, part.offset : part.offset + len(part.b)]
    values = columns[rows].float() + reduced @ part.b.float().T
    if part.gains is not None:
        values = values * part.gains[0] + part.gains[1]
    columns[rows] = values.to(y.dtype)


class OwnNorms:
    """The rows of some tokens whose adapters have norms of their own."""

    def __init__(self, adapters: Sequence[PackedAdapter], index: np.ndarray, device: torch.device) -> None:
        """index int32 [T]: of `AdapterBatch`."""
        self._groups = [
            (adapter.norms, rows)
            for number, adapter in enumerate(adapters)
            if adapter.norms and len(rows := rows_of(number, index, device))
        ]

    def of(self, layer: int, *names: str) -> Iterator[tuple[Tensor, list[Tensor | None]]]:
        """Yield the rows of each adapter that has one of some norms of a layer, and these; None: that of the layer."""
        for norms, rows in self._groups:
            own = [norms[layer].get(name) for name in names]
            if any(weight is not None for weight in own):
                yield rows, own
