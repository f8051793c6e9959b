"""The counts of requests that a worker has taken off the queue, from claims on a real Redis."""

from __future__ import annotations

from quire.shared.broker import Broker, QueueBounds, QueueReader, new_id
from quire.shared.redis.clients import command_client
from quire.worker.queue.counts import ClaimCounts

BOUNDS = QueueBounds(requests=100, tokens=1000)


async def test_what_was_handed_back_before_its_first_token_is_a_migration_and_waited_once(redis_url: str) -> None:
    client = command_client(redis_url)
    try:
        broker = Broker(client, "lane")
        await broker.create_groups()
        await broker.submit("r", b"body", gateway="g", cost=1, bounds=BOUNDS)
        counts = ClaimCounts()
        for worker in ("first", "second"):
            [delivery] = await QueueReader(client, "lane", worker).read(1, 0)
            claim = await broker.claim(delivery, worker, new_id())
            assert claim is not None
            counts.note(claim)
            assert await broker.release([("r", claim.attempt)]) == 1
        assert (counts.first, counts.migrated, counts.waited_s["standard"].count) == (1, 1, 1)
    finally:
        await client.aclose()
