"""The HTTP server under the application: aiohttp's, with the errors of this API and a timeout for slow clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.web_protocol import RequestHandler

from quire.gateway.api.headers import add_request_headers
from quire.gateway.errors import api_errors, error_responses
from quire.gateway.serving.model_directory import DIRECTORY
from quire.gateway.serving.service import GatewayProcess
from quire.shared.config.validators import shown

log = logging.getLogger("gateway")

# Bounds of a request's head; aiohttp enforces them while it parses.
MAX_HEADER_BYTES = 8190
MAX_HEADERS = 64


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers of every response that the application prepares."""
    add_request_headers(request, response)
    _add_common_headers(response)


def _add_common_headers(response: web.StreamResponse) -> None:
    response.headers["Server"] = "quire"  # aiohttp's default names the versions of aiohttp and Python
    response.headers.setdefault("X-Content-Type-Options", "nosniff")


class _Connection(RequestHandler):
    """A client's connection. Errors below HTTP have the shape of this API, and a client that does not read is cut."""

    # Called with the size of what arrives, before it is parsed.
    received: Callable[[int], None] | None = None

    def data_received(self, data: bytes) -> None:
        if self.received is not None:
            self.received(len(data))
        super().data_received(data)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun; it cannot become an error")
        error: api_errors.ApiError
        if isinstance(exc, LineTooLong) or "many headers" in (message or "").lower():
            error = api_errors.HeadersTooLarge(
                f"The head of the request is too large: at most {MAX_HEADERS} headers of {MAX_HEADER_BYTES} bytes each."
            )
        elif status < 500:
            error = api_errors.InvalidRequest("The request is not valid HTTP.", code="invalid_http")
        else:
            log.error("a connection failed unexpectedly", exc_info=exc)
            error = api_errors.ApiError("Internal error.", code="internal")
        assert isinstance(self._manager, HttpServer)
        self._manager.meters.refused("other", str(error.status), error_responses.reason(error))
        response = error_responses.response(error)
        _add_common_headers(response)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write a response that has not been streamed, for the write timeout at most."""
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
    """aiohttp's server with connections of this module."""

    def __init__(self, handler: Any, process: GatewayProcess, **options: Any) -> None:
        super().__init__(handler, **options)
        self.meters = process.meters
        self.write_timeout_s = process.settings.write_timeout_s

    def __call__(self) -> RequestHandler:
        """Return the protocol for a new connection."""
        return _Connection(self, loop=self._loop, **self._kwargs)


class GatewayRunner(web.AppRunner):
    """Runs the application on an `HttpServer`. Handlers are cancelled when their clients leave."""

    def __init__(self, app: web.Application) -> None:
        settings = app[DIRECTORY].process.settings
        super().__init__(
            app,
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=settings.http_keepalive_s,
            # aiohttp waits this long twice: for handlers to end, then for those that still read a body to notice. A
            # value of 0 would mean no limit.
            shutdown_timeout=max(settings.drain_s, 0.001) / 2,
            auto_decompress=False,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            lingering_time=1.0,
        )

    async def _make_server(self) -> web.Server:
        # Starts the application. The server that this returns is not used: aiohttp lets only a subclass of its server
        # choose the class of connections, and has no way to pass one in.
        await super()._make_server()
        return HttpServer(self._handle, self.app[DIRECTORY].process, request_factory=self._make_request, **self._kwargs)

    def _make_request(self, message: RawRequestMessage, *arguments: Any) -> web.Request:
        """Make the request of a message. A path with a slash at its end is the path without it, for every method."""
        url = message.url
        if len(url.raw_path) > 1 and url.raw_path.endswith("/"):
            url = url.with_path(url.raw_path[:-1], encoded=True, keep_query=True)
            message = message._replace(url=url, path=str(url))
        return self.app._make_request(message, *arguments)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self.app._handle(request)
        except web.HTTPExpectationFailed:
            # aiohttp checks the header Expect before it calls middlewares, which give an error its form and its id.
            handler: error_responses.Handler = _refuse_expectation
            for middleware in reversed(self.app.middlewares):
                handler = partial(middleware, handler=handler)
            return await handler(request)


async def _refuse_expectation(request: web.Request) -> web.StreamResponse:
    raise api_errors.ExpectationFailed(
        f"The header Expect may only be 100-continue, not {shown(request.headers['Expect'])}; leave it out."
    )


async def start_site(runner: web.AppRunner, host: str, port: int, reuse_port: bool = False) -> int:
    """Listen; return the port. Raises OSError.

    With `reuse_port` several processes may listen on the same port, and the kernel distributes connections among them.
    """
    site = web.TCPSite(runner, host, port, backlog=1024, reuse_port=reuse_port)
    await site.start()
    sockets: Any = site._server.sockets  # type: ignore[union-attr]
    return int(sockets[0].getsockname()[1])
