"""The errors of the API: status, type and code of each class, and the JSON of a body."""

from __future__ import annotations

import json

import pytest

from quire.gateway.errors import api_errors
from quire.gateway.errors.api_errors import ApiError, InvalidRequest, ModelNotFound, body


def classes(cls: type[ApiError] = ApiError) -> list[type[ApiError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in classes(child))]


def test_a_body_has_all_four_fields() -> None:
    error = json.loads(body(InvalidRequest("n is wrong", param="n")))["error"]
    assert error == {"message": "n is wrong", "type": "invalid_request_error", "param": "n", "code": None}


def test_the_code_of_a_class_can_be_replaced_for_one_error() -> None:
    assert ModelNotFound("x").code == "model_not_found"
    assert ModelNotFound("x", code="other").code == "other"


@pytest.mark.parametrize("cls", [cls for cls in classes() if cls.__module__ == api_errors.__name__])
def test_a_class_says_whether_client_or_server_is_at_fault(cls: type[ApiError]) -> None:
    assert 400 <= cls.status < 600
    assert cls.type
    if cls.type == "invalid_request_error":
        assert cls.status < 500
