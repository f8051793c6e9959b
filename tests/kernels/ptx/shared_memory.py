"""The shared memory of a block, with the state that decides whether an access is a race.

A barrier interval is the time between two barriers. In one interval, what one warp writes may not be touched by another
warp, and what one warp reads may not be written by another. Lanes of one warp are in step. Copies and products under
way have places of their own: bytes in flight may not be touched, and operands of a product may not be written.
"""

import numpy as np

from tests.kernels.ptx.program import PtxFault

BASE = 1024  # the address of the first byte; the hardware's swizzles count from multiples of 1024
UNWRITTEN = 0xFF  # NaN in every format


class SharedMemory:
    """Bytes and their state. The state is kept per unit: the smallest number of bytes that the program touches."""

    def __init__(self, size: int, unit: int, warps: int) -> None:
        self.size, self.unit = -(-size // 16) * 16, unit
        units = self.size // unit
        self.data = np.empty(self.size, np.uint8)
        self._by_unit = self.data.view(f"u{unit}")
        self._interval = 1
        self._write_interval, self._writer = np.zeros(units, np.int64), np.zeros(units, np.int16)
        self._read_interval, self._readers = np.zeros(units, np.int64), np.zeros(units, np.int64)
        self._landing = np.zeros(units, np.int16)  # copies in flight to the unit
        self._products = np.zeros(units, np.int32)  # products in flight that read the unit
        self._hidden = np.zeros(units, bool)  # written, but not yet visible to the asynchronous proxy
        self._spread: dict[int, np.ndarray] = {}
        self._bits = np.int64(1) << np.arange(warps, dtype=np.int64)
        self.clear()

    def clear(self) -> None:
        """Return to the state before the first instruction of a block."""
        self.data[:] = UNWRITTEN
        self._interval += 1
        self._landing[:] = self._products[:] = 0
        self._hidden[:] = False

    def barrier(self) -> None:
        self._interval += 1

    def fence(self) -> None:
        """Make all writes visible to the asynchronous proxy, through which products read."""
        self._hidden[:] = False

    def units(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Return the units [n, size / unit] of accesses of `size` bytes."""
        at = addresses - BASE
        if (at < 0).any() or (at + size > self.size).any():
            raise PtxFault("a shared address is outside of the block's memory")
        if (at % size).any():
            raise PtxFault("a shared address is not aligned")
        count = size // self.unit
        if count not in self._spread:
            self._spread[count] = np.arange(count)
        return (at // self.unit)[:, None] + self._spread[count]

    def read(self, addresses: np.ndarray, size: int, warps: np.ndarray) -> np.ndarray:
        """Return bytes [n, size]. warps [n]: of the reading threads."""
        at, by = self.units(addresses, size), warps[:, None]
        if self._landing[at].any():
            raise PtxFault("reads what a copy in flight has not delivered")
        if ((self._write_interval[at] == self._interval) & (self._writer[at] != by)).any():
            raise PtxFault("reads what another warp has written since the last barrier")
        self._note_read(at, np.broadcast_to(self._bits[by], at.shape))
        return np.ascontiguousarray(self._by_unit[at]).view(np.uint8)

    def _note_read(self, at: np.ndarray, bits: np.ndarray | np.int64) -> None:
        self._readers[at[self._read_interval[at] != self._interval]] = 0
        self._read_interval[at] = self._interval
        np.bitwise_or.at(self._readers, at, bits)

    def write(self, addresses: np.ndarray, data: np.ndarray, warps: np.ndarray) -> None:
        """Write bytes data [n, size]. warps [n]: of the writing threads."""
        at, by = self.units(addresses, data.shape[1]), warps[:, None]
        self._check_write(at, by)
        self._note_write(at, by)
        self._by_unit[at] = np.ascontiguousarray(data).view(self._by_unit.dtype)

    def _check_write(self, at: np.ndarray, by: np.ndarray) -> None:
        if self._landing[at].any():
            raise PtxFault("writes where a copy is in flight")
        if self._products[at].any():
            raise PtxFault("writes what a product in flight reads")
        read = self._read_interval[at] == self._interval
        if (read & ((self._readers[at] & ~self._bits[by]) != 0)).any():
            raise PtxFault("writes what another warp has read since the last barrier")
        if ((self._write_interval[at] == self._interval) & (self._writer[at] != by)).any():
            raise PtxFault("writes what another warp has written since the last barrier")

    def _note_write(self, at: np.ndarray, by: np.ndarray) -> None:
        self._write_interval[at], self._writer[at], self._hidden[at] = self._interval, by, True

    def begin_copy(self, addresses: np.ndarray, size: int, warps: np.ndarray) -> None:
        """Begin an asynchronous copy to these places."""
        at = self.units(addresses, size)
        self._check_write(at, warps[:, None])
        self._landing[at] += 1
        self._by_unit[at] = np.iinfo(self._by_unit.dtype).max

    def end_copy(self, addresses: np.ndarray, data: np.ndarray, warps: np.ndarray) -> None:
        """Deliver the bytes of a copy; the threads that began it see them, the others after a barrier."""
        at = self.units(addresses, data.shape[1])
        self._landing[at] -= 1
        self._by_unit[at] = np.ascontiguousarray(data).view(self._by_unit.dtype)
        self._note_write(at, warps[:, None])

    def begin_product(self, at: np.ndarray) -> None:
        """Begin a product that reads the units `at`, each once."""
        if self._landing[at].any():
            raise PtxFault("a product reads what a copy in flight has not delivered")
        if self._hidden[at].any():
            raise PtxFault("a product reads what no fence has made visible to the asynchronous proxy")
        if (self._write_interval[at] == self._interval).any():
            raise PtxFault("a product reads what was written since the last barrier")
        self._products[at] += 1

    def end_product(self, at: np.ndarray, group: int) -> None:
        """End a product of warps 4 * group to 4 * group + 3."""
        self._products[at] -= 1
        self._note_read(at, np.int64(0xF << (4 * group)))
