"""The subscription of a gateway over a connection that fails it without being closed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import pytest

from quire.gateway.stream.subscription import Subscription
from quire.shared.broker import Claim
from quire.shared.messages import StepItem
from quire.shared.redis.clients import pubsub_client
from quire.shared.redis.lane_client import LaneClient
from tests.support.gateway.running import RunningGateway, parse_events, texts, until
from tests.support.hand_worker import BODY, IDS, TEXT, HandWorker, one_each, run
from tests.support.redis_server import RedisServer


@asynccontextmanager
async def subscription(client: LaneClient) -> AsyncIterator[Subscription]:
    one = Subscription(client, "channel", lambda items, now: None, lambda: 0)
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


async def test_a_corrupt_frame_is_counted_and_dropped(gateway: RunningGateway) -> None:
    async def act(worker: HandWorker, claim: Claim, items: list[StepItem]) -> None:
        await worker.log(claim, items)
        for item in items:
            await worker.publish(b"\xc1 this is not msgpack")
            await worker.publish(item.encode()[:-1])
            await worker.publish(item.encode())

    assert await run(gateway, act) == TEXT
    assert gateway.gateway.subscription.corrupt == 2 * len(IDS)


async def test_a_subscription_that_was_cut_is_made_again_and_every_stream_repaired(gateway: RunningGateway) -> None:
    async def act(worker: HandWorker, claim: Claim, items: list[StepItem]) -> None:
        middle = len(items) // 2
        for item in items[:middle]:
            await worker.log(claim, [item])
            await worker.publish(item.encode())
        before = gateway.gateway.subscription.subscribes
        await worker.broker.client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        await worker.log(claim, items[middle:])

        async def subscribed() -> bool:
            return gateway.gateway.subscription.subscribes > before

        await until(subscribed)

    assert await run(gateway, act) == TEXT


async def test_a_stream_survives_while_redis_is_away(gateway: RunningGateway, redis_server: Any) -> None:
    """Redis stops answering for a while; the stream stays open and goes on."""
    worker = HandWorker(gateway)
    async with (
        aiohttp.ClientSession(headers={"Accept": "text/event-stream"}) as session,
        session.post(gateway.url + "/v1/completions", json=BODY) as response,
    ):
        claim = await worker.claim()
        items = one_each(claim.request_id)
        await worker.log(claim, items[:3])
        await worker.publish(items[0].encode())
        first = await response.content.readuntil(b"\n\n")
        # Every connection is cut, and new ones are refused for as long as the limit stands.
        client = worker.broker.client
        await client.config_set("maxclients", 1)
        try:
            await client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        finally:
            await client.config_set("maxclients", 1000)
        await worker.log(claim, items[3:])
        rest = await asyncio.wait_for(response.content.read(), 20)
    events = parse_events((first + rest).decode())
    assert "".join(texts(events)) == TEXT
    assert events[-1].data == "[DONE]"
