"""Retries: a short outage of Redis delays a call, a long outage answers it with 503."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from quire.gateway.admission.retry import RETRY_S
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import MODEL, RunningGateway, tokens, until
from tests.support.redis_server import RedisServer, running_redis


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis server that the test may stop."""
    with running_redis("--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


async def queued(gateway: RunningGateway, count: int) -> None:
    async def reached() -> bool:
        return await gateway.queued() == count

    await until(reached)


async def test_without_redis_new_calls_get_503_and_later_ones_are_served_again(
    own_redis: RedisServer, start_gateway: Start
) -> None:
    gateway = await start_gateway(redis_url=own_redis.url)
    own_redis.kill()

    async def unready() -> bool:
        reply = await gateway.get("/readyz")
        return reply.status == 503 and "Redis does not answer" in reply.json["problems"]

    reply = await gateway.chat()
    assert (reply.status, reply.error["code"]) == (503, "broker_unavailable")
    assert int(reply.headers["retry-after"]) >= 1
    await until(unready)
    assert (await gateway.get("/healthz")).status == 200
    # A later call fails at once: an earlier call has already waited for Redis in vain.
    async with asyncio.timeout(RETRY_S / 2):
        assert (await gateway.chat()).status == 503
        assert (await gateway.post(f"/v1/completions/cmpl-{'0' * 32}/cancel", b"")).status == 503
    own_redis.start()
    await asyncio.wait_for(gateway.gateway.subscription.ready.wait(), 10)
    async with gateway.worker(emit(tokens("a"))):
        assert (await gateway.chat()).status == 200


async def test_a_redis_that_is_soon_back_costs_new_calls_a_wait_and_no_error(
    own_redis: RedisServer, start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.gateway.admission.retry.RETRY_S", 20.0)  # longer than any start of Redis takes
    gateway = await start_gateway(redis_url=own_redis.url)
    own_redis.kill()
    first = asyncio.create_task(gateway.chat())

    async def lost() -> bool:
        return not gateway.gateway.subscription.ready.is_set()

    await until(lost)
    calls = [first, *(asyncio.create_task(gateway.chat()) for _ in range(3))]
    assert not (await asyncio.wait(calls, timeout=0.5))[0]
    own_redis.start()
    async with gateway.worker(emit(tokens("a"))):
        assert [reply.status for reply in await asyncio.gather(*calls)] == [200] * 4


async def test_a_stream_lives_through_a_restart_of_redis(own_redis: RedisServer, start_gateway: Start) -> None:
    gateway = await start_gateway(redis_url=own_redis.url, keepalive_s=0.2)
    body = {"model": MODEL, "prompt": "x", "stream": True}
    call = asyncio.create_task(gateway.events("/v1/completions", body))
    await queued(gateway, 1)
    own_redis.kill()
    await asyncio.sleep(0)
    own_redis.start()
    async with gateway.worker(emit(tokens("after the restart"))):
        events = await asyncio.wait_for(call, 20)
    assert events[-1].data == "[DONE]"
