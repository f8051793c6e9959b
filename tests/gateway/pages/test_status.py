"""`/status`: which workers respond, by the age of their heartbeats."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.gateway.pages.status import REDIS_TIMEOUT_S, summary
from quire.shared.broker import LastBeat
from quire.shared.version import installed_version
from tests.gateway.conftest import Start
from tests.gateway.pages.test_engine_page import worker
from tests.support.gateway.running import RunningGateway, until
from tests.support.redis_server import running_redis


async def status(gateway: RunningGateway) -> Any:
    reply = await gateway.get("/status")
    assert reply.status == 200
    return reply.json


async def test_without_a_worker_none_responds(gateway: RunningGateway) -> None:
    assert await status(gateway) == {"redis": True, "workers": 0, "responding": 0, "silent_s": None}
    wrong = await gateway.get("/status?worker=w1")
    assert (wrong.status, wrong.error["message"]) == (400, "'worker' is no parameter of /status; it has none.")


async def test_a_worker_whose_heartbeat_is_overdue_is_registered_and_does_not_respond(gateway: RunningGateway) -> None:
    async with worker(gateway) as fake, worker(gateway, "w2"):
        found = await status(gateway)
        assert (found["workers"], found["responding"]) == (2, 2)
        assert 0 <= found["silent_s"] < 2
        key = fake.broker.keys.worker("w1")
        beat = int(await fake.broker.client.hget(key, "beat"))
        await fake.broker.client.hset(key, "beat", beat - 4000)

        async def overdue() -> bool:  # the gateway looks five times per second at the most
            found = await status(gateway)
            return bool((found["workers"], found["responding"]) == (2, 1))

        await until(overdue)


async def test_a_worker_that_starts_has_no_card_and_is_not_counted(gateway: RunningGateway) -> None:
    async with worker(gateway) as fake:
        await fake.broker.client.hdel(fake.broker.keys.worker("w1"), "card")
        assert await status(gateway) == {"redis": True, "workers": 0, "responding": 0, "silent_s": None}


def test_a_heartbeat_is_overdue_after_two_of_them() -> None:
    beats = [LastBeat(1.9, 1.0), LastBeat(2.1, 1.0), LastBeat(9.0, 5.0)]
    assert summary(beats) == {"redis": True, "workers": 3, "responding": 2, "silent_s": 1.9}


async def test_a_redis_that_does_not_answer_is_told_in_time(start_gateway: Start) -> None:
    with running_redis() as server:
        gateway = await start_gateway(redis_url=server.url)
        assert (await status(gateway))["redis"] is True

        async def is_silent() -> bool:
            return (await status(gateway))["redis"] is False

        with server.stopped():
            async with asyncio.timeout(REDIS_TIMEOUT_S + 1):
                await until(is_silent)

        async def answers() -> bool:
            return bool((await status(gateway))["redis"])

        await until(answers)


@pytest.mark.parametrize("path", ["/healthz", "/health", "/ping"])
async def test_a_gateway_is_alive_while_redis_is_away(start_gateway: Start, path: str) -> None:
    with running_redis() as server:
        gateway = await start_gateway(redis_url=server.url)
        with server.stopped():
            reply = await gateway.get(path)
            assert (reply.status, reply.json) == (200, {"status": "ok"})


async def test_the_version_is_that_of_the_installed_package(gateway: RunningGateway) -> None:
    assert (await gateway.get("/version")).json == {"version": installed_version("0 (not installed)")}
