"""Reads the tensors of a checkpoint whose stacked experts are MXFP4: as numbers, or as grouped weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from quire.kernels.weights import GROUP, GroupedWeight, grouped_part
from quire.shared.process.errors import CheckpointError
from quire.worker.models.files.loader import AGAIN
from quire.worker.models.files.quantized.checkpoint import QuantizedCheckpoint
from quire.worker.models.files.quantized.layout import Stored
from quire.worker.models.files.quantized.mxfp4 import mxfp4_weight

BLOCKS, SCALES = "_blocks", "_scales"


class Mxfp4Checkpoint(QuantizedCheckpoint):
    """Tensors by their canonical names. Experts `NAME` [E, K, N] are stored as `NAME_blocks` and `NAME_scales`."""

    def check(self, expected: dict[str, tuple[int, ...]], ignored: Iterable[str] = ()) -> None:
        self._experts = {
            name: shape for name, shape in expected.items() if len(shape) == 3 and name not in self._tensors
        }
        used = set(ignored)
        for name, (count, k, n) in self._experts.items():
            if k % GROUP:
                what = f"{name} has {k} input features, expected a multiple of {GROUP} as the weights are MXFP4"
                raise CheckpointError(self._folder, what, "use a checkpoint of 16 bits")
            groups = k // GROUP
            self._check_stored(name + BLOCKS, Stored(("U8",), ((count, n, groups, GROUP // 2),)))
            self._check_stored(name + SCALES, Stored(("U8",), ((count, n, groups),)))
            used |= {name + BLOCKS, name + SCALES}
        super().check({name: shape for name, shape in expected.items() if name not in self._experts}, used)
        self._total_bytes += sum(self._elements(name) * self.stored_dtype(name).itemsize for name in self._experts)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._experts[name] if name in self._experts else super().shape(name)

    def stored_dtype(self, name: str) -> torch.dtype:
        return self._wide if name in self._experts else super().stored_dtype(name)

    def grouped_entry(self, name: str, index: int, part: tuple[slice, ...]) -> GroupedWeight | None:
        if name not in self._experts:
            return None
        weight = grouped_part(self._entry(name, index), part)
        if weight is not None:
            self._count(name, (slice(index, index + 1),))
        return weight

    def _entry(self, name: str, index: int) -> GroupedWeight:
        """Read the weights of one expert, [N, K]."""
        span = (slice(index, index + 1),)
        try:
            stored = [super(Mxfp4Checkpoint, self)._stored(name + end, span) for end in (BLOCKS, SCALES)]
            weight = mxfp4_weight(stored[0][0], stored[1][0])
            for tensor in stored:
                self._mapped.release(tensor)
            return weight
        except ValueError as error:
            raise CheckpointError(self._path(name), f"tensor {name}: scales {error}", AGAIN) from None

    def _stored(self, name: str, part: tuple[slice, ...]) -> Tensor:
        if name not in self._experts:
            return super()._stored(name, part)
        first, last, _ = part[0].indices(self._experts[name][0])
        entries = torch.stack([self._entry(name, at).dequantized(self._wide).T for at in range(first, last)])
        return entries[(slice(None), *part[1:])]

    def _path(self, name: str) -> Path:
        return super()._path(name + BLOCKS if name in self._experts else name)

    def _elements(self, name: str) -> int:
        return math.prod(self._experts[name]) if name in self._experts else super()._elements(name)

    def _count(self, name: str, part: tuple[slice, ...] = ()) -> None:
        if name not in self._experts or not part:
            super()._count(name, part)
            return
        self._read_bytes += self._elements(name) // self._experts[name][0] * self.stored_dtype(name).itemsize
        if self._progress is not None:
            self._progress(self._read_bytes, self._total_bytes)
