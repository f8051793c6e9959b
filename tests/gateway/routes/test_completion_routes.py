"""The routes of chats and completions; tests/gateway/serving/test_calls.py has what their handlers do."""

from __future__ import annotations

from quire.gateway.routes.completion_routes import routes
from quire.gateway.serving.model_directory import ModelDirectory
from quire.gateway.serving.service import GatewayProcess
from quire.gateway.settings import GatewaySettings


def test_each_api_has_the_verbs_of_a_call() -> None:
    directory = ModelDirectory(GatewayProcess(GatewaySettings(discover_models=True)))
    found = {(route.method, route.path) for route in routes(directory)}
    assert found == {
        (method, f"/v1/{api}{rest}")
        for api in ("chat/completions", "completions")
        for method, rest in (
            ("POST", ""),
            ("GET", "/{id}/stream"),
            *(("POST", f"/{{id}}/{verb}") for verb in ("cancel", "park", "unpark")),
        )
    }
