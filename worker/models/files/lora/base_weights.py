"""The base weights of an adapter's modules, in float32, as the files of the model have them. Quantised ones are
dequantised.

The files are opened again for each adapter that needs them: a file that stays mapped could change the model. A worker
refuses files that have changed since it started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from quire.shared.model.folder import gguf_files
from quire.shared.process.errors import CheckpointError
from quire.worker.models.files.loader import Weights

# Elements that are read at a time: a running step waits for no more of them.
CHUNK = 1 << 20
# Size and time of the last change of each file, by name.
Versions = dict[str, tuple[int, int]]


class BaseFiles:
    """The files of a loaded model."""

    def __init__(self, path: Path, open_again: Callable[[], Weights], embedding: str, head: str) -> None:
        """embedding, head: names of tensors; the same one if the model ties them."""
        self.path, self._open = path, open_again
        self.names = {"model.embed_tokens": embedding, "lm_head": head}
        self._versions = _versions(path)

    def open(self) -> Weights:
        """Open the files. Raises CheckpointError if they have changed."""
        weights = self._open()
        if _versions(self.path) != self._versions:
            what = "the weights have changed since this worker has read them, and the adapter needs them again"
            raise CheckpointError(self.path, what, "restart the worker")
        return weights


class BaseWeights:
    """The weights of a model, by the names of modules. Opened at the first use, and closed with this object."""

    def __init__(self, files: BaseFiles) -> None:
        self._files = files
        self._opened: Weights | None = None

    @property
    def is_tied(self) -> bool:
        return len(set(self._files.names.values())) == 1

    @property
    def _weights(self) -> Weights:
        self._opened = self._opened or self._files.open()
        return self._opened

    def chunks(self, module: str, width: int, rows: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield all rows of the weights [rows, width] of a module, some at a time, each with its place."""
        name = self._files.names.get(module, f"{module}.weight")
        step = max(1, CHUNK // width)
        for first in range(0, rows, step):
            place = slice(first, min(first + step, rows))
            yield place, self._weights.rows([name], torch.float32, "cpu", [(place, slice(0, width))])

    def bias(self, module: str) -> torch.Tensor | None:
        """Return the bias of a projection, or None if it has none."""
        name = f"{module}.bias"
        return self._weights.rows([name], torch.float32) if name in self._weights else None


def _versions(path: Path) -> Versions:
    files = gguf_files(path) if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()}
