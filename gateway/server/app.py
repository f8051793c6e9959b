"""The HTTP application of a gateway: its routes, and the middlewares around every request."""

from __future__ import annotations

from aiohttp import web

from quire.gateway.api import body_budget, headers
from quire.gateway.errors import error_responses
from quire.gateway.features.admin import admin_routes
from quire.gateway.features.batches.batch_parameters import BATCH_SCHEMAS
from quire.gateway.features.batches.batch_parameters import BODIES as BATCH_BODIES
from quire.gateway.features.batches.batch_parameters import PARAMETERS as BATCH_PARAMETERS
from quire.gateway.features.batches.batch_service import BATCHES, BatchService
from quire.gateway.features.conversations.sweep import ConversationSweep
from quire.gateway.features.cors.origins import CorsOrigins
from quire.gateway.features.openapi import document
from quire.gateway.features.pages import routes as pages
from quire.gateway.features.several_models.discovery import DISCOVERY, ModelDiscovery
from quire.gateway.features.tokenization import tokenization
from quire.gateway.features.tokenization.token_requests import BODIES as TOKEN_BODIES
from quire.gateway.features.tracing.http_span import http_spans
from quire.gateway.features.websocket.connections import PATH, WebSockets
from quire.gateway.routes import table
from quire.gateway.server.access_log import recording
from quire.gateway.server.http_server import add_headers
from quire.gateway.serving.model_directory import DIRECTORY, ModelDirectory, Served

# For /openapi.json: the parameters of each body, and answers and other parameters besides those of the feature.
BODIES = table.BODIES | BATCH_BODIES | TOKEN_BODIES
ANSWERS = table.ANSWERS | BATCH_SCHEMAS
PARAMETERS = table.PARAMETERS | BATCH_PARAMETERS


def create_app(models: Served) -> web.Application:
    """Return the application of a gateway process: of one model, or of a directory of models.

    The application starts the models on startup and closes them on cleanup. Raises StartError for a wrong setting.
    """
    directory = ModelDirectory.of(models)
    process, settings = directory.process, directory.process.settings
    origins = CorsOrigins.parse(settings.cors_origins)
    app = web.Application(
        middlewares=[
            recording(process.meters, http_spans(process.tracer)),
            error_responses.middleware(table.error_shape),
            headers.middleware,
            origins.middleware(),
            process.keys.authentication(),
        ],
        client_max_size=settings.max_body_bytes,
    )
    app[DIRECTORY] = directory
    body_budget.add_to(app, process.bodies)
    batches = app[BATCHES] = BatchService(directory, table.LINE_ENDPOINTS)
    app.on_startup.append(batches.open)
    app.on_startup.append(_start)
    app.on_startup.append(batches.start)
    sweep = ConversationSweep(directory)
    app.on_startup.append(sweep.start)
    if directory.is_discovering:
        discovery = app[DISCOVERY] = ModelDiscovery(directory)
        app.on_startup.append(discovery.start)
        app.on_cleanup.append(discovery.close)
    # Before the directory: its connections are used until then.
    app.on_cleanup.append(sweep.close)
    app.on_cleanup.append(batches.close)
    app.add_routes(
        [
            *table.routes(directory),
            *tokenization.routes(directory),
            *batches.routes(),
            *admin_routes.routes(directory),
            web.get("/openapi.json", document.handler(directory.title, BODIES, ANSWERS, PARAMETERS)),
        ]
    )
    pages.add_to(app, directory)
    sockets = WebSockets(process)
    app.add_routes([web.get(PATH, sockets.serve, allow_head=False)])
    app.on_shutdown.append(directory.drain)
    app.on_shutdown.append(sockets.leave)
    app.on_cleanup.append(_close)
    app.on_response_prepare.append(add_headers)
    app.on_response_prepare.extend(table.ON_PREPARE)
    app.on_response_prepare.append(origins.on_prepare())
    return app


async def _start(app: web.Application) -> None:
    await app[DIRECTORY].start()


async def _close(app: web.Application) -> None:
    await app[DIRECTORY].close()
