"""The HTTP application: routes, request ids, one log line per request, and errors in the shape of the OpenAI API."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler

from quire.gateway.admin.request_meter import BEGAN, METER, RequestMeters, clock
from quire.gateway.admin.tracing import PREFIX, SPAN, HttpSpan
from quire.gateway.api import error_responses, errors
from quire.gateway.api.error_responses import REASON, Handler
from quire.gateway.api.errors import REQUEST_ID
from quire.gateway.model.served_model import ServedModel
from quire.gateway.pages import chat_page, engine_page
from quire.gateway.pages.status import Status
from quire.gateway.service import Gateway
from quire.gateway.settings import GatewaySettings
from quire.gateway.stream.transcript import ANSWER
from quire.shared.broker import new_id
from quire.shared.validators import shown

if TYPE_CHECKING:
    from quire.shared.telemetry.spans import Tracer

access = logging.getLogger("gateway.access")
log = logging.getLogger("gateway")

GATEWAY = web.AppKey("gateway", Gateway)
# Bounds of a request's head; aiohttp enforces them while it parses.
MAX_HEADER_BYTES = 8190
MAX_HEADERS = 64
# Supervisors, and pages with a silent answer, ask these several times a second: the log has them at DEBUG only.
PROBES = ("/healthz", "/readyz", "/status")


def create_app(settings: GatewaySettings, model: ServedModel, tracer: Tracer | None = None) -> web.Application:
    """The application; it connects to Redis when it starts up."""
    gateway = Gateway(settings, model, tracer)
    app = web.Application(middlewares=[_outermost, error_responses.middleware], client_max_size=settings.max_body_bytes)
    app[GATEWAY] = gateway
    engine_page.add_to(app, gateway)
    app.add_routes(
        [
            web.post("/v1/chat/completions", gateway.chat),
            web.post("/v1/completions", gateway.completions),
            # Not for HEAD, which would attach to the request.
            web.get("/v1/chat/completions/{id}/stream", gateway.resume_chat, allow_head=False),
            web.get("/v1/completions/{id}/stream", gateway.resume_completion, allow_head=False),
            web.post("/v1/chat/completions/{id}/cancel", gateway.cancel_chat),
            web.post("/v1/completions/{id}/cancel", gateway.cancel_completion),
            web.get("/v1/models", gateway.models),
            web.get("/v1/models/{name:.+}", gateway.one_model),
            web.get("/healthz", gateway.healthz),
            web.get("/readyz", gateway.readyz),
            web.get("/status", Status(gateway).show),
            *chat_page.routes(),
        ]
    )
    app.on_startup.append(_start)
    app.on_shutdown.append(gateway.drain)
    app.on_cleanup.append(_close)
    app.on_response_prepare.append(_add_headers)
    return app


async def _start(app: web.Application) -> None:
    await app[GATEWAY].start()


async def _close(app: web.Application) -> None:
    await app[GATEWAY].close()


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    if request_id := request.get(REQUEST_ID):
        response.headers["x-request-id"] = request_id
    _add_common(response)


def _add_common(response: web.StreamResponse) -> None:
    response.headers["Server"] = "quire"  # not which versions of what
    response.headers.setdefault("X-Content-Type-Options", "nosniff")


@web.middleware
async def _outermost(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives the request its id, counts it, and one line in the log when it is over. Never what it said."""
    request[REQUEST_ID] = new_id()
    began = request[BEGAN] = clock()
    tracer = request.app[GATEWAY].tracer
    span = None
    if tracer is not None and request.path.startswith(PREFIX):
        span = request[SPAN] = HttpSpan(tracer, request)
    status: Any = "gone"
    try:
        response = await handler(request)
        status = response.status
        return response
    except web.HTTPException as error:
        status = error.status
        raise
    finally:
        _count(request, str(status))
        level = logging.DEBUG if request.path in PROBES else logging.INFO
        if access.isEnabledFor(level):
            _log_access(level, request, status, 1000 * (clock() - began))
        if span is not None:
            span.end(status if status != "gone" else None)


def _count(request: web.Request, status: str) -> None:
    meters = request.app[GATEWAY].meters
    resource = request.match_info.route.resource
    meters.http[resource.canonical if resource else "other", status] += 1
    reason = request.get(REASON)
    if (meter := request.get(METER)) is not None:
        answer = request.get(ANSWER)
        if answer is not None and answer.outcome is not None and answer.ended:
            meter.close(answer.outcome.name)
        else:
            meter.close("refused" if reason else "gone")
    if reason:
        meters.refusals[reason] += 1


