"""CUDA graphs: what a step launches, recorded once for each shape and then replayed in one go.

A graph has room for so many tokens and sequences, and a step is padded to the next that has room for it. Its kernels
read static buffers, and their grids depend on the shape alone (kernels/gpu/ops.py), so a replay does what the buffers
say then. All graphs share one pool of memory: only one runs at a time, and none leaves anything behind in the pool.

A capture waits for the device and makes it wait. So none happens while requests run: the worker captures before it is
ready, and what is left while nothing runs. A step that finds no graph is launched kernel by kernel.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch

from quire.kernels import triton_failure

log = logging.getLogger(__name__)

# Steps that only decode, greedily or with a draw; and any step, up to its logits.
GREEDY, DRAWN, MIXED = "greedy", "drawn", "mixed"


class GraphBucket(NamedTuple):
    """What a graph has room for."""

    kind: str
    tokens: int
    sequences: int


class Graph(Protocol):
    def replay(self) -> None:
        """Launch what was recorded, on the current stream."""


# Records what a function launches, into a pool of memory (None: a new one); the graph, and its pool.
Record = Callable[[Callable[[], None], Any], tuple[Graph, Any]]


# Torch's allocator of pinned memory asks a graph whose capture failed, also after it is gone, whether it is still under
# way, and takes no other capture into its pool.
_failed: list[Graph] = []


def record_on_cuda(launch: Callable[[], None], pool: Any) -> tuple[Graph, Any]:
    """Where it raises anything but OutOfMemoryError, nothing more can be recorded into this pool."""
    graph, pool = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
    try:
        # Torch leaves its own stream current where the end of a capture fails. And only this thread's calls are refused
        # while it records: others may pin memory or wait for events.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            launch()
    except Exception:  # errors of Triton are no RuntimeError
        # There the allocator also takes the capture for under way for ever, and refuses to free memory. Elsewhere it
        # has ended, which is what this raises then.
        device = torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device, pool)
            _failed.append(graph)
            torch._C._cuda_releasePool(device, pool)
        raise
    return graph, pool


def from_last(rooms: Iterable[GraphBucket]) -> list[GraphBucket]:
    """Rooms in the order of their capture, the first one last.

    That is the largest of all, in whose memory the others find room; then those of decodes, which gain most; then the
    others. Of each kind the largest first: it does for smaller steps until theirs is there.
    """
    ordered = sorted(rooms, key=lambda room: (room.tokens, room.kind))
    return sorted(ordered[:-1], key=lambda room: room.kind != MIXED) + ordered[-1:]


class Graphs:
    """rooms: all that are to be captured. launch(room): launches a step of that shape from the static buffers; it is
    called once before it is recorded, on buffers that it prepares itself with prepare(room)."""

    def __init__(
        self,
        rooms: Iterable[GraphBucket],
        prepare: Callable[[GraphBucket], None],
        launch: Callable[[GraphBucket], None],
        record: Record = record_on_cuda,
    ) -> None:
        self._missing = from_last(rooms)
        self._prepare, self._launch, self._record = prepare, launch, record
        self._graphs: dict[GraphBucket, Graph] = {}
        self._by_kind: dict[str, list[GraphBucket]] = {}
        self._pool: Any = None

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    @property
    def num_missing(self) -> int:
        return len(self._missing)

    def find(self, kind: str, tokens: int, sequences: int) -> tuple[GraphBucket, Graph] | None:
        """The smallest graph there is with room for so many."""
        for room in self._by_kind.get(kind, ()):
            if room.tokens >= tokens and room.sequences >= sequences:
                return room, self._graphs[room]
        return None

    def capture_next(self) -> bool:
        """Capture one more (`from_last`); False if there is none left. It waits for the device."""
        if not self._missing:
            return False
        room = self._missing.pop()
        if (graph := self._capture(room)) is None:
            torch.cuda.empty_cache()  # not where the error is caught: its traceback still holds activations
            return True
        self._graphs[room] = graph
        self._by_kind[room.kind] = sorted((*self._by_kind.get(room.kind, ()), room), key=lambda one: one.tokens)
        return True

    def _capture(self, room: GraphBucket) -> Graph | None:
        """None if it cannot be."""
        try:
            # Once without a graph, so that all kernels are compiled and loaded. On the stream of all steps: for another
            # one cuBLAS and the allocator would keep memory that nobody counts.
            self._prepare(room)
            with torch.inference_mode():
                self._launch(room)
                graph, self._pool = self._record(lambda: self._launch(room), self._pool)
                # The first replay sends the graph to the device: better now than in a request.
                graph.replay()
                return graph
        except torch.OutOfMemoryError:
            log.warning("out of device memory for the CUDA graph of %d tokens: such steps go without", room.tokens)
        except RuntimeError:
            # What a driver or a kernel refuses in one capture it refuses in all. Steps are right without graphs.
            log.exception("a CUDA graph of %d tokens cannot be captured: no more are", room.tokens)
            self._missing.clear()
        except Exception as error:
            if (failure := triton_failure(error)) is None:
                raise
            log.error(
                "a CUDA graph of %d tokens cannot be captured: %s; steps are launched kernel by kernel, as with "
                "--no-cuda-graphs",
                room.tokens,
                failure,
            )
            self._missing.clear()
        return None
