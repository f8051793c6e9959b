"""Returns memory that was freed to the system while weights are loaded.

The allocator of the C library keeps freed memory for later calls. The temporary tensors of loading would leave it holes
as large as a good part of the weights.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

INTERVAL = 1 << 20  # weights that are read, after which freed memory is returned


class FreeMemory:
    """Counts weights that are read, and returns freed memory from time to time."""

    def __init__(self, interval: int = INTERVAL) -> None:
        self._interval, self._read = interval, 0
        self._trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc

    def count(self, weights: int) -> None:
        """Count weights that were read and are packed."""
        self._read += weights
        if self._read >= self._interval:
            self.give_back()

    def give_back(self) -> None:
        """Return freed memory to the system now."""
        self._read = 0
        if self._trim is not None:
            self._trim(0)
