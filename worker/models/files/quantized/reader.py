"""Packs the weights of a quantised checkpoint for the kernels, and logs how they are kept.

Weights are never rounded twice. A format that rounds activations to 8 bits, as the kernels do, is kept in its integers.
Codes with scales per group are kept as they are, and activations are not rounded. All other layers are dequantised and
kept in 16 bits, and activations are not rounded, either.
--quantization may name the stored format: then the integer kernels multiply its integers, and the other layers are
rounded on load.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from quire.kernels.ops import Ops
from quire.kernels.weights import (
    FP8_DYNAMIC,
    MXFP4,
    CodedWeight,
    Fp8Activations,
    GroupedWeight,
    LinearWeight,
    QuantizedWeight,
)
from quire.shared.process.errors import CheckpointError
from quire.worker.models.files.quantized.checkpoint import QuantizedCheckpoint
from quire.worker.models.files.weight_reader import Form, Held, NotHeld, Part, TensorSource, WeightReader

log = logging.getLogger(__name__)

AS_STORED, DEQUANTIZED = "as stored", "dequantised"  # `Form.how`


class StoredLayout(Protocol):
    """The format of a layer that is stored quantised."""

    @property
    def label(self) -> str: ...

    @property
    def integer_bits(self) -> int:
        """Bits of weights if the format multiplies them with activations that are rounded to 8 bits; else 0."""


class Labelled(Protocol):
    """The quantisation of a checkpoint, named for the log."""

    @property
    def label(self) -> str: ...


class StoredLayers(TensorSource, Protocol):
    """A checkpoint whose layers may be stored as integers or codes: a `QuantizedCheckpoint` or a GGUF file."""

    @property
    def folder(self) -> Path: ...

    @property
    def quantization(self) -> Labelled | None: ...

    def layout(self, name: str) -> StoredLayout | None:
        """Return the layout of a weight; None if it is not quantised."""

    def exact(self, names: Sequence[str], bits: int, parts: Sequence[Part]) -> QuantizedWeight | None:
        """Return layers as one in integers of these bits; None if that would round them."""

    def codes(self, names: Sequence[str], parts: Sequence[Part], layer: Sequence[str] = ()) -> CodedWeight | None:
        """Return layers as one, as codes with scales; None if that would round them. layer: all that are packed."""


class QuantizedReader(WeightReader):
    """Reads the weights of a quantised checkpoint."""

    def __init__(
        self,
        weights: StoredLayers,
        shard: Held,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device | str,
        bits: int | str = 0,
    ) -> None:
        super().__init__(weights, shard, ops, dtype, device, bits)
        self._checkpoint = weights
        self._kinds: Counter[str] = Counter()  # how layers are kept: number of layers
        self._has_float_activations = False
        self._has_fp8_activations = isinstance(ops, Fp8Activations) and ops.fp8_activations
        self._has_fp8_product = False

    def _forms(self, names: Sequence[str], bits: int) -> Iterator[Form]:
        layouts = [self._checkpoint.layout(name) for name in names]
        if not any(layouts):
            yield from super()._forms(names, bits)
            return

        def integers(wanted: int) -> Form:
            def read(chosen: Sequence[str], parts: Sequence[Part]) -> LinearWeight:
                weight = self._checkpoint.exact(chosen, wanted, parts)
                if weight is None:
                    raise NotHeld
                return weight

            return Form(read, AS_STORED)

        def codes(chosen: Sequence[str], parts: Sequence[Part]) -> LinearWeight:
            weight = self._checkpoint.codes(chosen, parts, names)
            if weight is None or weight.kind not in self._ops.code_kinds:
                raise NotHeld
            return weight

        kept = self._kept(names)
        yield from map(integers, self._wanted(names, bits))
        yield Form(codes, AS_STORED)
        yield Form(lambda chosen, parts: self._weights.rows(chosen, kept, self._device, parts), DEQUANTIZED)

    def _note(self, names: Sequence[str], form: Form, weight: LinearWeight, made: object) -> None:
        layouts = [self._checkpoint.layout(name) for name in names]
        stored = " and ".join(sorted({layout.label if layout else "not quantised" for layout in layouts}))
        if isinstance(weight, torch.Tensor):
            kept = str(weight.dtype).removeprefix("torch.")
        else:
            kept = f"int{weight.bits}" if isinstance(weight, QuantizedWeight) else weight.kind
            kept += " without further rounding" if form.how == AS_STORED else ", rounded on load"
        if getattr(made, "kind", "") == FP8_DYNAMIC:
            self._has_fp8_product = True
            kept += ", activations rounded to e4m3"
        elif form.how and not isinstance(weight, QuantizedWeight):
            self._has_float_activations = True
        self._kinds[f"{stored} as {kept}"] += len(names)

    def grouped_entry(self, name: str, index: int, part: tuple[slice, ...]) -> GroupedWeight | None:
        if MXFP4 not in self._ops.code_kinds or not isinstance(self._checkpoint, QuantizedCheckpoint):
            return None
        return self._checkpoint.grouped_entry(name, index, part)

    def _wanted(self, names: Sequence[str], bits: int) -> list[int]:
        """Return the bits to try: those that the user asked for, else those of a format that rounds activations."""
        if isinstance(self._bits, str):
            return []
        if self._bits:
            wanted = [self._bits, bits]
        else:
            layouts = [self._checkpoint.layout(name) for name in names]
            wanted = [layout.integer_bits for layout in layouts if layout is not None]
            if len(wanted) < len(names) or len(set(wanted)) > 1:
                return []
        return [at for at in dict.fromkeys(wanted) if at in self._ops.quantized_bits]

    def finish(self) -> None:
        super().finish()
        if self._has_fp8_activations and not self._has_fp8_product:
            raise CheckpointError(
                self._checkpoint.folder,
                "no layer has FP8 weights with a scale per output channel or tensor, whose activations "
                "--quantization fp8-dynamic rounds",
                "leave it out",
            )
        kept = "; ".join(f"{count} layers: {kind}" for kind, count in self._kinds.most_common())
        note = "; other activations are not rounded" if self._has_fp8_product else "; activations are not rounded"
        note = note if self._has_float_activations else ""
        quantization = self._checkpoint.quantization
        log.info("quantised checkpoint, %s: %s%s", quantization.label if quantization else "", kept, note)
