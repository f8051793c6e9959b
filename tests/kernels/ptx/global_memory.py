"""Global memory: the memory of torch's tensors, at its own addresses."""

import ctypes
import gc
from collections.abc import Iterable

import numpy as np
import torch

from tests.kernels.ptx.program import PtxFault


class GlobalMemory:
    """Reads and writes the memory of tensors. Any other address raises PtxFault."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._take(tensors)

    def _take(self, tensors: Iterable[torch.Tensor]) -> None:
        found = {(one.untyped_storage().data_ptr(), one.untyped_storage().nbytes()) for one in tensors}
        known = sorted((begin, size) for begin, size in found if size)
        self._begins = np.array([begin for begin, _ in known], np.int64)
        self._ends = np.array([begin + size for begin, size in known], np.int64)
        self._bytes = [np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(begin)) for begin, size in known]

    def read(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Return bytes [n, size] at addresses [n] int64."""
        out = np.empty((len(addresses), size), np.uint8)
        for buffer, lanes, at in self._places(addresses, size):
            out[lanes] = buffer[at]
        return out

    def write(self, addresses: np.ndarray, data: np.ndarray) -> None:
        """Write bytes data [n, size] to addresses [n] int64."""
        for buffer, lanes, at in self._places(addresses, data.shape[1]):
            buffer[at] = data[lanes]

    def _places(self, addresses: np.ndarray, size: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return, for each tensor that is touched: its bytes, the lanes, and the indices of their bytes."""
        if not len(addresses):
            return []
        if (addresses % size).any():
            raise PtxFault("a global address is not aligned")
        number = self._owners(addresses, size)
        if number is None:  # the kernel may have read the addresses of tensors from another tensor
            cpu = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.device.type == "cpu"]
            self._take(cpu)
            number = self._owners(addresses, size)
        if number is None:
            raise PtxFault("a global address is outside of all tensors")
        spread = np.arange(size)
        return [
            (self._bytes[one], lanes, (addresses[lanes] - self._begins[one])[:, None] + spread)
            for one in np.unique(number)
            for lanes in [number == one]
        ]

    def _owners(self, addresses: np.ndarray, size: int) -> np.ndarray | None:
        """Return the number of the tensor at each address; None if an address has none."""
        if not len(self._begins):
            return None
        number = np.searchsorted(self._begins, addresses, side="right") - 1
        return number if (number >= 0).all() and (addresses + size <= self._ends[number]).all() else None
