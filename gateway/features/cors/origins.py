"""Cross-origin requests: web pages of the origins in `--cors-origins` may call the API.

Without that setting no answer has CORS headers, and browsers refuse such calls. Answers never allow credentials: a
gateway has no cookies, and API keys are ordinary headers.

Browsers let a page open a WebSocket to any server, and leave it to the server to check the origin of the page. So the
handshake of a page is refused unless its origin is in the setting, or is that of the gateway itself.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from quire.gateway.api.headers import CLIENT_ID_HEADER, NO_EFFECT_HEADER, SERVER_ID_HEADER
from quire.gateway.errors.api_errors import PermissionDenied
from quire.shared.config.validators import shown
from quire.shared.process.errors import StartError

ANY = "*"
# Paths of the API. Pages and the engine view are for their own origin.
_OTHERS = ("/tokenize", "/detokenize", "/tokenizer_info", "/version", "/openapi.json")
PATHS = ("/v1/", "/v2/", "/rerank", "/score", *_OTHERS)
METHODS = "GET, POST, DELETE"
EXPOSED = ", ".join((CLIENT_ID_HEADER, SERVER_ID_HEADER, "Retry-After", NO_EFFECT_HEADER))
# Seconds that a browser keeps the answer to a preflight request; two hours is Chromium's limit.
MAX_AGE_S = 7200

_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", re.ASCII)
# A list of header names. Longer ones than MAX_HEADERS_LENGTH are refused: the answer repeats them.
_HEADERS = re.compile(r"[A-Za-z0-9-]+(, ?[A-Za-z0-9-]+)*", re.ASCII)
MAX_HEADERS_LENGTH = 2048


@dataclass(frozen=True, slots=True)
class CorsOrigins:
    """The origins that may call the API; ANY stands for all."""

    origins: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> CorsOrigins:
        """Return the origins of the setting. Raises StartError for one that no browser would send."""
        origins = [origin for part in text.split(",") if (origin := part.strip())]
        for origin in origins:
            if origin != ANY and not _ORIGIN.fullmatch(origin):
                raise StartError(
                    f"--cors-origins (QUIRE_CORS_ORIGINS): {origin!r} is not an origin; give the scheme, the host in "
                    "lower case and perhaps a port, without a path, such as https://app.example.com, or * for all."
                )
        if ANY in origins and len(origins) > 1:
            raise StartError(
                "--cors-origins (QUIRE_CORS_ORIGINS): * is every origin; give either * alone or a list of origins."
            )
        return cls(frozenset(origins))

    def middleware(self) -> Middleware:
        """Answer preflight requests of these origins, and refuse WebSockets of others."""

        @web.middleware
        async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.headers.get(hdrs.UPGRADE, "").lower() == "websocket":
                self._check(request)
            asks = request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
            if not asks or not self._allowed(request):
                return await handler(request)
            response = web.Response(status=204)
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_METHODS] = METHODS
            response.headers[hdrs.ACCESS_CONTROL_MAX_AGE] = str(MAX_AGE_S)
            asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
            if len(asked) <= MAX_HEADERS_LENGTH and _HEADERS.fullmatch(asked):
                # SDKs send headers of their own, so every header is allowed. The value * leaves out Authorization.
                response.headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = asked
            return response

        return preflight

    def on_prepare(self) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
        """Add the CORS headers to every answer of the API, errors and streams too."""

        async def add(request: web.Request, response: web.StreamResponse) -> None:
            if not self.origins or not request.path.startswith(PATHS):
                return
            if ANY not in self.origins:
                response.headers.add(hdrs.VARY, hdrs.ORIGIN)
            if allowed := self._allowed(request):
                response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = allowed
                response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = EXPOSED

        return add

    def _check(self, request: web.Request) -> None:
        """Refuse the handshake of a page of another origin. Raises PermissionDenied."""
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or self._allowed(request) or origin.partition("://")[2] == request.host:
            return
        raise PermissionDenied(
            f"Pages of {shown(origin)} may not open WebSockets here (this server's setting --cors-origins)."
        )

    def _allowed(self, request: web.Request) -> str:
        """Return the origin that the answer allows; empty if the request is not from an allowed origin."""
        if not request.path.startswith(PATHS) or (origin := request.headers.get(hdrs.ORIGIN)) is None:
            return ""
        if ANY in self.origins:
            return ANY
        return origin if origin in self.origins else ""
