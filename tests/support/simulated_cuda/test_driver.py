"""The simulated driver keeps the rules of CUDA: late results, memory that runs out, and what a capture forbids."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from quire.worker.device.cuda.graphs import record_on_cuda
from tests.support.simulated_cuda.devices import CONTEXT_BYTES, GRAPH_BYTES
from tests.support.simulated_cuda.driver import CUDA, Driver, simulated_cuda

MIB = 1 << 20


@pytest.fixture
def driver() -> Iterator[Driver]:
    with simulated_cuda(total=CONTEXT_BYTES + 64 * MIB) as driver:
        yield driver


# --- late results -----------------------------------------------------------------------------------------------------


def test_operations_run_when_the_host_waits(driver: Driver) -> None:
    x = torch.ones(3, device="cuda") * 2
    assert x.device == CUDA
    assert x.is_cuda
    assert x.memory.tolist() != [2, 2, 2], "a result is poison until its operation has run"
    assert driver.num_waits == 0
    assert x.tolist() == [2, 2, 2]
    assert driver.num_waits == 1


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


def test_memory_is_pinned_as_long_as_it_exists(driver: Driver) -> None:
    view = torch.zeros(1000).pin_memory()[5:]
    assert view.is_pinned()
    assert len(driver.pinned) == 1
    del view
    assert not driver.pinned


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


def test_threads_that_start_later_see_the_devices(driver: Driver) -> None:
    found: list[torch.Tensor] = []

    class Own(threading.Thread):
        def run(self) -> None:
            found.append(torch.ones(2, device="cuda"))

    for thread in (Own(), threading.Thread(target=lambda: found.append(torch.ones(2, device="cuda")))):
        thread.start()
        thread.join()
    assert [one.tolist() for one in found] == [[1, 1], [1, 1]]


def test_two_devices_do_not_mix() -> None:
    with simulated_cuda(num_devices=2):
        assert torch.cuda.device_count() == 2
        one, other = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1")
        with pytest.raises(RuntimeError, match="same device"):
            one + other
        with pytest.raises(RuntimeError, match="same device"):
            one + torch.ones(2)
        assert (one + other.to("cuda:0")).tolist() == [2, 2]
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.ones(2, device="cuda:2")


def test_everything_is_restored() -> None:
    before = torch.cuda.Event, threading.Thread._bootstrap_inner, torch.version.cuda
    with simulated_cuda():
        assert torch.cuda.is_available()
    assert (torch.cuda.Event, threading.Thread._bootstrap_inner, torch.version.cuda) == before


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_counted_and_kept_in_reserve(driver: Driver) -> None:
    total = torch.cuda.mem_get_info()[1]
    x = torch.empty(10 * MIB, dtype=torch.uint8, device="cuda")
    view = x[5:]
    assert torch.cuda.memory_allocated() == torch.cuda.memory_reserved() == 10 * MIB
    assert torch.cuda.mem_get_info() == (54 * MIB, total)
    del x
    assert torch.cuda.memory_allocated() == 10 * MIB, "the view holds it"
    del view
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.memory_reserved() == torch.cuda.max_memory_allocated() == 10 * MIB
    y = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() == 10 * MIB
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 4 * MIB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == y.nbytes


def test_memory_runs_out(driver: Driver) -> None:
    held = torch.empty(60 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 5.00 MiB.* 4.00 MiB free"):
        torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    del held
    torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")


def test_an_allocation_fails_on_request(driver: Driver) -> None:
    driver.devices[0].fails_allocation = lambda size: size >= MIB
    torch.empty(10, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(MIB, device="cuda")


# --- graphs -----------------------------------------------------------------------------------------------------------


def test_a_graph_repeats_its_launches_on_the_same_memory(driver: Driver) -> None:
    total, step = torch.zeros(3, device="cuda"), torch.ones(3, device="cuda")
    graph, _ = record_on_cuda(lambda: total.add_(step * 2), None)
    assert total.tolist() == [0, 0, 0], "a capture runs nothing"
    graph.replay()
    step.fill_(3)
    graph.replay()
    assert total.tolist() == [8, 8, 8]
    assert driver.num_replays == 2


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


def test_graphs_of_a_pool_use_the_same_memory_in_turn(driver: Driver) -> None:
    """A graph overwrites the results of another graph in the same pool."""
    results: list[torch.Tensor] = []
    x = torch.ones(MIB, device="cuda")
    one, pool = record_on_cuda(lambda: results.append(x * 2), None)
    kept = results.pop()
    seen = kept.memory
    free = torch.cuda.mem_get_info()[0]
    one.replay()
    assert kept[0].item() == 2
    del kept
    other, _ = record_on_cuda(lambda: results.append(x * 5), pool)
    assert torch.cuda.mem_get_info()[0] == free - GRAPH_BYTES, "the second graph takes no memory of its own"
    other.replay()
    torch.cuda.synchronize()
    assert seen[0].item() == 5


def test_the_memory_of_graphs_is_free_when_the_last_one_of_a_pool_is_gone(driver: Driver) -> None:
    x = torch.ones(MIB, device="cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    graph, pool = record_on_cuda(lambda: x.add_(x * 2), None)
    assert torch.cuda.mem_get_info()[0] == before - x.nbytes - GRAPH_BYTES
    del graph
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == before
    with pytest.raises(RuntimeError, match="gone"):
        record_on_cuda(lambda: x.add_(1), pool)


# --- lost devices -----------------------------------------------------------------------------------------------------


def test_a_failed_operation_is_an_error_of_the_next_call_and_of_all_later_ones(driver: Driver) -> None:
    device = driver.devices[0]
    device.fault = (device.num_run + 2, "uncorrectable ECC error encountered")
    x = torch.ones(3, device="cuda")
    x.add_(1)  # launched without an error
    for call in (torch.cuda.synchronize, x.tolist, lambda: x.add_(1), lambda: torch.ones(3, device="cuda")):
        with pytest.raises(RuntimeError, match="CUDA error: uncorrectable ECC error"):
            call()


def test_waiting_is_an_error_in_the_debug_mode(driver: Driver) -> None:
    x = torch.ones(3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing"):
        x.tolist()
    torch.cuda.set_sync_debug_mode("default")
    assert x.tolist() == [1, 1, 1]
