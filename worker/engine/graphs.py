"""CUDA graphs: what a step launches, recorded once for each shape and then replayed in one go.

A graph has room for so many tokens and sequences, and a step is padded to the next that has room for it. Its kernels
read static buffers, and their grids depend on the shape alone (kernels/gpu/ops.py), so a replay does what the buffers
say then. All graphs share one pool of memory: only one runs at a time, and none leaves anything behind in the pool.

A capture waits for the device and makes it wait. So none happens while requests run: the worker captures before it is
ready, and what is left while nothing runs. A step that finds no graph is launched kernel by kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch

log = logging.getLogger(__name__)

# Steps that only decode, greedily or with a draw; and any step, up to its logits.
GREEDY, DRAWN, MIXED = "greedy", "drawn", "mixed"


class Room(NamedTuple):
    """What a graph has room for."""

    kind: str
    tokens: int
    sequences: int


class Graph(Protocol):
    def replay(self) -> None:
        """Launch what was recorded, on the current stream."""


# Records what a function launches, into a pool of memory (None: a new one); the graph, and its pool.
Record = Callable[[Callable[[], None], Any], tuple[Graph, Any]]


def record_on_cuda(launch: Callable[[], None], pool: Any) -> tuple[Graph, Any]:
    graph = torch.cuda.CUDAGraph()
    # Only this thread's calls are refused while it records: others may pin memory or wait for events.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        launch()
    return graph, graph.pool()


class Graphs:
    """rooms: all that are to be captured. launch(room): launches a step of that shape from the static buffers; it is
    called once before it is recorded, on buffers that it prepares itself with prepare(room)."""

    def __init__(
        self,
        rooms: Iterable[Room],
        prepare: Callable[[Room], None],
        launch: Callable[[Room], None],
        record: Record = record_on_cuda,
    ) -> None:
        # The largest first, in whose memory the others find room.
        self._missing = sorted(rooms, key=lambda room: (room.tokens, room.kind))
        self._prepare, self._launch, self._record = prepare, launch, record
        self._graphs: dict[Room, Graph] = {}
        self._by_kind: dict[str, list[Room]] = {}
        self._pool: Any = None

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    @property
    def num_missing(self) -> int:
        return len(self._missing)

    def find(self, kind: str, tokens: int, sequences: int) -> tuple[Room, Graph] | None:
        """The smallest graph there is with room for so many."""
        for room in self._by_kind.get(kind, ()):
            if room.tokens >= tokens and room.sequences >= sequences:
                return room, self._graphs[room]
        return None

    def capture_next(self) -> bool:
        """Capture one more, the largest first; False if there is none left. It waits for the device."""
        if not self._missing:
            return False
        room = self._missing.pop()
        try:
            # Once without a graph, so that all kernels are compiled and loaded. On the stream of all steps: for another
            # one cuBLAS and the allocator would keep memory that nobody counts.
            self._prepare(room)
            with torch.inference_mode():
                self._launch(room)
                self._graphs[room], self._pool = self._record(lambda: self._launch(room), self._pool)
        except torch.OutOfMemoryError:
            log.warning("out of device memory for the CUDA graph of %d tokens: such steps go without", room.tokens)
            torch.cuda.empty_cache()
        else:
            self._by_kind[room.kind] = sorted((*self._by_kind.get(room.kind, ()), room), key=lambda one: one.tokens)
        return True
