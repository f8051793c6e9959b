"""The headers of answers: ids of the request, and names of parameters without effect.

A client or a proxy may give a request an id, in the header `X-Request-Id`. The gateway gives every HTTP request an id
of its own, so that no client can choose an id in Redis. An answer has the client's id, or else the gateway's, as
`X-Request-Id`, and always the gateway's as `X-Quire-Request-Id`.
"""

from __future__ import annotations

import re

from aiohttp import web
from aiohttp.typedefs import Handler

from quire.gateway.errors.api_errors import NO_EFFECT_NAMES, REQUEST_ID, refused
from quire.shared.config.validators import shown

CLIENT_ID_HEADER = "X-Request-Id"
SERVER_ID_HEADER = "X-Quire-Request-Id"
NO_EFFECT_HEADER = "X-Quire-No-Effect"
# A header of requests: calls with the same key, path and body are one call.
IDEMPOTENCY_KEY = "Idempotency-Key"
# The form of its values.
KEY = re.compile(r"[!-~]{1,255}", re.ASCII)

# Headers of the answer to one request, such as those about its limits.
ANSWER_HEADERS = web.RequestKey("answer_headers", dict[str, str])

# Visible ASCII without quotes: the id is a field of log lines.
CLIENT_ID = re.compile(r"[!#-&(-~]{1,128}", re.ASCII)


def client_id(request: web.BaseRequest) -> str:
    """Return the id that the client gave to a request; empty if it gave none, or one that is refused."""
    values = request.headers.getall(CLIENT_ID_HEADER, [])
    return values[0] if len(values) == 1 and CLIENT_ID.fullmatch(values[0]) else ""


@web.middleware
async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse a request with an id that cannot be logged. Raises InvalidRequest."""
    values = request.headers.getall(CLIENT_ID_HEADER, [])
    if values and not client_id(request):
        given = shown(values[0]) if len(values) == 1 else f"{len(values)} values"
        raise refused(
            CLIENT_ID_HEADER,
            f"{CLIENT_ID_HEADER} must be 1 to 128 visible ASCII characters without quotes, not {given}; leave it out "
            "for an id of the server.",
        )
    return await handler(request)


def add_request_headers(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Add to an answer the headers that depend on its request."""
    if server_id := request.get(REQUEST_ID):
        response.headers[CLIENT_ID_HEADER] = client_id(request) or server_id
        response.headers[SERVER_ID_HEADER] = server_id
    response.headers.update(request.get(ANSWER_HEADERS, {}))
    if names := request.get(NO_EFFECT_NAMES):
        response.headers[NO_EFFECT_HEADER] = names
