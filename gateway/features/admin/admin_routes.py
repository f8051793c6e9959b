"""The routes of the admin API, all under one key; none without a key. The usage of a caller belongs to them."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from quire.gateway.features.admin.admin_key import check_admin_key, read_admin_key
from quire.gateway.features.keys.key_calls import KeyCalls
from quire.gateway.features.keys.usage_calls import PATH as USAGE
from quire.gateway.features.keys.usage_calls import UsageCalls
from quire.gateway.features.lora.adapter_calls import AdapterCalls
from quire.gateway.serving.model_directory import ModelDirectory


def admin_routes(directory: ModelDirectory) -> list[web.RouteDef]:
    """Return the routes of the usage and of the admin API of a gateway. Raises StartError for a wrong key."""
    process, settings = directory.process, directory.process.settings
    key = read_admin_key(settings.admin_key, settings.admin_key_file)
    usage = UsageCalls(process.retry, directory.usage)
    routes = [web.get(USAGE, usage.own, allow_head=False)]
    if key:
        guarded = [
            web.get("/admin/usage", usage.all, allow_head=False),
            *AdapterCalls(directory).routes(),
            *KeyCalls(process.keys.ring, process.retry, settings.body_timeout_s).routes(),
        ]
        routes += [web.RouteDef(one.method, one.path, _guarded(key, one.handler), one.kwargs) for one in guarded]
    return routes


def _guarded(key: str, handler: Handler) -> Handler:
    """Return a handler for requests that have the key of the admin API."""

    async def handle(request: web.Request) -> web.StreamResponse:
        check_admin_key(request, key)
        return await handler(request)

    return handle
