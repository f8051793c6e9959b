"""The outermost middleware: gives each HTTP request its id, and records its end in metrics, access log and trace."""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from quire.gateway.api.caller import caller_of
from quire.gateway.api.headers import client_id
from quire.gateway.api.request_span import SPAN, BeginSpan
from quire.gateway.errors.api_errors import REQUEST_ID, USER_HASH
from quire.gateway.errors.error_responses import REASON, Handler
from quire.gateway.stream.transcript import TRANSCRIPT
from quire.gateway.telemetry.request_meter import BEGAN, METER, RequestMeters, clock
from quire.shared.protocol.broker import new_id

access = logging.getLogger("gateway.access")

# Paths that supervisors and waiting pages request several times per second: logged at DEBUG only.
PROBES = ("/health", "/healthz", "/ping", "/readyz", "/status")


def recording(meters: RequestMeters, begin_span: BeginSpan) -> Middleware:
    """Return the middleware. Nothing that it records contains the text of a prompt or an answer."""

    @web.middleware
    async def record(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = new_id()
        began = request[BEGAN] = clock()
        if (span := begin_span(request)) is not None:
            request[SPAN] = span
        status: Any = "gone"
        try:
            response = await handler(request)
            status = response.status
            return response
        except web.HTTPException as error:
            status = error.status
            raise
        finally:
            _count(meters, request, str(status))
            level = logging.DEBUG if request.path in PROBES else logging.INFO
            if access.isEnabledFor(level):
                _log(level, request, status, 1000 * (clock() - began))
            if span is not None:
                span.end(status if status != "gone" else None)

    return record


def _count(meters: RequestMeters, request: web.Request, status: str) -> None:
    resource = request.match_info.route.resource
    meters.http[resource.canonical if resource else "other", status] += 1
    reason = request.get(REASON)
    if (meter := request.get(METER)) is not None:
        transcript = request.get(TRANSCRIPT)
        if transcript is not None and transcript.outcome is not None and transcript.ended:
            meter.close(transcript.outcome.name)
        else:
            meter.close("refused" if reason else "gone")
    if reason:
        meters.refusals[reason] += 1


def _log(level: int, request: web.Request, status: Any, duration_ms: float) -> None:
    path = request.rel_url.raw_path[:200]
    request_id = request[REQUEST_ID]
    line = f"{request.method} {path} {status} request={request_id} ms={duration_ms:.0f}"
    fields: dict[str, Any] = {
        "request_id": request_id,
        "method": request.method,
        "path": path,
        "status": status,
        "duration_ms": round(duration_ms, 3),
    }
    if given := client_id(request):
        line += f" client_request={given}"
        fields["client_request_id"] = given
    if owner := caller_of(request).owner:
        line += f" key={owner}"
        fields["key_id"] = owner
    if user := request.get(USER_HASH):
        line += f" user={user}"
        fields["user_hash"] = user
    if (span := request.get(SPAN)) is not None:
        line += f" trace={span.trace_id}"
        fields["trace_id"] = span.trace_id
    if (meter := request.get(METER)) is not None and meter.first_s is not None:
        line += f" ttft_ms={1000 * meter.first_s:.1f}"
        fields["ttft_ms"] = round(1000 * meter.first_s, 3)
    if (transcript := request.get(TRANSCRIPT)) is not None:
        outcome = transcript.outcome.name if transcript.outcome else "none"
        metadata = transcript.metadata
        line += f" outcome={outcome} prompt_tokens={metadata.prompt_tokens} tokens={transcript.tokens}"
        line += " background" * int(metadata.is_background) + " joined" * int(transcript.is_joined)
        fields |= {"outcome": outcome, "prompt_tokens": metadata.prompt_tokens, "tokens": transcript.tokens}
    access.log(level, "%s", line, extra=fields)
