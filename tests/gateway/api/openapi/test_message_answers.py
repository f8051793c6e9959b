"""The schemas of the Messages API describe real answers, events and errors, and refuse others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from quire.gateway.api.messages.answer import TIERS
from quire.gateway.api.openapi.answers import SCHEMAS
from quire.gateway.api.openapi.message_answers import ERROR_TYPES
from quire.gateway.api.schema_parts import ref
from quire.gateway.errors.api_errors import ApiError
from quire.gateway.errors.message_errors import error_type
from tests.gateway.conftest import Start
from tests.support.gateway.agents import ANSWER, TEMPLATE, WEATHER, body, saying, stream_events
from tests.support.gateway.running import MODEL, RunningGateway, write_model

PATH = "/v1/messages"


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({**ref(name), "components": {"schemas": SCHEMAS}})


@pytest.fixture
async def server(start_gateway: Start, tmp_path: Path) -> RunningGateway:
    return await start_gateway(model=str(write_model(tmp_path / MODEL, chat_template=TEMPLATE)))


@pytest.mark.parametrize("more", [{}, {"thinking": {"type": "enabled", "display": "omitted"}}, {"max_tokens": 0}])
async def test_a_message_and_its_events(server: RunningGateway, more: dict[str, Any]) -> None:
    asked = body(tools=[WEATHER], **more) if "max_tokens" not in more else body() | more
    async with server.worker(saying(ANSWER)):
        whole = (await server.post(PATH, asked)).json
        events = [event.data for event in await stream_events(server, PATH, asked | {"stream": True})]
    check = validator("Message")
    check.validate(whole)
    assert [block["type"] for block in whole["content"]] == (
        [] if "max_tokens" in more else ["thinking", "text", "tool_use"]
    )
    for event in events:
        validator("MessageEvent").validate(event)
    assert {"message_start", "message_delta", "message_stop"} <= {event["type"] for event in events}
    for wrong in ({**whole, "more": 1}, {**whole, "stop_reason": "stop"}, {**whole, "content": [{"type": "image"}]}):
        assert not check.is_valid(wrong)
    assert not validator("MessageEvent").is_valid({**events[0], "type": "message_begin"})


async def test_a_stream_that_fails_ends_with_an_error(server: RunningGateway) -> None:
    async with server.worker(saying("Hello", reason="error")):
        events = [event.data for event in await stream_events(server, PATH, body(stream=True))]
    assert events[-1]["type"] == "error"
    validator("MessageEvent").validate(events[-1])


async def test_a_count_and_an_error(server: RunningGateway) -> None:
    count = {name: value for name, value in body().items() if name != "max_tokens"}
    validator("MessageCount").validate((await server.post(f"{PATH}/count_tokens", count)).json)
    for wrong in ({}, {**body(), "max_tokens": "many"}):
        reply = await server.post(PATH, wrong)
        assert reply.status == 400
        validator("MessageError").validate(reply.json)
        assert not validator("Error").is_valid(reply.json)


def subclasses(cls: type[ApiError]) -> set[type[ApiError]]:
    return {cls} | {found for child in cls.__subclasses__() for found in subclasses(child)}


def test_names_are_those_of_the_code() -> None:
    assert set(ERROR_TYPES) == {error_type(cls("x")) for cls in subclasses(ApiError)}
    assert set(SCHEMAS["MessageUsage"]["properties"]["service_tier"]["enum"]) == set(TIERS.values())
