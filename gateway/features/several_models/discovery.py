"""The models that workers register in Redis (`--discover-models`): each is loaded, and added to the model directory."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from aiohttp import web
from redis.exceptions import RedisError

from quire.gateway.features.several_models.registered_model import RegistrationFault, load_registered
from quire.gateway.serving.model_directory import ModelDirectory
from quire.gateway.serving.service import Gateway
from quire.shared.config.validators import shown
from quire.shared.process.backoff import Backoff
from quire.shared.process.tasks import end_tasks
from quire.shared.protocol.broker.hosts import HostRegistry
from quire.shared.protocol.broker.models import ModelRegistry
from quire.shared.protocol.keys import BEAT_S, REGISTRY_LANE
from quire.shared.protocol.messages import MessageError
from quire.shared.protocol.messages.host_card import HostedModel, by_name
from quire.shared.protocol.messages.manifest import ModelManifest
from quire.shared.redis.cancellation import check_cancelled
from quire.shared.redis.clients import command_client

log = logging.getLogger("gateway")

# Time after which a registration that cannot be served is tried again, and the longest after repeated faults: a file
# may have been lost with the data of Redis, and a trial takes processor time.
FIRST_RETRY_S, LAST_RETRY_S = 15.0, 3600.0


@dataclass(slots=True)
class Fault:
    """Why a registered model is not served. data: the message of its manifest. retry_at: on the loop's clock."""

    data: bytes
    why: str
    retry_at: float
    backoff: Backoff


class ModelDiscovery:
    """Follows the registrations of models between `start` and `close`."""

    def __init__(self, directory: ModelDirectory) -> None:
        self._directory = directory
        self._settings = directory.process.settings
        # The message of the manifest of each model that is served, by its name.
        self._served: dict[str, bytes] = {}
        # The models of hosts, by name.
        self._hosted: dict[str, HostedModel] = {}
        # Registrations that cannot be served, by name.
        self.faults: dict[str, Fault] = {}
        # Set once the registrations were read for the first time.
        self.looked = asyncio.Event()

    async def start(self, app: web.Application) -> None:
        self._client = command_client(self._settings.redis_url, REGISTRY_LANE, connections=2)
        self._registry, self._hosts = ModelRegistry(self._client), HostRegistry(self._client)
        self._task = asyncio.create_task(self._follow())

    async def close(self, app: web.Application) -> None:
        await end_tasks(self._task)
        await self._client.aclose()

    async def _follow(self) -> None:
        directory = self._directory
        while True:
            try:
                cards = await self._hosts.cards()
                registered = await self._registry.registered()
                directory.redis_answers = True
                self._note_hosted(by_name(cards))
                await self._update(registered)
                # A host has registered its models before it has a card, so all of them are served by now.
                directory.has_host = bool(cards)
            except (RedisError, OSError) as error:
                if directory.redis_answers:
                    log.warning("the registered models cannot be read: %s", error)
                directory.redis_answers = False
            directory.num_refused = len(self.faults)
            self.looked.set()
            check_cancelled()
            await asyncio.sleep(BEAT_S)

    async def _update(self, registered: dict[str, bytes]) -> None:
        """Load models that are new or have changed, one after the other, and forget those that are not registered."""
        await self._directory.close_left()
        self.faults = {name: fault for name, fault in self.faults.items() if name in registered}
        for name in self._served.keys() - registered.keys():
            del self._served[name]
            self._directory.remove(name)
            log.info("model %s is no longer registered", name)
        now = asyncio.get_running_loop().time()
        # Models that were never tried go first: faults delay no other model.
        for name, data in sorted(registered.items(), key=lambda item: item[0] in self.faults):
            known, fault = self._served.get(name), self.faults.get(name)
            if known == data:
                continue
            if known is None and len(self._served) >= self._settings.max_models:
                self._note_fault(name, b"", "this gateway has as many models as --max-models allows")
                continue
            if fault is not None and fault.data == data and now < fault.retry_at:
                continue
            try:
                gateway = await self._load(name, data)
            except RegistrationFault as error:
                self._note_fault(name, data, str(error))
                continue
            self._served[name] = data
            self._directory.serve(name, gateway)
            self.faults.pop(name, None)
            log.info("model %s is served: %s", name, ", ".join(gateway.names))

    def _note_hosted(self, hosted: dict[str, HostedModel]) -> None:
        """Note the models of hosts and their states."""
        self._hosted = hosted
        for gateway in self._directory.gateways:
            gateway.worker_registry.hosted = hosted.get(gateway.model.name)

    async def _load(self, name: str, data: bytes) -> Gateway:
        """Return the started gateway of a registered model. Raises RegistrationFault, RedisError or OSError."""
        try:
            manifest = ModelManifest.decode(data)
        except MessageError as error:
            raise RegistrationFault(str(error)) from error
        if manifest.model != name:
            raise RegistrationFault("the manifest has the name of another model")
        model = await load_registered(self._registry, manifest, self._settings)
        gateway = Gateway(self._settings, model, process=self._directory.process)
        try:
            await gateway.start(self._hosted.get(name))
        except BaseException:
            await gateway.close()
            raise
        return gateway

    def _note_fault(self, name: str, data: bytes, why: str) -> None:
        before = self.faults.get(name)
        if before is not None and (before.data, before.why) == (data, why):
            backoff = before.backoff
        else:
            backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S)
            log.error("the registered model %.200s is not served: %s", shown(name), why)
        self.faults[name] = Fault(data, why, asyncio.get_running_loop().time() + backoff.next(), backoff)


DISCOVERY = web.AppKey("discovery", ModelDiscovery)
