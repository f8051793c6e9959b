"""Metrics and the internal server of a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.gateway.features.admin import metrics
from quire.gateway.features.admin.internal_server import GatewayAdminServer
from quire.gateway.features.admin.metrics import GatewayMetrics
from quire.gateway.serving.model_directory import ModelDirectory
from quire.shared.telemetry.internal_server import bind
from tests.support.gateway.running import RunningGateway

# --- The metrics of a gateway: their values, and a HELP text for each that stands alone -------------------------------


async def samples(of: GatewayMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = (await of.render()).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_while_redis_does_not_answer_the_lane_is_left_out(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(broker: object) -> None:
        raise ConnectionError("Redis is away")

    monkeypatch.setattr(metrics, "read_lane", away)
    found = await samples(GatewayMetrics(ModelDirectory.of(gateway.gateway)))
    assert found["quire_redis_up", frozenset()] == 0
    assert not any(name.startswith(("quire_lane", "quire_queue", "quire_retry")) for name, _ in found)


async def test_redis_is_asked_once_for_scrapes_that_come_together(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, asked = metrics.read_lane, []

    async def counted(broker: object) -> object:
        asked.append(broker)
        return await read(broker)  # type: ignore[arg-type]

    monkeypatch.setattr(metrics, "read_lane", counted)
    # On a busy machine three renders can take longer than the second of LANE_S.
    monkeypatch.setattr(metrics, "LANE_S", 3600.0)
    of = GatewayMetrics(ModelDirectory.of(gateway.gateway))
    await asyncio.gather(*(of.render() for _ in range(3)))
    await of.render()
    assert len(asked) == 1
    monkeypatch.setattr(metrics, "LANE_S", 0.0)
    await of.render()
    assert len(asked) == 2


# --- The admin server answers with metrics, and with a 503 while the gateway cannot do its work -----------------------


@asynccontextmanager
async def admin(gateway: RunningGateway) -> AsyncIterator[aiohttp.ClientSession]:
    server = GatewayAdminServer(ModelDirectory.of(gateway.gateway), bind("127.0.0.1", 0)).server
    await server.start()
    try:
        async with aiohttp.ClientSession(server.url) as session:
            yield session
    finally:
        await server.close()


async def test_health_is_that_of_redis_and_the_subscription(gateway: RunningGateway) -> None:
    async with admin(gateway) as session:
        async with session.get("/health") as response:
            assert (response.status, await response.json()) == (200, {"status": "ok", "workers": 0})
        gateway.gateway.subscription.ready.clear()
        async with session.get("/health") as response:
            assert response.status == 503
            assert (await response.json())["reason"] == "not subscribed to the workers' output"
