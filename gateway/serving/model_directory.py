"""The models of a gateway process, and which one a call means.

A gateway serves either the model of its folder, or every model that workers register in Redis (`--discover-models`).
Each model is a `Gateway` of its own over its own lane. A call names a model by its served name, by an alias, or by a
LoRA adapter: `names` of each model has all of them, and here is the one place where a name becomes a lane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web
from redis.asyncio import Redis

from quire.gateway.api.caller import ANONYMOUS, Caller
from quire.gateway.errors.api_errors import ApiKeyWrong, BrokerDown, InvalidRequest, ModelNotFound
from quire.gateway.serving.service import Gateway, GatewayProcess
from quire.gateway.stream.buffer import ClosedOutcome, RevokedOutcome
from quire.shared.config.validators import shown
from quire.shared.process.tasks import end_tasks
from quire.shared.protocol.keys import LaneKeys
from quire.shared.redis.cancellation import check_cancelled

# Names of models that an error lists.
MAX_LISTED = 16
# Time between two looks at the API keys of open calls.
LOOK_S = 2.0
# Time that streams get for their last event before the process cuts them, and its largest share of --drain-s.
WRITE_S = 0.5
WRITE_SHARE = 0.05
LEAVING = (
    "This gateway is shutting down. A streamed call with one prompt runs on: resume it after its last event at another "
    "gateway. Send any other call again."
)


class ModelDirectory:
    """The models of one process."""

    def __init__(self, process: GatewayProcess, folder_model: Gateway | None = None) -> None:
        """folder_model: the model of the gateway's folder; None if a feature finds models and calls `serve`."""
        self.process = process
        self._folder_model = folder_model
        # By served name.
        self._models: dict[str, Gateway] = {}
        if folder_model is not None:
            self._models[folder_model.model.name] = folder_model
        # Models that were replaced or forgotten, and still have open calls.
        self._leaving: list[Gateway] = []
        self._background: set[asyncio.Task[None]] = set()
        # What the feature that finds models knows: whether Redis answers, how many models it cannot serve, and hosts.
        self.redis_answers = folder_model is not None
        self.num_refused = 0
        # True while a host with a folder of models is alive; the folder may be empty.
        self.has_host = False

    @classmethod
    def of(cls, models: Gateway | ModelDirectory) -> ModelDirectory:
        """Return the directory of a process that serves one model, that of its folder; a directory is itself."""
        return models if isinstance(models, ModelDirectory) else cls(models.process, models)

    async def start(self) -> None:
        self.process.start()
        self._background.add(asyncio.create_task(self._close_streams_of_revoked_keys()))
        if self._folder_model is not None:
            await self._folder_model.start()

    async def close(self) -> None:
        await end_tasks(*self._background)
        await self.process.close()
        for gateway in (*self.gateways, *self._leaving):
            await gateway.close()

    # --- models that come and go --------------------------------------------------------------------------------------

    @property
    def is_discovering(self) -> bool:
        """True if the gateway has no model of a folder, and serves those that workers register."""
        return self._folder_model is None

    def serve(self, name: str, gateway: Gateway) -> None:
        """Serve a started model under its name; a model that it replaces ends with its open calls."""
        self.remove(name)
        self._models[name] = gateway

    def remove(self, name: str) -> None:
        """Serve a model no longer; its open calls go on."""
        if (gateway := self._models.pop(name, None)) is not None:
            self._leaving.append(gateway)

    async def close_left(self) -> None:
        """Close the models that were removed and have no open calls any more."""
        for gateway in [gateway for gateway in self._leaving if not gateway.router.calls]:
            self._leaving.remove(gateway)
            await gateway.close()

    # --- which model --------------------------------------------------------------------------------------------------

    @property
    def gateways(self) -> list[Gateway]:
        """All models, in the order of their names."""
        return [gateway for _, gateway in sorted(self._models.items())]

    @property
    def live(self) -> list[Gateway]:
        """The models that are listed: those with a live worker or a host, and the model of the folder."""
        return [gateway for gateway in self.gateways if gateway is self._folder_model or gateway.can_answer]

    def find(self, name: str) -> Gateway | None:
        """Return the model that has this name. A served name has precedence over aliases and adapters of others."""
        if (gateway := self._models.get(name)) is not None:
            return gateway
        return next((gateway for gateway in self.gateways if name in gateway.names), None)

    def choose(self, name: Any, caller: Caller = ANONYMOUS) -> Gateway:
        """Return the model that a call means. Raises ModelNotFound, and InvalidRequest without a name among several.

        name: the parameter `model` as it is. A value that is no text is left to the check of the model's API, as is
        any name if the gateway serves the model of its folder. caller: a model that its key may not use is treated as
        one that does not exist, so that neither the error nor the check of the body tells of it.
        """
        gateway = self._choose(name, caller)
        self.process.keys.check_model(caller, name if type(name) is str else gateway.model.name)
        return gateway

    def _choose(self, name: Any, caller: Caller) -> Gateway:
        models = self.gateways
        if self._folder_model is not None:
            return self._folder_model
        if type(name) is str and self.process.keys.may_use(caller, name) and (gateway := self.find(name)) is not None:
            return gateway
        if type(name) is str or not models:
            what = f"There is no model {shown(name)} here" if type(name) is str else "There is no model here yet"
            why = ", or your API key has no access to it" if caller.accounts and type(name) is str else ""
            raise ModelNotFound(f"{what}{why}; {self._listed(caller)}.", param="model")
        if len(models) > 1 and name is None:
            raise InvalidRequest(
                f"model is missing, and this server has several: {self._listed(caller)}.",
                param="model",
                code="missing_model",
            )
        return models[0]

    def _listed(self, caller: Caller) -> str:
        live = [name for gateway in self.live for name in gateway.names]
        names = [name for name in live if self.process.keys.may_use(caller, name)]
        if live and not names:
            return "your API key may use none of the models of this server"
        if not names:
            return "no worker is alive, and a model is served once its worker has registered it"
        return f"this server has {', '.join(map(repr, names[:MAX_LISTED]))}" + (", ..." * (len(names) > MAX_LISTED))

    async def holding(self, call_id: str, key: Callable[[LaneKeys, str], str] = LaneKeys.request) -> Gateway | None:
        """Return the model whose lane has the hash of a request, or that of another `key`; by default the first model.

        None without models. Raises BrokerDown.
        """
        models = self.gateways
        if len(models) < 2:
            return models[0] if models else None
        answers = await asyncio.gather(*(gateway.retry(partial(_has, gateway, call_id, key)) for gateway in models))
        return next((gateway for gateway, has in zip(models, answers, strict=True) if has), models[0])

    @property
    def clients(self) -> dict[str, Redis]:
        """The connection of each model, by its lane."""
        return {gateway.model.name: gateway.broker.client for gateway in self.gateways}

    @property
    def title(self) -> str:
        """The name of the model of the folder; of a gateway that discovers models, "Quire"."""
        return self._folder_model.model.name if self._folder_model is not None else "Quire"

    def redis_problems(self) -> list[str]:
        """Return why no call can be accepted now; a model without a subscription makes only its own calls fail."""
        problems = [gateway.redis_problems() for gateway in self.gateways]
        if problems and all(problems):
            return problems[0]
        return [] if self.redis_answers or self.gateways else ["Redis does not answer"]

    async def drain(self, app: web.Application) -> None:
        """Make the gateway not ready; open calls go on for --drain-s, shortly before whose end their streams end."""
        self.process.draining = True
        self._background.add(asyncio.create_task(self._close_streams_in_time()))
        # Let the event loop close listening sockets, and answer requests that have arrived.
        await asyncio.sleep(0)

    async def _close_streams_in_time(self) -> None:
        drain_s = self.process.settings.drain_s
        await asyncio.sleep(drain_s - min(WRITE_S, WRITE_SHARE * drain_s))
        for gateway in (*self.gateways, *self._leaving):
            gateway.router.close_streams(ClosedOutcome(ClosedOutcome.NAME, LEAVING))

    async def _close_streams_of_revoked_keys(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for gateway in (*self.gateways, *self._leaving):
                for owner in gateway.router.owners:
                    try:
                        await self.process.keys.ring.owner(owner)
                    except ApiKeyWrong as error:
                        gateway.router.close_streams(RevokedOutcome(ClosedOutcome.NAME, error.message), owner)
                    except BrokerDown:
                        check_cancelled()


async def _has(gateway: Gateway, call_id: str, key: Callable[[LaneKeys, str], str]) -> bool:
    return bool(await gateway.broker.client.exists(key(gateway.broker.keys, call_id)))


# A gateway application serves one of these.
Served = Gateway | ModelDirectory

DIRECTORY = web.AppKey("directory", ModelDirectory)
