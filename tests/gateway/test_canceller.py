"""What nobody wants is cancelled, and what somebody wants is not, whoever else has left or given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gateway.submission import Canceller
from shared.broker import Broker, QueueBounds
from shared.keys import LaneKeys
from shared.redis_clients import command_client

KEYS = LaneKeys("lane")
BOUNDS = QueueBounds(requests=10, tokens=100)


@asynccontextmanager
async def lane(redis_url: str) -> AsyncIterator[Broker]:
    client = command_client(redis_url)
    try:
        yield Broker(client, "lane")
    finally:
        await client.aclose()


async def test_who_leaves_while_an_earlier_cancellation_is_under_way_is_not_forgotten(redis_url: str) -> None:
    async with lane(redis_url) as broker:
        for name in ("wanted", "slow"):
            await broker.submit(name, b"", gateway="g", cost=1, bounds=BOUNDS)
        listening = {"wanted"}
        asked, answer = asyncio.Event(), asyncio.Event()
        detach: Any = broker.detach

        async def slowly(request_id: str, gateway_id: str) -> list[str]:
            asked.set()
            await answer.wait()
            found: list[str] = await detach(request_id, gateway_id)
            return found

        broker.detach = slowly  # type: ignore[method-assign]
        canceller = Canceller(broker, "g", listening.__contains__)
        canceller.cancel(["wanted", "slow"])
        await asked.wait()
        listening.clear()
        canceller.cancel(["wanted"])
        answer.set()
        await canceller.close(10)
        for name in ("wanted", "slow"):
            assert await broker.client.hget(KEYS.request(name), "outcome") == b"cancelled"
