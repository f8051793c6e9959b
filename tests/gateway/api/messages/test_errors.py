"""Errors in the shape of the Messages API."""

from __future__ import annotations

import json

import pytest

from quire.gateway.api import errors
from quire.gateway.api.messages.errors import error_json, error_type, is_messages_path

TYPES = {
    errors.ApiKeyWrong: "authentication_error",
    errors.BudgetSpent: "billing_error",
    errors.PermissionDenied: "permission_error",
    errors.RateLimited: "rate_limit_error",
    errors.InvalidRequest: "invalid_request_error",
    errors.AdminKeyWrong: "authentication_error",
    errors.NotFound: "not_found_error",
    errors.ModelNotFound: "not_found_error",
    errors.MethodNotAllowed: "invalid_request_error",
    errors.BodyTimeout: "invalid_request_error",
    errors.IdempotencyKeyReused: "conflict_error",
    errors.AdapterExists: "conflict_error",
    errors.Parked: "conflict_error",
    errors.BodyTooLarge: "request_too_large",
    errors.FileTooLarge: "request_too_large",
    errors.StorageIsFull: "request_too_large",
    errors.FilesAreOff: "not_found_error",
    errors.FileInUse: "conflict_error",
    errors.TooManyBatches: "rate_limit_error",
    errors.StorageDown: "overloaded_error",
    errors.UnsupportedMedia: "invalid_request_error",
    errors.ExpectationFailed: "invalid_request_error",
    errors.HeadersTooLarge: "invalid_request_error",
    errors.ParkingIsFull: "rate_limit_error",
    errors.QueueIsFull: "rate_limit_error",
    errors.Cancelled: "api_error",
    errors.GenerationFailed: "api_error",
    errors.BrokerDown: "overloaded_error",
    errors.NoWorkers: "overloaded_error",
    errors.DeadlinePassed: "timeout_error",
    errors.ApiError: "api_error",
}


def all_errors() -> list[type[errors.ApiError]]:
    found, classes = [], [errors.ApiError]
    while classes:
        cls = classes.pop()
        if cls.__module__ == errors.__name__:
            found.append(cls)
        classes += cls.__subclasses__()
    return found


def test_every_error_has_a_type() -> None:
    assert {cls: error_type(cls("x")) for cls in all_errors()} == TYPES


def test_the_shape() -> None:
    error = errors.refused("max_tokens", "max_tokens is required.", code="missing_required_parameter")
    assert json.loads(error_json(error, "abc")) == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "max_tokens is required.",
            "details": {"error_code": "missing_required_parameter", "param": "max_tokens"},
        },
        "request_id": "abc",
    }
    assert json.loads(error_json(errors.ApiError("x"), "abc"))["error"]["details"] == {}


def test_the_json_is_one_line_of_ascii() -> None:
    text = error_json(errors.ApiError("line\n\u2028\u00e9"), "abc")
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
