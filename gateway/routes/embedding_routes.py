"""The route of embeddings."""

from __future__ import annotations

from aiohttp import web

from quire.gateway.serving.dispatch import ModelDirectory, by_body
from quire.gateway.serving.embedding_calls import serve

PATH = "/v1/embeddings"


def routes(directory: ModelDirectory) -> list[web.RouteDef]:
    """Returns the route of embeddings."""
    return [web.post(PATH, by_body(directory, serve, is_charged=True))]
