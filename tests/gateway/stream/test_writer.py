"""The writer sends answers at once, in order and completely. A fault or a slow client ends only one answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import aiohttp
import pytest

from quire.gateway.stream.writer import PART_CHARACTERS, EventRenderer
from quire.shared.messages import StepItem
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit, endless
from tests.support.gateway.running import MODEL, RunningGateway, chat_body, raw_request, read_reply, tokens


async def test_a_fault_of_the_gateway_in_the_middle_of_a_stream_is_its_last_event(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = EventRenderer.feed

    def broken(events: EventRenderer, items: Sequence[StepItem]) -> str:
        if any(item.start >= 3 for item in items):
            raise RuntimeError("a secret detail")
        return feed(events, items)

    monkeypatch.setattr(EventRenderer, "feed", broken)
    async with gateway.worker(endless(65)) as worker:
        reader, writer = await gateway.connect(
            raw_request("POST", "/v1/chat/completions", json.dumps(chat_body(stream=True)).encode())
            + raw_request("GET", "/healthz")
        )
        stream = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 10)
        # The connection still serves the next request.
        assert (await asyncio.wait_for(read_reply(reader), 10)).json == {"status": "ok"}
        writer.close()
        assert await asyncio.wait_for(worker.cancelled.get(), 10) == worker.claimed[0].id
    assert stream.count(b"HTTP/1.1") == 1
    last = stream.decode().split("data: ")[-1]
    assert json.loads(last.split("\n")[0])["error"]["code"] == "internal"
    assert "secret" not in last


async def test_a_fault_of_the_gateway_in_the_middle_of_a_long_answer_cuts_it(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pieces(*arguments: Any) -> Iterator[str]:
        yield '{"choices":['
        yield PART_CHARACTERS * " "
        raise RuntimeError

    monkeypatch.setattr("quire.gateway.api.chat.ChatAnswer.full", pieces)
    async with gateway.worker(emit(tokens("a"))):
        reader, writer = await gateway.connect(
            raw_request("POST", "/v1/chat/completions", json.dumps(chat_body()).encode())
        )
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
    assert answer.count(b"HTTP/1.1") == 1
    assert not answer.endswith(b"0\r\n\r\n")


async def test_headers_come_as_soon_as_the_request_is_accepted(gateway: RunningGateway) -> None:
    # Without a worker no token comes: this request would hang if the headers waited for the first token.
    async with aiohttp.ClientSession() as session:
        url = gateway.url + "/v1/chat/completions"
        async with session.post(url, json=chat_body(stream=True)) as response:
            assert response.status == 200
            assert len(response.headers["x-request-id"]) == 32
            assert await gateway.queued() == 1


async def test_a_silent_stream_gets_comments(start_gateway: Start) -> None:
    gateway = await start_gateway(keepalive_s=0.1)
    async with aiohttp.ClientSession() as session:
        url = gateway.url + "/v1/completions"
        async with session.post(url, json={"model": MODEL, "prompt": "x", "stream": True}) as response:
            assert await response.content.readline() == b": keep-alive\n"