def _log_access(level: int, request: web.Request, status: Any, duration_ms: float) -> None:
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
    if (span := request.get(SPAN)) is not None:
        line += f" trace={span.trace_id}"
        fields["trace_id"] = span.trace_id
    if (meter := request.get(METER)) is not None and meter.first_s is not None:
        line += f" ttft_ms={1000 * meter.first_s:.1f}"
        fields["ttft_ms"] = round(1000 * meter.first_s, 3)
    if (answer := request.get(ANSWER)) is not None:
        outcome = answer.outcome.name if answer.outcome else "none"
        line += f" outcome={outcome} prompt_tokens={answer.about.prompt_tokens} tokens={answer.tokens}"
        line += " background" * int(answer.about.is_background) + " joined" * int(answer.is_joined)
        fields |= {"outcome": outcome, "prompt_tokens": answer.about.prompt_tokens, "tokens": answer.tokens}
    access.log(level, "%s", line, extra=fields)


async def _refuse_expectation(request: web.Request) -> web.StreamResponse:
    """Answers a request whose header Expect aiohttp does not know."""

    async def refuse(request: web.Request) -> web.StreamResponse:
        raise errors.ExpectationFailed(
            f"The header Expect may only be 100-continue, not {shown(request.headers['Expect'])}; leave it out."
        )

    return await error_responses.middleware(request, refuse)


class _Protocol(RequestHandler):
    """aiohttp's connection handler, with its own errors (malformed HTTP) in the shape of this API."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun; it cannot become an error")
        error: errors.ApiError
        if isinstance(exc, LineTooLong) or "many headers" in (message or "").lower():
            error = errors.HeadersTooLarge(
                f"The head of the request is too large: at most {MAX_HEADERS} headers of {MAX_HEADER_BYTES} bytes each."
            )
        elif status < 500:
            error = errors.InvalidRequest("The request is not valid HTTP.", code="invalid_http")
        else:
            log.error("a connection failed unexpectedly", exc_info=exc)
            error = errors.ApiError("Internal error.", code="internal")
        assert isinstance(self._manager, HttpServer)
        self._manager.meters.refused("other", str(error.status), error_responses.reason(error))
        response = error_responses.response(error)
        _add_common(response)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        # Answers in one piece are written here; what is streamed has its own care for clients that do not read.
        server = self._manager
        if not isinstance(server, HttpServer):  # the client has left
            return await super().finish_response(request, resp, start_time)
        try:
            async with asyncio.timeout(server.write_timeout_s):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            server.meters.slow_clients += 1
            if self.transport is not None:
                self.transport.abort()
            return resp, True


class HttpServer(web.Server):
    """Connections whose handlers are cancelled when their clients leave."""

    meters: RequestMeters
    write_timeout_s: float

    def __call__(self) -> RequestHandler:
        return _Protocol(self, loop=self._loop, **self._kwargs)


class GatewayRunner(web.AppRunner):
    """Runs the application on `HttpServer`."""

    def __init__(self, app: web.Application, settings: GatewaySettings) -> None:
        super().__init__(
            app,
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=settings.http_keepalive_s,
            # aiohttp waits for so long twice: for handlers to end, and for those that still read a body to be told so.
            # It takes 0 for ever.
            shutdown_timeout=max(settings.drain_s, 0.001) / 2,
            auto_decompress=False,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            lingering_time=1.0,
        )

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        # aiohttp has no other way to choose the class of its connections.
        server.__class__ = HttpServer
        assert isinstance(server, HttpServer)
        server.meters = self.app[GATEWAY].meters
        server.request_handler = self._handle
        server.write_timeout_s = self.app[GATEWAY].settings.write_timeout_s
        return server

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        assert isinstance(request, web.Request)
        try:
            return await self.app._handle(request)
        except web.HTTPExpectationFailed:
            # aiohttp looks at the header Expect before any middleware, which would give the error its form and its id.
            return await _outermost(request, _refuse_expectation)


async def start_site(runner: web.AppRunner, host: str, port: int, reuse_port: bool = False) -> int:
    """Listen; the port that was taken. Raises OSError. With `reuse_port` the kernel spreads connections."""
    site = web.TCPSite(runner, host, port, backlog=1024, reuse_port=reuse_port)
    await site.start()
    sockets: Any = site._server.sockets  # type: ignore[union-attr]
    return int(sockets[0].getsockname()[1])
