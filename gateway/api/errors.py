"""What may go wrong with a call: an exception per cause, and the one place that renders them.

The body has the shape of the OpenAI API: `{"error": {"message", "type", "param", "code"}}`, always with all four.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

log = logging.getLogger("gateway")

# The id of an HTTP request: in the answer's headers, in the log, and in Redis.
REQUEST_ID = web.RequestKey("request_id", str)

# What it was refused for, if it was.
REASON = web.RequestKey("reason", str)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiError(Exception):
    """A call that ends with an error. `message` says what is wrong, with which value, and what to do instead."""

    status = 500
    type = "server_error"
    code: str | None = None
    # Whether the rest of what the client sends is of no use any more.
    closes = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else type(self).code
        self.headers = headers or {}


class InvalidRequest(ApiError):
    status = 400
    type = "invalid_request_error"


class NotFound(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(ApiError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class BodyTimeout(ApiError):
    status = 408
    type = "invalid_request_error"
    code = "body_timeout"
    closes = True


class IdempotencyKeyReused(ApiError):
    status = 409
    type = "invalid_request_error"
    code = "idempotency_conflict"


class BodyTooLarge(ApiError):
    status = 413
    type = "invalid_request_error"
    code = "body_too_large"
    closes = True


class UnsupportedMedia(ApiError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class ExpectationFailed(ApiError):
    status = 417
    type = "invalid_request_error"
    code = "expectation_failed"


class HeadersTooLarge(ApiError):
    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class QueueIsFull(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class Cancelled(ApiError):
    """Somebody other than the client stopped the request. 499 is what proxies use for a request that was given up."""

    status = 499
    type = "server_error"
    code = "cancelled"


class GenerationFailed(ApiError):
    status = 500
    type = "server_error"
    code = "generation_failed"


class BrokerDown(ApiError):
    status = 503
    type = "server_error"
    code = "broker_unavailable"


class DeadlinePassed(ApiError):
    status = 504
    type = "server_error"
    code = "deadline_exceeded"


def body(error: ApiError) -> str:
    """The JSON of an error; one line, ASCII only."""
    return json.dumps(
        {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}
    )


def response(error: ApiError) -> web.Response:
    reason = "Client Closed Request" if error.status == 499 else None
    answer = web.Response(
        status=error.status, reason=reason, text=body(error), content_type="application/json", headers=error.headers
    )
    if error.closes:
        answer.force_close()
    return answer


def reason(error: ApiError) -> str:
    """Why something was refused, in one of a few words: that of the class, since codes of 400s are many."""
    return type(error).code or ("invalid_request" if error.status == 400 else "internal")


def reasons() -> tuple[str, ...]:
    """All that `reason` may say."""
    found, classes = {"internal", "invalid_request"}, [ApiError]
    while classes:
        one = classes.pop()
        classes += one.__subclasses__()
        if one.code:
            found.add(one.code)
    return tuple(sorted(found))


def of_http(error: web.HTTPException, method: str, path: str) -> ApiError:
    """The error of this API that stands for one of the HTTP framework's."""
    if error.status == 404:
        return NotFound(f"There is nothing at {path[:200]}. This server has /v1/chat/completions and /v1/completions.")
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


@web.middleware
async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns every exception of a handler into the answer that clients of the OpenAI API know."""
    try:
        return await handler(request)
    except ApiError as error:
        refusal = error
    except web.HTTPException as error:
        if error.status < 400:
            raise
        refusal = of_http(error, request.method, request.path)
    except ConnectionError:
        raise  # the client has gone
    except Exception as error:
        refusal = unexpected(error, request)
        if request.writer.output_size > 0:
            raise ConnectionResetError("the answer has begun; it cannot become an error") from error
    request[REASON] = reason(refusal)
    return response(refusal)


def unexpected(error: Exception, request: web.Request) -> ApiError:
    """A fault of this program: the traceback goes to the log, the client gets the id to ask about."""
    request_id = request.get(REQUEST_ID, "")
    log.error("request %s failed unexpectedly", request_id, exc_info=error, extra={"request_id": request_id})
    refusal = ApiError(f"Internal error. The log of the gateway has more about request {request_id}.", code="internal")
    request[REASON] = reason(refusal)
    return refusal
