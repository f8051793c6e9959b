"""One API key stores and parks as much as it can (case 35): only that key is refused, and the count survives kills."""

from __future__ import annotations

import os
import random
import signal
import string
from typing import Any

import openai
import pytest

from tests.faults.test_response_faults import asked
from tests.support.faults.calls import FAST, make_keys
from tests.support.faults.stack import KEYS, FaultStack

SHARE = 1_500_000
TOTAL = 4 * SHARE
TEXT = 500_000
FLAGS = ("--require-keys", "--max-stored-bytes", str(TOTAL), "--max-parked-requests", "400")


def client(url: str, secret: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=secret, max_retries=0, timeout=60)


def large(stack: FaultStack, chance: random.Random) -> dict[str, Any]:
    """A response with TEXT bytes that cannot be compressed much, of which the prompt has a few tokens."""
    text = "".join(chance.choices(string.ascii_letters + string.digits, k=TEXT))
    items = [{"role": "user", "content": text}, {"role": "user", "content": "w1 w2 w3"}]
    return asked(stack, input=items, truncation="auto", background=True)


def held(stack: FaultStack, key: str = "") -> int:
    """Return the bytes that count for a key, or for all."""
    if key:
        return int(stack.redis.zscore(KEYS.holders, key) or 0)
    return int(stack.redis.hget(KEYS.held, "") or 0)


def memory(stack: FaultStack) -> int:
    return int(stack.redis.info("memory")["used_memory"])


@pytest.mark.faults
@pytest.mark.timeout(120)
@pytest.mark.promise
def test_a_key_that_fills_the_memory_is_refused_and_nobody_else(stack: FaultStack) -> None:
    [(greedy, greedy_secret)] = make_keys(stack.redis_server.url, "acme/web", concurrent_requests=4)
    [(other, other_secret)] = make_keys(stack.redis_server.url, "acme/web")
    gateways = [stack.gateway(*FLAGS) for _ in range(2)]
    worker = stack.worker("a", *FAST)
    before, chance, refusals = memory(stack), random.Random(3), []
    with client(gateways[1][1], other_secret) as there:
        kept = there.responses.create(**asked(stack))
        kept_ttl = stack.redis.ttl(KEYS.request(kept.id.removeprefix("resp_")))
    parked = []
    for index in range(8):
        with client(gateways[index % 2][1], greedy_secret) as here:
            try:
                response = here.responses.create(**large(stack, chance))
            except openai.RateLimitError as error:
                refusals.append(error)
                continue
            here.post(f"/responses/{response.id}/park", cast_to=object)
            parked.append(response.id)
    # TEXT random letters and digits are three quarters of that when compressed.
    assert 2 <= len(parked) <= 4
    assert len(refusals) == 8 - len(parked)
    for error in refusals:
        assert error.code == "stored_bytes_full"
        assert greedy in str(error)
        assert "--max-key-share" in str(error)
        assert "Delete stored responses" in str(error)
        assert error.response.headers["x-should-retry"] == "false"
    assert held(stack, greedy) <= SHARE
    assert memory(stack) - before < TOTAL
    # Nothing changed for the other key, which may also store and park.
    name = KEYS.request(kept.id.removeprefix("resp_"))
    assert stack.redis.ttl(name) > kept_ttl - 60
    with client(gateways[0][1], other_secret) as there:
        assert there.responses.retrieve(kept.id).output_text == kept.output_text
        response = there.responses.create(**large(stack, chance))
        # The processes die while it waits or runs, and a parked one of the greedy key ends meanwhile.
        os.kill(gateways[1][0].pid, signal.SIGKILL)
        os.kill(worker.pid, signal.SIGKILL)
        with client(gateways[0][1], greedy_secret) as here:
            here.responses.cancel(parked[0])
        stack.worker("b", *FAST)
        stack.wait(lambda: there.responses.retrieve(response.id).status == "incomplete", 30)
        # The remedy of the error.
        with client(gateways[0][1], greedy_secret) as here:
            for one in parked:
                here.responses.delete(one)
            stack.wait(lambda: held(stack, greedy) < 100_000)
            again = here.responses.create(**large(stack, chance))
            stack.wait(lambda: here.responses.retrieve(again.id).status == "incomplete", 30)
    stack.wait(stack.is_drained)
    assert held(stack) == held(stack, greedy) + held(stack, other)
    held_hash: Any = stack.redis.hgetall(KEYS.held)
    names = {name.decode() for name in held_hash if name}
    assert {kept.id, response.id, again.id} <= {f"resp_{name}" for name in names}
    stack.assert_invariants()
