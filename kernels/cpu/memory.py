"""Memory on large pages: weights and caches are streamed, and small pages would cost a table walk every 4 KiB."""

import contextlib
import mmap

import torch

_LARGE_PAGE = 2 << 20
_CHUNK = 64 << 20


def _map(size: int) -> tuple[torch.Tensor, int]:
    """Zeroed private bytes, freed with the last view of them, and the offset of the first large page in them."""
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

    def take(self, size: int) -> torch.Tensor:
        """[size] uint8, zeroed, 4 KiB-aligned."""
        if self._next + size > len(self._chunk):
            self._chunk, self._next = _map(max(size, min(_CHUNK, 4 * size)))
        taken = self._chunk[self._next : self._next + size]
        self._next += -(-size // 4096) * 4096
        return taken
