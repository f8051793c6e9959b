"""Errors in the shape of the Messages API."""

from __future__ import annotations

import json

import pytest

from quire.gateway.errors import api_errors
from quire.gateway.errors.message_errors import error_json, error_type, is_messages_path

TYPES = {
    api_errors.ApiKeyWrong: "authentication_error",
    api_errors.BudgetSpent: "billing_error",
    api_errors.PermissionDenied: "permission_error",
    api_errors.RateLimited: "rate_limit_error",
    api_errors.InvalidRequest: "invalid_request_error",
    api_errors.AdminKeyWrong: "authentication_error",
    api_errors.NotFound: "not_found_error",
    api_errors.ModelNotFound: "not_found_error",
    api_errors.MethodNotAllowed: "invalid_request_error",
    api_errors.ContextExceeded: "invalid_request_error",
    api_errors.BodyTimeout: "invalid_request_error",
    api_errors.IdempotencyKeyReused: "conflict_error",
    api_errors.AdapterExists: "conflict_error",
    api_errors.Parked: "conflict_error",
    api_errors.BodyTooLarge: "request_too_large",
    api_errors.FileTooLarge: "request_too_large",
    api_errors.StorageIsFull: "request_too_large",
    api_errors.FilesAreOff: "not_found_error",
    api_errors.FileInUse: "conflict_error",
    api_errors.TooManyBatches: "rate_limit_error",
    api_errors.StorageDown: "overloaded_error",
    api_errors.UnsupportedMedia: "invalid_request_error",
    api_errors.ExpectationFailed: "invalid_request_error",
    api_errors.HeadersTooLarge: "invalid_request_error",
    api_errors.ParkingIsFull: "rate_limit_error",
    api_errors.QueueIsFull: "rate_limit_error",
    api_errors.Cancelled: "api_error",
    api_errors.GenerationFailed: "api_error",
    api_errors.MemoryIsFull: "rate_limit_error",
    api_errors.BrokerDown: "overloaded_error",
    api_errors.NoWorkers: "overloaded_error",
    api_errors.ServerBusy: "overloaded_error",
    api_errors.ShuttingDown: "overloaded_error",
    api_errors.DeadlinePassed: "timeout_error",
    api_errors.ApiError: "api_error",
}


def all_errors() -> list[type[api_errors.ApiError]]:
    found, classes = [], [api_errors.ApiError]
    while classes:
        cls = classes.pop()
        if cls.__module__ == api_errors.__name__:
            found.append(cls)
        classes += cls.__subclasses__()
    return found


def test_every_error_has_a_type() -> None:
    assert {cls: error_type(cls("x")) for cls in all_errors()} == TYPES


def test_the_shape() -> None:
    error = api_errors.refused("max_tokens", "max_tokens is required.", code="missing_required_parameter")
    assert json.loads(error_json(error, "abc")) == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "max_tokens is required.",
            "details": {"error_code": "missing_required_parameter", "param": "max_tokens"},
        },
        "request_id": "abc",
    }
    assert json.loads(error_json(api_errors.ApiError("x"), "abc"))["error"]["details"] == {}


def test_the_json_is_one_line_of_ascii() -> None:
    text = error_json(api_errors.ApiError("line\n\u2028\u00e9"), "abc")
    assert text.isascii()
    assert "\n" not in text


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/messages", True),
        ("/v1/messages/count_tokens", True),
        ("/v1/messages/", True),
        ("/v1/messages/msg_1/stream", True),
        ("/v1/messagesx", False),
        ("/v1/chat/completions", False),
        ("/", False),
    ],
)
def test_the_paths(path: str, expected: bool) -> None:
    assert is_messages_path(path) is expected
