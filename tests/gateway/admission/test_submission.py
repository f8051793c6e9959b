"""Submissions: a full queue, and replies of Redis that are lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import RunningGateway, tokens, until


async def queued(gateway: RunningGateway, count: int) -> None:
    async def reached() -> bool:
        return await gateway.queued() == count

    await until(reached)


async def test_a_full_queue_is_a_429_that_says_when_to_come_again(start_gateway: Start) -> None:
    gateway = await start_gateway(max_queued_requests=2)
    waiting = [asyncio.create_task(gateway.chat()) for _ in range(2)]
    await queued(gateway, 2)
    reply = await gateway.chat()
    assert (reply.status, reply.error["type"], reply.error["code"]) == (429, "rate_limit_error", "queue_full")
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    async with gateway.worker(emit(tokens("a"))):
        assert [(await task).status for task in waiting] == [200, 200]
        assert (await gateway.chat()).status == 200


async def test_a_call_that_does_not_fit_as_a_whole_is_not_accepted_in_part(start_gateway: Start) -> None:
    gateway = await start_gateway(max_queued_requests=3)
    reply = await gateway.complete(prompt=["a", "b", "c", "d"])
    assert reply.status == 429
    await queued(gateway, 0)


async def test_the_bound_on_tokens_counts_what_requests_may_use(start_gateway: Start) -> None:
    gateway = await start_gateway(max_queued_tokens=300)
    waiting = asyncio.create_task(gateway.complete(max_tokens=200))
    await queued(gateway, 1)
    assert (await gateway.complete(max_tokens=200)).status == 429
    waiting.cancel()


async def test_a_submission_whose_reply_was_lost_is_made_again_and_accepted_once(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    from redis.exceptions import ConnectionError as RedisConnectionError

    broker = gateway.gateway.broker
    real, calls = broker.submit, []

    async def unlucky(*arguments: Any, **options: Any) -> str:
        first: str = await real(*arguments, **options)
        calls.append(arguments[0])
        if len(calls) < 3:
            raise RedisConnectionError("the reply was lost")
        return first

    monkeypatch.setattr(broker, "submit", unlucky)
    async with gateway.worker(emit(tokens("a"))) as worker:
        assert (await gateway.chat()).status == 200
    assert len(calls) == 3
    assert len(worker.claimed) == 1
    assert await gateway.accepted() == 1


async def test_a_submission_that_stays_unknown_is_cancelled(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    from redis.exceptions import ConnectionError as RedisConnectionError

    broker = gateway.gateway.broker
    real = broker.submit

    async def unlucky(*arguments: Any, **options: Any) -> None:
        await real(*arguments, **options)
        raise RedisConnectionError("the reply was lost")

    monkeypatch.setattr(broker, "submit", unlucky)
    assert (await gateway.chat()).status == 503
    await queued(gateway, 0)
