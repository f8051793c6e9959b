"""`/engine`: the page that shows a worker's engine at work, and where it gets that from.

It shows how many requests run, and the beginnings of their ids, to everybody who can reach the gateway. So by itself it
is on only where that is this machine; elsewhere all of it is a 404 that names the setting.
"""

from __future__ import annotations

import ipaddress

from aiohttp import web

from quire.gateway.api.errors import NotFound
from quire.gateway.pages.engine_view import EngineView
from quire.gateway.service import Gateway
from quire.gateway.settings import GatewaySettings


def is_on(settings: GatewaySettings) -> bool:
    """Whether this gateway shows engines: as set, and by itself only to its own machine."""
    if settings.engine_view != "auto":
        return settings.engine_view == "on"
    if settings.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(settings.host).is_loopback
    except ValueError:
        return False


def add_to(app: web.Application, gateway: Gateway) -> None:
    """Serve what the page asks for, or the reason why not. To be called before the routes of all pages are added."""
    if not is_on(gateway.settings):
        app.add_routes([web.get("/engine", _refuse), web.get("/engine/{rest:.*}", _refuse)])
        return
    view = EngineView(gateway)
    app.add_routes([web.get("/engine/workers", view.workers), web.get("/engine/stream", view.stream, allow_head=False)])
    app.on_shutdown.append(view.close)


async def _refuse(request: web.Request) -> web.StreamResponse:
    raise NotFound(
        "The view of the engine is off here: it would show to everybody who reaches this gateway what runs. Start the "
        "gateway with --engine-view on (QUIRE_ENGINE_VIEW=on) to have it."
    )
