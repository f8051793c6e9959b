"""The span of an HTTP request, by the semantic conventions for HTTP and gen_ai, without prompts and answers.

https://opentelemetry.io/docs/specs/semconv/http/http-spans/ and https://opentelemetry.io/docs/specs/semconv/gen-ai/
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from quire.gateway.api.call import Call
from quire.gateway.errors.api_errors import REQUEST_ID
from quire.gateway.errors.error_responses import REASON
from quire.gateway.stream.transcript import TRANSCRIPT
from quire.gateway.telemetry.request_meter import BEGAN, METER
from quire.shared.protocol.states import OutcomeName
from quire.shared.telemetry.trace_context import TraceContext

if TYPE_CHECKING:
    from quire.shared.telemetry.spans import Tracer

PATHS = ("/v1/", "/v2/", "/rerank", "/score")
TRACEPARENT = "traceparent"
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")
OPERATIONS = {
    "chat": "chat",
    "completion": "text_completion",
    "response": "chat",
    "message": "chat",
    "embeddings": "embeddings",
    "rerank": "rerank",
    "score": "score",
}
WITHOUT_TEXT = ("embeddings", "rerank", "score")
ID_PREFIXES = {
    "chat": "chatcmpl-",
    "completion": "cmpl-",
    "response": "resp_",
    "message": "msg_",
    "embeddings": "embd-",
    "rerank": "rerank-",
    "score": "score-",
}
# Characters of the path that are recorded; clients choose it.
MAX_PATH = 200


class HttpSpan:
    """The span of one HTTP request of the APIs."""

    def __init__(self, tracer: Tracer, request: web.Request) -> None:
        from quire.shared.telemetry.spans import SpanKind, context_of

        self._request = request
        resource = request.match_info.route.resource
        route = resource.canonical if resource else None
        method = request.method if request.method in METHODS else "_OTHER"
        self._began_ns = time.time_ns()
        attributes = {
            "http.request.method": method,
            "url.path": request.rel_url.raw_path[:MAX_PATH],
            "url.scheme": request.scheme,
            "network.protocol.version": f"{request.version.major}.{request.version.minor}",
            "quire.request.id": request[REQUEST_ID],
        }
        if route:
            attributes["http.route"] = route
        name = method if method != "_OTHER" else "HTTP"
        self._span = tracer.span(
            f"{name} {route}" if route else name,
            _parent(request),
            attributes,
            kind=SpanKind.SERVER,
            began_ns=self._began_ns,
        )
        self.context = context_of(self._span)

    @property
    def trace_id(self) -> str:
        return f"{self.context.trace_id:032x}"

    def asks(self, dialect: str, call: Call) -> None:
        """Record the parameters of the call."""
        if not self._span.is_recording():
            return
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": OPERATIONS[dialect],
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": call.model,
            "gen_ai.usage.input_tokens": call.about.prompt_tokens,
        }
        if dialect not in WITHOUT_TEXT:
            attributes |= _sampling_attributes(call)
        self._span.set_attributes(attributes)

    def end(self, status: int | None) -> None:
        """End the span; `status` is None if the client left."""
        from quire.shared.telemetry.spans import fail

        span, request = self._span, self._request
        if not span.is_recording():
            return
        if status is not None:
            span.set_attribute("http.response.status_code", status)
            if status >= 500:
                fail(span, str(status))
        if reason := request.get(REASON):
            span.set_attribute("quire.refusal", reason)
        meter = request.get(METER)
        if meter is not None and meter.first_at:
            first_s = meter.first_at - request[BEGAN]
            span.set_attribute("gen_ai.response.time_to_first_chunk", first_s)
            span.add_event("first token", timestamp=self._began_ns + int(1e9 * first_s))
        if (transcript := request.get(TRANSCRIPT)) is not None:
            dialect = transcript.metadata.dialect
            span.set_attributes(
                {
                    "gen_ai.operation.name": OPERATIONS[dialect],
                    "gen_ai.provider.name": "quire",
                    "gen_ai.response.id": ID_PREFIXES[dialect] + request[REQUEST_ID],
                    "gen_ai.response.model": transcript.model_name,
                    "gen_ai.usage.input_tokens": transcript.metadata.prompt_tokens,
                    "gen_ai.usage.output_tokens": transcript.tokens,
                    "gen_ai.response.finish_reasons": transcript.finish_reasons,
                    "quire.joined": transcript.is_joined,
                }
            )
            outcome = transcript.outcome.name if transcript.outcome is not None and transcript.ended else "gone"
            span.set_attribute("quire.outcome", outcome)
            if outcome in (OutcomeName.ERROR, OutcomeName.QUARANTINED, OutcomeName.DEADLINE):
                fail(span, outcome)
        span.end()


def _sampling_attributes(call: Call) -> dict[str, Any]:
    """Return the attributes of a call that generates tokens."""
    sampling = call.sampling[0]
    attributes: dict[str, Any] = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.request.stream": call.stream,
    }
    if call.seed is not None:
        # Attributes are signed 64-bit integers; a larger seed wraps around.
        attributes["gen_ai.request.seed"] = (call.seed + 2**63) % 2**64 - 2**63
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if sampling.frequency_penalty:
        attributes["gen_ai.request.frequency_penalty"] = float(sampling.frequency_penalty)
    if sampling.presence_penalty:
        attributes["gen_ai.request.presence_penalty"] = float(sampling.presence_penalty)
    if len(call.prompts) * sampling.n > 1:
        attributes["gen_ai.request.choice.count"] = len(call.prompts) * sampling.n
    return attributes


def http_spans(tracer: Tracer | None) -> Callable[[web.Request], HttpSpan | None]:
    """Return what begins the spans of requests; without a tracer it begins none."""
    return lambda request: HttpSpan(tracer, request) if tracer and request.path.startswith(PATHS) else None


def _parent(request: web.Request) -> TraceContext | None:
    """Return the client's trace context; None, which starts a new trace, if it is missing, invalid or given twice."""
    values = request.headers.getall(TRACEPARENT, [])
    return TraceContext.parse(values[0]) if len(values) == 1 else None
