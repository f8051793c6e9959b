"""The described endpoints are those of the application."""

from __future__ import annotations

from quire.gateway.api.openapi.endpoints import ENDPOINTS
from quire.gateway.model.served_model import load_model
from quire.gateway.pages import static_files
from quire.gateway.server.app import create_app
from quire.gateway.serving.service import Gateway
from quire.gateway.settings import GatewaySettings
from quire.ops.paths import PROJECT_ROOT


def test_every_route_is_described_and_every_description_is_a_route() -> None:
    app = create_app(
        Gateway(GatewaySettings(engine_view="on"), load_model(str(PROJECT_ROOT / "models" / "demo"), "demo"))
    )
    files = {static_files.path_of(name) for name in static_files.names() if not name.endswith(".html")}
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.method != "HEAD" and route.resource is not None and route.resource.canonical not in files
    }
    assert {(one.method, one.path) for one in ENDPOINTS} == routes
    assert len(ENDPOINTS) == len(routes)


def test_a_call_with_a_body_has_its_errors() -> None:
    for one in ENDPOINTS:
        assert bool(one.request) == bool(one.table)
        assert not one.request or {408, 413, 415} <= set(one.errors)
