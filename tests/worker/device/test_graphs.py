"""Graphs of a runner: the order of their capture, the one that a step takes, and captures that fail."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from quire.worker.device.graphs import DRAWN, GREEDY, MIXED, GraphBucket, Graphs, record_on_cuda
from tests.kernels.conftest import HAS_TRITON
from tests.support.mock_model import CalledAgain


class Launched:
    """Records the buckets that are launched, in order; some do not fit into memory."""

    def __init__(self, too_large: tuple[GraphBucket, ...] = ()) -> None:
        self.captured: list[GraphBucket] = []
        self.too_large = too_large

    def __call__(self, bucket: GraphBucket) -> None:
        if bucket in self.too_large:
            raise torch.OutOfMemoryError
        if bucket not in self.captured:
            self.captured.append(bucket)


def graphs(launched: Launched, *buckets: GraphBucket) -> Graphs:
    return Graphs(buckets, lambda bucket: None, launched, lambda launch, pool: (CalledAgain(launch), "pool"))


SMALL, MIDDLE, LARGE = GraphBucket(MIXED, 16, 8), GraphBucket(MIXED, 64, 8), GraphBucket(MIXED, 128, 8)


def test_graphs_are_captured_largest_first_and_the_smallest_that_fits_is_taken() -> None:
    launched = Launched()
    made = graphs(launched, MIDDLE, LARGE, SMALL)
    assert made.find(MIXED, 1, 1) is None
    assert made.capture_next()
    assert launched.captured == [LARGE]
    assert made.find(MIXED, 1, 1) == (LARGE, made._graphs[LARGE])  # rather than to capture while requests run
    while made.capture_next():
        pass
    assert launched.captured == [LARGE, MIDDLE, SMALL]
    for tokens, sequences, expected in ((16, 8, SMALL), (17, 1, MIDDLE), (65, 1, LARGE)):
        found = made.find(MIXED, tokens, sequences)
        assert found is not None
        assert found[0] == expected
    assert made.find(MIXED, 129, 1) is made.find(MIXED, 1, 9) is made.find(GREEDY, 1, 1) is None


def test_the_largest_is_captured_first_for_its_memory_then_decodes() -> None:
    launched = Launched()
    decodes = [GraphBucket(kind, size, size) for kind in (GREEDY, DRAWN) for size in (1, 2)]
    made = graphs(launched, SMALL, *decodes, LARGE, MIDDLE)
    while made.capture_next():
        pass
    assert launched.captured == [LARGE, *(decodes[at] for at in (1, 3, 0, 2)), MIDDLE, SMALL]


def test_a_graph_is_replayed_once_before_a_request_needs_it() -> None:
    made = graphs(Launched(), SMALL)
    assert made.capture_next()
    found = made.find(MIXED, 1, 1)
    assert found is not None
    assert isinstance(found[1], CalledAgain)
    assert found[1].num_replays == 1


def test_a_graph_that_does_not_fit_into_memory_is_left_out_and_smaller_ones_are_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: list[Any] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: handled.append(sys.exc_info()[0]))
    made = graphs(Launched(too_large=(LARGE,)), MIDDLE, LARGE, SMALL)
    while made.capture_next():
        pass
    assert (made.num_captured, made.num_missing) == (2, 0)
    assert made.find(MIXED, 65, 1) is None
    assert "out of device memory for the CUDA graph of 128 tokens" in caplog.text
    assert handled == [None]  # while an error is handled, what its traceback holds cannot be freed


def test_a_capture_that_fails_leaves_stream_and_memory_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    @contextmanager
    def stream(one: str) -> Iterator[None]:
        try:
            yield
        finally:
            done.append(one)

    @contextmanager
    def capture(graph: Any, **options: Any) -> Iterator[None]:
        yield
        done.append(options["pool"])
        raise RuntimeError("the capture is invalid")

    class Graph:
        """A graph that must stay alive after its failure, because torch still asks it."""

        def __del__(self) -> None:
            done.append("gone")

    fakes = {"CUDAGraph": Graph, "graph_pool_handle": lambda: "pool", "current_device": lambda: 0}
    fakes |= {"stream": stream, "current_stream": lambda: "stream", "graph": capture}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *at, name=name: done.append((name, *at)), raising=False)
    with pytest.raises(RuntimeError, match="the capture is invalid"):
        record_on_cuda(lambda: None, None)
    ended = [("_cuda_endAllocateToPool", 0, "pool"), ("_cuda_releasePool", 0, "pool")]
    assert done == ["pool", "stream", *ended]


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_an_error_of_triton_in_a_capture_is_one_line_and_steps_run_without_graphs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Errors of Triton are not RuntimeErrors."""
    from triton.runtime.errors import OutOfResources

    def record(launch: Any, pool: Any) -> Any:
        raise OutOfResources(172160, 101376, "shared memory")

    made = Graphs([SMALL, LARGE], lambda bucket: None, lambda bucket: None, record)
    assert made.capture_next()
    assert not made.capture_next()
    assert made.find(MIXED, 1, 1) is None
    [said] = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert "a CUDA graph of 128 tokens cannot be captured: a Triton kernel " in said.message
    assert "Required: 172160" in said.message
    assert said.exc_info is None
