"""Schemas are tried in processes of their own; the results are kept."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from quire.gateway.model import schema_check
from tests.gateway.conftest import Start
from tests.gateway.running import RunningGateway, chat_body

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"enum": ["ä", 1]}}, "required": ["b"]}


def wanted(schema: Any = SCHEMA, **changes: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema} | changes}


@pytest.fixture
async def server(start_gateway: Start) -> AsyncIterator[RunningGateway]:
    """A gateway whose queue must still be untouched when the test is over."""
    gateway = await start_gateway()
    yield gateway
    assert await gateway.accepted() == 0


async def test_who_asks_for_a_schema_that_is_known_waits_for_no_trial_of_another(
    server: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    tried: list[tuple[str, str]] = []

    def try_out(schema: str) -> str:
        tried.append((schema, threading.current_thread().name))
        has_begun.set()
        may_end.wait(10)
        return "so it is"

    known = wanted({"type": "strin"})
    assert (await server.post(CHAT, chat_body(response_format=known))).status == 400
    monkeypatch.setattr(schema_check, "try_out", try_out)
    others = [
        asyncio.create_task(server.post(CHAT, chat_body(response_format=wanted({"const": number}))))
        for number in range(8)
    ]
    try:
        await asyncio.to_thread(has_begun.wait, 10)
        assert "Invalid type" in (await server.post(CHAT, chat_body(response_format=known))).error["message"]
        assert not any(other.done() for other in others)
    finally:
        may_end.set()
    for other in others:
        assert "so it is" in (await other).error["message"]
    assert len(tried) == 8
    assert all(name.startswith("schema") for _, name in tried)


async def test_the_schemas_that_are_known_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(schema_check, "try_out", lambda schema: tried.append(schema) or "")
    some = schema_check.Schemas(1)
    for number in range(schema_check.KEPT):
        await some.check(str(number))
        await some.check("0")
    assert len(some._known) == schema_check.KEPT
    await some.check(str(schema_check.KEPT))
    await some.check("0")
    assert tried == [str(number) for number in range(schema_check.KEPT + 1)]
    some.close()


async def test_a_schema_that_got_no_time_on_a_busy_machine_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    some = schema_check.Schemas(1)
    with monkeypatch.context() as patch:
        patch.setattr(schema_check, "TIMEOUT_S", 0.0)
        with pytest.raises(schema_check.SchemaError, match="takes too long"):
            await some.check('{"const": 1}')
    await some.check('{"const": 1}')
    some.close()
