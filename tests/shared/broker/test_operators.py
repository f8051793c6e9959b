"""The dead-letter stream as operators read it."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from quire.shared.broker import Broker
from tests.support.broker_calls import KEYS


async def test_entries_of_the_dead_that_are_corrupt_are_left_out(
    broker: Broker, client: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    good = {"id": "r", "class": "batch", "worker": "w", "emitted": 3, "body": b"b", "metadata": b"a"}
    await client.xadd(KEYS.dead, good)
    for name, data in (("emitted", "x"), ("class", "none"), ("id", b"\xff")):
        await client.xadd(KEYS.dead, good | {name: data})
    await client.xadd(KEYS.dead, {"surprise": 1})
    [dead] = await broker.read_dead()
    assert (dead.request_id, dead.priority_class, dead.emitted) == ("r", "batch", 3)
    assert broker.corrupt == {"dead entry": 4}
    assert caplog.text.count("is corrupt") == 1
