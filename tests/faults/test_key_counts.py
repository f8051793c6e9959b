"""Counts of API keys after kills of workers, gateways and Redis: counted = committed for every key."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from typing import Any

import pytest

from quire.shared.accounts.usage import read_usage
from quire.shared.protocol.keys import ACCOUNTS_TAG, AccountKeys
from quire.shared.redis.clients import command_client
from tests.support.faults.calls import FAST, body, make_keys
from tests.support.faults.stack import KEYS, FaultStack, Stream

ACCOUNTS = AccountKeys()
KEYS_IN_USE = 3
SECONDS = 45


async def counted(url: str) -> dict[str, tuple[int, int, int]]:
    """Return requests, prompt tokens and generated tokens of each key as the scripts have counted them."""
    client = command_client(url, ACCOUNTS_TAG)
    rows = await read_usage(client, ACCOUNTS.prefix, 2)
    await client.aclose()
    return {row.key: (row.requests, row.prompt, row.completion) for row in rows}


def committed(stack: FaultStack) -> dict[str, list[tuple[int, bool]]]:
    """Return the generated tokens of each request by key, from the output logs, and whether it computed anything."""
    found: dict[str, list[tuple[int, bool]]] = {}
    for name in stack.redis.scan_iter(KEYS.request("*")):
        account, outcome = stack.redis.hmget(name, "account", "outcome")
        request_id = name.decode().rsplit(":", 1)[1]
        entries: Any = stack.redis.xrevrange(KEYS.output(request_id), count=1)
        tokens = int(entries[0][0].split(b"-")[0])
        assert outcome is not None
        assert account is not None
        found.setdefault(account.decode(), []).append((tokens, tokens > 0 or outcome in (b"stop", b"length")))
    return found


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_kills_neither_leak_nor_count_twice(stack: FaultStack) -> None:
    secrets = dict(make_keys(stack.redis_server.url, *["acme/web"] * KEYS_IN_USE, concurrent_requests=8))
    workers = {name: stack.worker(name, *FAST, ready=False) for name in "ab"}
    gateways = [stack.gateway("--require-keys") for _ in range(2)]
    stack.man(workers, *FAST)
    chance, streams = random.Random(7), []
    ends = time.monotonic() + SECONDS
    turns = itertools.cycle(secrets.values())
    while time.monotonic() < ends:
        for _ in range(4):
            headers = {"Authorization": f"Bearer {next(turns)}"}
            streams.append(Stream(chance.choice(gateways)[1], body("greedy"), headers))
        time.sleep(0.3)  # the kill comes at any point of the requests
        victim = chance.choice(("worker", "gateway", "client", "redis", "client"))
        if victim == "worker":
            workers[chance.choice("ab")].kill()
            stack.man(workers, *FAST)
        elif victim == "gateway":
            index = chance.randrange(2)
            gateways[index][0].kill()
            gateways[index] = stack.gateway("--require-keys")
        elif victim == "redis":
            assert stack.redis_server.process is not None
            stack.redis_server.process.kill()
            stack.redis_server.process.wait()
            stack.redis_server.start()
        else:
            chance.choice(streams).leave()
    for stream in streams:
        stream.wait_end(60)
    stack.wait(stack.is_drained, 60)
    stack.wait(lambda: stack.redis.hlen(KEYS.reserved) == 0, 60)
    found = asyncio.run(counted(stack.redis_server.url))
    expected = committed(stack)
    assert found.keys() == expected.keys() == secrets.keys()
    prompt = {counts[1] // sum(computed for _, computed in expected[key]) for key, counts in found.items()}
    assert len(prompt) == 1, "all requests have the same prompt"
    [size] = prompt
    assert sum(map(len, expected.values())) > 30
    for key, requests in expected.items():
        computed = sum(one for _, one in requests)
        assert found[key] == (len(requests), size * computed, sum(tokens for tokens, _ in requests))
        spent: Any = stack.redis.hgetall(ACCOUNTS.spent(f"key:{key}"))
        assert int(spent[b"open"]) == 0
        assert int(spent[b"month_tokens"]) == found[key][1] + found[key][2]
    of_project: Any = stack.redis.hgetall(ACCOUNTS.spent("project:acme/web"))
    assert int(of_project[b"open"]) == 0
    assert int(of_project[b"month_tokens"]) == sum(counts[1] + counts[2] for counts in found.values())
