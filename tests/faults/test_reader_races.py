"""A blocking read that is cancelled while entries arrive loses no entry."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

from quire.ops.local.embedded_redis import EmbeddedRedis
from quire.shared.protocol.broker import Admission, Broker, QueueBounds, QueueReader, new_id
from quire.shared.redis.clients import blocking_client, command_client

ROUNDS = 400


async def test_entries_that_race_with_the_end_of_a_read_are_read_or_pending(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    server.start()
    commands, blocking = command_client(server.url), blocking_client(server.url)
    try:
        broker, reader = Broker(commands, "lane"), QueueReader(blocking, "lane", "a")
        await broker.create_groups()
        await reader.pending()
        draw = random.Random(0)
        sent, seen = [], Counter[str]()

        async def submit(request_id: str) -> None:
            await asyncio.sleep(draw.uniform(0, 0.002))
            await broker.submit(request_id, b"", Admission(gateway="g", cost=1, bounds=QueueBounds(10**6, 10**6)))

        async def unblock() -> None:
            await asyncio.sleep(draw.uniform(0, 0.002))
            await reader.unblock(commands)

        for _ in range(ROUNDS):
            sent.append(new_id())
            found, *_ = await asyncio.gather(reader.read(4, 20), submit(sent[-1]), unblock())
            seen.update(delivery.request_id for delivery in found)
        for delivery in await reader.read(ROUNDS, 0):
            seen[delivery.request_id] += 1
        assert seen == Counter(sent)
        assert {delivery.request_id for delivery in await reader.pending()} == set(sent)
    finally:
        await commands.aclose()
        await blocking.aclose()
        server.stop()
