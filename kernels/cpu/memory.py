"""Memory on large pages for weights and caches. Kernels stream them; small pages cost a page-table walk every 4 KiB."""

import contextlib
import mmap

import torch

_SMALL_PAGE, _LARGE_PAGE = 4 << 10, 2 << 20
_CHUNK = 64 << 20
# The distance between the offsets, within a large page, of two successive `apart` allocations: the golden ratio
# of a page, so that the offsets of any number of allocations are far from each other.
_STEP = 316 * _SMALL_PAGE


def _map(size: int) -> tuple[torch.Tensor, mmap.mmap, int]:
    """Map at least `size` zeroed bytes. The memory is freed with its last view.

    Returns the bytes, their mapping, and the offset of the first large page in them.
    """
    size = -(-size // _LARGE_PAGE) * _LARGE_PAGE + _LARGE_PAGE  # one page more, to align
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without large pages: slower, not wrong
            memory.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    return data, memory, -data.data_ptr() % _LARGE_PAGE


class Arena:
    """Allocates memory; small allocations share a chunk. A chunk is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._mapping: mmap.mmap | None = None
        self._next = 0
        self._taken = 0  # bytes
        self._place = 0

    def take(self, size: int, apart: bool = False) -> torch.Tensor:
        """Return [size] uint8, zeroed and aligned to 4 KiB.

        apart: for memory that fills up at the same rate, such as the caches of all layers. Each allocation begins at
        another offset in a large page, so that the page faults of first writes come in different steps. The memory up
        to the next large page has small pages: a cache with few tokens in it takes little memory, and a start does not
        wait for a large page of each cache.
        """
        at = self._next
        if apart:
            self._place = (self._place + _STEP) % _LARGE_PAGE
            at += (self._place - self._chunk.data_ptr() - at) % _LARGE_PAGE
        if at + size > len(self._chunk):
            self._give_back_rest()
            chunk = max(size, min(_CHUNK, max(4 * size, self._taken // 4)))  # which grows with the model
            self._chunk, self._mapping, at = _map(chunk + (_LARGE_PAGE if apart else 0))
            at += self._place if apart else 0
        if apart:
            self._use_small_pages(at)
        self._taken += size
        self._next = at + -(-size // _SMALL_PAGE) * _SMALL_PAGE
        return self._chunk[at : at + size]

    def _give_back_rest(self) -> None:
        """Return the memory of the chunk that is not taken. Its first part is in the last large page that is in use."""
        rest = len(self._chunk) - self._next
        if self._mapping is not None and rest > 0 and hasattr(mmap, "MADV_DONTNEED"):
            with contextlib.suppress(OSError):
                self._mapping.madvise(mmap.MADV_DONTNEED, self._next, rest)

    def _use_small_pages(self, at: int) -> None:
        """Have the memory of the chunk from `at` up to the next large page in small pages."""
        rest = min(-(self._chunk.data_ptr() + at) % _LARGE_PAGE, len(self._chunk) - at)
        if self._mapping is not None and rest and hasattr(mmap, "MADV_NOHUGEPAGE"):
            with contextlib.suppress(OSError):
                self._mapping.madvise(mmap.MADV_NOHUGEPAGE, at, rest)
