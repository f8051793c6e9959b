"""Barriers in shared memory that count arrivals and bytes (mbarrier), and copies by descriptor (TMA) to these bytes.

A copy is delivered by the last wait that allows it to be late: the one for the phase of its mbarrier. Until then its
bytes may not be touched. A phase is complete once all arrivals and all expected bytes are there. A warp that has waited
for it knows all that the arriving warps did before, and the delivered bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tests.kernels.ptx.global_memory import GlobalMemory
from tests.kernels.ptx.program import PtxFault
from tests.kernels.ptx.shared_memory import SharedMemory

SIZE = 8  # bytes of an mbarrier
SWIZZLE = 128  # bytes of a row of a tile; its 16-byte pieces change places within 8 rows
ALIGNMENT = 128  # of a tile


@dataclass(frozen=True)
class TensorMap:
    """The content of a descriptor: a matrix [rows, columns] of 2-byte elements, and the tile of a copy."""

    base: int  # address
    rows: int
    columns: int
    row_bytes: int  # from one row to the next
    tile: tuple[int, int]  # rows and columns


@dataclass
class _MBarrier:
    count: int  # arrivals of a phase
    agent: int  # who delivers its copies, among those whose writes `SharedMemory` tells apart
    pending: int = 0
    expected: int = 0  # bytes of the phase
    phase: int = 0  # complete phases
    copies: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # addresses, global addresses or -1
    seen: np.ndarray | None = None  # the clocks of the warps that have arrived in this phase
    released: np.ndarray | None = None  # those of the last complete phase


class MBarriers:
    """The mbarriers of a block. maps: the descriptors, by address."""

    def __init__(self, shared: SharedMemory, memory: GlobalMemory, maps: Mapping[int, TensorMap]) -> None:
        self._shared, self._memory, self._maps = shared, memory, maps
        self._all: dict[int, _MBarrier] = {}

    def clear(self) -> None:
        self._all = {}

    def init(self, warp: int, at: int, count: int) -> None:
        if at in self._all:
            raise PtxFault("an mbarrier is initialised again")
        self._shared.write(np.array([at]), np.zeros((1, SIZE), np.uint8), np.array([warp]))
        self._shared.reserve(at, SIZE)
        self._all[at] = _MBarrier(count, self._shared.add_agent(), count)

    def _find(self, at: int, warp: int) -> _MBarrier:
        if at not in self._all:
            raise PtxFault("there is no mbarrier at the address")
        if not self._shared.knows(at, warp):
            raise PtxFault("another warp has initialised the mbarrier since the last barrier")
        return self._all[at]

    def expect(self, warp: int, at: int, size: int) -> None:
        self._find(at, warp).expected += size

    def arrive(self, warp: int, at: int, count: int) -> None:
        one = self._find(at, warp)
        if one.pending < count:
            raise PtxFault("more arrivals than the mbarrier counts in a phase")
        one.pending -= count
        clocks = self._shared.release(warp)
        one.seen = clocks if one.seen is None else np.maximum(one.seen, clocks)
        if not one.expected and not one.copies:
            self._complete(one)

    def copy(self, warp: int, descriptor: int, row: int, column: int, to: int, at: int) -> None:
        """Begin a copy of a tile that begins at a row and a column, from one thread."""
        if descriptor not in self._maps:
            raise PtxFault("there is no descriptor at the address")
        one, tensor = self._find(at, warp), self._maps[descriptor]
        if not self._shared.is_visible(at, SIZE, warp):
            raise PtxFault("no fence has made the mbarrier visible to the asynchronous proxy")
        if to % ALIGNMENT:
            raise PtxFault("the tile of a copy is not aligned")
        rows, columns = tensor.tile
        places = to + SWIZZLE * np.arange(rows)[:, None] + np.arange(0, SWIZZLE, 16)[None, :]
        places ^= (places >> 7 & 7) << 4
        r, c = row + np.arange(rows)[:, None], column + np.arange(0, columns, 8)[None, :]
        inside = (r >= 0) & (r < tensor.rows) & (c >= 0) & (c < tensor.columns)
        sources = np.where(inside, tensor.base + r * tensor.row_bytes + 2 * c, -1).reshape(-1)
        self._memory.check_read(sources[sources >= 0], 16)
        addresses = places.reshape(-1)
        if not self._shared.is_visible(to, rows * SWIZZLE, warp):
            raise PtxFault("a copy overwrites what no fence has made visible to the asynchronous proxy")
        self._shared.begin_copy(addresses, 16, np.full(len(addresses), warp))
        one.copies.append((addresses, sources))

    def wait(self, warps: np.ndarray, at: int, parity: int) -> bool:
        """Return whether the phase with this parity is complete, which completes it if it can."""
        for warp in warps:
            one = self._find(at, warp)
        if one.phase % 2 == parity:
            self._complete(one)
        if one.phase % 2 == parity:
            return False
        if one.released is not None:
            self._shared.acquire(warps, one.released)
        return True

    def _complete(self, one: _MBarrier) -> None:
        """Complete the phase if all arrivals and bytes are there."""
        delivered = sum(16 * len(addresses) for addresses, _ in one.copies)
        if one.pending or one.expected > delivered:
            return
        if one.expected < delivered:
            raise PtxFault("copies deliver more bytes than their mbarrier expects")
        for addresses, sources in one.copies:
            data = np.zeros((len(addresses), 16), np.uint8)
            inside = sources >= 0
            data[inside] = self._memory.read(sources[inside], 16)
            self._shared.end_copy_of(one.agent, addresses, data)
        assert one.seen is not None
        one.released = self._shared.with_agent(one.seen, one.agent)
        one.pending, one.expected, one.copies, one.seen = one.count, 0, [], None
        one.phase += 1

    def check_complete(self) -> None:
        if any(one.copies for one in self._all.values()):
            raise PtxFault("the program ends while a copy is in flight")
