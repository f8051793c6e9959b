"""CUDA graphs: a capture records launches, forbids what CUDA forbids, and allocates from the pool of its graph."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, NamedTuple

from tests.support.simulated_cuda.devices import GRAPH_BYTES, MemoryPool, cuda_error
from tests.support.simulated_cuda.streams import Operation, SimulatedStream

if TYPE_CHECKING:
    from tests.support.simulated_cuda.driver import Driver

MODES = ("global", "thread_local", "relaxed")
_handles = itertools.count(1)


def pool_handle() -> tuple[int, int]:
    return next(_handles), 0


class Capture(NamedTuple):
    """A capture under way. failures: the calls that ended it; the capture must still be ended by its program."""

    stream: SimulatedStream
    pool_id: object
    mode: str
    thread: int
    failures: list[str]

    def forbids(self) -> bool:
        """Return whether the calling thread may not wait for the device, nor ask it for its progress."""
        return self.mode == "global" or (self.mode == "thread_local" and self.thread == threading.get_ident())


class SimulatedGraph:
    """Stands in for torch.cuda.CUDAGraph."""

    driver: Driver

    def __init__(self, keep_graph: bool = False) -> None:
        self._capture: Capture | None = None
        self._operations: list[Operation] | None = None
        self._pool: MemoryPool | None = None

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global", **_: object) -> None:
        assert capture_error_mode in MODES, f"capture_error_mode is {capture_error_mode!r}"
        stream, pool_id = self.driver.current_stream(), pool or pool_handle()
        device = stream.of_device
        device.check()
        if stream is self.driver.default_streams[device.index]:
            raise cuda_error("operation not permitted when stream is capturing: the default stream cannot be captured")
        if self.driver.captures:
            raise RuntimeError("another capture is under way")
        if pool_id in self.driver.dead_pools or pool_id in device.capturing:
            raise RuntimeError("the pool belongs to graphs that are gone, or to a capture that failed")
        self._pool = device.pools.setdefault(pool_id, MemoryPool())
        self._pool.num_users += 1
        device.capturing.append(pool_id)
        stream.recorded = []
        self._capture = Capture(stream, pool_id, capture_error_mode, threading.get_ident(), [])
        self.driver.captures.append(self._capture)

    def capture_end(self) -> None:
        capture = self._capture
        assert capture is not None, "no capture has begun"
        self._capture = None
        self.driver.captures.remove(capture)
        operations, capture.stream.recorded = capture.stream.recorded, None
        if capture.failures:
            # The allocator is not told: torch raises before it ends the allocations to the pool.
            raise cuda_error("operation failed due to a previous error during capture")
        capture.stream.of_device.capturing.remove(capture.pool_id)
        capture.stream.of_device.graph_bytes += GRAPH_BYTES
        self._operations, self._capture_of = operations, capture

    def replay(self) -> None:
        if self._operations is None:
            raise RuntimeError("the graph holds no capture")
        stream = self.driver.current_stream()
        if stream.recorded is not None:
            raise cuda_error("a graph cannot be replayed in a capture")
        self.driver.num_replays += 1
        for operation in self._operations:
            stream.submit(operation)

    def pool(self) -> object:
        assert self._operations is not None
        return self._capture_of.pool_id

    def reset(self) -> None:
        if self._operations is None:
            return
        self._operations, device = None, self._capture_of.stream.of_device
        device.graph_bytes -= GRAPH_BYTES
        self.driver.release_pool(device, self._capture_of.pool_id)

    def __del__(self) -> None:
        self.reset()
