"""The shared memory of a block, with the state that decides whether an access is a race.

A warp may touch bytes that another warp has written, or overwrite bytes that another has read, only after both have
met: at a barrier, or by an mbarrier at which the other arrives and for which the warp waits. Lanes of one warp are in
step. Each warp has a clock, and knows the clocks of the others as of their last meeting (vector clocks). Copies
and products under way have places of their own: bytes in flight may not be touched, and operands of a product may not
be written.
"""

import numpy as np

from tests.kernels.ptx.program import PtxFault

BASE = 1024  # the address of the first byte; the hardware's swizzles count from multiples of 1024
UNWRITTEN = 0xFF  # NaN in every format
MOST_AGENTS = 32  # that deliver copies


class SharedMemory:
    """Bytes and their state. The state is kept per unit: the smallest number of bytes that the program writes."""

    def __init__(self, size: int, unit: int, warps: int) -> None:
        self.size, self.unit, self._warps = -(-size // 16) * 16, unit, warps
        units = self.size // unit
        self.data = np.empty(self.size, np.uint8)
        self._by_unit = self.data.view(f"u{unit}")
        # The clocks of all, as each warp knows them, [warps, warps and agents]; on the diagonal: its own clock.
        self._clocks = np.eye(warps, warps + MOST_AGENTS, dtype=np.int64)
        self._agent_clocks = np.zeros(MOST_AGENTS, np.int64)
        self._agents = 0
        self._write_clock, self._writer = np.zeros(units, np.int64), np.zeros(units, np.int16)
        self._read_clocks = np.zeros((units, warps), np.int64)
        self._landing = np.zeros(units, np.int16)  # copies in flight to the unit
        self._products = np.zeros(units, np.int32)  # products in flight that read the unit
        # Writes that the asynchronous proxy sees only after a fence, the warps that have fenced them (bits), and the
        # first of these with its clock.
        self._hidden, self._fenced = np.zeros(units, bool), np.zeros(units, np.int64)
        self._fencer, self._fence_clock = np.zeros(units, np.int16), np.zeros(units, np.int64)
        self._reserved = np.zeros(units, bool)  # of mbarriers
        self._spread: dict[int, np.ndarray] = {}
        self.clear()

    def clear(self) -> None:
        """Return to the state before the first instruction of a block."""
        self.data[:] = UNWRITTEN
        self._clocks[:, self._warps :] = self._agent_clocks
        self._agent_clocks += 1
        self._agents = 0
        self.barrier(np.arange(self._warps))
        self._landing[:] = self._products[:] = 0
        self._hidden[:] = self._reserved[:] = False

    # Clocks

    def barrier(self, warps: np.ndarray) -> None:
        """Let these warps know what each of them has done."""
        self._clocks[warps] = self._clocks[warps].max(axis=0)
        self._clocks[warps, warps] += 1

    def release(self, warp: int) -> np.ndarray:
        """Return what a warp has done and knows, for others; what it does from now on is not part of it."""
        known = self._clocks[warp].copy()
        self._clocks[warp, warp] += 1
        return known

    def acquire(self, warps: np.ndarray, known: np.ndarray) -> None:
        """Let these warps know what others have released."""
        self._clocks[warps] = np.maximum(self._clocks[warps], known)

    def add_agent(self) -> int:
        """Return the number of one who delivers copies."""
        self._agents += 1
        assert self._agents <= MOST_AGENTS, "the emulator does not know so many mbarriers"
        return self._agents - 1

    def with_agent(self, known: np.ndarray, agent: int) -> np.ndarray:
        """Add what an agent has delivered so far."""
        found = known.copy()
        found[self._warps + agent] = self._agent_clocks[agent]
        self._agent_clocks[agent] += 1
        return found

    def fence(self, warps: np.ndarray) -> None:
        """Make the writes that these warps know visible to their asynchronous proxy, through which products read.

        Another warp sees them so once it knows of the fence.
        """
        (at,) = np.nonzero(self._hidden)
        knows = self._write_clock[at] <= self._clocks[warps[:, None], self._writer[at]]
        new = (self._fenced[at] == 0) & knows.any(axis=0)
        fencer = np.where(np.isin(self._writer[at], warps), self._writer[at], warps[knows.argmax(axis=0)])[new]
        self._fencer[at[new]], self._fence_clock[at[new]] = fencer, self._clocks[fencer, fencer]
        self._fenced[at] |= (knows << warps[:, None]).sum(axis=0)

    def knows(self, address: int, warp: int) -> bool:
        """Return whether a warp knows the last write at an address."""
        at = (address - BASE) // self.unit
        return bool(self._write_clock[at] <= self._clocks[warp, self._writer[at]])

    def is_visible(self, address: int, size: int, warp: int) -> bool:
        """Return whether the asynchronous proxy of a warp sees all that was written at these bytes."""
        at = np.arange((address - BASE) // self.unit, (address - BASE + size) // self.unit)
        return self._sees(at, np.array([warp]))

    def _sees(self, at: np.ndarray, warps: np.ndarray) -> bool:
        at = at[self._hidden[at]]
        own = (self._fenced[at] >> warps[:, None] & 1) == 1
        known = (self._fenced[at] != 0) & (self._fence_clock[at] <= self._clocks[warps[:, None], self._fencer[at]])
        return bool((own | known).all())

    def reserve(self, address: int, size: int) -> None:
        """Take bytes for an mbarrier: ordinary instructions may not touch them."""
        self._reserved[(address - BASE) // self.unit : (address - BASE + size) // self.unit] = True

    # Accesses

    def units(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Return the units [n, size / unit] of accesses of `size` bytes, at least one unit."""
        at = addresses - BASE
        if (at < 0).any() or (at + size > self.size).any():
            raise PtxFault("a shared address is outside of the block's memory")
        if (at % size).any():
            raise PtxFault("a shared address is not aligned")
        count = max(1, size // self.unit)
        if count not in self._spread:
            self._spread[count] = np.arange(count)
        return (at // self.unit)[:, None] + self._spread[count]

    def read(self, addresses: np.ndarray, size: int, warps: np.ndarray) -> np.ndarray:
        """Return bytes [n, size]. warps [n]: of the reading threads."""
        at, by = self.units(addresses, size), warps[:, None]
        if self._landing[at].any():
            raise PtxFault("reads what a copy in flight has not delivered")
        if self._reserved[at].any():
            raise PtxFault("reads an mbarrier")
        if (self._write_clock[at] > self._clocks[by, self._writer[at]]).any():
            raise PtxFault("reads what another warp has written since the last barrier")
        self._read_clocks[at, by] = self._clocks[by, by]
        if size < self.unit:
            return self.data[(addresses - BASE)[:, None] + np.arange(size)]
        return np.ascontiguousarray(self._by_unit[at]).view(np.uint8)

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
        if self._reserved[at].any():
            raise PtxFault("writes to an mbarrier")
        if (self._read_clocks[at] > self._clocks[by, : self._warps]).any():
            raise PtxFault("writes what another warp has read since the last barrier")
        if (self._write_clock[at] > self._clocks[by, self._writer[at]]).any():
            raise PtxFault("writes what another warp has written since the last barrier")

    def _note_write(self, at: np.ndarray, by: np.ndarray) -> None:
        self._write_clock[at], self._writer[at] = self._clocks[by, by], by
        self._hidden[at], self._fenced[at] = True, 0

    def begin_copy(self, addresses: np.ndarray, size: int, warps: np.ndarray) -> None:
        """Begin an asynchronous copy to these places."""
        at = self.units(addresses, size)
        self._check_write(at, warps[:, None])
        self._landing[at] += 1
        self._by_unit[at] = np.iinfo(self._by_unit.dtype).max

    def end_copy(self, addresses: np.ndarray, data: np.ndarray, warps: np.ndarray) -> None:
        """Deliver the bytes of a copy; the threads that began it see them, the others after a barrier."""
        at = self._deliver(addresses, data)
        self._note_write(at, warps[:, None])

    def end_copy_of(self, agent: int, addresses: np.ndarray, data: np.ndarray) -> None:
        """Deliver the bytes of a copy by an agent, through the asynchronous proxy; see `with_agent`."""
        at = self._deliver(addresses, data)
        self._write_clock[at], self._writer[at] = self._agent_clocks[agent], self._warps + agent
        self._hidden[at] = False

    def _deliver(self, addresses: np.ndarray, data: np.ndarray) -> np.ndarray:
        at = self.units(addresses, data.shape[1])
        self._landing[at] -= 1
        self._by_unit[at] = np.ascontiguousarray(data).view(self._by_unit.dtype)
        return at

    def begin_product(self, at: np.ndarray, group: int) -> None:
        """Begin a product of warps 4 * group to 4 * group + 3 that reads the units `at`, each once."""
        if self._landing[at].any():
            raise PtxFault("a product reads what a copy in flight has not delivered")
        warps = np.arange(4 * group, 4 * group + 4)
        if not self._sees(at, warps):
            raise PtxFault("a product reads what no fence has made visible to the asynchronous proxy")
        if (self._write_clock[at] > self._clocks[warps[:, None], self._writer[at]]).any():
            raise PtxFault("a product reads what was written since the last barrier")
        self._products[at] += 1

    def end_product(self, at: np.ndarray, group: int) -> None:
        """End a product of warps 4 * group to 4 * group + 3."""
        self._products[at] -= 1
        warps = np.arange(4 * group, 4 * group + 4)
        self._read_clocks[at[:, None], warps] = self._clocks[warps, warps]
