from __future__ import annotations

import logging

import pytest
from opentelemetry.sdk.trace.export import SpanExportResult

from quire.shared.telemetry.spans import SpanKind, Tracer, _Exporter, context_of, fail
from quire.shared.telemetry.trace_context import TraceContext
from tests.support.collector import running_collector

PARENT = TraceContext(trace_id=0xABC, span_id=0x123, flags=1)


def test_a_span_arrives_with_its_parent_its_id_and_its_failure() -> None:
    with running_collector() as collector:
        tracer = Tracer("gateway", "g1", f"{collector.url}/v1/traces", {})
        span = tracer.span("call", PARENT, {"n": 1}, kind=SpanKind.SERVER, span_id=0x456)
        assert context_of(span) == TraceContext(PARENT.trace_id, 0x456, 1)
        fail(span, "timeout")
        span.end()
        other = tracer.span("next", None, {}, links=[PARENT])
        assert context_of(other).span_id != 0x456
        other.end()
        tracer.close()
        first, second = collector.wait(lambda spans: len(spans) == 2)
    assert (first.name, first.service, first.failed) == ("call", "quire-gateway", True)
    assert (first.trace_id, first.span_id, first.parent_id) == (f"{0xABC:032x}", f"{0x456:016x}", f"{0x123:016x}")
    assert first.attributes == {"n": 1, "error.type": "timeout"}
    assert second.parent_id == ""
    assert second.links == [(f"{0xABC:032x}", f"{0x123:016x}")]


class Failing:
    """An exporter whose results are given."""

    def __init__(self, results: list[SpanExportResult | Exception]) -> None:
        self._results = results

    def export(self, spans: object) -> SpanExportResult:
        result = self._results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    def shutdown(self) -> None:
        pass


def test_a_collector_that_is_away_is_logged_once_and_its_return_once(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = SpanExportResult.SUCCESS, SpanExportResult.FAILURE
    exporter = _Exporter(Failing([good, bad, OSError("no route"), bad, good, good]), "http://collector")  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, "quire.shared.telemetry.spans"):
        results = [exporter.export([]) for _ in range(6)]
    assert results == [good, bad, bad, bad, good, good]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
