"""Models that a host loads on demand: gateways list them, wait for them, and tell why one cannot be loaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from quire.gateway.admission import worker_registry
from quire.gateway.features.several_models import discovery
from quire.shared.protocol.broker.hosts import HostRegistry
from quire.shared.protocol.messages.host_card import HostCard, HostedModel, HostState
from tests.support.gateway.fake_worker import FakeWorker, emit
from tests.support.gateway.running import write_model
from tests.support.registrations import DiscoveringGateway, discovering_gateway, open_registry, register

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def short_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "BEAT_S", 0.05)
    monkeypatch.setattr(worker_registry, "BEAT_S", 0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("hosted") / "one")


@asynccontextmanager
async def host_of(redis_url: str) -> AsyncIterator[HostRegistry]:
    async with open_registry(redis_url) as registry:
        yield HostRegistry(registry.client)


async def say(host: HostRegistry, state: HostState, reason: str = "") -> None:
    await host.beat("host", HostCard("", (HostedModel("one", state, reason),)))


async def until_status(gateway: DiscoveringGateway, status: str) -> None:
    async with asyncio.timeout(60):
        while True:
            cards = (await gateway.get("/v1/models")).json["data"]
            if [card["status"] for card in cards] == [status]:
                return
            await asyncio.sleep(0.02)


async def test_a_model_that_a_host_can_load_is_listed_and_waited_for(redis_url: str, folder: Path) -> None:
    await register(redis_url, "one", folder)
    async with host_of(redis_url) as host, discovering_gateway(redis_url, no_worker_timeout_s=0.1) as gateway:
        await say(host, HostState.NOT_LOADED)
        await until_status(gateway, "not_loaded")
        async with asyncio.timeout(60):
            while (await gateway.get("/readyz")).status != 200:  # noqa: ASYNC110 - a task of the gateway finds it
                await asyncio.sleep(0.02)
        waiting = asyncio.create_task(gateway.complete(model="one"))
        await say(host, HostState.LOADING)
        await until_status(gateway, "loading")
        one = gateway.directory.find("one")
        assert one is not None
        for _ in range(20):  # looks of the gateway, each after the time-out
            await one.worker_registry.refresh()
            assert (one.worker_registry.empty_s, waiting.done()) == (0.0, False)
        async with FakeWorker(redis_url, "one", emit([300])).running():
            assert (await waiting).status == 200
            await until_status(gateway, "loaded")
        # The host has gone: now the time-out counts.
        waiting = asyncio.create_task(gateway.complete(model="one"))
        await host.retire("host")
        reply = await waiting
        assert (reply.status, reply.error["code"]) == (503, "no_workers")


async def test_calls_of_a_model_that_cannot_be_loaded_get_the_reason(redis_url: str, folder: Path) -> None:
    await register(redis_url, "one", folder)
    async with host_of(redis_url) as host, discovering_gateway(redis_url) as gateway:
        await say(host, HostState.NOT_LOADED)
        await until_status(gateway, "not_loaded")
        waiting = asyncio.create_task(gateway.complete(model="one"))
        await say(host, HostState.FAILED, "one/model.safetensors: the file is cut off")
        reply = await waiting
        assert (reply.status, reply.error["code"]) == (503, "model_not_loaded")
        assert "the file is cut off" in reply.error["message"]
        assert "retry-after" in reply.headers
        events = await gateway.events("/v1/completions", {"model": "one", "prompt": "Hi", "stream": True})
        assert events[-1].data["error"]["code"] == "model_not_loaded"
        # Another host, or a plain worker, can.
        async with FakeWorker(redis_url, "one", emit([300])).running():
            await until_status(gateway, "loaded")
            assert (await gateway.complete(model="one")).status == 200
