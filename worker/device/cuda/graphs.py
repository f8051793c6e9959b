"""CUDA graphs: the kernels of a step, recorded once for each bucket and then replayed with one call.

A bucket is a number of tokens and sequences, and a step is padded to the smallest bucket that holds it. The kernels
read static buffers, and their grids depend on the bucket alone (kernels/gpu/ops.py), so a replay computes the current
contents of the buffers. All graphs share one memory pool: only one runs at a time, and none keeps anything in the pool.

A capture waits for the device and blocks it. So no graph is captured while requests run: the worker captures graphs
before it is ready, and further ones while it is idle. A step without a graph is launched kernel by kernel.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from quire.kernels import triton_failure

log = logging.getLogger(__name__)

# Kinds of graphs: steps that only decode, including the choice of tokens, either all greedy or also drawn at random;
# and steps of any other kind, up to their logits.
GREEDY, DRAWN, MIXED = "greedy", "drawn", "mixed"


class GraphBucket(NamedTuple):
    """A kind of graph, and the size of the steps that it can run."""

    kind: str
    num_tokens: int
    num_sequences: int


class Graph(Protocol):
    def replay(self) -> None:
        """Launch the recorded kernels on the current stream."""


# Records the kernels that a function launches, in a memory pool (None: a new one). Returns the graph and its pool.
Record = Callable[[Callable[[], None], Any], tuple[Graph, Any]]


@runtime_checkable
class Recorder(Protocol):
    """A model that records graphs itself, on all of its ranks. record: records those of one rank."""

    def record(self, launch: Callable[[], None], pool: Any, record: Record) -> tuple[Graph, Any]: ...


# Graphs whose capture failed. Torch's allocator of pinned memory later asks these graphs if they are still capturing,
# so the graphs must stay alive. The pool of a failed graph accepts no other capture.
_failed: list[Graph] = []


def record_on_cuda(launch: Callable[[], None], pool: Any) -> tuple[Graph, Any]:
    """Record a CUDA graph (see `Record`). After any error but OutOfMemoryError the pool is unusable."""
    graph, pool = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
    try:
        # The outer stream context restores the stream, which torch does not if the end of a capture fails. The error
        # mode restricts only this thread during the capture: other threads may pin memory or wait for events.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            launch()
    except Exception:  # errors of Triton are not RuntimeErrors
        # After a failed capture the allocator may believe that the capture still runs, and then never frees memory. The
        # calls below end it for the allocator; if the capture did end, they raise a RuntimeError without consequence.
        device = torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device, pool)
            _failed.append(graph)
            torch._C._cuda_releasePool(device, pool)
        raise
    return graph, pool


def recorder(model: object) -> Record:
    """Return the function that records CUDA graphs of a model."""
    return partial(model.record, record=record_on_cuda) if isinstance(model, Recorder) else record_on_cuda


def in_capture_order(buckets: Iterable[GraphBucket]) -> list[GraphBucket]:
    """Return the buckets as a stack: the bucket to capture first is last.

    The largest bucket comes first, because all smaller buckets reuse its memory. Decodes come next, because graphs
    speed them up most. All other buckets follow. Within a kind, larger buckets come first, because they can also run
    smaller steps.
    """
    ordered = sorted(buckets, key=lambda bucket: (bucket.num_tokens, bucket.kind))
    return sorted(ordered[:-1], key=lambda bucket: bucket.kind != MIXED) + ordered[-1:]


class Graphs:
    """The graphs of a runner, captured one by one.

    buckets: all to capture. prepare(bucket): fills the static buffers for a step of this size. launch(bucket): launches
    such a step; it is called once before it is recorded. record: how to record a graph.
    """

    def __init__(
        self,
        buckets: Iterable[GraphBucket],
        prepare: Callable[[GraphBucket], None],
        launch: Callable[[GraphBucket], None],
        record: Record = record_on_cuda,
    ) -> None:
        self._missing = in_capture_order(buckets)
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

    def find(self, kind: str, num_tokens: int, num_sequences: int) -> tuple[GraphBucket, Graph] | None:
        """Return the smallest captured graph of this kind for such a step, with its bucket, or None."""
        for bucket in self._by_kind.get(kind, ()):
            if bucket.num_tokens >= num_tokens and bucket.num_sequences >= num_sequences:
                return bucket, self._graphs[bucket]
        return None

    def capture_next(self) -> bool:
        """Capture the next graph, and wait for the device. Returns False if none is left."""
        if not self._missing:
            return False
        bucket = self._missing.pop()
        if (graph := self._capture(bucket)) is None:
            torch.cuda.empty_cache()  # not in the except block: the error's traceback still holds activations
            return True
        self._graphs[bucket] = graph
        self._by_kind[bucket.kind] = sorted(
            (*self._by_kind.get(bucket.kind, ()), bucket), key=lambda captured: captured.num_tokens
        )
        return True

    def _capture(self, bucket: GraphBucket) -> Graph | None:
        """Capture the graph of a bucket. Returns None if that fails."""
        try:
            # A first launch without a graph compiles and loads all kernels. This launch uses the stream of all steps:
            # for another stream cuBLAS and the allocator would hold memory that the memory plan does not count.
            self._prepare(bucket)
            with torch.inference_mode():
                self._launch(bucket)
                graph, self._pool = self._record(lambda: self._launch(bucket), self._pool)
                # The first replay uploads the graph to the device, so that no request waits for that.
                graph.replay()
                return graph
        except torch.OutOfMemoryError:
            log.warning(
                "out of device memory for the CUDA graph of %d tokens: such steps go without", bucket.num_tokens
            )
        except RuntimeError:
            # A driver or kernel that refuses one capture refuses all. Steps give the same results without graphs.
            log.exception("a CUDA graph of %d tokens cannot be captured: no more are", bucket.num_tokens)
            self._missing.clear()
        except Exception as error:
            if (failure := triton_failure(error)) is None:
                raise
            log.error(
                "a CUDA graph of %d tokens cannot be captured: %s; steps are launched kernel by kernel, as with "
                "--no-cuda-graphs",
                bucket.num_tokens,
                failure,
            )
            self._missing.clear()
        return None
