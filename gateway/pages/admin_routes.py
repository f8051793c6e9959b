"""The routes of the admin API, all under one key; none without a key. The usage of a caller belongs to them."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from quire.gateway.pages.adapter_calls import AdapterCalls
from quire.gateway.pages.admin_key import read_admin_key
from quire.gateway.pages.key_calls import KeyCalls
from quire.gateway.pages.usage_calls import PATH as USAGE
from quire.gateway.pages.usage_calls import UsageCalls
from quire.gateway.serving.model_directory import ModelDirectory


def admin_routes(directory: ModelDirectory) -> list[web.RouteDef]:
    """Return the routes of the usage and of the admin API of a gateway. Raises StartError for a wrong key."""
    settings = directory.process.settings
    key = read_admin_key(settings.admin_key, settings.admin_key_file)
    usage = UsageCalls(directory)
    routes = [web.get(USAGE, usage.own, allow_head=False)]
    if key:
        routes.append(web.get("/admin/usage", partial(usage.all, key), allow_head=False))
    return [*routes, *AdapterCalls(directory, key).routes(), *KeyCalls(directory.process, key).routes()]
