"""The verb of an embedding call, `serve`, and embeddings in batches."""

from __future__ import annotations

from aiohttp import web

from quire.gateway.api.embeddings import BODIES, EmbeddingDialect
from quire.gateway.serving.calls import serve_with
from quire.gateway.serving.pooled_calls import PooledLines, write_answer
from quire.gateway.serving.service import Gateway

__all__ = ["BODIES", "PooledLines", "embedding_lines", "serve"]


async def serve(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """POST /v1/embeddings: computes the embedding of each input."""
    dialect = EmbeddingDialect(gateway.model, gateway.settings.max_embedding_inputs)
    return await serve_with(dialect, gateway, request, write_answer)


def embedding_lines(gateway: Gateway, _owner: str) -> PooledLines:
    """Return the endpoint for lines of batches that are embedding calls."""
    dialect = EmbeddingDialect(gateway.model, gateway.settings.max_embedding_inputs)
    return PooledLines(gateway, dialect, BODIES["EmbeddingRequest"])
