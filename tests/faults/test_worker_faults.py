"""Workers die, hang, stop and drain. Clients see a pause and then the same text as without the fault."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conftest import QuireProcess
from tests.support.faults.stack import KEYS, FaultStack, Stream, said

# One greedy request; one sampled with penalties, log-probabilities and n=2; one with a stop string of several tokens.
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 150},
    "drawn": {
        "temperature": 1,
        "seed": 7,
        "n": 2,
        "logprobs": 3,
        "presence_penalty": 0.6,
        "repetition_penalty": 1.1,
        "max_tokens": 120,
    },
    "top": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 11, "max_tokens": 150, "min_tokens": 20},
}
FAST = ("--lease-s", "1", "--beat-s", "0.25")


def body(name: str) -> dict[str, Any]:
    return {"model": "tiny", "prompt": f"w10 w20 w30 {name}", "ignore_eos": True, **REQUESTS[name]}


def undisturbed(url: str, name: str) -> list[str]:
    """Return the choices of a request without faults."""
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body(name)).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return [said([choice]) for choice in json.load(response)["choices"]]


def all_undisturbed(url: str) -> dict[str, list[str]]:
    """Return the choices of all requests, which run at the same time."""
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        return dict(zip(REQUESTS, pool.map(lambda name: undisturbed(url, name), REQUESTS), strict=True))


def two_workers(stack: FaultStack, *flags: str) -> tuple[str, dict[str, QuireProcess]]:
    """Start a gateway and two workers; return the gateway's URL and the workers."""
    workers = {name: stack.worker(name, *flags, ready=False) for name in ("a", "b")}
    _, url = stack.gateway()
    for worker in workers.values():
        worker.wait_for("ready: worker")
    return url, workers


def start_streams(url: str) -> dict[str, Stream]:
    """Start all requests; wait until each is in the middle of its answer."""
    streams = {name: Stream(url, body(name) | {"stream": True}) for name in REQUESTS}
    for stream in streams.values():
        stream.wait_events(10)
    return streams


def owner(stack: FaultStack, workers: dict[str, QuireProcess]) -> QuireProcess:
    """Return a worker that owns some of the running requests."""
    owners = [stack.redis.hget(key, "owner") for key in stack.redis.scan_iter(KEYS.prefix + "req:*")]
    running = [name.decode() for name in owners if name is not None]
    assert running, "nothing runs"
    return workers[max(workers, key=running.count)]


def assert_same(streams: dict[str, Stream], expected: dict[str, list[str]]) -> None:
    for name, stream in streams.items():
        stream.wait_end()
        assert stream.is_complete, stream.error
        assert [said(stream.choices(index)) for index in range(len(expected[name]))] == expected[name]


def longest_pause(streams: dict[str, Stream]) -> float:
    return max(stream.longest_pause_s for stream in streams.values())


@pytest.mark.slow
@pytest.mark.alone
def test_a_killed_workers_streams_go_on_elsewhere_token_for_token(stack: FaultStack) -> None:
    url, workers = two_workers(stack, *FAST)
    expected = all_undisturbed(url)
    streams = start_streams(url)
    os.kill(owner(stack, workers).pid, signal.SIGKILL)
    assert_same(streams, expected)
    # The lease, plus the time to notice that the lease has expired and to recompute the lost tokens.
    assert longest_pause(streams) < 1.0 + 1.0
    stack.assert_invariants()


@pytest.mark.faults
def test_the_only_worker_goes_on_with_its_requests_after_a_restart(stack: FaultStack) -> None:
    _, url = stack.gateway()
    worker = stack.worker("a", *FAST)
    expected = all_undisturbed(url)
    streams = start_streams(url)
    os.kill(worker.pid, signal.SIGKILL)
    stack.worker("a", *FAST)
    assert_same(streams, expected)
    stack.assert_invariants()


@pytest.mark.faults
@pytest.mark.alone
def test_a_worker_that_is_told_to_stop_hands_its_requests_over_at_once(stack: FaultStack) -> None:
    url, workers = two_workers(stack, "--drain-s", "0.2")
    expected = all_undisturbed(url)
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
def test_a_worker_that_sleeps_too_long_is_fenced_when_it_wakes(stack: FaultStack) -> None:
    url, workers = two_workers(stack, *FAST)
    expected = all_undisturbed(url)
    streams = start_streams(url)
    sleeper = owner(stack, workers)
    sleeper.send(signal.SIGSTOP)
    time.sleep(1.6)
    sleeper.send(signal.SIGCONT)
    assert_same(streams, expected)
    sleeper.wait_for("is lost: it ended or is parked, or another worker has claimed it")
    stack.assert_invariants()
    # The worker serves again like any other.
    assert undisturbed(url, "greedy") == expected["greedy"]


@pytest.mark.faults
@pytest.mark.promise
def test_a_worker_whose_engine_hangs_loses_its_requests_and_ends_itself(stack: FaultStack) -> None:
    _, url = stack.gateway()
    first = stack.worker("a", *FAST, "--watchdog-s", "2", TEST_HANGING_TOKEN="33")
    expected = {"greedy": undisturbed(url, "greedy")}
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
    expected = all_undisturbed(url)
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
    expected = all_undisturbed(url)
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
