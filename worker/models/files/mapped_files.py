"""Files of weights that are mapped into the memory of this process, and the return of their pages.

A page of a mapped file is in the memory of a process from its first use on. Without a return, a process that has copied
all weights would hold them twice.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import torch

_MAPS, _DETAILS = Path("/proc/self/maps"), Path("/proc/self/smaps")


class MappedFiles:
    """The mappings of some files into the memory of this process."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._paths = {os.path.realpath(file) for file in files}
        self._ranges: list[tuple[int, int]] = []  # of addresses
        self._mapped: set[str] = set()
        self._madvise = getattr(ctypes.CDLL(None), "madvise", None)

    def release(self, tensor: torch.Tensor) -> None:
        """Take the pages of a tensor out of the memory of this process, if it lies in one of the files.

        The next use reads the pages again, out of the system's cache of files as a rule. The tensor must not have been
        written to.
        """
        if self._madvise is None or not hasattr(mmap, "MADV_DONTNEED") or not tensor.is_cpu or not tensor.numel():
            return
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        first = tensor.data_ptr()
        end = first + (last + 1) * tensor.element_size()
        if not self._holds(first, end):
            return
        # Other tensors share the pages at both ends.
        self._release(-(-first // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE)

    def release_all(self) -> None:
        """Take all pages of the files out of the memory of this process, unless something has written to them."""
        if self._madvise is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        if self._mapped != self._paths:
            self._read()
        if not self._has_changes():
            for first, end in self._ranges:
                self._release(first, end)

    def _release(self, first: int, end: int) -> None:
        if end > first and self._madvise is not None:
            self._madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)

    def _has_changes(self) -> bool:
        """Return whether a page of the files was written to, so that it differs from the file."""
        of_a_file = False
        for line in _DETAILS.read_text().splitlines():
            name, *values = line.split(maxsplit=5)
            if not name.endswith(":"):
                of_a_file = len(values) == 5 and values[-1] in self._paths
            elif name == "Anonymous:" and of_a_file and int(values[0]):
                return True
        return False

    def _holds(self, first: int, end: int) -> bool:
        if self._is_inside(first, end):
            return True
        if self._mapped == self._paths:
            return False
        self._read()  # a file may be mapped at its first use
        return self._is_inside(first, end)

    def _is_inside(self, first: int, end: int) -> bool:
        return any(low <= first and end <= high for low, high in self._ranges)

    def _read(self) -> None:
        self._ranges, self._mapped = [], set()
        try:
            lines = _MAPS.read_text().splitlines()
        except OSError:  # not Linux
            self._mapped = set(self._paths)
            return
        for line in lines:
            addresses, _, _, _, _, *path = line.split(maxsplit=5)
            if path and path[0] in self._paths:
                low, _, high = addresses.partition("-")
                self._ranges.append((int(low, 16), int(high, 16)))
                self._mapped.add(path[0])
