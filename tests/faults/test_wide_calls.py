"""Calls of many sequences (`n`, `best_of`, beams): idle workers share them, and other tenants hardly notice them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from tests.faults.test_fair_sharing import body, first_token_behind, make_keys
from tests.support.faults.stack import KEYS, FaultStack, Stream

ROWS = 16
CALLS = 16
WORKER = ("--max-num-seqs", str(ROWS), "--max-num-batched-tokens", "256")


def wide(index: int, max_tokens: int) -> dict[str, Any]:
    return body(f"w{index} w{index + 1}", max_tokens) | {"n": ROWS}


@pytest.mark.faults
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
    flood, late = asyncio.run(make_keys(stack.redis_server.url))
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
