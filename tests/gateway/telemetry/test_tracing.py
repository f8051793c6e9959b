"""The span of an HTTP request has what the conventions name, and nothing that the client chose without bounds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

from quire.gateway.errors.error_responses import REASON
from quire.gateway.telemetry.access_log import recording
from quire.gateway.telemetry.request_meter import RequestMeters
from quire.gateway.telemetry.tracing import MAX_PATH, SPAN
from quire.shared.telemetry.trace_context import TraceContext

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Tracer:
    """Keeps the spans that it makes, with the parents that they were given."""

    def __init__(self) -> None:
        self._tracer = TracerProvider().get_tracer("test")
        self.spans: list[ReadableSpan] = []
        self.parents: list[TraceContext | None] = []

    def span(
        self, name: str, parent: TraceContext | None, attributes: Mapping[str, Any], *, kind: Any, began_ns: int
    ) -> Any:
        span = self._tracer.start_span(name, attributes=dict(attributes), kind=kind, start_time=began_ns)
        assert isinstance(span, ReadableSpan)
        self.spans.append(span)
        self.parents.append(parent)
        return span


@asynccontextmanager
async def serving(tracer: Tracer) -> AsyncIterator[TestClient[Any, Any]]:
    async def handler(request: web.Request) -> web.Response:
        if request.match_info["name"] == "bad":
            request[REASON] = "internal"
            return web.Response(status=500)
        return web.Response()

    one: Any = tracer
    app = web.Application(middlewares=[recording(RequestMeters(), one)])
    app.add_routes([web.get("/v1/{name}", handler), web.get("/{name}", handler)])
    async with TestClient(TestServer(app)) as client:
        yield client


async def test_a_span_has_the_route_and_a_bounded_path() -> None:
    tracer = Tracer()
    async with serving(tracer) as client:
        await client.get("/v1/" + "x" * 1000, headers={"traceparent": TRACEPARENT})
    [span] = tracer.spans
    assert span.name == "GET /v1/{name}"
    assert span.attributes is not None
    assert span.attributes["http.route"] == "/v1/{name}"
    assert len(str(span.attributes["url.path"])) == MAX_PATH
    assert span.attributes["http.response.status_code"] == 200
    assert span.end_time is not None
    assert str(tracer.parents[0]) == TRACEPARENT


async def test_a_failure_is_named() -> None:
    tracer = Tracer()
    async with serving(tracer) as client:
        await client.get("/v1/bad")
    [span] = tracer.spans
    assert span.attributes is not None
    assert (span.attributes["quire.refusal"], span.attributes["http.response.status_code"]) == ("internal", 500)
    assert span.attributes["error.type"] == "500"
    assert not span.status.is_ok


async def test_an_invalid_or_repeated_parent_starts_a_trace_of_its_own() -> None:
    tracer = Tracer()
    async with serving(tracer) as client:
        await client.get("/v1/x", headers={"traceparent": "nonsense"})
        await client.get("/v1/x", headers=[("traceparent", TRACEPARENT), ("traceparent", TRACEPARENT)])
    assert tracer.parents == [None, None]


async def test_only_requests_of_the_api_are_traced() -> None:
    tracer = Tracer()
    async with serving(tracer) as client:
        await client.get("/healthz")
    assert tracer.spans == []


async def test_an_embedding_call_names_its_operation() -> None:
    tracer: Any = Tracer()

    call: Any = SimpleNamespace(options=SimpleNamespace(model="m"), prompt_tokens=12)

    async def handler(request: web.Request) -> web.Response:
        request[SPAN].asks("embeddings", call)
        return web.Response()

    app = web.Application(middlewares=[recording(RequestMeters(), tracer)])
    app.add_routes([web.post("/v1/embeddings", handler)])
    async with TestClient(TestServer(app)) as client:
        await client.post("/v1/embeddings")
    [span] = tracer.spans
    assert span.attributes["gen_ai.operation.name"] == "embeddings"
    assert (span.attributes["gen_ai.request.model"], span.attributes["gen_ai.usage.input_tokens"]) == ("m", 12)
    assert "gen_ai.request.max_tokens" not in span.attributes
