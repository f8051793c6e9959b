"""Simulated devices: their memory, counted as torch's allocator counts it, and their failures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import torch

UNIT = 512  # bytes; torch's allocator rounds up to it
CONTEXT_BYTES = 300 << 20  # the driver's own
GRAPH_BYTES = 1 << 20  # of the driver for each graph
POISON = 0x55
MULTIPROCESSORS = 3  # few, because the interpreter runs the programs of a grid one after the other
SHARED_BYTES = 227 << 10


def cuda_error(reason: str) -> RuntimeError:
    """Return the error that torch raises for a failed call of CUDA."""
    return torch.AcceleratorError(f"CUDA error: {reason}")


class Allocation:
    """Bytes of a device. The bytes are free again when the last tensor in them is dropped."""

    def __init__(self, device: SimulatedDevice, buffer: torch.Tensor, pool: MemoryPool | None) -> None:
        self.device, self.buffer, self.pool = device, buffer, pool

    def __del__(self) -> None:
        self.device.allocated -= len(self.buffer)
        if self.pool is not None:
            self.pool.free.append(self.buffer)


class MemoryPool:
    """The memory of the graphs that share a pool. Memory that one graph frees is used by the next operation or graph.

    num_users: graphs of the pool, and captures under way.
    """

    def __init__(self) -> None:
        self.free: list[torch.Tensor] = []
        self.size = self.num_users = 0


class SimulatedDevice:
    """A device.

    fails_allocation: given the size of an allocation, returns whether it fails as if memory had run out.
    fault: (number of an operation, reason); that operation fails when it runs, and the device is lost.
    """

    def __init__(self, index: int, total: int) -> None:
        self.index, self.total = index, total
        self.allocated = self.peak = self.reserved = self.graph_bytes = 0
        self.pools: dict[object, MemoryPool] = {}
        self.capturing: list[object] = []  # pools of captures under way, for the allocator
        self.fails_allocation: Callable[[int], bool] = lambda size: False
        self.fault: tuple[int, str] | None = None
        self.lost: str | None = None  # the reason
        self.num_run = 0
        self._lock = threading.RLock()

    @property
    def properties(self) -> SimpleNamespace:
        return SimpleNamespace(
            name="simulated CUDA device", major=9, minor=0, total_memory=self.total,
            multi_processor_count=MULTIPROCESSORS, shared_memory_per_block_optin=SHARED_BYTES,
        )  # fmt: skip

    @property
    def free(self) -> int:
        """Bytes that the driver reports as free."""
        return self.total - CONTEXT_BYTES - self.reserved - self.graph_bytes - sum(p.size for p in self.pools.values())

    def check(self) -> None:
        """Raise if the device is lost: every call of CUDA fails then, until the process ends."""
        if self.lost is not None:
            raise cuda_error(self.lost)

    def run(self, operation: Callable[[], object]) -> None:
        """Run an operation in the order of its stream."""
        self.num_run += 1
        if self.fault is not None and self.num_run >= self.fault[0]:
            self.lost = self.fault[1]
        self.check()
        operation()

    def allocate(self, size: int, pool_id: object | None = None) -> Allocation:
        """Allocate poisoned bytes, of a graph's pool if one is given. Raises OutOfMemoryError."""
        self.check()
        size = -(-size // UNIT) * UNIT
        with self._lock:
            pool = self.pools[pool_id] if pool_id is not None else None
            found = None
            if pool is not None:
                fitting = [one for one in pool.free if len(one) >= size]
                found = min(fitting, key=len, default=None)
                pool.free = [one for one in pool.free if one is not found]
            grows = 0
            if found is None:
                grows = size if pool is not None else max(0, self.allocated_outside + size - self.reserved)
                if self.fails_allocation(size) or grows > self.free:
                    raise torch.OutOfMemoryError(
                        f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB. GPU {self.index} has "
                        f"{self.free / 2**20:.2f} MiB free (simulated)"
                    )
                found = torch.empty(size, dtype=torch.uint8)
            if pool is not None:
                pool.size += grows
            else:
                self.reserved += grows
            self.allocated += len(found)
            self.peak = max(self.peak, self.allocated)
        found.fill_(POISON)
        return Allocation(self, found, pool)

    @property
    def allocated_outside(self) -> int:
        """Allocated bytes outside of the pools of graphs."""
        in_pools = sum(pool.size - sum(map(len, pool.free)) for pool in self.pools.values())
        return self.allocated - in_pools

    def empty_cache(self) -> None:
        if self.capturing:
            raise RuntimeError("the allocator's cache cannot be emptied while a capture is under way (simulated)")
        for name, pool in list(self.pools.items()):
            if not pool.num_users:
                del self.pools[name]
        self.reserved = max(0, self.allocated_outside)
