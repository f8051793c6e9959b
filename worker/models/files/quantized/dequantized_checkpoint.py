"""A quantised checkpoint of a model that Transformers computes: its tensors as numbers, by their stored names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quire.shared.process.errors import CheckpointError
from quire.worker.models.files.loader import HARMLESS_DTYPES, Progress
from quire.worker.models.files.quantized.checkpoint import NEUTRAL_ENDS, QuantizedCheckpoint
from quire.worker.models.files.quantized.layout import LayerLayout, Quantization, TensorFault

# Ends of the tensors that hold the weights of a layer, in all formats.
WEIGHT_ENDS = (".weight", ".qweight", ".weight_packed")


class DequantizedCheckpoint(QuantizedCheckpoint):
    """The tensors of a checkpoint by their stored names. A layer is quantised if it has a tensor of scales.

    No list of expected tensors is needed: shapes follow from the stored tensors, and Transformers compares them with
    its model. Raises CheckpointError for a layer whose tensors do not fit together.
    """

    def __init__(
        self,
        folder: Path,
        quantization: Quantization,
        dtypes: Sequence[torch.dtype],
        progress: Progress | None = None,
    ) -> None:
        super().__init__(folder, quantization, dtypes, progress=progress)
        self._shapes: dict[str, tuple[int, ...]] = {}
        parts: set[str] = set()  # tensors of quantised layers
        for name in list(self._tensors):
            end = next((end for end in WEIGHT_ENDS if name.endswith(end)), None)
            if end is not None and (layout := self._layout(layer := name.removesuffix(end) + ".weight", (0, 0))):
                self._shapes[layer] = self._shape_of(layer.removesuffix(".weight"), layout)
                parts.update(f"{layer.removesuffix('.weight')}.{part}" for part in layout.tensors(*self._shapes[layer]))
        for name in self._tensors:
            if name not in parts and not name.endswith(NEUTRAL_ENDS):
                header = self._header(name, ())[1]
                if header.get_dtype() not in HARMLESS_DTYPES and self._is_of_no_layer(name):
                    self._shapes[name] = tuple(header.get_shape())
        self.check(self._shapes)

    def num_elements(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self._shapes.values())

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield name, values and whether they were quantised: weights of quantised layers in `dtype`, others as stored.

        Quantised weights are computed in float32 and rounded once. Raises CheckpointError for values that are not
        finite.
        """
        for name in self._shapes:
            is_quantized = self.layout(name) is not None
            values = self._rows(name, ())[0].dequantized(dtype) if is_quantized else self.read_plain(name)
            self.finished([name])
            yield name, values, is_quantized

    def _rename(self) -> None:
        """Keep the stored names: Transformers has its own rules for them."""

    def _layout(self, name: str, shape: tuple[int, ...]) -> LayerLayout | None:
        layout = super()._layout(name, shape)
        has_scales = layout is not None and f"{name.removesuffix('.weight')}.{layout.scale}" in self._tensors
        return layout if has_scales else None

    def _is_of_no_layer(self, name: str) -> bool:
        """Return False for tensors besides the weights of a quantised layer, such as its order of groups."""
        return f"{name.rpartition('.')[0]}.weight" not in self._shapes or name.endswith((".weight", ".bias"))

    def _shape_of(self, layer: str, layout: LayerLayout) -> tuple[int, int]:
        def stored_shape(end: str) -> tuple[int, ...] | None:
            name = f"{layer}.{end}"
            return tuple(self._header(name, ())[1].get_shape()) if name in self._tensors else None

        def load(end: str) -> Tensor | None:
            name = f"{layer}.{end}"
            return self._finite(name, ()) if name in self._tensors else None

        try:
            return layout.shape(stored_shape, load)
        except TensorFault as fault:
            name = f"{layer}.{fault.end}"
            path = self._tensors[name][0] if name in self._tensors else self._folder
            raise CheckpointError(path, f"tensor {name} {fault.what}", fault.remedy) from None
