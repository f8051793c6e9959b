"""Memory on large pages: weights and caches are streamed, and small pages would cost a table walk every 4 KiB."""

import contextlib
import mmap

import torch

_SMALL_PAGE, _LARGE_PAGE = 4 << 10, 2 << 20
_CHUNK = 64 << 20
# What is taken `apart` begins one step further in a large page than the one before: by the golden ratio of a page, so
# that the places of any number of them are far from each other.
_STEP = 316 * _SMALL_PAGE


def _map(size: int) -> tuple[torch.Tensor, int]:
    """`size` zeroed private bytes, freed with the last view of them, and the offset of the first large page in them."""
    size = -(-size // _LARGE_PAGE) * _LARGE_PAGE + _LARGE_PAGE  # room to align
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without large pages: slower, not wrong
            memory.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    return data, -data.data_ptr() % _LARGE_PAGE


class Arena:
    """Hands out bytes, small ones side by side in a shared chunk. A chunk lives as long as any tensor in it."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._next = 0
        self._place = 0

    def take(self, size: int, apart: bool = False) -> torch.Tensor:
        """[size] uint8, zeroed, 4 KiB-aligned.

        apart: for what fills up together, like the caches of all layers. They come to pages that were never touched,
        which take their time, one after the other, and not all in the same step.
        """
        at = self._next
        if apart:
            self._place = (self._place + _STEP) % _LARGE_PAGE
            at += (self._place - self._chunk.data_ptr() - at) % _LARGE_PAGE
        if at + size > len(self._chunk):
            self._chunk, at = _map(max(size, min(_CHUNK, 4 * size)) + (_LARGE_PAGE if apart else 0))
            at += self._place if apart else 0
        self._next = at + -(-size // _SMALL_PAGE) * _SMALL_PAGE
        return self._chunk[at : at + size]
