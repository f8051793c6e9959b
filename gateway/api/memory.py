"""Gives memory that is free back to the operating system."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

# Bytes of bodies after whose end memory is given back, and seconds between the end and that.
LARGE = 16 * 1024 * 1024
PAUSE_S = 1.0


# Blocks from this size on are mapped alone, so freeing one gives its memory back at once. By default glibc raises the
# bound to the size of the largest block that was freed, up to 32 MiB.
MAPPED_BYTES = 256 * 1024
_M_MMAP_THRESHOLD = -3


def map_large_blocks() -> None:
    """Have the C library map large blocks alone. Does nothing with a C library without mallopt."""
    try:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
    except (OSError, AttributeError):
        return


def _trim() -> Callable[[int], int] | None:
    """Return malloc_trim; None if the C library has none, as musl."""
    try:
        malloc_trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
        return malloc_trim
    except (OSError, AttributeError):
        return None


class MemoryReturn:
    """Calls malloc_trim some time after large bodies.

    glibc keeps freed memory for the next allocation, for each thread apart.
    """

    def __init__(self) -> None:
        map_large_blocks()
        self._trim = _trim()
        self._freed = 0
        self._timer: asyncio.TimerHandle | None = None

    def note(self, size: int) -> None:
        """Note that a body of this size is not needed any more."""
        self._freed += size
        if self._freed >= LARGE and self._timer is None and self._trim is not None:
            self._timer = asyncio.get_running_loop().call_later(PAUSE_S, self._give_back)

    def _give_back(self) -> None:
        self._freed, self._timer = 0, None
        assert self._trim is not None
        # In a thread, without Python's lock: it takes milliseconds for each gigabyte.
        asyncio.get_running_loop().run_in_executor(None, self._trim, 0)
