"""The adapters of a step, gathered from the rows of the input batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire.kernels.ops import NO_ADAPTER, AdapterBatch
from quire.worker.engine.input_batch import InputBatch

if TYPE_CHECKING:
    from quire.worker.engine.adapters import Adapter


def adapter_batch(batch: InputBatch, rows: np.ndarray, starts: np.ndarray, wanted: np.ndarray) -> AdapterBatch | None:
    """Return the adapters of a step, or None if no token uses one.

    rows int64 [S]: of the input batch. starts int32 [S + 1]: the first token of each sequence, and the end. wanted: the
    tokens whose output is wanted.
    """
    if not batch.num_adapted:
        return None
    numbers: dict[Adapter, int] = {}
    index = [
        NO_ADAPTER if adapter is None else numbers.setdefault(adapter, len(numbers))
        for adapter in map(batch.adapters.__getitem__, rows.tolist())
    ]
    if not numbers:
        return None
    tokens = np.repeat(np.array(index, dtype=np.int32), np.diff(starts))
    return AdapterBatch([adapter.packed for adapter in numbers], tokens, tokens[wanted])
