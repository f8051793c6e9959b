"""The errors of a call: one exception per cause, and their JSON.

The body has the shape of the OpenAI API: `{"error": {"message", "type", "param", "code"}}`, always with all four.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from aiohttp import web

from quire.shared.config.validators import InvalidValue, wrong

# The id of an HTTP request: in the answer's headers, in the log, and in Redis.
REQUEST_ID = web.RequestKey("request_id", str)
# The hash of the user that a request names, for the log, and the names of its parameters without effect, for a header.
USER_HASH = web.RequestKey("user_hash", str)
NO_EFFECT_NAMES = web.RequestKey("no_effect_names", str)


class ApiError(Exception):
    """A call that ends with an error. `message` names the value that is wrong, and tells what to do instead."""

    status = 500
    type = "server_error"
    code: str | None = None
    # True if the connection closes, because the rest of the client's body is not read.
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


class ImageTimeout(InvalidRequest):
    """The host of an image has not sent it in time."""

    code = "image_timeout"


class ContextExceeded(InvalidRequest):
    """A prompt, perhaps with its answer, that is longer than the context.

    context: in tokens. prompt_tokens: the length of the prompt; if it was not tokenized, the smallest possible one.
    """

    context = 0
    prompt_tokens = 0


class ApiKeyWrong(ApiError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class BudgetSpent(ApiError):
    status = 402
    type = "insufficient_quota"
    code = "insufficient_quota"


class PermissionDenied(ApiError):
    """The API key is valid, but its limits do not allow what the call asks for."""

    status = 403
    type = "permission_error"
    code = "permission_denied"


class AdminKeyWrong(ApiError):
    status = 401
    type = "authentication_error"
    code = "invalid_admin_key"


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


class AdapterExists(ApiError):
    status = 409
    type = "invalid_request_error"
    code = "adapter_exists"


class Parked(ApiError):
    """The call is parked: no worker computes it until it is unparked."""

    status = 409
    type = "invalid_request_error"
    code = "parked"


class BodyTooLarge(ApiError):
    status = 413
    type = "invalid_request_error"
    code = "body_too_large"
    closes = True


class FileTooLarge(BodyTooLarge):
    code = "file_too_large"


class StorageIsFull(BodyTooLarge):
    """The files of the caller, or all files, take as much as the server allows."""

    code = "storage_full"


class FilesAreOff(NotFound):
    """The server has no storage for files."""

    code = "files_off"


class FileInUse(ApiError):
    status = 409
    type = "invalid_request_error"
    code = "file_in_use"


class TooManyBatches(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "too_many_batches"


class StorageDown(ApiError):
    status = 503
    type = "server_error"
    code = "storage_unavailable"


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


class RateLimited(ApiError):
    """A limit of the API key, its project or its organisation is reached."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class QueueIsFull(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class DeadlineOutOfReach(ApiError):
    """The answer would end after the deadline, by the queue and by what the workers have learnt."""

    status = 429
    type = "rate_limit_error"
    code = "deadline_unreachable"


class MemoryIsFull(ApiError):
    """Stored, background and parked calls take as much memory as they may."""

    status = 429
    type = "rate_limit_error"
    code = "stored_bytes_full"


class ParkingIsFull(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "parking_full"


class Cancelled(ApiError):
    """Another client or an operator stopped the request. Proxies use 499 for requests that were given up."""

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


class ServerBusy(ApiError):
    """There is no memory for the body now, which is not read then, or no process for an image."""

    status = 503
    type = "server_error"
    code = "server_busy"
    closes = True


class ShuttingDown(ApiError):
    """The gateway ends before the call does."""

    status = 503
    type = "server_error"
    code = "shutting_down"


class NoWorkers(ApiError):
    status = 503
    type = "server_error"
    code = "no_workers"


class ModelNotLoaded(NoWorkers):
    """The host of the model cannot load it. The text has the reason."""

    code = "model_not_loaded"


class DeadlinePassed(ApiError):
    status = 504
    type = "server_error"
    code = "deadline_exceeded"


# Each value of `type` in the JSON of an error.
ERROR_TYPES = sorted({ApiError.type, *(kind.type for kind in ApiError.__subclasses__())})


def body(error: ApiError) -> str:
    """Return the JSON of an error; one line, ASCII only."""
    return json.dumps(
        {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}
    )


def refused(param: str | None, message: str, *, code: str | None = None) -> InvalidRequest:
    """Return the error for a value that cannot be honoured; its `code` is by default invalid_value."""
    return InvalidRequest(message, param=param, code=code or "invalid_value")


def conversation_locked() -> InvalidRequest:
    """Return the error for a conversation that another response continues, with the status and code of OpenAI's API."""
    return refused(
        "conversation",
        "Another response continues this conversation, or its items have just changed. Wait for the end of that "
        "response, or cancel it, and try again.",
        code="conversation_locked",
    )


def too_long(param: str, context: int, prompt_tokens: int, however: str, remedy: str) -> ContextExceeded:
    """Return the error for a prompt over the context, with the words by which clients recognise a full context."""
    message = f"This model's maximum context length is {context} tokens. However, {however}. {remedy}"
    error = ContextExceeded(message, param=param, code="context_length_exceeded")
    error.context, error.prompt_tokens = context, prompt_tokens
    return error


def invalid(param: str, expected: str, value: Any) -> InvalidRequest:
    """Return the error for a value of another type or range than `expected`."""
    return of_check(wrong(param, expected, value))


def of_check(error: InvalidValue) -> InvalidRequest:
    """Return the error for a value that a check of `quire.shared.config.validators` refuses."""
    return refused(error.name, f"{error}.")


def only(name: str, value: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse keys of an object that are not known. Raises InvalidRequest."""
    for key in value:
        if key not in known:
            raise refused(
                f"{name}.{key[:80]}",
                f"{name}.{key[:80]} is not supported; {name} has {', '.join(known)} only.",
                code="unsupported_parameter",
            )
