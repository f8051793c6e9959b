"""Reading the queues: order, bounds, and reads that block."""

from __future__ import annotations

import asyncio

from quire.shared.broker import Broker, QueueBounds, QueueReader, new_id
from quire.shared.keys import GROUP
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


async def test_a_read_counts_rows_and_nothing_passes_a_request_that_is_too_wide(broker: Broker) -> None:
    await broker.create_groups()
    for index, rows in enumerate((1, 3, 2, 1)):
        await broker.submit(
            f"r{index}", b"body", gateway="g", cost=1, bounds=QueueBounds(requests=100, tokens=1000), rows=rows
        )
    reader = QueueReader(broker.client, "lane", "w")
    found = []
    for rows, widest, expected, too_wide in (
        (3, None, ["r0"], "r1"),
        (2, None, [], "r1"),
        (3, None, ["r1"], ""),
        (1, 1, [], "r2"),
        (1, 4, ["r2"], ""),
        (5, None, ["r3"], ""),
    ):
        new = await reader.read(rows, 60_000 if too_wide else 0, widest=widest)  # it does not block either
        assert ([one.request_id for one in new], reader.too_wide) == (expected, too_wide)
        found += new
    assert [one.rows for one in found] == [1, 3, 2, 1]


async def test_requests_that_come_back_are_read_by_their_rows(broker: Broker) -> None:
    """Requests that a worker hands back, those that it leaves behind, and parked ones."""
    await broker.create_groups()
    bounds = QueueBounds(requests=100, tokens=1000)
    for name in ("a", "b", "c"):
        await broker.submit(name, b"body", gateway="g", cost=1, bounds=bounds, rows=3)
    claims = []
    for delivery in await QueueReader(broker.client, "lane", "w").read(9, 0):
        claim = await broker.claim(delivery, "w", new_id())
        assert claim is not None
        claims.append((claim.request_id, claim.attempt))
    await broker.release(claims[:2])
    heir = QueueReader(broker.client, "lane", "heir")
    for name in ("a", "b"):
        assert [(one.request_id, one.rows) for one in await heir.read(3, 0)] == [(name, 3)]
    # All three are old by now, and the leases of three rows are enough.
    for name, rows in (("a", 1), ("b", 3)):
        found = await broker.reclaim("third", 0, rows)
        assert [(one.request_id, one.rows) for one in found] == [(name, 3)]
        await broker.client.xack(broker.keys.queue(found[0].queue), GROUP, found[0].entry_id)
    await broker.park("c", retention_s=60)
    await broker.unpark("c", bounds)
    assert (await heir.read(2, 0), heir.too_wide) == ([], "c")


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
