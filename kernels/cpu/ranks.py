"""Ranks on CPUs: processes that exchange through memory which all of them map (ranks.h)."""

import ctypes
import mmap
import os

from torch import Tensor

from quire.kernels import checks
from quire.kernels.cpu import library


class GivenUp(RuntimeError):
    """Another rank has ended; nobody waits for the others any more."""


class CpuRanks:
    """One rank's side. All ranks call the same operations in the same order, with tensors of the same shapes."""

    def __init__(self, rank: int, size: int, file: int) -> None:
        """file: descriptor of a file that all ranks have open, zeroed and of `bytes_for(size)`; may be closed then."""
        self.rank, self.size = rank, size
        self._library = library.load()
        self._memory = mmap.mmap(file, self.bytes_for(size))  # until nobody refers to it
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.address = self._library.quire_ranks_open(start, rank, size)

    @staticmethod
    def bytes_for(size: int) -> int:
        """ValueError for more ranks than there can be."""
        size_in_bytes: int = library.load().quire_ranks_bytes(size)
        if not size_in_bytes:
            raise ValueError(f"{size} ranks are more than there can be")
        return size_in_bytes

    def all_reduce(self, values: Tensor) -> Tensor:
        """In place, the sum over all ranks, taken in their order; float32 or bfloat16. GivenUp."""
        if values.dtype not in library.LEVELS:
            raise TypeError(f"values are {values.dtype}, not float32 or bfloat16")
        checks.tensor("values", values, values.dtype, values.shape)
        self._check(
            self._library.quire_ranks_all_reduce(self.address, checks.address(values), values.numel(), values.itemsize)
        )
        return values

    def broadcast(self, values: Tensor) -> Tensor:
        """In place, what rank 0 has. GivenUp."""
        checks.tensor("values", values, values.dtype, values.shape)
        self._check(self._library.quire_ranks_broadcast(self.address, checks.address(values), values.nbytes))
        return values

    def gather(self, values: Tensor) -> Tensor | None:
        """[...] of each rank -> [ranks, ...] on rank 0, None elsewhere. GivenUp."""
        checks.tensor("values", values, values.dtype, values.shape)
        out = values.new_empty((self.size, *values.shape)) if self.rank == 0 else None
        self._check(
            self._library.quire_ranks_gather(self.address, checks.address(values), values.nbytes, checks.address(out))
        )
        return out

    def give_up(self) -> None:
        """End every operation that waits now or later, on all ranks."""
        self._library.quire_ranks_give_up(self.address)

    @staticmethod
    def _check(done: int) -> None:
        if not done:
            raise GivenUp("another rank has ended")


def shared_file(size: int) -> int:
    """Descriptor of a file in memory for so many ranks."""
    file = os.memfd_create("quire-ranks")
    os.ftruncate(file, CpuRanks.bytes_for(size))
    return file
