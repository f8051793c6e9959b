"""Calls of many sequences (`n`, `best_of`, beams): idle workers share them, and all that they compute is charged."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from quire.shared.protocol.keys import AccountKeys
from quire.shared.protocol.share import COUNTER_UNITS, INPUT_COST, OUTPUT_COST
from tests.conftest import QuireProcess
from tests.faults.test_fair_sharing import body, first_token_behind, two_keys
from tests.faults.test_key_counts import counted
from tests.support.faults.calls import FAST, owner
from tests.support.faults.stack import KEYS, FaultStack, Stream

ROWS = 16
CALLS = 16
WORKER = ("--max-num-seqs", str(ROWS), "--max-num-batched-tokens", "256")


def wide(index: int, max_tokens: int) -> dict[str, Any]:
    return body(f"w{index} w{index + 1}", max_tokens) | {"n": ROWS}


@pytest.mark.faults
@pytest.mark.promise
def test_two_idle_workers_share_wide_calls(stack: FaultStack) -> None:
    for name in "ab":
        stack.worker(name, *WORKER)
    _, url = stack.gateway()
    calls = [Stream(url, wide(index, 16)) for index in range(CALLS)]
    for call in calls:
        assert call.wait_end(60).status == 200
        assert len(call.answer["choices"]) == ROWS
    owners = Counter(stack.redis.hget(key, "owner") for key in stack.redis.scan_iter(KEYS.request("*")))
    assert min(owners[b"a"], owners[b"b"]) >= CALLS // 4
    stack.assert_invariants()


@pytest.mark.faults
def test_a_call_waits_for_one_wide_call_of_another_key_at_most(stack: FaultStack) -> None:
    flood, late = two_keys(stack)
    stack.worker("a", *WORKER)
    (_, url), (_, other_url) = (stack.gateway("--require-keys") for _ in range(2))
    calls = [Stream(url, wide(index, 32), flood) for index in range(CALLS)]
    stack.wait(lambda: int(stack.redis.hget(KEYS.waiting, "requests acme/flood") or 0) >= CALLS - 2)
    # The one that runs, and one that the worker takes before the call arrives.
    counts = [first_token_behind(stack, other_url, late) for _ in range(3)]
    assert max(counts) <= 2
    for call in calls:
        assert call.wait_end(60).status == 200
    stack.assert_invariants()


RANKED: tuple[dict[str, Any], ...] = (
    {"best_of": 8, "n": 2, "temperature": 1, "seed": 5},
    {"use_beam_search": True, "beam_width": 8, "n": 2},
)


# Tokens of a choice: three workers are killed before six calls of them end.
LENGTH = 150


def ranked(index: int, max_tokens: int) -> dict[str, Any]:
    return body(f"w{index} w{index + 1}", max_tokens) | RANKED[index % 2]


def computed(stack: FaultStack) -> dict[bytes, int]:
    """Return the tokens that Redis knows to have been computed, by request, of those that have begun."""
    keys = list(stack.redis.scan_iter(KEYS.request("*")))
    counts = {key: stack.redis.hget(key, "computed") for key in keys}
    return {key: int(count) for key, count in counts.items() if count is not None}


@pytest.mark.faults
@pytest.mark.promise
def test_all_that_ranked_calls_compute_is_charged_once(stack: FaultStack) -> None:
    """Workers die in the middle of calls, and clients leave."""
    headers, _ = two_keys(stack)
    workers: dict[str, QuireProcess] = {}
    stack.man(workers, *WORKER, *FAST)
    _, url = stack.gateway("--require-keys")
    calls = [Stream(url, ranked(index, LENGTH), headers) for index in range(6)]
    for kills in range(1, 4):
        stack.wait(lambda least=kills: len(computed(stack)) > least)
        owner(stack, workers).kill()
        stack.man(workers, *WORKER, *FAST)
    for call in calls:
        assert call.wait_end(60).status == 200, call.text_body
        # The answer has two of eight choices.
        assert call.answer["usage"]["completion_tokens"] == 2 * LENGTH
    assert stack.redis.hget(KEYS.recoveries, "migrations")
    assert set(computed(stack).values()) == {8 * LENGTH}
    before = len(computed(stack))
    leaving = [Stream(url, ranked(index, 1000), headers) for index in range(2)]
    stack.wait(lambda: len(computed(stack)) == before + 2)
    for call in leaving:
        call.leave()
    stack.wait(stack.is_drained)
    stack.wait(lambda: stack.redis.hlen(KEYS.reserved) == 0)
    assert stack.totals()["cancelled"] == 2
    counts = computed(stack).values()
    assert 6 * 8 * LENGTH < sum(counts) < 6 * 8 * LENGTH + 2 * 8 * 1000
    [(requests, prompt, completion)] = asyncio.run(counted(stack.redis_server.url)).values()
    assert (requests, completion) == (8, sum(counts))
    spent = stack.redis.hget(AccountKeys().spent("project:acme/flood"), "month_tokens")
    assert int(spent or 0) == prompt + completion
    served = stack.redis.hget(KEYS.served("standard"), "acme/flood")
    assert int(served or 0) == COUNTER_UNITS * (INPUT_COST * prompt + OUTPUT_COST * completion)
    stack.assert_invariants()


@pytest.mark.faults
def test_a_tenant_has_its_share_beside_ranked_calls(stack: FaultStack) -> None:
    """Two tenants at two gateways and two workers: what they are served counts, not what they get."""
    flood, late = two_keys(stack)
    for name in "ab":
        stack.worker(name, *WORKER)
    (_, url), (_, other_url) = (stack.gateway("--require-keys") for _ in range(2))
    tokens, prompts = 32, 64
    calls = [Stream(url, ranked(index, tokens), flood) for index in range(40)]
    stack.wait(lambda: int(stack.redis.hget(KEYS.waiting, "requests acme/flood") or 0) > 30)
    served = sum(computed(stack).values())
    other = Stream(other_url, body([f"w{index} w{index + 1}" for index in range(prompts)], tokens), late)
    assert other.wait_end(60).status == 200
    served = sum(computed(stack).values()) - served
    # Both workers may hold two calls that were taken before or at the end.
    assert served <= prompts * tokens + 4 * 8 * tokens
    for call in calls:
        assert call.wait_end(60).status == 200
    stack.assert_invariants()
