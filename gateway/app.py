"""The HTTP application of a gateway: its routes, and the middlewares around every request."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from quire.gateway import calls
from quire.gateway.api import error_responses
from quire.gateway.http_server import add_headers
from quire.gateway.pages import engine_page, static_files
from quire.gateway.pages.status import Status
from quire.gateway.service import GATEWAY, Gateway
from quire.gateway.telemetry.access_log import recording


def create_app(gateway: Gateway) -> web.Application:
    """Returns the application of a gateway. The application starts the gateway on startup and closes it on cleanup."""
    app = web.Application(
        middlewares=[recording(gateway.meters, gateway.tracer), error_responses.middleware],
        client_max_size=gateway.settings.max_body_bytes,
    )
    app[GATEWAY] = gateway
    app.on_startup.append(_start)
    status = Status(gateway)
    # Before the static files: if the engine view is off, its routes replace the page.
    engine_page.add_to(app, gateway)
    for path, dialect in calls.DIALECTS.items():
        app.add_routes(
            [
                web.post(path, partial(calls.serve, gateway, dialect)),
                # No HEAD: a HEAD request would attach to the generation request.
                web.get(f"{path}/{{id}}/stream", partial(calls.resume, gateway, dialect), allow_head=False),
                web.post(f"{path}/{{id}}/cancel", partial(calls.cancel, gateway, dialect)),
            ]
        )
    app.add_routes(
        [
            web.get("/v1/models", status.models),
            web.get("/v1/models/{name:.+}", status.one_model),
            web.get("/healthz", status.healthz),
            web.get("/readyz", status.readyz),
            web.get("/status", status.show),
            *static_files.routes(),
        ]
    )
    app.on_shutdown.append(gateway.drain)
    app.on_cleanup.append(_close)
    app.on_response_prepare.append(add_headers)
    return app


async def _start(app: web.Application) -> None:
    await app[GATEWAY].start()


async def _close(app: web.Application) -> None:
    await app[GATEWAY].close()
