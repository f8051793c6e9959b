"""The form of a line of a batch, and the lines of the output files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.gateway.batches.batch_store import LinePlace
from quire.gateway.batches.jsonl import RawLine
from quire.gateway.batches.line import BatchLine, answer_line, call_id_of, error_line, read_line, unrun_line
from quire.gateway.errors.api_errors import InvalidRequest, refused

URL = "/v1/chat/completions"
GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": URL, "body": {"model": "m"}}


def parse(value: Any, *, is_too_long: bool = False) -> BatchLine:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return read_line(RawLine(LinePlace(100, 7), data, is_too_long), URL, 1000)


def test_a_line() -> None:
    assert parse(GOOD) == BatchLine(7, "a", {"model": "m"})


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"custom_id": ""}, "custom_id", "invalid_value"),
        ({"custom_id": 5}, "custom_id", "invalid_value"),
        ({"custom_id": "x" * 513}, "custom_id", "invalid_value"),
        ({"method": "GET"}, "method", "invalid_value"),
        ({"url": "/v1/completions"}, "url", "invalid_value"),
        ({"body": []}, "body", "invalid_value"),
        ({"more": 1}, "more", "invalid_value"),
        ({"body": {"stream": True}}, "stream", "invalid_value"),
        ({"body": {"background": True}}, "background", "invalid_value"),
        ({"body": {"store": True}}, "store", "invalid_value"),
        ({"body": {"priority": "interactive"}}, "priority", "invalid_value"),
        ({"body": {"priority": 0}}, "priority", "invalid_value"),
        ({"body": {"service_tier": "priority"}}, "service_tier", "invalid_value"),
        ({"body": {"service_tier": []}}, "service_tier", "invalid_value"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(change: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse({**GOOD, **change})
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize("name", GOOD)
def test_every_field_is_required(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} is missing") as caught:
        parse({key: value for key, value in GOOD.items() if key != name})
    assert caught.value.code == "missing_required_parameter"


@pytest.mark.parametrize(
    "body", [{"stream": False}, {"store": False}, {"priority": "batch"}, {"priority": 5}, {"service_tier": "flex"}]
)
def test_values_that_ask_for_what_a_line_has_are_accepted(body: dict[str, Any]) -> None:
    assert parse({**GOOD, "body": body}).body == body


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"a":NaN}', b'{"a":1,"a":2}', b"\xff", b"null"])
def test_json_is_strict(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"[Ll]ine|key|NaN"):
        parse(data)


def test_a_line_that_is_too_long_names_the_setting() -> None:
    with pytest.raises(InvalidRequest, match="--max-body-bytes"):
        parse(GOOD, is_too_long=True)


def test_the_id_of_a_call_follows_from_batch_and_line() -> None:
    ids = {call_id_of(batch, number) for batch in ("a", "b") for number in range(100)}
    assert len(ids) == 200
    assert all(len(one) == 32 for one in ids)
    assert call_id_of("a", 5) == call_id_of("a", 5)


def test_lines_of_the_output_files_are_one_line_each() -> None:
    name = 'quote " line\n end \u2028'
    answer = "".join(answer_line("id", name, ['{"a":', "1}"]))
    error = error_line("id", name, refused("x", "bad\nvalue"))
    unrun = unrun_line("id", name, "batch_expired", "too late")
    for text in (answer, error, unrun):
        assert text.endswith("\n")
        assert text.count("\n") == 1
        assert json.loads(text)["custom_id"] == name
        assert json.loads(text)["id"] == "batch_req_id"
    assert json.loads(answer)["response"] == {"status_code": 200, "request_id": "id", "body": {"a": 1}}
    assert json.loads(error)["response"]["body"]["error"]["message"] == "bad\nvalue"
    assert (json.loads(unrun)["response"], json.loads(unrun)["error"]["code"]) == (None, "batch_expired")
