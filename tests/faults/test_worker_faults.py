"""Workers die, hang, stop and drain. Clients see a pause and then the same text as without the fault."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import QuireProcess
from tests.support.faults.calls import FAST, assert_same, body, longest_pause, owner, start_streams, undisturbed
from tests.support.faults.stack import KEYS, FaultStack, Stream


def two_workers(stack: FaultStack, *flags: str) -> tuple[str, dict[str, QuireProcess]]:
    """Start a gateway and two workers; return the gateway's URL and the workers."""
    workers = {name: stack.worker(name, *flags, ready=False) for name in ("a", "b")}
    _, url = stack.gateway()
    for worker in workers.values():
        worker.wait_for("ready: worker")
    return url, workers


@pytest.mark.slow
@pytest.mark.alone
def test_a_killed_workers_streams_go_on_elsewhere_token_for_token(stack: FaultStack) -> None:
    url, workers = two_workers(stack, *FAST)
    expected = undisturbed(url)
    streams = start_streams(url)
    os.kill(owner(stack, workers).pid, signal.SIGKILL)
    assert_same(streams, expected)
    # The lease, plus the time to notice that the lease has expired and to recompute the lost tokens.
    assert longest_pause(streams) < 1.0 + 1.0
    stack.assert_invariants()


@pytest.mark.faults
@pytest.mark.alone
def test_a_worker_that_is_told_to_stop_hands_its_requests_over_at_once(stack: FaultStack) -> None:
    url, workers = two_workers(stack, "--drain-s", "0.2")
    expected = undisturbed(url)
    streams = start_streams(url)
    leaving = owner(stack, workers)
    leaving.send(signal.SIGTERM)
    assert_same(streams, expected)
    assert leaving.wait() == 0
    leaving.wait_for("requests are returned to the queue")
    assert longest_pause(streams) < 1.0
    assert {int(stack.redis.hget(key, "deaths") or 0) for key in stack.redis.scan_iter(KEYS.prefix + "req:*")} == {0}
    stack.assert_invariants()


@pytest.mark.faults
@pytest.mark.promise
def test_a_worker_whose_engine_hangs_loses_its_requests_and_ends_itself(stack: FaultStack) -> None:
    _, url = stack.gateway()
    first = stack.worker("a", *FAST, "--watchdog-s", "2", TEST_HANGING_TOKEN="33")
    expected = undisturbed(url, "greedy")
    stream = Stream(url, body("greedy") | {"stream": True}).wait_events(10)
    hanging = Stream(url, {"model": "tiny", "prompt": [33, 5], "max_tokens": 4, "stream": True, "temperature": 0})
    stack.worker("b", *FAST)
    assert_same({"greedy": stream}, expected)
    assert hanging.wait_end().is_complete
    assert first.wait() == 70
    assert "the engine has not moved" in first.stderr
    stack.assert_invariants()


@pytest.mark.faults
def test_a_request_that_kills_its_workers_is_given_up_and_the_innocent_finish(stack: FaultStack) -> None:
    _, url = stack.gateway()
    first = stack.worker("a", *FAST, TEST_DEADLY_TOKEN="44")
    expected = undisturbed(url)
    streams = start_streams(url)
    deadly = Stream(url, {"model": "tiny", "prompt": [44, 5], "max_tokens": 4, "stream": True, "temperature": 0})
    last = first
    for _ in range(3):
        assert last.wait(30) == -signal.SIGKILL
        last = stack.worker("a", *FAST, TEST_DEADLY_TOKEN="44", ready=False)
    last.wait_for("ready: worker")
    deadly.wait_end()
    assert deadly.error is not None
    assert deadly.error["code"] == "quarantined"
    assert_same(streams, expected)
    assert last.process.poll() is None
    assert stack.totals()["quarantined"] == 1
    assert stack.redis.xlen(KEYS.dead) == 1
    last.send(signal.SIGTERM)
    assert last.wait() == 0
    stack.worker("a", *FAST)  # a version that accepts the request
    assert_dead_commands(stack)
    stack.assert_invariants()


def assert_dead_commands(stack: FaultStack) -> None:
    """Check that `quire dead` lists, shows and retries dead-lettered requests."""

    def quire(*arguments: str) -> str:
        command = [sys.executable, "-m", "quire", "dead", *arguments, "--redis-url", stack.redis_server.url]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    (line,) = quire("list").splitlines()
    entry = line.split()[0]
    assert json.loads(quire("show", "--entry", entry))["prompt_tokens"] == [44, 5]
    request_id = quire("retry", "--entry", entry).split()[-1]
    stack.wait(lambda: stack.redis.hget(KEYS.request(request_id), "outcome") == b"length")
    assert quire("list") == ""


@pytest.mark.faults
def test_what_runs_for_a_gateway_that_died_is_cancelled_when_nobody_comes_back(stack: FaultStack) -> None:
    gateway, url = stack.gateway()
    stack.worker("a", "--orphan-s", "1")
    stream = Stream(url, body("greedy") | {"stream": True, "max_tokens": 1500}).wait_events(5)
    os.kill(gateway.pid, signal.SIGKILL)
    stream.wait_end()
    stack.wait(lambda: stack.totals().get("cancelled") == 1, 20)
    stack.assert_invariants()


@pytest.mark.faults
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_redis_that_comes_back_with_its_data_costs_a_pause(stack: FaultStack, how: str) -> None:
    _, url = stack.gateway()
    stack.worker("a")
    expected = undisturbed(url)
    streams = start_streams(url)
    process = stack.redis_server.process
    assert process is not None
    time.sleep(1.2)  # the append-only file is fsynced every second
    if how == "killed":
        process.kill()
        process.wait()
        time.sleep(0.5)
        stack.redis_server.start()
    else:
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        process.send_signal(signal.SIGCONT)
    assert_same(streams, expected)
    stack.assert_invariants()
