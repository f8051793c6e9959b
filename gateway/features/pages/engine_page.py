"""`/engine`: the data of the page that shows a worker's engine at work, as server-sent events.

The page shows the number of running requests of all tenants and the beginnings of their ids to everyone whose calls the
gateway accepts. So by default the page is on only if the gateway listens on the loopback interface and needs no API
keys: behind a proxy, clients are others. If the page is off, its URLs answer 404 with the name of the setting.
"""

from __future__ import annotations

import asyncio
import contextlib
from weakref import WeakKeyDictionary

from aiohttp import web

from quire.gateway.admission.worker_registry import WorkerRegistry
from quire.gateway.api.caller import caller_of
from quire.gateway.errors.api_errors import ApiError, InvalidRequest, NotFound
from quire.gateway.features.pages.engine_viewer import EngineViewer
from quire.gateway.features.pages.view_subscriptions import ViewSubscriptions
from quire.gateway.serving.model_directory import ModelDirectory
from quire.gateway.serving.service import Gateway
from quire.gateway.stream import sse
from quire.shared.config.service_settings import is_loopback

# Maximum number of open streams of one gateway.
MAX_VIEWERS = 64


class TooManyViewers(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "too_many_viewers"


def is_on(setting: str, host: str, is_open: bool) -> bool:
    """Return True if a gateway that listens on `host` serves the page.

    setting: the value of `--engine-view`. is_open: calls without an API key are accepted.
    """
    if setting != "auto":
        return setting == "on"
    return is_open and is_loopback(host)


def add_to(app: web.Application, directory: ModelDirectory) -> None:
    """Add the routes of the page's data, or of the refusal. Must be called before the routes of the page are added."""
    settings = directory.process.settings
    if not is_on(settings.engine_view, settings.host, settings.is_open):
        app.add_routes([web.get("/engine", _refuse), web.get("/engine/{rest:.*}", _refuse)])
        return
    page = EnginePage(directory)
    app.add_routes([web.get("/engine/workers", page.workers), web.get("/engine/stream", page.stream, allow_head=False)])
    app.on_shutdown.append(page.close)


async def _refuse(request: web.Request) -> web.StreamResponse:
    raise NotFound(
        "The engine view is off at this gateway, because it would show what all clients run. Start "
        "the gateway with --engine-view on (QUIRE_ENGINE_VIEW=on) to have it."
    )


class EnginePage:
    """Handlers of the page's data. Until `close` they accept viewers."""

    def __init__(self, directory: ModelDirectory) -> None:
        self._directory = directory
        self._may_use = directory.process.keys.may_use
        self._is_closing = False
        # The subscriptions of each model with a viewer; a model that is gone takes its own with it.
        self._views: WeakKeyDictionary[Gateway, ViewSubscriptions] = WeakKeyDictionary()

    async def close(self, app: web.Application) -> None:
        """End all streams: the same views can be had from another gateway."""
        self._is_closing = True
        for views in self._views.values():
            views.end_all()

    def _views_of(self, gateway: Gateway) -> ViewSubscriptions:
        if gateway not in self._views:
            url = gateway.settings.redis_url
            # No reference to the gateway itself: the key of a weak dictionary must not be held by its value.
            registry = gateway.worker_registry
            self._views[gateway] = ViewSubscriptions(url, gateway.broker, lambda: _ids(registry))
        return self._views[gateway]

    def _choose(self, request: web.Request) -> Gateway:
        """Return the model that `model` names, by default the first with a live worker. Raises ApiError."""
        name, caller = request.query.get("model"), caller_of(request)
        if name is not None:
            gateway = self._directory.choose(name, caller)
            gateway.limits.check_model(name)
            return gateway
        gateways = self._directory.live or self._directory.gateways
        models = [gateway for gateway in gateways if self._may_use(caller, gateway.model.name)]
        if not models:
            raise NotFound("This server has no model for you yet.", param="model")
        return models[0]

    async def workers(self, request: web.Request) -> web.Response:
        """GET /engine/workers?model=NAME: the live workers of a model, and the names of all models."""
        gateway = self._choose(request)
        workers = [
            {
                "id": card.worker_id,
                "running": card.running,
                "waiting": card.waiting,
                "free_blocks": card.free_blocks,
                "total_blocks": card.total_blocks,
                "block_size": card.block_size,
                "max_model_len": card.max_model_len,
                "max_num_seqs": card.max_num_seqs,
            }
            for card in sorted(gateway.worker_registry.workers, key=lambda card: card.worker_id)
        ]
        names = [live.model.name for live in self._directory.live]
        return web.json_response(
            {
                "model": gateway.model.name,
                "models": [name for name in names if self._may_use(caller_of(request), name)],
                "workers": workers,
            }
        )

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """GET /engine/stream?model=NAME: views of the live workers of a model, until the client leaves."""
        gateway = self._choose(request)
        unknown = sorted(request.query.keys() - {"model"})
        if unknown:
            raise InvalidRequest(f"{unknown[0][:80]!r} is no parameter of {request.path}; it has model.")
        if self._is_closing:
            raise ApiError("This gateway is shutting down.", code="shutting_down")
        if sum(views.num_viewers for views in self._views.values()) >= MAX_VIEWERS:
            raise TooManyViewers(
                f"This gateway has {MAX_VIEWERS} open engine views already, which is its limit; close one, or wait."
            )
        viewer = EngineViewer()
        response = web.StreamResponse(headers=sse.HEADERS)
        async with self._views_of(gateway).showing(viewer):
            await response.prepare(request)
            await self._send(request, response, viewer)
        return response

    async def _send(self, request: web.Request, response: web.StreamResponse, viewer: EngineViewer) -> None:
        """Write events until the viewer ends, the client leaves, or the client does not read for the write timeout."""
        settings = self._directory.process.settings
        with contextlib.suppress(ConnectionError):
            while True:
                try:
                    async with asyncio.timeout(settings.keepalive_s):
                        event = await viewer.next()
                except TimeoutError:
                    event = sse.KEEPALIVE
                if event is None:
                    return
                try:
                    async with asyncio.timeout(settings.write_timeout_s):
                        await response.write(event)
                except TimeoutError:
                    # The viewer is no longer counted, so its connection and the bytes buffered for it go at once.
                    if request.transport is not None:
                        request.transport.abort()
                    return


def _ids(registry: WorkerRegistry) -> list[str]:
    return [card.worker_id for card in registry.workers]
