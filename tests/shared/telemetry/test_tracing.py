"""Tracing: endpoints, contexts and spans."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
from opentelemetry.sdk.trace.export import SpanExportResult

from quire.shared.telemetry.spans import SpanKind, Tracer, _Exporter, context_of, fail
from quire.shared.telemetry.trace_context import TraceContext
from quire.shared.telemetry.tracing import TracingError, start
from tests.support.collector import running_collector

# --- tracing ----------------------------------------------------------------------------------------------------------
# Tracing starts only with a valid endpoint, and costs nothing without one.


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_without_an_endpoint_there_is_no_tracing(environ: dict[str, str]) -> None:
    assert start("gateway", "g", "", environ) is None


@pytest.mark.parametrize(
    ("endpoint", "environ", "words"),
    [
        (
            "collector:4318",
            {},
            "--otlp-endpoint (QUIRE_OTLP_ENDPOINT) is 'collector:4318'; give an http:// or https:// URL",
        ),
        ("ftp://collector", {}, "give an http:// or https:// URL"),
        ("http://", {}, "give an http:// or https:// URL"),
        ("http://collector:99999", {}, "give an http:// or https:// URL"),
        ("http://collector/?x=1", {}, "give an http:// or https:// URL"),
        ("http://me:hush@collector", {}, "OTEL_EXPORTER_OTLP_HEADERS"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "nonsense"}, "OTEL_EXPORTER_OTLP_ENDPOINT is 'nonsense'"),
        (
            "",
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'; Quire sends traces by http/protobuf only",
        ),
    ],
)
def test_a_wrong_endpoint_is_refused_with_its_name_and_the_remedy(
    endpoint: str, environ: dict[str, str], words: str
) -> None:
    with pytest.raises(TracingError) as caught:
        start("gateway", "g", endpoint, environ)
    assert words in str(caught.value)
    assert "hush" not in str(caught.value)


def test_an_endpoint_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("opentelemetry", "quire.shared.telemetry.spans"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(
        TracingError, match=r"opentelemetry\S* is missing: `pip install .* -e '\.\[tracing\]'` installs"
    ):
        start("gateway", "g", "http://127.0.0.1:4318", {})


def test_without_an_endpoint_nothing_to_trace_with_is_imported() -> None:
    program = (
        "import sys, quire.gateway.server.app, quire.worker.main, quire.worker.queue.attempt_spans\n"
        "from quire.shared.telemetry.tracing import start\n"
        "assert start('gateway', 'g', '', {}) is None\n"
        # redis-py imports OpenTelemetry's metrics by itself where they are installed.
        "ours = ('opentelemetry.sdk.trace', 'opentelemetry.exporter', 'google.protobuf', 'requests',"
        "'quire.shared.telemetry.spans')\n"
        "print([name for name in sys.modules if name.startswith(ours)])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- trace context ----------------------------------------------------------------------------------------------------


TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01"),
        (f"00-{TRACE}-{SPAN}-00", f"00-{TRACE}-{SPAN}-00"),
        (f"00-{TRACE}-{SPAN}-03", f"00-{TRACE}-{SPAN}-03"),
        (f"01-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01"),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", f"00-{TRACE}-{SPAN}-01"),
        (f"cc-{TRACE}-{SPAN}-01.what", None),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"00-{TRACE}-{SPAN}-01 ", None),
        (f"00-{TRACE}-{SPAN}-01\n", None),
        (f" 00-{TRACE}-{SPAN}-01", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN[:-1]}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        (f"00-{TRACE}-{SPAN}-1", None),
        (f"00-{TRACE[:-1]}٣-{SPAN}-01", None),
        ("", None),
        ("x" * 8000, None),
    ],
)
def test_a_traceparent_is_read_strictly(text: str, said: str | None) -> None:
    context = TraceContext.parse(text)
    assert (None if context is None else str(context)) == said


# --- spans ------------------------------------------------------------------------------------------------------------


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
