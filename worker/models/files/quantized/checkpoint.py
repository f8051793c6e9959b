"""Reads the tensors of a checkpoint whose linear layers are quantised: as numbers, or as weights for the kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quire.kernels.weights import (
    CodedWeight,
    GroupedWeight,
    QuantizedWeight,
    coded_part,
    coded_rows,
    quantized_part,
    quantized_rows,
)
from quire.shared.process.errors import CheckpointError
from quire.worker.models.files.loader import AGAIN, TORCH_DTYPES, Progress, Weights
from quire.worker.models.files.quantized.layout import LayerLayout, Quantization, Stored, TensorFault
from quire.worker.models.files.quantized.weight import StoredWeight

# Tensors that do not change the weights: the rounding of activations and of the KV cache.
NEUTRAL_ENDS = (".input_scale", ".input_zero_point", ".output_scale", ".k_scale", ".v_scale", ".q_scale",
                ".input_scale_ub", ".activation_scale", ".input_global_scale")  # fmt: skip
SAME_MODEL = "config.json and the weights must be of the same model"


class QuantizedCheckpoint(Weights):
    """Tensors by their canonical names. `check` finds the quantised layers.

    dtypes: of weights that the kernels multiply by. Dequantised weights have the type of their scales if it is one of
    these and of 16 bits; else `wide` if it is one of these; else the first of these. So they are rounded once.
    """

    def __init__(
        self,
        folder: Path,
        quantization: Quantization,
        dtypes: Sequence[torch.dtype],
        wide: torch.dtype = torch.bfloat16,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(folder, progress)
        self.quantization = quantization
        self._dtypes, self._wide = dtypes, wide if wide in dtypes else dtypes[0]
        self._layers: dict[str, tuple[LayerLayout, int, int]] = {}  # name of the weight: layout, rows, columns
        self._last: tuple[tuple[str, int, int], StoredWeight, list[Tensor]] | None = None  # with its stored tensors
        self._used: list[Tensor] = []  # stored tensors that the last result was made of, or is

    def __contains__(self, name: str) -> bool:
        layer = name.removesuffix(".weight")
        return super().__contains__(name) or any(
            f"{layer}.{end}" in self._tensors for end in ("qweight", "weight_packed")
        )

    def check(self, expected: dict[str, tuple[int, ...]], ignored: Iterable[str] = ()) -> None:
        plain, used = {}, set(ignored)
        used.update(name for name in self._tensors if name.endswith(NEUTRAL_ENDS))
        for name, shape in expected.items():
            layout = self._layout(name, shape)
            if layout is None:
                plain[name] = shape
                continue
            layer = name.removesuffix(".weight")
            for end, stored in layout.tensors(shape[0], shape[1]).items():
                self._check_stored(f"{layer}.{end}", stored)
                used.add(f"{layer}.{end}")
            used.update(f"{layer}.{end}" for end in ("weight_shape", "g_idx", "weight_g_idx", "weight_zero_point"))
            self._layers[name] = layout, shape[0], shape[1]
        super().check(plain, ignored=used)
        self._total_bytes += sum(self._elements(name) * self.stored_dtype(name).itemsize for name in self._layers)

    def layout(self, name: str) -> LayerLayout | None:
        """Return the layout of a weight; None if it is not quantised."""
        return self._layers[name][0] if name in self._layers else None

    def stored_dtype(self, name: str) -> torch.dtype:
        if name not in self._layers:
            return super().stored_dtype(name)
        scale = self._stored_type(f"{name.removesuffix('.weight')}.{self._layers[name][0].scale}")
        dtype = TORCH_DTYPES.get(scale or "", torch.float32)
        return dtype if dtype.itemsize == 2 and dtype in self._dtypes else self._wide

    def exact(self, names: Sequence[str], bits: int, parts: Sequence[tuple[slice, ...]]) -> QuantizedWeight | None:
        """Return quantised layers as one in a layout of the kernels; None if it cannot hold them without rounding."""
        self._release_used()
        weights = []
        for name, part in zip(names, parts, strict=True):
            if name not in self._layers:
                return None
            rows, inside = self._rows(name, part)
            exact = rows.exact(bits)
            weight = None if exact is None else quantized_part(exact, inside)
            if weight is None:
                return None
            weights.append(weight)
        return quantized_rows(weights)

    def codes(
        self, names: Sequence[str], parts: Sequence[tuple[slice, ...]], layer: Sequence[str] = ()
    ) -> CodedWeight | None:
        """Return quantised layers as one, as codes with scales; None if that would round them.

        layer: the names of all weights that are packed as one.
        """
        self._release_used()
        weights = []
        for name, part in zip(names, parts, strict=True):
            if name not in self._layers:
                return None
            rows, inside = self._rows(name, part)
            grouped = rows.grouped()
            weight = None if grouped is None else coded_part(grouped, inside)
            if weight is None:
                return None
            weights.append(weight)
        return coded_rows(weights)

    def finished(self, names: Sequence[str]) -> None:
        self._last = None
        self._release_used()
        super().finished(names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._layers[name][1:] if name in self._layers else super().shape(name)

    def grouped_entry(self, name: str, index: int, part: tuple[slice, ...]) -> GroupedWeight | None:
        """Return an entry of stacked experts, [N, K], or rows and columns of it; None if it has no groups."""

    def _layout(self, name: str, shape: tuple[int, ...]) -> LayerLayout | None:
        layer = name.removesuffix(".weight")
        if layer == name or len(shape) != 2 or layer.endswith("embed_tokens"):
            return None
        layout = self.quantization.layer(layer, self._stored_type)
        ends = [] if layout is None else list(layout.tensors(shape[0], shape[1]))
        if ends and "weight" not in ends and name in self._tensors:
            other = next((end for end in ends if f"{layer}.{end}" in self._tensors), "")
            if other:
                what = f"tensors {name} and {layer}.{other} are of the same layer, expected one of them"
                raise CheckpointError(self._tensors[name][0], what, AGAIN)
        return layout

    def _check_stored(self, name: str, stored: Stored) -> None:
        if name not in self._tensors:
            if stored.optional:
                return
            what = f"tensor {name} is missing, expected with the shape {list(stored.shapes[0])}"
            remedy = "quantization_config must describe these weights, and the checkpoint must be complete"
            raise CheckpointError(self._folder, what, remedy)
        path, header = self._header(name, stored.shapes[0])
        shape, kind = tuple(header.get_shape()), header.get_dtype()
        if kind not in stored.types:
            what = f"tensor {name} has the type {kind}, expected {' or '.join(stored.types)}"
            raise CheckpointError(path, what, "quantization_config must describe these weights; " + AGAIN)
        if stored.most:
            if len(shape) != 1 or shape[0] > stored.most:
                what = f"tensor {name} has the shape {list(shape)}, expected a text of at most {stored.most} bytes"
                raise CheckpointError(path, what, AGAIN)
        elif shape not in stored.shapes:
            what = f"tensor {name} has the shape {list(shape)}, expected {list(stored.shapes[0])}"
            raise CheckpointError(path, what, SAME_MODEL)
        if stored.holds is not None:
            values = super()._stored(name, ()).reshape(-1).tolist()
            if values != list(stored.holds):
                what = f"tensor {name} is {values}, expected {list(stored.holds)}"
                raise CheckpointError(path, what, "repair or convert the model again")

    def _stored_type(self, name: str) -> str | None:
        if name not in self._tensors:
            return None
        _, handle, inside = self._tensors[name]
        kind: str = handle.get_slice(inside).get_dtype()
        return kind

    def _stored(self, name: str, part: tuple[slice, ...]) -> Tensor:
        if name not in self._layers:
            return super()._stored(name, part)
        self._release_used()
        rows, inside = self._rows(name, part)
        weight = rows.dequantized(self.stored_dtype(name))
        return weight[inside].contiguous() if inside else weight

    def _rows(self, name: str, part: tuple[slice, ...]) -> tuple[StoredWeight, tuple[slice, ...]]:
        """Read the rows of a part of a layer, and those that are stored in one word or block with them.

        Returns them, and the part inside of them.
        """
        layout, n, k = self._layers[name]
        first, last, _ = part[0].indices(n) if part else (0, n, 1)
        unit = layout.row_unit(k)
        low, high = first // unit * unit, min(n, -(-last // unit) * unit)
        inside = (slice(first - low, last - low), *part[1:]) if part else ()
        return self._weight(name, low, high), inside

    def _weight(self, name: str, first: int, last: int) -> StoredWeight:
        """Read some rows of a layer. The last ones are kept: they are tried in several layouts."""
        if self._last is not None and self._last[0] == (name, first, last):
            self._used += self._last[2]
            return self._last[1]
        layout, n, k = self._layers[name]
        layer = name.removesuffix(".weight")
        stored_tensors: list[Tensor] = []
        whole, start, end = (layout.tensors(rows, k) for rows in (n, first, last))

        def load(kind: str) -> Tensor | None:
            stored = f"{layer}.{kind}"
            if stored not in self._tensors:
                return None
            if whole[kind].most:
                stored_tensors.append(super(QuantizedCheckpoint, self)._stored(stored, ()))
                return stored_tensors[-1]
            at = whole[kind].shapes.index(super(QuantizedCheckpoint, self).shape(stored))
            sizes = zip(start[kind].shapes[at], end[kind].shapes[at], strict=True)
            part = [slice(None) if low == high else slice(low, high) for low, high in sizes]
            is_all = (first, last) == (0, n) or all(span == slice(None) for span in part)
            stored_tensors.append(self._finite(stored, () if is_all else tuple(part)))
            return stored_tensors[-1]

        try:
            weight = layout.weight(last - first, k, load)
        except TensorFault as fault:
            at = f"{layer}.{fault.end}"
            raise CheckpointError(self._path(at), f"tensor {at} {fault.what}", fault.remedy) from None
        self._last = (name, first, last), weight, stored_tensors
        self._used += stored_tensors
        return weight

    def _release_used(self) -> None:
        """Take the pages of the last result out of the memory of this process."""
        for tensor in self._used:
            self._mapped.release(tensor)
        self._used.clear()

    def _finite(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Read a tensor or a part of it. Raises CheckpointError for values that are not finite."""
        stored = super()._stored(name, part)
        if not is_finite(stored):
            raise CheckpointError(self._path(name), f"tensor {name} has values that are not finite", AGAIN)
        return stored

    def _path(self, name: str) -> Path:
        if name not in self._layers:
            return super()._path(name)
        return super()._path(f"{name.removesuffix('.weight')}.{self._layers[name][0].scale}")

    def _elements(self, name: str) -> int:
        if name not in self._layers:
            return super()._elements(name)
        _, n, k = self._layers[name]
        return n * k


def is_finite(values: Tensor) -> bool:
    """Return whether all values are finite. Types of 8 bits have no infinity, and few values that are no numbers."""
    if values.dtype is torch.float8_e4m3fn:
        return not bool(((values.view(torch.uint8) & 127) == 127).any())
    if values.dtype is torch.float8_e8m0fnu:
        return not bool((values.view(torch.uint8) == 255).any())
    return not values.is_floating_point() or bool(values.isfinite().all())
