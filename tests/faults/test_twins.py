"""Two worker processes with one name: the second starts only after the first has died."""

from __future__ import annotations

import signal

import pytest

from tests.support.faults.calls import FAST, body
from tests.support.faults.stack import KEYS, FaultStack, Stream


@pytest.mark.faults
def test_a_second_worker_of_a_name_says_so_and_the_first_serves_on(stack: FaultStack) -> None:
    _, url = stack.gateway()
    first = stack.worker("a", *FAST)
    stream = Stream(url, body("greedy") | {"stream": True}).wait_events(5)
    second = stack.worker("a", *FAST, ready=False)
    assert second.wait() == 1
    said = second.stderr.splitlines()[-1]
    assert f"'a' is in use: process {first.pid} on " in said
    assert "--worker-id (QUIRE_WORKER_ID)" in said
    assert stream.wait_end().is_complete
    assert stack.redis.hget(KEYS.recoveries, "migrations") is None
    # The name of a killed worker is free at once: the next worker continues the stream before the lease would expire.
    stream = Stream(url, body("greedy") | {"stream": True}).wait_events(5)
    first.send(signal.SIGKILL)
    last = stack.worker("a", "--lease-s", "3600", "--beat-s", "60")
    assert stream.wait_end().is_complete
    stack.assert_invariants()
    # The shutdown of the last worker does not wait for the lease either.
    last.send(signal.SIGTERM)
    assert last.wait() == 0


@pytest.mark.faults
def test_a_worker_that_slept_while_its_name_was_taken_ends_itself(stack: FaultStack) -> None:
    _, url = stack.gateway()
    first = stack.worker("a", *FAST)
    stream = Stream(url, body("greedy") | {"stream": True}).wait_events(5)
    first.send(signal.SIGSTOP)
    stack.worker("a", *FAST)
    first.send(signal.SIGCONT)
    assert first.wait() == 1
    assert "'a' is in use" in first.stderr.splitlines()[-1]
    assert stream.wait_end().is_complete
    assert stream.text() == Stream(url, body("greedy") | {"stream": True}).wait_end().text()
    stack.assert_invariants()
