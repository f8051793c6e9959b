"""The routes about a gateway: models, probes, usage, and the admin API, which is off without a key of its own."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from quire.gateway.features.admin.admin_key import check_admin_key, read_admin_key
from quire.gateway.features.admin.model_cards import ModelCards
from quire.gateway.features.admin.status import Status
from quire.gateway.features.lora.adapter_calls import AdapterCalls
from quire.gateway.serving.model_directory import ModelDirectory


def routes(directory: ModelDirectory) -> list[web.RouteDef]:
    """Return the routes. Raises StartError for a wrong key of the admin API."""
    keys, settings = directory.process.keys, directory.process.settings
    status, model_cards = Status(directory), ModelCards(directory)
    table = [
        web.get("/v1/models", model_cards.all),
        web.get("/v1/models/{name:.+}", model_cards.show),
        web.get("/version", status.version),
        web.get("/healthz", status.healthz),
        # The names of the probe in vLLM and in SageMaker.
        web.get("/health", status.healthz),
        web.get("/ping", status.healthz),
        web.get("/readyz", status.readyz),
        web.get("/status", status.show),
        *keys.routes(lambda: directory.clients),
    ]
    if key := read_admin_key(settings.admin_key, settings.admin_key_file):
        admin = [*AdapterCalls(directory).routes(), *keys.admin_routes(lambda: directory.clients)]
        table += [web.RouteDef(route.method, route.path, _guarded(key, route.handler), route.kwargs) for route in admin]
    return table


def _guarded(key: str, handler: Handler) -> Handler:
    """Return a handler for requests that have the key of the admin API."""

    async def handle(request: web.Request) -> web.StreamResponse:
        check_admin_key(request, key)
        return await handler(request)

    return handle
