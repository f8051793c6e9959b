"""Error responses: the middleware that turns exceptions into them, and their labels in metrics."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from quire.gateway.errors.api_errors import (
    REQUEST_ID,
    ApiError,
    BodyTooLarge,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    body,
)
from quire.shared.text.panics import is_panic

log = logging.getLogger("gateway")

# The label of the error with which an HTTP request was refused, for metrics.
REASON = web.RequestKey("reason", str)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# The JSON of an error. The second argument is the id of the request.
ErrorShape = Callable[[ApiError, str], str]


def response(error: ApiError, text: str = "") -> web.Response:
    """Return the HTTP response for an error. text: its JSON; by default in the shape of OpenAI's API."""
    reason = "Client Closed Request" if error.status == 499 else None
    answer = web.Response(
        status=error.status,
        reason=reason,
        text=text or body(error),
        content_type="application/json",
        headers=error.headers,
    )
    if error.closes:
        answer.force_close()
    return answer


def reason(error: ApiError) -> str:
    """Return the label of an error in metrics: the code of its class. The codes of 400s share `invalid_request`."""
    return type(error).code or ("invalid_request" if error.status == 400 else "internal")


def reasons() -> tuple[str, ...]:
    """Return all labels that `reason` may return."""
    codes, classes = {"internal", "invalid_request"}, [ApiError]
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        if cls.code:
            codes.add(cls.code)
    return tuple(sorted(codes))


def of_http(error: web.HTTPException, method: str, path: str) -> ApiError:
    """Return the error of this API for an error of the HTTP framework."""
    if error.status == 404:
        return NotFound(f"There is nothing at {path[:200]}. GET /docs shows what this server has, and its methods.")
    if error.status == 405:
        allowed = error.headers.get("Allow", "")
        return MethodNotAllowed(
            f"{method[:20]} is not a method of {path[:200]}; use {allowed}.", headers={"Allow": allowed}
        )
    if error.status == 413:
        return BodyTooLarge(error.text or "The body is too large.")
    if 400 <= error.status < 500:
        return InvalidRequest(error.text or error.reason)
    return ApiError(error.reason)


def middleware(shape_of: Callable[[str], ErrorShape | None]) -> Middleware:
    """Return the middleware that turns every exception of a handler into an error response.

    shape_of: returns the shape of the API at a path; None for that of OpenAI's API.
    """

    @web.middleware
    async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            # The traceback has this frame, and the frames that have the body: a cycle would keep them until a
            # collection.
            refusal = error.with_traceback(None)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            refusal = of_http(error, request.method, request.path)
        except ConnectionError:
            raise  # the client has gone
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            refusal = unexpected(error, request)
            if request.writer.output_size > 0:
                raise ConnectionResetError("the answer has begun; it cannot become an error") from error
        request[REASON] = reason(refusal)
        shape = shape_of(request.path)
        return response(refusal, shape(refusal, request.get(REQUEST_ID, "")) if shape else "")

    return answer_errors


def unexpected(error: BaseException, request: web.Request) -> ApiError:
    """Return the error for a fault of this program: the log gets the traceback, the client gets the request id."""
    request_id = request.get(REQUEST_ID, "")
    log.error("request %s failed unexpectedly", request_id, exc_info=error, extra={"request_id": request_id})
    refusal = ApiError(f"Internal error. The log of the gateway has more about request {request_id}.", code="internal")
    request[REASON] = reason(refusal)
    return refusal
