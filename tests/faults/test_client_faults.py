"""Clients that disconnect, do not read or flood the gateway do not affect other clients."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults.calls import FAST, assert_same, body
from tests.support.faults.stack import KEYS, STEP_S, FaultStack, Stream
from tests.support.faults.stalling import Stalling

pytestmark = [pytest.mark.faults, pytest.mark.alone]

QUEUE_BOUND = 8
WRITE_TIMEOUT_S = 1.0
MANY = 200
# For a slow client the gateway buffers at most MAX_WAITING tokens and the transport's buffer.
MEMORY_OF_A_SLOW_CLIENT = 300_000

# The stack, the URL of its gateway, and the expected answer to the greedy request.
Served = tuple[FaultStack, str, dict[str, list[str]]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, long_model: Path) -> Iterator[Served]:
    """One gateway with a short queue and short timeouts, and one worker that runs a few requests at once."""
    stack = FaultStack(tmp_path_factory.mktemp("clients"), long_model)
    try:
        flags = ("--max-queued-requests", str(QUEUE_BOUND), "--write-timeout-s", str(WRITE_TIMEOUT_S))
        _, url = stack.gateway(*flags)
        stack.worker("a", *FAST, "--max-num-seqs", "16")
        yield stack, url, {"greedy": [Stream(url, body("greedy")).wait_end().answer["choices"][0]["text"]]}
    finally:
        stack.close()


def assert_well(stack: FaultStack) -> None:
    stack.assert_invariants()
    assert all(process.process.poll() is None for process in stack.processes)


@pytest.mark.promise
def test_clients_that_leave_at_any_moment_leave_nothing_behind(served: Served) -> None:
    stack, url, expected = served
    draw = random.Random(3)
    before = stack.totals()
    staying = Stream(url, body("greedy") | {"stream": True})
    leaving = []
    for index in range(50):
        asks = body("greedy") | {"stream": index % 2 == 0, "max_tokens": draw.choice([1, 20, 1500])}
        leaving.append(Stream(url, asks))
        time.sleep(draw.uniform(0, 0.06))
        for stream in draw.sample(leaving, min(len(leaving), 2)):
            stream.leave()
    for stream in leaving:
        stream.leave()
        stream.wait_end()
    assert_same({"greedy": staying}, expected)
    stack.wait(stack.is_drained, 30)
    assert_well(stack)
    after = stack.totals()
    assert after.get("cancelled", 0) > before.get("cancelled", 0)
    assert set(after) <= {"accepted", "length", "cancelled"}
    assert_same({"greedy": Stream(url, body("greedy") | {"stream": True})}, expected)


@pytest.mark.promise
def test_a_flood_is_refused_beyond_the_bound_and_the_accepted_finish(served: Served) -> None:
    stack, url, _ = served
    before = stack.totals()
    flood, longest = [], 0
    for _ in range(120):
        flood.append(Stream(url, body("greedy") | {"max_tokens": 60}))
        longest = max(longest, int(stack.redis.hget(KEYS.load, "requests") or 0))
    for call in flood:
        call.wait_end()
    statuses = [call.status for call in flood]
    assert set(statuses) == {200, 429}
    assert longest <= QUEUE_BOUND
    refused = [call for call in flood if call.status == 429]
    assert all(1 <= int(call.response_headers["retry-after"]) <= 60 for call in refused)
    assert {call.answer["error"]["code"] for call in refused} == {"queue_full"}
    assert len({call.answer["choices"][0]["text"] for call in flood if call.status == 200}) == 1
    assert stack.totals()["accepted"] - before["accepted"] == statuses.count(200)
    # The cancelled request ends at once.
    assert Stream(url, body("greedy") | {"max_tokens": 5}).wait_end().status == 200
    assert_well(stack)


@pytest.mark.promise
def test_slow_clients_are_cut_and_those_beside_them_do_not_wait(served: Served) -> None:
    stack, url, expected = served
    asks = body("greedy") | {"stream": True, "n": 2, "temperature": 1, "seed": 1, "max_tokens": 1900}
    cancelled = stack.totals().get("cancelled", 0)
    slow = [Stalling(url, asks) for _ in range(5)]
    try:
        stack.wait(lambda: len(list(stack.redis.scan_iter(KEYS.prefix + "out:*"))) >= 5)
        streams = [Stream(url, body("greedy") | {"stream": True}) for _ in range(3)]
        while not all(stream.is_complete or stream.failure for stream in streams):
            for client in slow:
                assert client.read(1)
            time.sleep(0.1)
        for stream in streams:
            assert_same({"greedy": stream}, expected)
            assert stream.longest_pause_s < 20 * STEP_S + 0.5
        # The gateway closes the connections of the slow clients and cancels the requests of these clients.
        deadline = time.monotonic() + 60
        while stack.totals().get("cancelled", 0) < cancelled + len(slow):
            assert time.monotonic() < deadline, "they are still served"
            for client in slow:
                client.read(1)
            time.sleep(0.1)
    finally:
        for client in slow:
            client.close()
    assert_well(stack)


def test_a_client_that_pauses_gets_everything(served: Served) -> None:
    stack, url, _ = served
    asks = body("greedy") | {"max_tokens": 500}
    whole = Stream(url, asks).wait_end().answer["choices"][0]["text"]
    client = Stalling(url, asks | {"stream": True})
    try:
        for _ in range(3):
            client.read(2000)
            time.sleep(0.7 * WRITE_TIMEOUT_S)
        while client.read(2000):
            pass
        assert client.events()[-1] == "[DONE]"
        assert client.text() == whole
    finally:
        client.close()
    assert_well(stack)


@pytest.mark.timeout(240)
def test_two_hundred_slow_clients_cost_bounded_memory_and_nobody_else_time(stack: FaultStack) -> None:
    """Case 19 at its full size: 200 slow clients."""
    gateway, url = stack.gateway("--write-timeout-s", str(WRITE_TIMEOUT_S))
    stack.worker("a", *FAST, "--max-num-seqs", str(2 * MANY + 16), "--kv-cache-gb", "2")
    good = body("greedy") | {"max_tokens": 60}
    expected = {"greedy": [Stream(url, good).wait_end().answer["choices"][0]["text"]]}
    before = resident_bytes(gateway.pid)
    # The answers are larger than the socket buffers of both sides.
    asks = body("greedy") | {"stream": True, "n": 2, "temperature": 1, "seed": 1, "max_tokens": 1900}
    slow = [Stalling(url, asks) for _ in range(MANY)]
    try:
        stack.wait(lambda: len(list(stack.redis.scan_iter(KEYS.prefix + "out:*"))) > MANY, 60)
        longest, deadline = 0, time.monotonic() + 150
        beside: list[Stream] = []
        while stack.totals().get("cancelled", 0) < MANY:
            assert time.monotonic() < deadline, f"still served: {stack.totals()}"
            for client in slow:
                client.read(1)
            longest = max(longest, resident_bytes(gateway.pid) - before)
            if not beside or (len(beside) < 5 and beside[-1].is_complete):
                beside.append(Stream(url, good | {"stream": True}))
            time.sleep(0.1)
        for stream in beside:
            assert_same({"greedy": stream}, expected)
            assert stream.longest_pause_s < WRITE_TIMEOUT_S
        assert longest < MANY * MEMORY_OF_A_SLOW_CLIENT
    finally:
        for client in slow:
            client.close()
    assert_well(stack)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
