"""The base weights of an adapter's modules, in float32, as the files of the model have them. Quantised ones are
dequantised.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.worker.models.files.loader import Weights

# Elements that are read at a time: a running step waits for no more of them.
CHUNK = 1 << 20


class BaseWeights:
    """The weights of a model, by the names of modules."""

    def __init__(self, weights: Weights, embedding: str, head: str) -> None:
        """embedding, head: names of tensors; the same one if the model ties them."""
        self._weights = weights
        self._names = {"model.embed_tokens": embedding, "lm_head": head}

    @property
    def is_tied(self) -> bool:
        return len(set(self._names.values())) == 1

    def chunks(self, module: str, width: int, rows: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield all rows of the weights [rows, width] of a module, some at a time, each with its place."""
        name = self._names.get(module, f"{module}.weight")
        step = max(1, CHUNK // width)
        for first in range(0, rows, step):
            place = slice(first, min(first + step, rows))
            yield place, self._weights.rows([name], torch.float32, "cpu", [(place, slice(0, width))])

    def bias(self, module: str) -> torch.Tensor | None:
        """Return the bias of a projection, or None if it has none."""
        name = f"{module}.bias"
        return self._weights.rows([name], torch.float32) if name in self._weights else None
