"""Logs, meters and traces of calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

from quire.gateway.api.request_span import SPAN
from quire.gateway.errors.error_responses import REASON
from quire.gateway.features.tracing.http_span import MAX_PATH, http_spans
from quire.gateway.server.access_log import recording
from quire.gateway.stream.call_metadata import DIALECTS
from quire.gateway.telemetry import request_meter
from quire.gateway.telemetry.request_meter import CALL_OUTCOMES, KINDS, RequestMeters
from quire.shared.telemetry.trace_context import TraceContext
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import RunningGateway, tokens

# --- Each HTTP request is counted once, and has one line in the access log --------------------------------------------


async def test_the_log_has_one_line_per_request_and_no_prompt(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with gateway.worker(emit(tokens("an answer"), "stop")):
        reply = await gateway.chat(messages=[{"role": "user", "content": "a secret question"}])
    lines = [record.getMessage() for record in caplog.records if record.name == "gateway.access"]
    [line] = [line for line in lines if "/v1/chat/completions" in line]
    assert line.startswith(f"POST /v1/chat/completions 200 request={reply.headers['x-request-id']} ms=")
    assert "ttft_ms" not in line  # the answer left in one piece
    assert line.endswith(
        f"outcome=stop prompt_tokens={reply.json['usage']['prompt_tokens']} tokens={len(tokens('an answer'))}"
    )
    assert "secret" not in caplog.text
    assert "an answer" not in caplog.text


async def test_probes_are_logged_at_debug_only(gateway: RunningGateway, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gateway.access")
    await gateway.get("/healthz")
    await gateway.get("/v1/models")
    lines = [record.getMessage() for record in caplog.records if record.name == "gateway.access"]
    assert [line.split(" request=")[0] for line in lines] == ["GET /v1/models 200"]
    caplog.set_level("DEBUG", "gateway.access")
    await gateway.get("/healthz")
    assert caplog.records[-1].getMessage().startswith("GET /healthz 200")


async def test_a_request_is_counted_by_its_route_and_a_call_by_its_outcome(gateway: RunningGateway) -> None:
    meters = gateway.gateway.meters
    async with gateway.worker(emit(tokens("a"), "stop")):
        await gateway.chat()
    await gateway.chat(n=0)
    await gateway.get("/no/such/path")
    await gateway.get("/v1/models/another")
    assert meters.calls["chat", "new", "stop"] == 1
    assert meters.calls["chat", "new", "refused"] == 1
    assert sum(meters.calls.values()) == 2
    assert meters.http["/v1/chat/completions", "200"] == 1
    assert meters.http["/v1/chat/completions", "400"] == 1
    assert meters.http["other", "404"] == 1
    assert meters.http["/v1/models/{name}", "404"] == 1
    assert {name: count for name, count in meters.refusals.items() if count} == {
        "invalid_request": 1,
        "not_found": 1,
        "model_not_found": 1,
    }


# --- A call is counted once when it ends; its tokens and times are counted as they are written ------------------------


NONE = dict.fromkeys(DIALECTS, 0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(request_meter, "clock", clock)
    return clock


def test_the_tokens_and_times_of_a_stream(clock: Clock) -> None:
    meters = RequestMeters()
    meter = meters.open("chat", "new", began=clock.now)
    assert meters.open_calls == {**NONE, "chat": 1}
    assert meter.first_s is None
    clock.now += 0.5
    meter.accepted(7)
    meter.wrote(0, 0.0)  # the opening of the stream brings no token
    clock.now += 1.5
    meter.wrote(3, came_at=clock.now - 0.25)
    clock.now += 1
    meter.wrote(4, came_at=clock.now)
    meter.wrote(4, 0.0)  # the end brings no token
    meter.close("stop")
    assert meter.first_s == 2.0
    assert meters.prompt_tokens["chat"] == 7
    assert meters.completion_tokens == {**NONE, "chat": 4}
    assert (meters.first_token_s["chat"].count, meters.first_token_s["chat"].sum) == (1, 2.0)
    assert (meters.between_tokens_s["chat"].count, meters.between_tokens_s["chat"].sum) == (1, 1.0)
    assert (meters.complete_s["chat"].count, meters.complete_s["chat"].sum) == (1, 3.0)
    assert (meters.overhead_s["accept"].count, meters.overhead_s["accept"].sum) == (1, 0.5)
    assert (meters.overhead_s["deliver"].count, meters.overhead_s["deliver"].sum) == (2, 0.25)
    assert meters.open_calls == NONE


def test_a_resumed_stream_counts_new_tokens_only_and_no_time_to_the_first(clock: Clock) -> None:
    meters = RequestMeters()
    meter = meters.open("completion", "resumed", began=clock.now)
    meter.tokens = 5
    meter.wrote(5, 0.0)
    meter.wrote(8, 0.0)
    meter.close("stop")
    assert meters.completion_tokens["completion"] == 3
    assert meters.first_token_s["completion"].count == meters.complete_s["completion"].count == 0
    assert meters.calls["completion", "resumed", "stop"] == 1


def test_every_outcome_is_there_from_the_start() -> None:
    """A counter that appears with its first event hides that event from Prometheus."""
    meters = RequestMeters()
    assert set(meters.calls) == {
        (dialect, kind, outcome) for dialect in DIALECTS for kind in KINDS for outcome in CALL_OUTCOMES
    }
    assert not any(meters.calls.values())
    assert {"queue_full", "invalid_request", "internal"} <= set(meters.refusals)


def test_open_streams_and_stalled_clients_are_counted() -> None:
    meters = RequestMeters()
    meter = meters.open("chat", "new", began=0.0)
    meter.stream_opened()
    assert meters.open_streams == 1
    meter.client_stalled()
    meter.stream_closed()
    assert (meters.open_streams, meters.slow_clients) == (0, 1)


# --- The span of an HTTP request has what the conventions name, and nothing that the client chose without -------------


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
    app = web.Application(middlewares=[recording(RequestMeters(), http_spans(one))])
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

    call: Any = SimpleNamespace(model="m", about=SimpleNamespace(prompt_tokens=12))

    async def handler(request: web.Request) -> web.Response:
        request[SPAN].asks("embeddings", call)
        return web.Response()

    app = web.Application(middlewares=[recording(RequestMeters(), http_spans(tracer))])
    app.add_routes([web.post("/v1/embeddings", handler)])
    async with TestClient(TestServer(app)) as client:
        await client.post("/v1/embeddings")
    [span] = tracer.spans
    assert span.attributes["gen_ai.operation.name"] == "embeddings"
    assert (span.attributes["gen_ai.request.model"], span.attributes["gen_ai.usage.input_tokens"]) == ("m", 12)
    assert "gen_ai.request.max_tokens" not in span.attributes
