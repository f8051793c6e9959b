"""Models in the registry of a Redis, and gateways that find them there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from quire.gateway.features.several_models.discovery import DISCOVERY, ModelDiscovery
from quire.gateway.server.app import create_app
from quire.gateway.server.http_server import GatewayRunner, start_site
from quire.gateway.serving.model_directory import ModelDirectory
from quire.gateway.serving.service import GatewayProcess
from quire.gateway.settings import GatewaySettings
from quire.shared.protocol.broker.models import ModelRegistry
from quire.shared.protocol.keys import REGISTRY_LANE
from quire.shared.protocol.messages.manifest import ModelManifest
from quire.shared.protocol.registered_files import manifest_of, read_files
from quire.shared.redis.clients import command_client
from tests.support.gateway.running import RunningGateway


@asynccontextmanager
async def open_registry(redis_url: str) -> AsyncIterator[ModelRegistry]:
    """The model registry of a Redis."""
    client = command_client(redis_url, REGISTRY_LANE)
    try:
        yield ModelRegistry(client)
    finally:
        await client.aclose()


async def register(redis_url: str, name: str, folder: Path, *aliases: str, **files: bytes) -> ModelManifest:
    """Register the files of a model folder under a name; `files` take the place of those of the folder."""
    contents = read_files(folder) | {name.replace("_json", ".json"): content for name, content in files.items()}
    manifest = manifest_of(name, aliases, contents)
    async with open_registry(redis_url) as registry:
        assert await registry.register(manifest, contents, replaces=True)
    return manifest


async def forget(redis_url: str, name: str) -> None:
    """Let the registration of a model expire."""
    async with open_registry(redis_url) as registry:
        await registry.client.delete(registry.keys.manifest(name))
        await registry.client.zrem(registry.keys.models, name)


class DiscoveringGateway(RunningGateway):
    """A gateway in the test's process that serves what workers register."""

    directory: ModelDirectory
    discovery: ModelDiscovery

    async def names(self) -> list[str]:
        """The names in /v1/models."""
        return [card["id"] for card in (await self.get("/v1/models")).json["data"]]

    async def until_names(self, *names: str) -> None:
        """Wait until /v1/models has these names."""
        async with asyncio.timeout(60):
            while sorted(await self.names()) != sorted(names):  # noqa: ASYNC110 - the worker is in another process
                await asyncio.sleep(0.02)


@asynccontextmanager
async def discovering_gateway(redis_url: str, **settings: Any) -> AsyncIterator[DiscoveringGateway]:
    """Run a gateway without a model folder."""
    given = GatewaySettings(redis_url=redis_url, port=0, discover_models=True, **settings)
    directory = ModelDirectory(GatewayProcess(given))
    runner = GatewayRunner(create_app(directory))
    await runner.setup()
    try:
        port = await start_site(runner, "127.0.0.1", 0)
        discovery = runner.app[DISCOVERY]
        await asyncio.wait_for(discovery.looked.wait(), 60)
        gateway = DiscoveringGateway(given, None, port, runner)  # type: ignore[arg-type]
        gateway.directory, gateway.discovery = directory, discovery
        yield gateway
    finally:
        await runner.cleanup()
