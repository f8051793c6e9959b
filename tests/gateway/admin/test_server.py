"""The admin server answers with metrics, and with a 503 while the gateway cannot do its work."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from quire.gateway.admin.server import GatewayAdminServer
from quire.gateway.serving.model_directory import ModelDirectory
from quire.shared.telemetry.internal_server import bind
from tests.support.gateway.running import RunningGateway


@asynccontextmanager
async def admin(gateway: RunningGateway) -> AsyncIterator[aiohttp.ClientSession]:
    server = GatewayAdminServer(ModelDirectory.of(gateway.gateway), bind("127.0.0.1", 0)).server
    await server.start()
    try:
        async with aiohttp.ClientSession(server.url) as session:
            yield session
    finally:
        await server.close()


async def test_metrics_are_in_the_format_of_prometheus(gateway: RunningGateway) -> None:
    async with admin(gateway) as session, session.get("/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        assert "# TYPE quire_calls_total counter" in await response.text()


async def test_health_is_that_of_redis_and_the_subscription(gateway: RunningGateway) -> None:
    async with admin(gateway) as session:
        async with session.get("/health") as response:
            assert (response.status, await response.json()) == (200, {"status": "ok", "workers": 0})
        gateway.gateway.subscription.ready.clear()
        async with session.get("/health") as response:
            assert response.status == 503
            assert (await response.json())["reason"] == "not subscribed to the workers' output"
