"""Registers what the worker serves, for gateways that find their models in Redis."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from redis.exceptions import RedisError

from quire.shared.model.files import ModelError
from quire.shared.protocol.broker.models import ModelRegistry
from quire.shared.protocol.keys import REGISTER_S, REGISTRY_LANE
from quire.shared.protocol.messages.manifest import ModelManifest
from quire.shared.protocol.registered_files import manifest_of, read_files
from quire.shared.redis.clients import command_client

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Registration:
    """The manifest of the worker's model, and the contents of its files by name."""

    manifest: ModelManifest
    files: Mapping[str, bytes]


def read_registration(path: Path, model: str, aliases: tuple[str, ...]) -> Registration | None:
    """Return the registration of a model folder or GGUF file; None if it has a file that cannot be registered."""
    try:
        files = read_files(path)
    except ModelError as error:
        log.warning("the model is not registered for gateways that find their models in Redis: %s", error)
        return None
    return Registration(manifest_of(model, aliases, files), files)


class ModelRegistrar:
    """Registers a model when the worker starts, and renews the registration until it ends.

    The worker that started last decides: it takes the place of another manifest of the same model. Later it only renews
    its own, so that two workers with different files do not replace each other's in turn.
    """

    def __init__(self, redis_url: str, registration: Registration) -> None:
        self._client = command_client(redis_url, REGISTRY_LANE, connections=2)
        self._registry = ModelRegistry(self._client)
        self._registration = registration
        self._is_first = True
        self._is_warned = False

    async def run(self, ended: asyncio.Event) -> None:
        """Keep the model registered until `ended` is set."""
        try:
            while not ended.is_set():
                with suppress(TimeoutError):
                    await self.refresh()
                    async with asyncio.timeout(REGISTER_S):
                        await ended.wait()
        finally:
            await self._client.aclose()

    async def refresh(self) -> None:
        """Register the model once. A Redis that does not answer is tried again at the next call."""
        registration = self._registration
        try:
            done = await self._registry.register(registration.manifest, registration.files, replaces=self._is_first)
        except (RedisError, OSError) as error:
            log.debug("the model cannot be registered now: %s", error)
            return
        self._is_first = False
        if not done and not self._is_warned:
            self._is_warned = True
            log.warning(
                "another worker has registered other files or aliases for the model %s; gateways that find their "
                "models in Redis use those: give all workers of a model the same folder and --model-aliases",
                registration.manifest.model,
            )


async def keep_registered(redis_url: str, registration: Registration, ended: asyncio.Event) -> None:
    """Keep a model registered until `ended` is set."""
    await ModelRegistrar(redis_url, registration).run(ended)
