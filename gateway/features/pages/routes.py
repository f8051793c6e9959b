"""The door of the pages: the chat, the engine view and the API document, and the data of the engine view."""

from __future__ import annotations

import os

from aiohttp import web

from quire.gateway.features.pages import engine_page, static_files, worker_of
from quire.gateway.serving.model_directory import ModelDirectory


def add_to(app: web.Application, directory: ModelDirectory) -> None:
    """Add the routes of the pages to an application."""
    app.add_routes(worker_of.routes(directory, os.environ))
    # Before the static files: if the engine view is off, its routes replace the page.
    engine_page.add_to(app, directory)
    app.add_routes(static_files.routes())
