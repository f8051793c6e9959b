"""Two API keys at the real stack: one floods the queue, and the other one hardly notices."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import clean_environ
from tests.support.faults.calls import FAST, bearers, make_keys
from tests.support.faults.stack import KEYS, FaultStack, Stream

ROWS = 2
CALLS, PROMPTS, TOKENS = 4, 64, 8


def two_keys(stack: FaultStack) -> list[dict[str, str]]:
    """Return the headers of two keys, of one project each."""
    return bearers(make_keys(stack.redis_server.url, "acme/flood", "acme/late"))


def body(prompt: Any, max_tokens: int = TOKENS) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def ended(stack: FaultStack) -> int:
    return sum(count for name, count in stack.totals().items() if name != "accepted")


def first_token_behind(stack: FaultStack, url: str, headers: dict[str, str]) -> int:
    """Send a call; return how many requests ended between its acceptance and its first token, itself not counted."""
    accepted, before = stack.totals()["accepted"], ended(stack)
    stream = Stream(url, body("w1 w2", 40) | {"stream": True}, headers)
    stack.wait(lambda: stack.totals()["accepted"] > accepted)
    stream.wait_events(1)
    count = ended(stack) - before
    assert stream.wait_end().is_complete
    return count


@pytest.mark.faults
def test_a_flood_of_one_key_does_not_delay_another(stack: FaultStack) -> None:
    flood, late = two_keys(stack)
    flags = ("--max-num-seqs", str(ROWS), "--max-num-batched-tokens", "256", *FAST)
    worker = stack.worker("a", *flags)
    _, url = stack.gateway("--require-keys")
    alone = Stream(url, body("w1 w2", 40) | {"stream": True}, late).wait_end()
    prompts = [f"w{index} w{index + 1}" for index in range(PROMPTS)]
    calls = [Stream(url, body(prompts), flood) for _ in range(CALLS)]
    stack.wait(lambda: int(stack.redis.hget(KEYS.waiting, "requests acme/flood") or 0) > 200)
    # One service time: the rows in use are freed, and the first of them is for the other key. A few may end before the
    # test has looked.
    counts = [first_token_behind(stack, url, late) for _ in range(3)]
    assert max(counts) <= 3 * ROWS
    assert int(stack.redis.hget(KEYS.waiting, "requests acme/flood") or 0) > 100
    # The worker dies, and another one goes on with all lines.
    worker.kill()
    stack.worker("b", *flags)
    assert first_token_behind(stack, url, late) <= 3 * ROWS + ROWS
    assert int(stack.redis.hget(KEYS.waiting, "requests acme/flood") or 0) > 50
    for call in calls:
        assert call.wait_end(60).status == 200
        assert len(call.answer["choices"]) == PROMPTS
    assert stack.totals()["accepted"] == CALLS * PROMPTS + 5
    assert alone.is_complete
    stack.assert_invariants()


@pytest.mark.faults
@pytest.mark.promise
def test_no_key_comes_before_the_shares_of_others_by_a_class_that_it_was_not_granted(stack: FaultStack) -> None:
    """Two gateways and two workers; the operator grants the class to one key by the command."""
    plain, other = two_keys(stack)
    for name in "ab":
        stack.worker(name, *FAST)
    urls = [stack.gateway("--require-keys")[1] for _ in range(2)]
    asked = body("w1 w2") | {"priority": "interactive"}

    def statuses(headers: dict[str, str]) -> list[int]:
        return [Stream(url, asked, headers).wait_end().status for url in urls]

    assert statuses(plain) == statuses(other) == [403, 403]
    key_id = plain["Authorization"].split("-")[2]
    command = [sys.executable, "-m", "quire", "keys", "limit", "--id", key_id, "--priority", "interactive"]
    subprocess.run([*command, "--redis-url", stack.redis_server.url], check=True, env=clean_environ())
    stack.wait(lambda: statuses(plain) == [200, 200])
    assert statuses(other) == [403, 403]
    assert stack.redis.xinfo_stream(KEYS.queue("interactive"))["last-generated-id"] != b"0-0"
    stack.wait(stack.is_drained)
