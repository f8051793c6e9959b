"""The keys that a lane leaves in Redis."""

from __future__ import annotations

from redis.asyncio import Redis

from quire.shared.broker import Broker
from quire.shared.keys import RETENTION_S
from tests.support.broker_calls import KEYS, start, step


async def test_when_all_is_done_only_keys_with_a_ttl_and_counters_are_left(broker: Broker, client: Redis) -> None:
    claim = await start(broker)
    await broker.commit_step("w", [step(claim, 0, (1,), "stop")])
    assert await client.hgetall(KEYS.load) == {
        b"requests": b"0",
        b"tokens": b"0",
        b"requests:standard": b"0",
        b"tokens:standard": b"0",
    }
    assert (await client.xpending(KEYS.queue(), "workers"))["pending"] == 0
    assert await client.xlen(KEYS.queue()) == 0
    for key in (KEYS.request("r"), KEYS.output("r")):
        assert 0 < await client.ttl(key) <= RETENTION_S
    assert await client.hexists(KEYS.request("r"), "body") is False
