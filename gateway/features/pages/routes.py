"""The door of the pages: all routes besides those of the APIs for generating."""

from __future__ import annotations

from aiohttp import web

from quire.gateway.features.admin.admin_routes import admin_routes
from quire.gateway.features.admin.model_cards import ModelCards
from quire.gateway.features.admin.status import Status
from quire.gateway.features.pages import engine_page, static_files
from quire.gateway.serving.model_directory import ModelDirectory


def add_to(app: web.Application, directory: ModelDirectory) -> None:
    """Add the routes of model cards, probes, the admin API, the engine view and the pages to an application."""
    status, model_cards = Status(directory), ModelCards(directory)
    app.add_routes(
        [
            web.get("/v1/models", model_cards.all),
            web.get("/v1/models/{name:.+}", model_cards.one),
            web.get("/version", status.version),
            web.get("/healthz", status.healthz),
            # The names of the probe in vLLM and in SageMaker.
            web.get("/health", status.healthz),
            web.get("/ping", status.healthz),
            web.get("/readyz", status.readyz),
            web.get("/status", status.show),
            *admin_routes(directory),
        ]
    )
    # Before the static files: if the engine view is off, its routes replace the page.
    engine_page.add_to(app, directory)
    app.add_routes(static_files.routes())
