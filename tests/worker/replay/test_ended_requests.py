"""A canary learns of ended requests: the same ones as any other canary, the newest first if it is behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from redis import Redis

from quire.ops.local.embedded_redis import EmbeddedRedis
from quire.shared.redis.clients import pubsub_client
from quire.worker.replay import ended_requests
from quire.worker.replay.ended_requests import EndedRequests, is_sampled

CHANNEL = "quire:{m}:endings"
IDS = [f"{number:032x}" for number in range(20_000)]


def test_a_share_of_the_requests_is_sampled_and_a_larger_share_has_all_of_a_smaller() -> None:
    sampled = {share: {name for name in IDS if is_sampled(name, share)} for share in (0.0, 0.01, 0.25, 1.0)}
    assert [len(found) / len(IDS) for found in sampled.values()] == pytest.approx([0, 0.01, 0.25, 1], abs=0.01)
    assert sampled[0.0] < sampled[0.01] < sampled[0.25] < sampled[1.0]


async def wait_until(is_true: Callable[[], bool]) -> None:
    for _ in range(2000):
        if is_true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen in time")


async def test_those_that_wait_longest_are_passed_over(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ended_requests, "MAX_WAITING", 3)
    client, redis = pubsub_client(redis_server.url), Redis.from_url(redis_server.url)
    ended = EndedRequests(client, CHANNEL, 1)
    run = asyncio.create_task(ended.run())
    try:
        await wait_until(lambda: ended.is_subscribed)
        for name in IDS[:5]:
            redis.publish(CHANNEL, name)
        await wait_until(lambda: ended.num_passed_over == 2)
        assert [await ended.next() for _ in range(3)] == IDS[2:5]
        waiting = asyncio.create_task(ended.next())
        await asyncio.sleep(0)
        redis.publish(CHANNEL, IDS[9])
        assert await waiting == IDS[9]
        assert (len(ended), ended.num_passed_over) == (0, 2)
    finally:
        run.cancel()
        await client.aclose()
        redis.close()


async def test_a_broken_subscription_is_made_again(
    redis_server: EmbeddedRedis,
) -> None:
    client, redis = pubsub_client(redis_server.url), Redis.from_url(redis_server.url)
    ended = EndedRequests(client, CHANNEL, 1)
    run = asyncio.create_task(ended.run())
    try:
        await wait_until(lambda: ended.is_subscribed)
        redis.client_kill_filter(_type="pubsub")
        await wait_until(lambda: not ended.is_subscribed)
        await wait_until(lambda: ended.is_subscribed)
        redis.publish(CHANNEL, IDS[1])
        assert await ended.next() == IDS[1]
    finally:
        run.cancel()
        await client.aclose()
        redis.close()
