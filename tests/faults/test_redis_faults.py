"""Redis is full, silent for a long time, or comes back empty."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.shared.redis.clients import COMMAND_TIMEOUT_S
from tests.support.faults.calls import FAST, assert_same, body, is_ready, longest_pause, start_streams, undisturbed
from tests.support.faults.stack import FaultStack, Stream

pytestmark = pytest.mark.faults

# Limit of log lines per process and second of a fault.
LINES_PER_S = 12

# The expected texts are those of a run without faults.
Served = tuple[FaultStack, str, dict[str, list[str]]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, long_model: Path) -> Iterator[Served]:
    """One gateway and two workers."""
    stack = FaultStack(tmp_path_factory.mktemp("redis"), long_model)
    try:
        _, url = stack.gateway()
        for name in ("a", "b"):
            stack.worker(name, *FAST, ready=False)
        for process in stack.processes[1:]:
            process.wait_for("ready: worker")
        yield stack, url, undisturbed(url)
    finally:
        stack.close()


class Quiet:
    """Checks that processes log little during a fault and that none of them ends."""

    def __init__(self, stack: FaultStack) -> None:
        self._stack = stack
        self._began = time.monotonic()
        self._lines = self._count()

    def _count(self) -> list[int]:
        return [process.stderr.count("\n") for process in self._stack.processes]

    def check(self) -> None:
        seconds = time.monotonic() - self._began
        logged = [after - before for before, after in zip(self._lines, self._count(), strict=True)]
        assert max(logged) < 10 + LINES_PER_S * seconds, self._stack.processes[logged.index(max(logged))].stderr[-3000:]
        assert all(process.process.poll() is None for process in self._stack.processes)
        assert all("Traceback" not in process.stderr for process in self._stack.processes)


def assert_refused(url: str) -> None:
    """Check that a new request is refused with a Retry-After."""
    call = Stream(url, body("greedy")).wait_end()
    assert (call.status, call.answer["error"]["code"]) == (503, "broker_unavailable")
    assert int(call.response_headers["retry-after"]) > 0


def assert_well(served: Served, sent_and_refused: int = 0) -> None:
    """Check that no trace of the fault is left and that new requests get the usual answers.

    sent_and_refused: number of requests whose submission got no reply from Redis. A request that Redis accepted
        late is cancelled.
    """
    stack, url, expected = served
    stack.wait(lambda: is_ready(url))
    assert undisturbed(url) == expected
    stack.assert_invariants()
    totals = stack.totals()
    assert totals.pop("cancelled", 0) <= sent_and_refused
    assert set(totals) == {"accepted", "length"}


@pytest.mark.promise
def test_redis_out_of_memory_refuses_the_new_and_keeps_the_running(served: Served) -> None:
    stack, url, expected = served
    quiet = Quiet(stack)
    streams = start_streams(url)
    stack.redis.config_set("maxmemory", 1)
    try:
        for _ in range(3):
            assert_refused(url)
        time.sleep(1.5)
    finally:
        stack.redis.config_set("maxmemory", 0)
    assert_same(streams, expected)
    quiet.check()
    assert_well(served)


def test_redis_out_of_memory_for_long_costs_no_request(served: Served) -> None:
    """The fault lasts longer than heartbeats are valid."""
    stack, url, expected = served
    quiet = Quiet(stack)
    streams = start_streams(url)
    stack.redis.config_set("maxmemory", 1)
    try:
        time.sleep(12)
        assert_refused(url)
    finally:
        stack.redis.config_set("maxmemory", 0)
    assert_same(streams, expected)
    quiet.check()
    assert_well(served)


@pytest.mark.promise
def test_redis_that_is_silent_for_longer_than_all_timeouts_costs_a_pause(served: Served) -> None:
    stack, url, expected = served
    quiet = Quiet(stack)
    streams = start_streams(url)
    process = stack.redis_server.process
    assert process is not None
    began = time.monotonic()
    process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(1)
        assert_refused(url)
        assert time.monotonic() - began < 1 + COMMAND_TIMEOUT_S + 3
        assert_refused(url)  # this call fails at once
        assert time.monotonic() - began < 1 + COMMAND_TIMEOUT_S + 4
        time.sleep(4)
    finally:
        process.send_signal(signal.SIGCONT)
    silent_s = time.monotonic() - began
    assert_same(streams, expected)
    assert longest_pause(streams) < silent_s + 5
    quiet.check()
    assert_well(served, sent_and_refused=1)


@pytest.mark.promise
def test_redis_that_comes_back_empty_ends_what_ran_and_serves_again(served: Served) -> None:
    stack, url, _ = served
    for _ in range(2):
        quiet = Quiet(stack)
        whole = Stream(url, body("greedy") | {"max_tokens": 1000})
        streams = start_streams(url)
        process = stack.redis_server.process
        assert process is not None
        process.kill()
        process.wait()
        for path in stack.redis_server.folder.glob("appendonly*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        stack.redis_server.start()
        began = time.monotonic()
        for stream in streams.values():
            stream.wait_end()
            assert not stream.is_complete
            assert stream.error is not None
            assert stream.error["code"] == "generation_failed"
            assert "lost" in stream.error["message"]
        assert whole.wait_end().status == 500
        assert time.monotonic() - began < 10
        stack.wait(lambda: Stream(url, body("greedy") | {"max_tokens": 1}).wait_end().status == 200)
        time.sleep(1)  # a busy loop would show now
        quiet.check()
        assert_well(served)
