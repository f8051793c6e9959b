"""The subscription of a gateway over a connection that fails it without being closed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from quire.gateway.stream.router import FrameRouter
from quire.gateway.stream.subscription import Subscription
from quire.shared.broker import Broker
from quire.shared.redis.clients import LaneClient, pubsub_client
from tests.support.redis_server import RedisServer


@asynccontextmanager
async def subscription(client: LaneClient) -> AsyncIterator[Subscription]:
    one = Subscription(client, "channel", FrameRouter(Broker(client, "lane"), keepalive_s=10))
    one.start()
    try:
        yield one
    finally:
        await one.close()
        await client.aclose()


async def test_a_subscription_that_redis_refuses_is_tried_again(redis_url: str, redis_server: RedisServer) -> None:
    """Such as while it is busy with a script."""
    with redis_server.client() as other:
        other.execute_command("ACL", "SETUSER", "default", "resetchannels")
        try:
            async with subscription(pubsub_client(redis_url)) as one:
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.5):  # until it was refused several times
                        await one.ready.wait()
                assert not one.ready.is_set()
                other.execute_command("ACL", "SETUSER", "default", "allchannels")
                async with asyncio.timeout(5):
                    await one.ready.wait()
        finally:
            other.execute_command("ACL", "SETUSER", "default", "allchannels")


@pytest.mark.slow
async def test_a_connection_is_not_given_up_before_it_was_pinged(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes to hear where the lane is."""
    monkeypatch.setattr("quire.gateway.stream.subscription.PING_AFTER_S", 0.05)
    client = pubsub_client(redis_url)
    is_current = client.is_current
    looks = asyncio.Semaphore(0)

    async def slowly(link: object) -> bool:
        await asyncio.sleep(0.15)
        looks.release()
        return await is_current(link)  # type: ignore[arg-type]

    monkeypatch.setattr(client, "is_current", slowly)
    async with subscription(client) as one:
        await one.ready.wait()
        for _ in range(6):
            await looks.acquire()
        assert one.subscribes == 1


async def test_an_answer_within_a_tick_of_the_clock_is_one(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks of event loops have milliseconds, and a Redis on the same machine answers a ping in less."""
    monkeypatch.setattr("quire.gateway.stream.subscription.PING_AFTER_S", 0.2)
    monkeypatch.setattr("quire.gateway.stream.subscription.LOOK_S", 0.05)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: int(10 * time.monotonic()) / 10)
    client = pubsub_client(redis_url)
    is_current = client.is_current
    looks = asyncio.Semaphore(0)

    async def counted(link: object) -> bool:
        looks.release()
        return await is_current(link)  # type: ignore[arg-type]

    monkeypatch.setattr(client, "is_current", counted)
    async with subscription(client) as one:
        await one.ready.wait()
        for _ in range(30):  # several pings
            await looks.acquire()
        assert one.subscribes == 1
