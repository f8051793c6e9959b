"""Deadlines that cannot be met, at the real stack: gateways with wrong clocks, two keys, and a worker that dies."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.faults.calls import FAST, bearers, make_keys
from tests.support.faults.stack import KEYS, FaultStack, Stream

ROWS, PROMPTS, CALLS, TOKENS = 2, 40, 2, 20


def body(prompt: Any, **parameters: Any) -> dict[str, Any]:
    exact = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return {"model": "tiny", "prompt": prompt, **exact, **parameters}


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.promise
def test_deadlines_that_cannot_be_met_are_refused_while_a_worker_says_how_fast_it_is(stack: FaultStack) -> None:
    flood, late = bearers(make_keys(stack.redis_server.url, "acme/flood", "acme/late"))
    flags = ("--max-num-seqs", str(ROWS), *FAST)
    worker = stack.worker("a", *flags)
    day_s = 86_400
    urls = [stack.gateway("--require-keys", **clock)[1] for clock in ({}, {"TEST_CLOCK_S": str(2 * day_s)})]
    calls = [Stream(urls[0], body([f"w{n} w{n + 1}" for n in range(PROMPTS)]), flood) for _ in range(CALLS)]

    def refusals(timeout_s: float) -> list[Stream]:
        asked = [Stream(url, body("w1 w2", timeout=timeout_s), flood).wait_end() for url in urls]
        return [one for one in asked if one.status == 429]

    # The worker learns its pace from the first calls; then both gateways refuse what cannot be met.
    stack.wait(lambda: len(refusals(1.0)) == 2)
    for refusal in refusals(1.0):
        assert refusal.answer["error"]["code"] == "deadline_unreachable"
        assert 1 <= int(refusal.response_headers["retry-after"]) <= 60
    # The backlog of one key takes no deadline of another key.
    for url in urls:
        assert Stream(url, body("w1 w2", timeout=30), late).wait_end(90).status == 200
    assert int(stack.redis.hget(KEYS.waiting, "requests acme/flood") or 0) > PROMPTS // 2
    # The worker dies, and what it knew goes with its card. Without a worker calls wait, as they would before it.
    worker.kill()
    stack.wait(lambda: not refusals(0.3))
    stack.worker("b", *flags)
    for call in calls:
        assert call.wait_end(120).status == 200
        assert len(call.answer["choices"]) == PROMPTS
    stack.wait(stack.is_drained)
    assert set(stack.totals()) <= {"accepted", "length", "deadline"}
    stack.assert_invariants()
