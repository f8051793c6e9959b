"""/admin/adapters: lists, loads and unloads LoRA adapters on all workers of the model, while they serve.

A load is announced in Redis; every worker reads the announcement within a heartbeat and loads the files from its own
--lora-dir. The call waits for all live workers, and withdraws the announcement if one of them reports a fault.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web

from quire.gateway.api.parsing import read_object
from quire.gateway.errors.api_errors import AdapterExists, DeadlinePassed, NotFound, NoWorkers, refused
from quire.gateway.serving.model_directory import ModelDirectory
from quire.gateway.serving.service import Gateway
from quire.shared.model.adapter_names import Announcement, InvalidAdapter, check_adapter_name, check_adapter_path
from quire.shared.protocol.broker import new_id

log = logging.getLogger("gateway")

PATH = "/admin/adapters"
# Longest time for which a call waits for all workers, and the interval at which it looks.
WAIT_S = 60.0
LOOK_S = 0.1
MAX_BODY_BYTES = 8192


class AdapterCalls:
    """Handlers of the admin API for adapters."""

    def __init__(self, directory: ModelDirectory) -> None:
        self._directory = directory

    def routes(self) -> list[web.RouteDef]:
        """Return the routes. The admin API checks its key before it calls a handler."""
        return [
            web.get(PATH, self.all, allow_head=False),
            web.post(PATH, self.load),
            web.delete(PATH + "/{name:.+}", self.unload),
        ]

    async def all(self, request: web.Request) -> web.Response:
        """GET /admin/adapters: the adapters of all models that workers hold, and those that are announced."""
        shown = []
        for gateway in self._directory.gateways:
            registry = gateway.worker_registry
            await registry.refresh()
            names = sorted(registry.held_names() | set(registry.announced))
            shown += [_shown(gateway, name) for name in names]
        return web.json_response({"object": "list", "data": shown})

    async def load(self, request: web.Request) -> web.Response:
        """POST /admin/adapters: loads an adapter from a folder below --lora-dir on all workers."""
        gateway, name, path = await self._read(request)
        registry = gateway.worker_registry
        if not registry.workers:
            raise NoWorkers("No worker of this model is alive; start one, and repeat the call.")
        if registry.holders(name):
            raise AdapterExists(f"The adapter {name!r} is loaded; unload it first, or choose another name.")
        announcement = Announcement(name, path, new_id())
        if not await gateway.retry(partial(gateway.broker.announce_adapter, announcement)):
            raise AdapterExists(f"The adapter {name!r} is announced; unload it first, or choose another name.")
        try:
            await _until(gateway, lambda: _is_loaded(gateway, announcement))
        except BaseException:
            await gateway.retry(partial(gateway.broker.withdraw_adapter, name))
            await registry.refresh()
            raise
        log.info("adapter %s is loaded on %d workers", name, len(registry.workers))
        return web.json_response(_shown(gateway, name), status=201)

    async def unload(self, request: web.Request) -> web.Response:
        """DELETE /admin/adapters/{name}: unloads an adapter that was loaded by this API. Running requests go on."""
        name = request.match_info["name"]
        model = request.query.get("model")
        holder = self._directory.find(name) if model is None else None
        gateway = holder or self._choose(model)
        if not await gateway.retry(partial(gateway.broker.withdraw_adapter, name)):
            if name in gateway.worker_registry.adapters:
                raise refused("name", f"The adapter {name!r} belongs to the setting --lora of the workers.")
            raise NotFound(f"There is no adapter {name[:200]!r}.", param="name")
        await _until(gateway, lambda: not gateway.worker_registry.holders(name))
        log.info("adapter %s is unloaded", name)
        return web.json_response({"id": name, "object": "adapter", "deleted": True})

    async def _read(self, request: web.Request) -> tuple[Gateway, str, str]:
        """Read model, name and path of a body. Raises ApiError."""
        body = await read_object(request, MAX_BODY_BYTES, self._directory.process.settings.body_timeout_s)
        if unknown := sorted(body.keys() - {"model", "name", "path"}):
            first = unknown[0][:100]
            raise refused(first, f"{first} is not a parameter of this call; it has model, name and path.")
        checked = []
        for parameter, check in (("name", check_adapter_name), ("path", check_adapter_path)):
            if parameter not in body:
                raise refused(parameter, f"{parameter} is missing.")
            try:
                checked.append(check(body[parameter]))
            except InvalidAdapter as error:
                raise refused(parameter, f"{error}.") from None
        gateway = self._choose(body.get("model"))
        if checked[0] in (gateway.model.name, *gateway.model.aliases):
            raise refused("name", f"{checked[0]!r} is the name of the model; choose another one.")
        return gateway, checked[0], checked[1]

    def _choose(self, name: Any) -> Gateway:
        """Return the model with this name; None is the only one. Raises ApiError."""
        gateway = self._directory.choose(name)
        if name is not None:
            gateway.limits.check_model(name)
        return gateway


def _is_loaded(gateway: Gateway, announcement: Announcement) -> bool:
    """Return True if all live workers hold the adapter. Raises InvalidRequest with the fault of a worker."""
    registry = gateway.worker_registry
    for card in registry.workers:
        for fault in card.adapter_faults:
            stamp, _, message = fault.partition(" ")
            if stamp == announcement.stamp:
                raise refused("path", f"Worker {card.worker_id}: {message}.")
    return 0 < len(registry.workers) == len(registry.holders(announcement.name))


async def _until(gateway: Gateway, is_done: Callable[[], bool]) -> None:
    """Wait until the workers have done something. Raises DeadlinePassed after WAIT_S."""
    try:
        async with asyncio.timeout(WAIT_S):
            while True:
                await gateway.worker_registry.refresh()
                if is_done():
                    return
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise DeadlinePassed(f"The workers did not finish within {WAIT_S:g} s; their logs say why.") from None


def _shown(gateway: Gateway, name: str) -> dict[str, Any]:
    registry = gateway.worker_registry
    announced = registry.announced.get(name)
    return {
        "id": name,
        "object": "adapter",
        "parent": gateway.model.name,
        "path": announced.path if announced else None,
        "ready": name in registry.adapters,
        "workers": registry.holders(name),
    }
