"""Collective operations of ranks on CPUs: processes that exchange tensors through shared memory (ranks.h)."""

import ctypes
import mmap
import os

from torch import Tensor

from quire.kernels import checks
from quire.kernels.cpu import library
from quire.kernels.cpu.levels import LEVELS


class GivenUp(RuntimeError):
    """A rank has ended: collective operations fail on all ranks from now on."""


class CpuRanks:
    """The collective operations of one rank.

    All ranks call the same operations in the same order, with contiguous tensors of the same shapes. An operation
    raises GivenUp if a rank has called `give_up`.
    """

    def __init__(self, rank: int, size: int, file: int) -> None:
        """Map the shared memory.

        rank: 0..size - 1. file: descriptor of a zeroed file of `bytes_for(size)` bytes that all ranks have open. The
        caller may close it afterwards.
        """
        self.rank, self.size = rank, size
        self._functions = library.load().common
        self._memory = mmap.mmap(file, self.bytes_for(size))  # keeps the mapping alive
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.address = self._functions.ranks_open(start, rank, size)

    @staticmethod
    def bytes_for(size: int) -> int:
        """Return the bytes of shared memory for `size` ranks. Raises ValueError for more ranks than are supported."""
        size_in_bytes = library.load().common.ranks_bytes(size)
        if not size_in_bytes:
            raise ValueError(f"{size} ranks are more than there can be")
        return size_in_bytes

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum float32 or bfloat16 values over all ranks in place, in the order of the ranks, and return them."""
        if values.dtype not in LEVELS:
            raise TypeError(f"values are {values.dtype}, not float32 or bfloat16")
        address, count = _address(values), values.numel()
        self._check(self._functions.ranks_all_reduce(self.address, address, count, values.itemsize))
        return values

    def broadcast(self, values: Tensor) -> Tensor:
        """Replace the values by those of rank 0, in place, and return them."""
        self._check(self._functions.ranks_broadcast(self.address, _address(values), values.nbytes))
        return values

    def gather(self, values: Tensor) -> Tensor | None:
        """Return the values of all ranks as [ranks, ...] on rank 0, and None on other ranks."""
        out = values.new_empty((self.size, *values.shape)) if self.rank == 0 else None
        address = _address(values)
        self._check(self._functions.ranks_gather(self.address, address, values.nbytes, checks.address(out)))
        return out

    def give_up(self) -> None:
        """Make every current and later operation fail, on all ranks."""
        self._functions.ranks_give_up(self.address)

    @staticmethod
    def _check(done: int) -> None:
        if not done:
            raise GivenUp("another rank has ended")


def _address(values: Tensor) -> int | None:
    checks.tensor("values", values, values.dtype, values.shape)
    return checks.address(values)


def shared_file(size: int) -> int:
    """Return the descriptor of a new file in memory, as `CpuRanks` needs it for `size` ranks."""
    file = os.memfd_create("quire-ranks")
    os.ftruncate(file, CpuRanks.bytes_for(size))
    return file
