"""The Messages API over HTTP: its errors and headers, also where no call is read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from tests.support.gateway.agents import WEATHER, body, saying
from tests.support.gateway.running import MODEL, Reply, RunningGateway, raw_request

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"


@pytest.fixture
async def server(start_gateway: Any) -> AsyncIterator[RunningGateway]:
    """A gateway whose queue must still be untouched when the test is over."""
    gateway = await start_gateway(max_body_bytes=100_000, body_timeout_s=0.2, max_tools=2, max_schema_bytes=300)
    yield gateway
    assert await gateway.accepted() == 0


def error_of(reply: Reply) -> dict[str, Any]:
    """The error in an answer, whose shape is checked."""
    assert list(reply.json) == ["type", "error", "request_id"]
    assert reply.json["type"] == "error"
    assert reply.json["request_id"] == reply.headers["request-id"]
    error: dict[str, Any] = reply.json["error"]
    assert list(error) == ["type", "message", "details"]
    return error


CASES: dict[str, tuple[bytes, int, str, str]] = {
    "malformed JSON": (
        raw_request("POST", PATH, b"{"),
        400,
        "invalid_request_error",
        "invalid_json",
    ),
    "malformed JSON of a count": (raw_request("POST", COUNT, b"[]"), 400, "invalid_request_error", "invalid_json"),
    "a wrong method": (raw_request("GET", PATH), 405, "invalid_request_error", "method_not_allowed"),
    "an unknown path": (raw_request("POST", PATH + "/batches", b"{}"), 404, "not_found_error", "not_found"),
    "an unknown stream": (raw_request("GET", PATH + "/msg_0/stream"), 404, "not_found_error", "not_found"),
    "an unknown call": (raw_request("POST", PATH + "/msg_0/cancel", b"{}"), 404, "not_found_error", "not_found"),
    "a large body": (raw_request("POST", PATH, b" " * 100_001), 413, "request_too_large", "body_too_large"),
    "another media type": (
        raw_request("POST", PATH, b"{}", {"Content-Type": "text/plain"}),
        415,
        "invalid_request_error",
        "unsupported_media_type",
    ),
    "an unknown expectation": (
        raw_request("POST", PATH, b"{}", {"Expect": "tea"}),
        417,
        "invalid_request_error",
        "expectation_failed",
    ),
    "a body that does not arrive": (
        raw_request("POST", PATH, b"", {"Content-Length": "5"}),
        408,
        "invalid_request_error",
        "body_timeout",
    ),
    "a wrong version": (
        raw_request("POST", PATH, json.dumps(body()).encode(), {"anthropic-version": "new"}),
        400,
        "invalid_request_error",
        "invalid_value",
    ),
    "a wrong beta": (
        raw_request("POST", COUNT, b"{}", {"anthropic-beta": "two words"}),
        400,
        "invalid_request_error",
        "invalid_value",
    ),
    "another model": (
        raw_request("POST", PATH, json.dumps(body(model="claude")).encode()),
        404,
        "not_found_error",
        "model_not_found",
    ),
    "another model of a count": (
        raw_request("POST", COUNT, json.dumps({"model": "claude", "messages": body()["messages"]}).encode()),
        404,
        "not_found_error",
        "model_not_found",
    ),
    "a wrong parameter": (
        raw_request("POST", PATH, json.dumps(body(temperature=2)).encode()),
        400,
        "invalid_request_error",
        "invalid_value",
    ),
}


async def test_errors_before_a_call_is_accepted(server: RunningGateway) -> None:
    for data, status, kind, code in CASES.values():
        reply = await server.send(data)
        error = error_of(reply)
        assert (reply.status, error["type"], error["details"]["error_code"]) == (status, kind, code)


async def test_other_paths_keep_the_shape_of_openai(server: RunningGateway) -> None:
    assert (await server.get("/v1/nothing")).error["code"] == "not_found"
    reply = await server.post("/v1/chat/completions", b"{")
    assert reply.error["code"] == "invalid_json"
    assert "request-id" not in reply.headers


async def test_a_tool_that_is_refused_is_named(server: RunningGateway) -> None:
    for tools, param, says in [
        ([{**WEATHER, "name": f"t{n}"} for n in range(3)], "tools", "at most 2"),
        (
            [{"type": "web_search_20250305"}, {**WEATHER, "input_schema": {"type": "object", "title": "x" * 300}}],
            "tools[1].input_schema",
            "of the tool get_weather",
        ),
        (
            [{**WEATHER, "strict": True, "input_schema": {"type": "object", "properties": {"a": {"type": "x"}}}}],
            "tools[0].input_schema",
            "cannot be followed",
        ),
    ]:
        error = error_of(await server.post(PATH, body(tools=tools)))
        assert error["details"]["param"] == param
        assert says in error["message"]


async def test_the_sdk_raises_the_class_of_each_error(server: RunningGateway) -> None:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="x", max_retries=0, timeout=60) as client:
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(**body(model="claude"))
        with pytest.raises(anthropic.BadRequestError) as wrong:
            await client.messages.create(**body(max_tokens=-1))
    assert missing.value.type == "not_found_error"
    assert missing.value.error_code == "model_not_found"
    assert wrong.value.type == "invalid_request_error"
    assert wrong.value.api_message == "max_tokens must be an integer from 0 to 2000000, not -1."
    assert wrong.value.request_id


async def test_the_headers_of_an_answer(gateway: RunningGateway) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "x-api-key": "sk-secret",
    }
    async with gateway.worker(saying("x")):
        reply = await gateway.post(PATH, body(tools=[search]), **headers)
        plain = await gateway.post(PATH, body())
    assert reply.json["id"] == "msg_" + reply.headers["request-id"]
    assert reply.headers["x-quire-no-effect"] == "claude-code-20250219, tools.web_search_20250305"
    assert "x-quire-no-effect" not in plain.headers
    count = await gateway.post(COUNT, {"model": MODEL, "messages": body()["messages"], "tools": [search]}, **headers)
    assert count.headers["x-quire-no-effect"] == reply.headers["x-quire-no-effect"]
    assert count.json["input_tokens"] > 0


async def test_a_stream_has_the_headers_too(gateway: RunningGateway) -> None:
    async with gateway.worker(saying("x")), gateway.stream(PATH, body(stream=True, diagnostics={})) as stream:
        headers = stream.response.headers
        assert headers["x-quire-no-effect"] == "diagnostics"
        assert len(headers["request-id"]) == 32


async def test_a_tool_whose_schema_is_loosened_is_named(gateway: RunningGateway) -> None:
    hard = {**WEATHER, "input_schema": {"type": "object", "properties": {"a": {"type": "strange"}}}}
    async with gateway.worker(saying("x")):
        reply = await gateway.post(PATH, body(tools=[{"type": "web_search_20250305", "name": "w"}, hard]))
    assert reply.status == 200, reply.json
    assert reply.headers["x-quire-no-effect"] == "tools.web_search_20250305, tools[1].input_schema"
