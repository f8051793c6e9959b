"""The worker that a request is left to dies, stops or is slow, or the gateway dies that would withdraw it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from tests.conftest import QuireProcess
from tests.support.faults.calls import is_ready
from tests.support.faults.stack import KEYS, FaultStack, Stream

# Far above the time for which a request is left, and below the time in which a lease is found to be over.
SOON_S = 2.5


def turn(number: int, turns: int = 1, **more: Any) -> dict[str, Any]:
    """Return a call: the turn of a conversation, which has the prompt of the one before."""
    prompt = [5 + (number * 31 + at * 7) % 200 for at in range(80 + 20 * turns)]
    return {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True, **more}


def placed(stack: FaultStack, stream: Stream) -> tuple[str, str]:
    """Return what Redis says of the placement of a request, and its worker."""
    request_id = stream.parsed[0]["id"].removeprefix("cmpl-")
    affinity, owner = stack.redis.hmget(KEYS.request(request_id), "affinity", "owner")
    return (affinity or b"").decode().partition(" ")[0], (owner or b"").decode()


def start(stack: FaultStack, *flags: str) -> tuple[str, dict[str, QuireProcess]]:
    """Start two workers and a gateway that sees both; return its URL."""
    workers = {name: stack.worker(name, *flags, ready=False) for name in ("a", "b")}
    for worker in workers.values():
        worker.wait_for("ready: worker")
    return gateway(stack)[1], workers


def gateway(stack: FaultStack, *flags: str) -> tuple[QuireProcess, str]:
    process, url = stack.gateway(*flags)
    process.wait_for("live workers: 2")
    stack.wait(lambda: is_ready(url))
    return process, url


def first_turn(stack: FaultStack, url: str, number: int = 1) -> str:
    """Return the worker that served the first turn of a conversation."""
    what, owner = placed(stack, Stream(url, turn(number)).wait_end())
    assert what == ""
    return owner


@pytest.mark.faults
@pytest.mark.promise
@pytest.mark.alone
def test_a_request_that_is_left_to_a_worker_that_dies_goes_elsewhere_at_once(stack: FaultStack) -> None:
    url, workers = start(stack)
    holder = first_turn(stack, url)
    again = Stream(url, turn(1, 2)).wait_end()
    assert placed(stack, again) == ("left", holder)
    workers[holder].send(signal.SIGSTOP)
    began = time.monotonic()
    left = Stream(url, turn(1, 3))
    stack.wait(lambda: stack.redis.xlen(KEYS.left(holder)) == 1)
    os.kill(workers[holder].pid, signal.SIGKILL)
    left.wait_end()
    assert time.monotonic() - began < SOON_S
    assert placed(stack, left) == ("waited", "b" if holder == "a" else "a")
    stack.assert_invariants()


@pytest.mark.faults
@pytest.mark.alone
def test_nothing_more_waits_for_a_worker_that_is_stopped_until_it_reads_again(stack: FaultStack) -> None:
    url, workers = start(stack, "--lease-s", "30", "--beat-s", "1")
    holder = first_turn(stack, url)
    other = "b" if holder == "a" else "a"
    assert first_turn(stack, url, 2)
    for number in (3, 4, 5, 6):  # until the holder has served one of them
        first_turn(stack, url, number)
    workers[holder].send(signal.SIGSTOP)
    began = time.monotonic()
    left = Stream(url, turn(1, 2)).wait_end()
    assert placed(stack, left) == ("waited", other)
    busy = [placed(stack, Stream(url, turn(number, 2)).wait_end()) for number in (2, 3, 4, 5, 6)]
    assert ("busy", other) in busy
    assert {owner for _, owner in busy} == {other}
    assert time.monotonic() - began < SOON_S
    workers[holder].send(signal.SIGCONT)
    stack.wait(lambda: stack.redis.xlen(KEYS.left(holder)) == 0)
    assert placed(stack, Stream(url, turn(1, 3)).wait_end()) == ("left", other)
    stack.assert_invariants()


@pytest.mark.faults
@pytest.mark.alone
def test_two_gateways_leave_a_conversation_to_the_same_worker_and_one_of_them_dies(stack: FaultStack) -> None:
    url, workers = start(stack, "--lease-s", "1", "--beat-s", "0.25")
    process, other_url = gateway(stack, "--prefix-affinity-ms", "10000")
    holder = first_turn(stack, url)
    assert placed(stack, Stream(other_url, turn(1, 2)).wait_end()) == ("left", holder)
    workers[holder].send(signal.SIGSTOP)
    key = {"Idempotency-Key": "again"}
    left = Stream(other_url, turn(1, 3), key)
    stack.wait(lambda: stack.redis.xlen(KEYS.left(holder)) == 1)
    process.kill()  # it withdraws nothing
    left.wait_end()
    again = Stream(url, turn(1, 3), key).wait_end()
    assert again.is_complete, again.error
    assert again.text() == Stream(url, turn(1, 3)).wait_end().text()
    workers[holder].send(signal.SIGCONT)
    stack.streams.remove(left)
    stack.assert_invariants()


@pytest.mark.faults
@pytest.mark.alone
def test_conversations_stay_at_their_workers_and_are_spread_over_them(stack: FaultStack) -> None:
    url, _ = start(stack)
    holders = {number: first_turn(stack, url, number) for number in range(12)}
    assert set(holders.values()) == {"a", "b"}
    for turns in (2, 3):
        for number, holder in holders.items():
            assert placed(stack, Stream(url, turn(number, turns)).wait_end()) == ("left", holder)
    # Another salt is another conversation.
    assert placed(stack, Stream(url, turn(1, 4, cache_salt="another")).wait_end())[0] == ""
    # A gateway may leave nothing.
    _, plain = gateway(stack, "--prefix-affinity-ms", "0")
    assert placed(stack, Stream(plain, turn(1, 5)).wait_end())[0] == ""
    stack.assert_invariants()


@pytest.mark.slow
@pytest.mark.alone
def test_a_fork_goes_to_the_worker_that_has_the_blocks_of_its_origin(stack: FaultStack) -> None:
    url, _ = start(stack)
    origins = {number: Stream(url, turn(number, 4, max_tokens=40, ignore_eos=True)).wait_end() for number in range(8)}
    # With two sequences the same prompts are at any worker, which holds their prefixes then.
    for number in origins:
        Stream(url, turn(number, 4, n=2, max_tokens=1)).wait_end()
    _, anywhere = gateway(stack, "--prefix-affinity-ms", "0")
    owners = {number: placed(stack, origin)[1] for number, origin in origins.items()}
    assert set(owners.values()) == {"a", "b"}
    for number, origin in origins.items():
        path = f"/v1/completions/{origin.parsed[0]['id']}/fork"
        body = {"at": 39, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
        forked = Stream(url, body, path=path).wait_end()
        assert forked.status == 200, forked.text_body
        assert placed(stack, forked) == ("left", owners[number])
        usage = forked.parsed[-1]["usage"]
        # All full blocks of the prompt and of the kept tokens, up to the last token.
        assert usage["prompt_tokens"] == 199
        assert usage["prompt_tokens_details"]["cached_tokens"] == 192
    plain = [
        Stream(anywhere, body, path=f"/v1/completions/{origin.parsed[0]['id']}/fork").wait_end()
        for origin in origins.values()
    ]
    assert {placed(stack, one)[0] for one in plain} == {""}
