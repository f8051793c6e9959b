"""Reading the queues: order, bounds, and reads that block."""

from __future__ import annotations

import asyncio

from quire.shared.broker import Broker, QueueBounds, QueueReader
from quire.shared.redis.clients import blocking_client


async def test_a_read_takes_from_the_first_queue_first_and_no_more_than_asked(broker: Broker) -> None:
    await broker.create_groups()
    for name in ("batch", "standard", "interactive"):
        for index in range(3):
            await broker.submit(
                f"{name}{index}",
                b"body",
                gateway="g",
                cost=1,
                bounds=QueueBounds(requests=100, tokens=1000),
                priority_class=name,
            )
    reader = QueueReader(broker.client, "lane", "w")
    assert await reader.read(0, 0) == []
    found = await reader.read(5, 0)
    assert [one.request_id for one in found] == [
        "interactive0",
        "interactive1",
        "interactive2",
        "standard0",
        "standard1",
    ]
    assert [(one.queue, one.cost) for one in found[2:4]] == [("interactive", 1), ("standard", 1)]
    assert [one.request_id for one in await reader.read(1, 0, ("batch",))] == ["batch0"]
    assert len(await reader.read(100, 0)) == 3
    assert len(await reader.pending()) == 9


async def test_behind_a_read_that_waited_none_is_lost_or_waited_for(broker: Broker, redis_url: str) -> None:
    await broker.create_groups()
    client = blocking_client(redis_url)
    reader = QueueReader(client, "lane", "w")
    waiting = asyncio.create_task(reader.read(50, 5000))
    await waits(broker)
    bounds = QueueBounds(requests=100, tokens=1000)
    for index in range(20):
        await broker.submit(f"r{index}", b"body", gateway="g", cost=1, bounds=bounds)
    found = await waiting
    async with asyncio.timeout(2):
        while len(found) < 20:
            found += await reader.read(50, 5000)
    assert [one.request_id for one in found] == [f"r{index}" for index in range(20)]
    await client.aclose()


async def waits(broker: Broker) -> None:
    """Wait until a client has been in a blocking command for a while."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(10):
        while (await broker.client.info("clients"))["blocked_clients"] < 1:
            pass
        since = loop.time()
        while loop.time() - since < 0.01:
            await broker.client.ping()
