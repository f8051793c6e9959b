"""Heartbeats, names of workers, and consumers that are forgotten."""

from __future__ import annotations

from dataclasses import replace

from redis.asyncio import Redis

from quire.shared.broker import Broker, QueueReader
from quire.shared.keys import GROUP, QUEUES
from quire.shared.messages import WorkerCard
from tests.support.broker_calls import KEYS, go_stale, start


async def consumers(client: Redis) -> set[str]:
    """Return the names of the consumers in the groups of all queues."""
    found = [one for name in QUEUES for one in await client.xinfo_consumers(KEYS.queue(name), GROUP)]
    return {one["name"].decode() for one in found}


async def test_workers_that_are_gone_leave_no_consumers_behind(broker: Broker, client: Redis) -> None:
    """Otherwise they would grow with every process that has a name of its own."""
    ended, killed, last = (
        WorkerCard(name, "1", "lane", 100, 64, 50, (2,), 16, 10, 5, 0, 0, 7) for name in ("ended", "killed", "last")
    )
    await broker.create_groups()
    for card in (ended, killed, last):
        await broker.beat(card)
        await QueueReader(client, "lane", card.worker_id).pending()
    assert await consumers(client) == {"ended", "killed", "last"}
    await broker.retire("ended", "1")
    assert await consumers(client) == {"killed", "last"}
    await client.zadd(KEYS.workers, {"killed": 1})  # beat last very long ago
    await broker.beat(last)
    assert await consumers(client) == {"last"}
    assert await client.zrange(KEYS.workers, 0, -1) == [b"last"]


async def test_what_is_pending_for_a_worker_that_is_gone_keeps_its_consumer(broker: Broker, client: Redis) -> None:
    ended = WorkerCard("w", "1", "lane", 100, 64, 50, (2,), 16, 10, 5, 0, 0, 7)
    heir = replace(ended, worker_id="heir")
    await broker.beat(ended)
    claim = await start(broker)
    await broker.retire("w", "1")
    await client.zadd(KEYS.workers, {"w": 1})
    await broker.beat(heir)
    assert await consumers(client) == {"w"}
    await go_stale(broker)
    [delivery] = await broker.reclaim("heir", 1000, 1)
    assert delivery.request_id == claim.request_id
    await broker.beat(heir)
    assert await consumers(client) == {"heir"}


async def test_a_name_is_of_one_incarnation_at_a_time(broker: Broker, client: Redis) -> None:
    card = WorkerCard("w", "1", "lane", 100, 64, 50, (2,), 16, 10, 5, 0, 0, 7)
    assert await broker.holder("w") is None
    for _ in range(2):
        assert await broker.enlist("w", "1", "here", 0.5)
    assert await broker.beat(card, home="here", beat_s=0.5)
    assert not await broker.enlist("w", "2", "there", 0.5)
    assert not await broker.enlist("w", "2", "there", 0.5, before="0")
    holder = await broker.holder("w")
    assert holder is not None
    assert (holder.incarnation, holder.home, holder.beat_s) == ("1", "here", 0.5)
    assert await broker.enlist("w", "2", "there", 0.5, before="1")
    # The one before has lost it, and its card is gone until the new one beats.
    assert not await broker.beat(card)
    assert await broker.live_workers() == []
    assert 0 < await client.ttl(KEYS.worker("w")) <= 5
    new = replace(card, incarnation="2")
    assert await broker.beat(new, slowest_step_s=10)
    assert await broker.live_workers() == [new]
    assert 5 < await client.ttl(KEYS.worker("w")) <= 30
