"""The canceller cancels a request without listeners, and keeps a request that still has a listener."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from quire.gateway.admission.canceller import Canceller
from quire.shared.broker import Broker, QueueBounds
from quire.shared.keys import LaneKeys
from quire.shared.messages import GenerationRequest
from quire.shared.redis.clients import command_client
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import Steps, emit
from tests.support.gateway.running import MODEL, tokens, until
from tests.support.redis_server import RedisServer

KEYS = LaneKeys("lane")
BOUNDS = QueueBounds(requests=10, tokens=100)


@asynccontextmanager
async def lane(redis_url: str) -> AsyncIterator[Broker]:
    client = command_client(redis_url)
    try:
        yield Broker(client, "lane")
    finally:
        await client.aclose()


async def test_who_leaves_while_an_earlier_cancellation_is_under_way_is_not_forgotten(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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

        monkeypatch.setattr(broker, "detach", slowly)
        canceller = Canceller(broker, "g", listening.__contains__)
        canceller.cancel(["wanted", "slow"])
        await asked.wait()
        listening.clear()
        canceller.cancel(["wanted"])
        answer.set()
        await canceller.close(10)
        for name in ("wanted", "slow"):
            assert await broker.client.hget(KEYS.request(name), "outcome") == b"cancelled"


async def test_who_came_with_the_same_key_has_the_answer_though_the_first_call_was_given_up(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first gateway never receives the reply to its submission; the client repeats the call at another gateway."""
    here, there = await start_gateway(), await start_gateway()
    submitted, cut = asyncio.Event(), asyncio.Event()
    submit: Any = here.gateway.broker.submit

    async def unheard(*args: Any, **options: Any) -> None:
        await submit(*args, **options)
        submitted.set()
        await cut.wait()
        raise RedisConnectionError("the reply is lost")

    monkeypatch.setattr(here.gateway.broker, "submit", unheard)
    may_emit = asyncio.Event()

    async def later(request: GenerationRequest) -> Steps:
        await may_emit.wait()
        async for step in emit(tokens("The quick brown fox"))(request):
            yield step

    async def attached() -> bool:
        keys = there.gateway.broker.keys
        [request] = await there.gateway.broker.client.keys(keys.request("*"))
        return bool(await there.gateway.broker.client.hget(request, "gateway") == there.gateway.id.encode())

    body = {"model": MODEL, "prompt": "Hello"}
    async with there.worker(later):
        first = asyncio.create_task(here.post("/v1/completions", body, Idempotency_Key="key"))
        await submitted.wait()
        second = asyncio.create_task(there.post("/v1/completions", body, Idempotency_Key="key"))
        await until(attached)
        cut.set()
        assert (await first).status == 503
        await here.gateway.submission.canceller._idle.wait()
        may_emit.set()
        reply = await second
    assert reply.status == 200, reply.body
    assert reply.json["choices"][0]["text"] == "The quick brown fox"


async def test_what_cannot_be_cancelled_in_time_is_counted(
    redis_url: str, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A cancellation that Redis has received and not answered counts too."""
    async with lane(redis_url) as broker:
        canceller = Canceller(broker, "g", lambda _: False)
        with redis_server.stopped():
            canceller.cancel([str(index) for index in range(20)])
            await canceller.close(0.1)
    assert "20 requests could not be cancelled" in caplog.text
