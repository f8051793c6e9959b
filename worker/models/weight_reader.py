"""Reads the weights of a decoder, or the part of one rank, and packs them for the kernels.

Linear layers and embedding tables keep the type in which the checkpoint stores them if the kernels multiply by it;
norms have the type of activations. Quantised on load, linear layers have 8 or 4 bits per weight, and the head has 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from quire.kernels.grouped_weight import GroupedWeight, LinearWeight, to_fp8
from quire.kernels.moe import ExpertWeights, PackedMoE, Routing
from quire.kernels.ops import Ops, PackedLinear
from quire.kernels.quantization import quantize
from quire.worker.models.kv_scales import scaled_rows
from quire.worker.models.sharding import Shard

HEAD_BITS = 8  # 4 bits of the head would change the logits of rare tokens most


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


Pack = Callable[[LinearWeight, torch.Tensor | None], PackedLinear]


class WeightReader:
    """The tensors of a model for one rank.

    dtype: of activations. bits: of weights that are rounded to integers on load, 8 or 4; FP8; 0: not quantised.
    """

    def __init__(
        self,
        weights: TensorSource,
        shard: Shard,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device | str,
        bits: int | str = 0,
    ) -> None:
        self._weights, self._shard, self._ops = weights, shard, ops
        self._dtype, self._device, self._bits = dtype, device, bits

    def read(self, *names: str) -> torch.Tensor:
        """Read tensors in the type of activations, as one along their first dimension."""
        return self._read(names, self._dtype)

    def norm(self, name: str, offset: float = 0.0) -> torch.Tensor:
        """Read the weights of a norm. offset: added to them."""
        weight = self.read(name)
        return weight.add_(offset) if offset else weight

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
            return self._pack(self._ops.pack_linear, weights, biases)
        weight = self._weight(weights, self._layer_bits)
        bias = self.read(*biases) if biases else None
        if row_factors is not None:
            weight = scaled_rows(weight, row_factors)
            bias = None if bias is None else bias * row_factors.to(bias)
        return self._ops.pack_linear(scaled_rows(weight, torch.full((weight.shape[0],), input_factor)), bias)

    def gate_up(self, weights: Sequence[str], biases: Sequence[str] = ()) -> PackedLinear:
        """Read and pack the gate and the up projection of an MLP."""
        return self._pack(self._ops.pack_gate_up, weights, biases)

    def router(self, name: str, biases: Sequence[str] = ()) -> PackedLinear:
        """Read and pack the router of experts. It is not quantised on load, because it chooses the weights of a row."""
        weight = self._read([name], self._kept([name]))
        return self._ops.pack_linear(weight, self.read(*biases) if biases else None)

    def weight(self, names: Sequence[str]) -> LinearWeight:
        """Read weights side by side as those of one linear layer, not packed."""
        return self._weight(names, self._layer_bits)

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

    def pack_moe(self, routing: Routing, router: PackedLinear, experts: Iterable[ExpertWeights]) -> PackedMoE:
        """Pack the experts of a layer, each as soon as it is read."""
        return self._ops.pack_moe(routing, router, experts)

    def head(self, name: str, table: torch.Tensor | None) -> PackedLinear:
        """Pack the head. table: the embedding, if the head is tied to it."""
        if table is None:
            return self._ops.pack_linear(self._weight([name], HEAD_BITS))
        part = table[self._shard.vocabulary]
        return self._ops.pack_linear(self._quantized(part, HEAD_BITS))

    def log(self) -> None:
        """Log how the weights are kept, if that does not follow from the settings."""

    def _pack(self, pack: Pack, weights: Sequence[str], biases: Sequence[str]) -> PackedLinear:
        weight = self._weight(weights, self._layer_bits)
        return pack(weight, self.read(*biases) if biases else None)

    def _weight(self, names: Sequence[str], bits: int) -> LinearWeight:
        """Read the weights of a linear layer. bits: of weights that are quantised on load."""
        weight = self._read(names, self._kept(names))
        return self._quantized(weight, bits)

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
