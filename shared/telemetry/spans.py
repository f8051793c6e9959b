"""Spans, made and exported with OpenTelemetry. Import this only where tracing is on (`shared/telemetry/tracing.py`).

Spans wait in a bounded queue for a thread that sends them. While the collector is away, spans that do not fit there are
dropped; nothing else is affected. The standard variables (`OTEL_TRACES_SAMPLER`, `OTEL_BSP_...`,
`OTEL_EXPORTER_OTLP_HEADERS`, ...) apply.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from quire.shared.process.version import installed_version
from quire.shared.telemetry.trace_context import TraceContext

log = logging.getLogger(__name__)

__all__ = ["Attributes", "Span", "SpanKind", "Tracer", "fail"]

# Time that the end of a process waits for its last spans to be sent.
FLUSH_S = 2.0
# Time for one batch, with its retries.
EXPORT_TIMEOUT_S = 5.0
# Short, so that most finished spans of a killed process have been sent.
SCHEDULE_DELAY_MS = 1000.0

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]


class _Ids(RandomIdGenerator):
    """Random span ids, except for a span whose id was chosen in advance."""

    def __init__(self) -> None:
        self.next_span_id = 0

    def generate_span_id(self) -> int:
        chosen, self.next_span_id = self.next_span_id, 0
        return chosen or super().generate_span_id()


class _Exporter(SpanExporter):
    """Logs once that spans cannot be sent, and once that they can be sent again."""

    def __init__(self, inner: SpanExporter, url: str) -> None:
        self._inner = inner
        self._url = url
        self._fails = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._inner.export(spans)
        except Exception as error:
            log.debug("exporting spans failed", exc_info=error)
            result = SpanExportResult.FAILURE
        fails = result is not SpanExportResult.SUCCESS
        if fails and not self._fails:
            log.warning("traces cannot be sent to %s; they are dropped until they can (this is said once)", self._url)
        elif self._fails and not fails:
            log.info("traces are sent to %s again", self._url)
        self._fails = fails
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()


class Tracer:
    """Makes the spans of one process, on its event loop only."""

    def __init__(self, process: str, instance: str, url: str, environ: Mapping[str, str]) -> None:
        # The library logs each failure; `_Exporter` logs it once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        attributes = {"service.instance.id": instance, "service.version": installed_version("0")}
        if not environ.get("OTEL_SERVICE_NAME"):
            attributes["service.name"] = f"quire-{process}"
        has_timeout = any(environ.get(f"OTEL_EXPORTER_OTLP_{name}TIMEOUT") for name in ("TRACES_", ""))
        exporter = OTLPSpanExporter(endpoint=url, timeout=None if has_timeout else EXPORT_TIMEOUT_S)
        self._ids = _Ids()
        self._provider = TracerProvider(
            resource=Resource.create(attributes), shutdown_on_exit=False, id_generator=self._ids
        )
        delay_ms = None if environ.get("OTEL_BSP_SCHEDULE_DELAY") else SCHEDULE_DELAY_MS
        self._provider.add_span_processor(BatchSpanProcessor(_Exporter(exporter, url), schedule_delay_millis=delay_ms))
        self._tracer = self._provider.get_tracer("quire", installed_version("0"))
        self.url = url

    def span(
        self,
        name: str,
        parent: TraceContext | None,
        attributes: Attributes,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        began_ns: int | None = None,
        span_id: int = 0,
        links: Sequence[TraceContext] = (),
    ) -> Span:
        """Start a span, now or at `began_ns` (of `time.time_ns`). The caller ends it. No parent: a root span."""
        self._ids.next_span_id = span_id
        context = set_span_in_context(NonRecordingSpan(_remote(parent))) if parent else {}
        return self._tracer.start_span(
            name,
            context,  # type: ignore[arg-type]
            kind,
            attributes,
            links=[Link(_remote(link)) for link in links],
            start_time=began_ns,
        )

    def close(self) -> None:
        """Send the waiting spans. Block for at most FLUSH_S."""
        # In a thread, because a connection attempt in progress cannot be interrupted.
        thread = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        thread.start()
        thread.join(FLUSH_S)


def context_of(span: Span) -> TraceContext:
    """Return the context that other processes use as the parent of their spans."""
    context = span.get_span_context()
    return TraceContext(context.trace_id, context.span_id, int(context.trace_flags))


def fail(span: Span, kind: str) -> None:
    """Mark a span as failed, for a reason in one word."""
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR))


def _remote(context: TraceContext) -> SpanContext:
    return SpanContext(context.trace_id, context.span_id, is_remote=True, trace_flags=TraceFlags(context.flags))
