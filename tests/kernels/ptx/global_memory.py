"""Global memory: the memory of torch's tensors, at its own addresses."""

import ctypes
from collections.abc import Iterable

import numpy as np
import torch

from tests.kernels.ptx.program import PtxFault
from tests.support.kernels.living_tensors import living_tensors


class GlobalMemory:
    """Reads and writes the memory of tensors. Any other address raises PtxFault.

    running: addresses of bytes that kernels have written which may still run; None unless the launch is a dependent
    one. Its blocks may read these bytes, and write any, only after their wait (`wait`).
    """

    def __init__(self, tensors: Iterable[torch.Tensor], running: list[np.ndarray] | None = None) -> None:
        self._take(tensors)
        self._running = running
        self._written: list[np.ndarray] = []
        self.begin_block()

    def begin_block(self) -> None:
        self._has_waited = self._running is None

    def wait(self) -> None:
        """Wait for the kernel before this one."""
        self._has_waited = True

    def end_block(self) -> None:
        if not self._has_waited:
            raise PtxFault("the block does not wait for the kernel before it")

    @property
    def written(self) -> np.ndarray:
        """The addresses of all bytes that the launch has written."""
        return np.unique(np.concatenate(self._written)) if self._written else np.empty(0, np.int64)

    def check_read(self, addresses: np.ndarray, size: int) -> None:
        """Check that a read may begin now."""
        if not self._has_waited:
            touched = (addresses[:, None] + np.arange(size)).reshape(-1)
            if any(np.isin(touched, one).any() for one in self._running or ()):
                raise PtxFault("reads a result before the wait for it")

    def _take(self, tensors: Iterable[torch.Tensor]) -> None:
        found = {(one.untyped_storage().data_ptr(), one.untyped_storage().nbytes()) for one in tensors}
        known = sorted((begin, size) for begin, size in found if size)
        self._begins = np.array([begin for begin, _ in known], np.int64)
        self._ends = np.array([begin + size for begin, size in known], np.int64)
        self._bytes = [np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(begin)) for begin, size in known]

    def read(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Return bytes [n, size] at addresses [n] int64."""
        self.check_read(addresses, size)
        out = np.empty((len(addresses), size), np.uint8)
        for buffer, lanes, at in self._places(addresses, size):
            out[lanes] = buffer[at]
        return out

    def write(self, addresses: np.ndarray, data: np.ndarray) -> None:
        """Write bytes data [n, size] to addresses [n] int64."""
        if not self._has_waited:
            raise PtxFault("writes before the wait for the kernel before it")
        self._written.append((addresses[:, None] + np.arange(data.shape[1])).reshape(-1))
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
            self._take(one for one in living_tensors() if one.device.type == "cpu")
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
