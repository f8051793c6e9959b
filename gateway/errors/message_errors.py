"""Errors in the shape of the Messages API: `{"type": "error", "error": {"type", "message", "details"}, "request_id"}`.

`details.error_code` is the code of this server, and `details.param` the value that is wrong, if there is one. The
`anthropic` SDK shows both.
"""

from __future__ import annotations

import json

from quire.gateway.errors.api_errors import ApiError

PATH = "/v1/messages"

_TYPES = {
    402: "billing_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Each type of an error.
ERROR_TYPES = tuple(dict.fromkeys(("invalid_request_error", *_TYPES.values())))


def is_messages_path(path: str) -> bool:
    """Return True for the paths whose errors have this shape."""
    return path == PATH or path.startswith(PATH + "/")


def error_type(error: ApiError) -> str:
    """Return the type of an error, by its HTTP status."""
    return _TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "api_error")


def error_json(error: ApiError, request_id: str) -> str:
    """Return the JSON of an error; one line, ASCII only."""
    details = {"error_code": error.code, "param": error.param}
    return json.dumps(
        {
            "type": "error",
            "error": {
                "type": error_type(error),
                "message": error.message,
                "details": {name: value for name, value in details.items() if value is not None},
            },
            "request_id": request_id,
        }
    )
