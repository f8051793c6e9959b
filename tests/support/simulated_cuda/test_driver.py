"""The simulated driver keeps the rules of CUDA: late results, memory that runs out, and what a capture forbids."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from quire.worker.device.cuda.graphs import record_on_cuda
from tests.support.simulated_cuda.devices import CONTEXT_BYTES
from tests.support.simulated_cuda.driver import CUDA, Driver, simulated_cuda

MIB = 1 << 20


@pytest.fixture
def driver() -> Iterator[Driver]:
    with simulated_cuda(total=CONTEXT_BYTES + 64 * MIB) as driver:
        yield driver


# --- late results -----------------------------------------------------------------------------------------------------


def test_a_copy_of_pinned_memory_reads_it_late_and_a_copy_of_other_memory_waits(driver: Driver) -> None:
    pinned, plain = torch.zeros(3).pin_memory(), torch.zeros(3)
    assert pinned.is_pinned()
    assert not plain.is_pinned()
    early, late = plain.to(CUDA, non_blocking=True), pinned.to(CUDA, non_blocking=True)
    waits = driver.num_waits
    assert waits == 1
    pinned.fill_(1)
    plain.fill_(1)
    assert late.tolist() == [1, 1, 1], "the buffer was reused too soon"
    assert early.tolist() == [0, 0, 0]


def test_a_copy_to_the_host_is_there_after_an_event(driver: Driver) -> None:
    host = torch.zeros(3, pin_memory=True)
    host.copy_(torch.ones(3, device="cuda"), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    assert not event.query()
    assert host.tolist() == [0, 0, 0]
    event.synchronize()
    assert event.query()
    assert host.tolist() == [1, 1, 1]


def test_streams_run_in_their_own_order(driver: Driver) -> None:
    x = torch.zeros(3, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.add_(1)  # before the zeros, which the side stream did not wait for
    side.synchronize()
    assert x.tolist() == [0, 0, 0]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    torch.cuda.current_stream().wait_stream(side)
    assert x.tolist() == [1, 1, 1]


# --- graphs -----------------------------------------------------------------------------------------------------------


FORBIDDEN: dict[str, Callable[[torch.Tensor], object]] = {
    "waiting for the device": lambda x: torch.cuda.synchronize(),
    "waiting for the stream": lambda x: torch.cuda.current_stream().synchronize(),
    "waiting for an event": lambda x: torch.cuda.Event().synchronize(),
    "asking for an event": lambda x: torch.cuda.Event().query(),
    "reading a value": lambda x: x.sum().item(),
    "deciding by a value": lambda x: bool((x > 1).any()),
    "a shape that is a result": lambda x: x.nonzero(),
    "copying to the host": lambda x: x.cpu(),
    "copying memory that is not pinned": lambda x: x.copy_(torch.ones(3)),
    "a tensor of numbers": lambda x: torch.tensor([1.0, 2.0], device="cuda"),
    "pinning memory of the program": lambda x: torch.cuda.cudart().cudaHostRegister(0, 4096, 0),
    "emptying the allocator's cache": lambda x: torch.cuda.empty_cache(),
}


@pytest.mark.parametrize("mistake", list(FORBIDDEN))
def test_a_capture_forbids(driver: Driver, mistake: str) -> None:
    x = torch.ones(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        FORBIDDEN[mistake](x)
    if mistake == "emptying the allocator's cache":  # an error of the allocator, which does not end the capture
        return
    with pytest.raises(RuntimeError, match="no capture"):
        graph.replay()


def test_a_failed_capture_leaves_the_stream_and_the_allocator_as_they_were(driver: Driver) -> None:
    """`record_on_cuda` cleans up. Without that, the allocator's cache cannot be emptied any more."""
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.sum().item()
    with pytest.raises(RuntimeError, match="capture is under way"):
        torch.cuda.empty_cache()
    driver.devices[0].capturing.clear()
    _, pool = record_on_cuda(lambda: x.mul_(2), None)
    for shared in (None, pool):
        with pytest.raises(RuntimeError):
            record_on_cuda(lambda: x.sum().item(), shared)
        assert torch.cuda.current_stream() is driver.default_streams[0]
        torch.cuda.empty_cache()
    with pytest.raises(RuntimeError, match="pool"):
        record_on_cuda(lambda: x.mul_(2), pool)
    record_on_cuda(lambda: x.mul_(2), None)


def test_another_thread_may_wait_unless_the_capture_is_global(driver: Driver) -> None:
    x = torch.ones(3, device="cuda")
    event = torch.cuda.Event()
    event.record()
    for mode, fails in (("thread_local", False), ("global", True)):
        errors: list[Exception] = []

        def wait(errors: list[Exception] = errors) -> None:
            try:
                event.synchronize()
            except RuntimeError as error:
                errors.append(error)

        graph = torch.cuda.CUDAGraph()
        thread = threading.Thread(target=wait)

        def capture(graph: object = graph, mode: str = mode, thread: threading.Thread = thread) -> None:
            with torch.cuda.graph(graph, capture_error_mode=mode):
                x.mul_(2)
                thread.start()
                thread.join()

        if fails:
            with pytest.raises(RuntimeError, match="previous error"):
                capture()
        else:
            capture()
        assert bool(errors) is fails


# --- lost devices -----------------------------------------------------------------------------------------------------
