"""The route of embeddings; tests/gateway/serving/test_embedding_calls.py has what its handler does."""

from __future__ import annotations

from quire.gateway.routes.embedding_routes import routes
from quire.gateway.serving.model_directory import ModelDirectory
from quire.gateway.serving.service import GatewayProcess
from quire.gateway.settings import GatewaySettings


def test_embeddings_are_created_and_have_no_stream() -> None:
    directory = ModelDirectory(GatewayProcess(GatewaySettings(discover_models=True)))
    assert [(route.method, route.path) for route in routes(directory)] == [("POST", "/v1/embeddings")]
