"""Reads the weights of a decoder, or the part of one rank, and packs them for the kernels.

Linear layers and embedding tables keep the type in which the checkpoint stores them if the kernels multiply by it;
norms have the type of activations. Quantised on load, linear layers have 8 or 4 bits per weight, and the head has 8.
Linear layers are read a few rows at a time, so that little memory is needed besides the packed weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from quire.kernels.ops import ExpertWeights, Ops, PackedLinear, PackedMoE, Routing
from quire.kernels.weights import GroupedWeight, LinearWeight, Ranges, RowsDiffer, WeightRows, quantize, to_fp8, whole
from quire.worker.models.files.free_memory import FreeMemory
from quire.worker.models.files.kv_scales import scaled_rows

HEAD_BITS = 8  # 4 bits of the head would change the logits of rare tokens most


T = TypeVar("T")
Part = tuple[slice, ...]  # slices of the dimensions of a tensor; empty for the whole


class TensorSource(Protocol):
    """The tensors of a model by name, such as the `Weights` of a checkpoint."""

    def stored_dtype(self, name: str) -> torch.dtype: ...

    def read(
        self,
        names: Sequence[str],
        dtype: torch.dtype,
        device: torch.device | str,
        parts: Sequence[tuple[slice, ...]] = (),
    ) -> torch.Tensor:
        """Return tensors as one along their first dimension. parts: slices of each."""

    def rows(
        self,
        names: Sequence[str],
        dtype: torch.dtype,
        device: torch.device | str,
        parts: Sequence[tuple[slice, ...]] = (),
    ) -> torch.Tensor:
        """Return tensors as `read` does, without counting them as read."""

    def finished(self, names: Sequence[str]) -> None:
        """Count tensors as read."""

    def shape(self, name: str) -> tuple[int, ...]: ...


class Held(Protocol):
    """The part of a model that a rank holds, such as a `Shard`."""

    @property
    def rank(self) -> int: ...

    @property
    def vocabulary(self) -> slice:
        """The tokens whose logits this rank computes."""

    def part(self, name: str) -> tuple[slice, ...]:
        """Return the part of a tensor that this rank holds: a slice per dimension; empty for the whole."""

    def owns_bias(self, name: str) -> bool:
        """Return False for a bias that another rank adds."""


class Unsplit:
    """A model that one process computes, whatever its layers are called."""

    rank = 0
    vocabulary = slice(None)

    def part(self, name: str) -> tuple[slice, ...]:
        return ()

    def owns_bias(self, name: str) -> bool:
        return True


Pack = Callable[[LinearWeight | WeightRows, torch.Tensor | None], PackedLinear]
# Returns rows of weights side by side as one: names, and the part of each.
ReadParts = Callable[[Sequence[str], Sequence[Part]], LinearWeight]


class NotHeld(Exception):
    """Weights that a form does not hold without rounding them."""


@dataclass(frozen=True)
class Form:
    """A way to keep the weights of a linear layer. read: raises NotHeld. how: for the log of a quantised checkpoint."""

    read: ReadParts
    how: str = ""


class WeightReader:
    """The tensors of a model for one rank.

    dtype: of activations. bits: of weights that are rounded to integers on load, 8 or 4; FP8; 0: not quantised.
    """

    def __init__(
        self,
        weights: TensorSource,
        shard: Held,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device | str,
        bits: int | str = 0,
    ) -> None:
        self._weights, self._shard, self._ops = weights, shard, ops
        self._dtype, self._device, self._bits = dtype, device, bits
        self._free_memory = FreeMemory()

    def read(self, *names: str) -> torch.Tensor:
        """Read tensors in the type of activations, as one along their first dimension."""
        return self._read(names, self._dtype)

    def norm(self, name: str, offset: float = 0.0) -> torch.Tensor:
        """Read the weights of a norm. offset: added to them."""
        weight = self.read(name)
        return weight.add_(offset) if offset else weight

    def ones(self, width: int) -> torch.Tensor:
        """Return the weights of a norm that has none."""
        return torch.ones(width, dtype=self._dtype, device=self._device)

    def embedding(self, name: str) -> torch.Tensor:
        """Read a whole embedding table in its stored type. All ranks have all of it."""
        return self._weights.read([name], dtype=self._kept([name]), device=self._device)

    def linear(
        self,
        weights: Sequence[str],
        biases: Sequence[str] = (),
        row_factors: torch.Tensor | None = None,
        input_factor: float = 1.0,
    ) -> PackedLinear:
        """Read and pack a linear layer, of weights side by side.

        row_factors [N]: powers of two with which the outputs are multiplied. input_factor: such a number for the input.
        """
        if row_factors is None and input_factor == 1:
            return self._pack(self._ops.pack_linear, weights, self._layer_bits, biases)
        bias = self.read(*biases) if biases else None
        if bias is not None and row_factors is not None:
            bias = bias * row_factors.to(bias)

        def pack(rows: WeightRows) -> PackedLinear:
            factors = torch.full((rows.shape[0],), input_factor)
            if row_factors is not None:
                factors *= row_factors
            return self._ops.pack_linear(scaled_rows(whole(rows), factors), bias)

        return self._first_that_holds(weights, self._layer_bits, pack)

    def gate_up(self, weights: Sequence[str], biases: Sequence[str] = ()) -> PackedLinear:
        """Read and pack the gate and the up projection of an MLP."""
        return self._pack(self._ops.pack_gate_up, weights, self._layer_bits, biases)

    def router(self, name: str, biases: Sequence[str] = ()) -> PackedLinear:
        """Read and pack the router of experts. It is not quantised on load, because it chooses the weights of a row."""
        weight = self._read([name], self._kept([name]))
        return self._ops.pack_linear(weight, self.read(*biases) if biases else None)

    def weight(self, names: Sequence[str]) -> LinearWeight:
        """Read weights side by side as those of one linear layer, not packed."""
        return self._first_that_holds(names, self._layer_bits, whole)

    @property
    def rank(self) -> int:
        return self._shard.rank

    def stacked(self, name: str, index: int, part: tuple[slice, ...]) -> torch.Tensor:
        """Read a part of entry `index` of a tensor. part: a slice for each of its other dimensions."""
        parts = [(slice(index, index + 1), *part)]
        return self._weights.read([name], dtype=self._kept([name]), device=self._device, parts=parts)[0]

    def quantized(self, weight: torch.Tensor) -> LinearWeight:
        """Quantise weights as those of a linear layer, if weights are quantised on load."""
        return self._quantized(weight, self._layer_bits)

    def pack_moe(
        self,
        routing: Routing,
        router: PackedLinear,
        experts: Iterable[ExpertWeights],
        scales: torch.Tensor | None = None,
    ) -> PackedMoE:
        """Pack the experts of a layer, each as soon as it is read. scales: of `Ops.pack_moe`."""
        return self._ops.pack_moe(routing, router, experts, scales)

    def head(self, name: str, table: torch.Tensor | None) -> PackedLinear:
        """Pack the head. table: the embedding, if the head is tied to it."""
        if table is None:
            return self._pack(self._ops.pack_linear, [name], HEAD_BITS)
        part = table[self._shard.vocabulary]
        if not self._bits:
            return self._ops.pack_linear(part)

        def read(ranges: Ranges) -> LinearWeight:
            self._free_memory.count(sum(last - first for first, last in ranges) * part.shape[1])
            return self._quantized(torch.cat([part[first:last] for first, last in ranges]), HEAD_BITS)

        packed = self._ops.pack_linear(WeightRows(part.shape, read))
        self._free_memory.give_back()
        return packed

    def finish(self) -> None:
        """Log how the weights are kept, if that does not follow from the settings, and return freed memory."""
        self._free_memory.give_back()

    def _pack(self, pack: Pack, names: Sequence[str], bits: int, biases: Sequence[str] = ()) -> PackedLinear:
        """Read and pack the weights of a linear layer. bits: of weights that are quantised on load."""
        bias = self.read(*biases) if biases else None
        return self._first_that_holds(names, bits, lambda rows: pack(rows, bias))

    def _first_that_holds(self, names: Sequence[str], bits: int, use: Callable[[WeightRows], T]) -> T:
        """Return what `use` makes of weights side by side, in the first of `_forms` that holds them."""
        last: list[LinearWeight] = []
        for form in self._forms(names, bits):

            def read(chosen: Sequence[str], parts: Sequence[Part], form: Form = form) -> LinearWeight:
                self._free_memory.count(math.prod(last[0].shape) if last else 0)
                last.clear()
                last.append(form.read(chosen, parts))
                return last[0]

            try:
                made = use(self._weight_rows(names, read))
            except (NotHeld, RowsDiffer):
                continue
            self._weights.finished(list(dict.fromkeys(names)))  # keys that are values, too, are read once
            self._note(names, form, last[0], made)
            return made
        raise AssertionError(f"no form holds {names}")  # the last one holds all weights

    def _forms(self, names: Sequence[str], bits: int) -> Iterator[Form]:
        """Yield the ways to keep the weights of a linear layer, the best first. The last one holds all weights."""
        kept = self._kept(names)
        yield Form(lambda chosen, parts: self._quantized(self._weights.rows(chosen, kept, self._device, parts), bits))

    def _note(self, names: Sequence[str], form: Form, weight: LinearWeight, made: object) -> None:
        """Note how weights are kept, for the log line of `finish`.

        weight: some rows of them. made: the packed layer, or weights that are packed with others.
        """

    def _weight_rows(self, names: Sequence[str], read: ReadParts) -> WeightRows:
        """Return weights side by side, of this rank, as rows that `read` returns."""
        shapes, parts = [self._weights.shape(name) for name in names], [self._shard.part(name) for name in names]
        rows = [
            part[0].indices(shape[0]) if part else (0, shape[0], 1) for part, shape in zip(parts, shapes, strict=True)
        ]
        width = len(range(*parts[0][1].indices(shapes[0][1]))) if parts[0] else shapes[0][1]

        def read_ranges(ranges: Ranges) -> LinearWeight:
            chosen, slices = [], []
            for first, last in ranges:
                start = 0
                for name, part, shape, (low, high, _) in zip(names, parts, shapes, rows, strict=True):
                    begin, end = max(first - start, 0), min(last - start, high - low)
                    if begin < end:
                        is_whole = not part and end - begin == shape[0]
                        chosen.append(name)
                        slices.append(() if is_whole else (slice(low + begin, low + end), *part[1:]))
                    start += high - low
            return read(chosen, slices)

        return WeightRows(torch.Size((sum(high - low for low, high, _ in rows), width)), read_ranges)

    @property
    def _layer_bits(self) -> int:
        return self._bits if isinstance(self._bits, int) else 0

    def _quantized(self, weight: torch.Tensor, bits: int) -> LinearWeight:
        """Round weights [N, K] if weights are quantised on load. bits: of integers."""
        if isinstance(self._bits, str):
            return to_fp8(weight)
        return quantize(weight, bits) if self._bits else weight

    def grouped_entry(self, name: str, index: int, part: tuple[slice, ...]) -> GroupedWeight | None:
        """Read rows and columns of one expert of a stacked tensor, [N, K], as codes; None if it is not stored so."""

    def _kept(self, names: Sequence[str]) -> torch.dtype:
        """Return the stored type of tensors, or that of activations if they differ or the kernels lack the type."""
        stored = {self._weights.stored_dtype(name) for name in names}
        return stored.pop() if len(stored) == 1 and stored <= set(self._ops.weight_dtypes) else self._dtype

    def _read(self, names: Sequence[str], dtype: torch.dtype) -> torch.Tensor:
        parts = [self._shard.part(name) for name in names]
        tensor = self._weights.read(names, dtype=dtype, device=self._device, parts=parts)
        return tensor if self._shard.owns_bias(names[0]) else tensor.zero_()
