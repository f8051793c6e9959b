"""The contract of every dialect: streams, whole answers, resumed streams, cancellation, errors and limits.

Log probabilities have forms of their own in each dialect; `api/test_logprobs.py` has them.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from quire.shared.protocol.messages import Delta, GenerationRequest, Outcome
from tests.gateway.conftest import Start
from tests.gateway.server.test_main import running, settings
from tests.support.gateway.fake_worker import FakeWorker, Script, Steps, endless
from tests.support.gateway.running import MODEL, TIMEOUT, RunningGateway, chat_body, tokens, until

TEXT = "Hello 😀, how are you?"
HALT = 6


@dataclass(frozen=True)
class Dialect:
    """How a client calls, finds the id of an answer, and reads texts. resume: path of a stream, and how it is taken up.

    piece: the text in the data of an event. text: the text of a whole answer.
    """

    path: str
    body: dict[str, Any]
    id_of: Callable[[Any], str]
    resume: str
    piece: Callable[[Any], str]
    text: Callable[[Any], str]


DIALECTS = {
    "chat": Dialect(
        "/v1/chat/completions",
        chat_body(),
        lambda data: data["id"],
        "{path}/{id}/stream",
        lambda data: data["choices"][0]["delta"].get("content") or "" if data["choices"] else "",
        lambda answer: answer["choices"][0]["message"]["content"],
    ),
    "completion": Dialect(
        "/v1/completions",
        {"model": MODEL, "prompt": "Hello"},
        lambda data: data["id"],
        "{path}/{id}/stream",
        lambda data: data["choices"][0]["text"] if data["choices"] else "",
        lambda answer: answer["choices"][0]["text"],
    ),
    "response": Dialect(
        "/v1/responses",
        {"model": MODEL, "input": "Hello"},
        lambda data: data["response"]["id"],
        "{path}/{id}?stream=true",
        lambda data: data["delta"] if data["type"] == "response.output_text.delta" else "",
        lambda answer: answer["output"][0]["content"][0]["text"],
    ),
    "message": Dialect(
        "/v1/messages",
        {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": "Hello"}]},
        lambda data: data["message"]["id"],
        "{path}/{id}/stream",
        lambda data: data["delta"].get("text", "") if data["type"] == "content_block_delta" else "",
        lambda answer: answer["content"][0]["text"],
    ),
}
EACH = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)


@dataclass(frozen=True)
class Event:
    id: str
    data: Any


class Events:
    """The events of a stream: of a new call, or of one that is taken up after the event `after`."""

    def __init__(self, url: str, dialect: Dialect, call: str = "", after: str = "") -> None:
        self._url, self._dialect, self._call, self._after = url, dialect, call, after

    async def __aenter__(self) -> Events:
        dialect, headers = self._dialect, {"Accept": "text/event-stream"}
        if self._after:
            headers["Last-Event-ID"] = self._after
        self._session = aiohttp.ClientSession(headers=headers, timeout=TIMEOUT)
        if self._call:
            path = dialect.resume.format(path=dialect.path, id=self._call)
            self._response = await self._session.get(self._url + path)
        else:
            self._response = await self._session.post(self._url + dialect.path, json={**dialect.body, "stream": True})
        assert self._response.status == 200, await self._response.text()
        self._iterator = self._read()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._response.close()
        await self._session.close()

    async def _read(self) -> AsyncIterator[Event]:
        fields: dict[str, str] = {}
        async for line in self._response.content:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name:
                fields[name] = value
            elif "data" in fields:
                if fields["data"] != "[DONE]":
                    yield Event(fields.get("id", ""), json.loads(fields["data"]))
                fields = {}

    async def begin(self) -> list[Event]:
        """Return the first events, to the third character of the text."""
        events = [await anext(self._iterator)]
        while len(text_of(self._dialect, events)) < 3:
            events.append(await anext(self._iterator))
        return events

    async def rest(self) -> list[Event]:
        return [event async for event in self._iterator]


def text_of(dialect: Dialect, events: list[Event]) -> str:
    return "".join(dialect.piece(event.data) for event in events)


async def resumed(url: str, dialect: Dialect, call: str, after: str = "") -> list[Event]:
    async with Events(url, dialect, call, after) as stream:
        return await stream.rest()


def halting(go_on: asyncio.Event) -> Script:
    async def script(request: GenerationRequest) -> Steps:
        for index, token in enumerate(tokens(TEXT)):
            if index == HALT:
                await go_on.wait()
            yield (Delta(0, (token,)),), None
        yield (Delta(0, (2,), "stop"),), Outcome("stop")

    return script


@EACH
async def test_a_stream_is_the_whole_answer_and_resumes_after_each_event(
    start_gateway: Start, dialect: Dialect
) -> None:
    here, there = await start_gateway(), await start_gateway()
    go_on = asyncio.Event()
    async with here.worker(halting(go_on)):
        async with Events(here.url, dialect) as stream:
            begun = await stream.begin()
            call = dialect.id_of(begun[0].data)
            early = asyncio.create_task(resumed(there.url, dialect, call, begun[-1].id))
            go_on.set()
            whole = [*begun, *await stream.rest()]
        assert text_of(dialect, whole) == TEXT
        assert await early == whole[len(begun) :]
        assert await resumed(there.url, dialect, call) == whole
        for index, event in enumerate(whole[:-1]):
            assert await resumed((here, there)[index % 2].url, dialect, call, event.id) == whole[index + 1 :]
        assert dialect.text((await here.post(dialect.path, dialect.body)).json) == TEXT


@pytest.mark.slow
async def test_a_gateway_that_is_killed_in_mid_stream_is_replaced(redis_url: str, model_folder: Path) -> None:
    """Also a response in the background, which no client listens to, survives its gateway."""
    go_on = asyncio.Event()
    given = settings(redis_url, model_folder)
    with running(given) as (first, here, _), running(given) as (second, there, _):
        async with FakeWorker(redis_url, MODEL, halting(go_on)).running(), aiohttp.ClientSession() as session:
            response = DIALECTS["response"]
            quiet = {**response.body, "background": True}
            reply = await (await session.post(here + response.path, json=quiet)).json()
            async with AsyncExitStack() as stack:
                begun = {}
                for name, dialect in DIALECTS.items():
                    begun[name] = await (await stack.enter_async_context(Events(here, dialect))).begin()
                first.kill()
            go_on.set()
            for name, dialect in DIALECTS.items():
                call = dialect.id_of(begun[name][0].data)
                rest = await resumed(there, dialect, call, begun[name][-1].id)
                assert text_of(dialect, begun[name] + rest) == TEXT
                assert await resumed(there, dialect, call) == begun[name] + rest

            async def has_ended() -> bool:
                nonlocal reply
                reply = await (await session.get(f"{there}{response.path}/{reply['id']}")).json()
                return bool(reply["status"] == "completed")

            await until(has_ended)
            assert response.text(reply) == TEXT
        second.send_signal(signal.SIGTERM)


@EACH
async def test_a_request_is_cancelled_when_its_client_leaves(gateway: RunningGateway, dialect: Dialect) -> None:
    async with gateway.worker(endless(65)) as worker:
        async with Events(gateway.url, dialect) as stream:
            await stream.begin()
        assert await asyncio.wait_for(worker.cancelled.get(), 60) == worker.claimed[0].id


@EACH
async def test_a_failure_is_an_error_also_in_a_stream_and_when_it_is_taken_up(
    start_gateway: Start, dialect: Dialect
) -> None:
    here, there = await start_gateway(), await start_gateway()

    async def failing(request: GenerationRequest) -> Steps:
        yield (Delta(0, tuple(tokens("begun"))),), None
        yield (), Outcome("error", "the engine broke")

    async with here.worker(failing):
        reply = await here.post(dialect.path, dialect.body)
        async with Events(here.url, dialect) as stream:
            events = await stream.rest()
    assert (reply.status, reply.json["error"]["message"]) == (500, "the engine broke")
    assert text_of(dialect, events[:-1]) == "begun"
    assert "the engine broke" in json.dumps(events[-1].data)
    assert await resumed(there.url, dialect, dialect.id_of(events[0].data)) == events


@EACH
async def test_a_full_queue_is_a_429_that_says_when(start_gateway: Start, dialect: Dialect) -> None:
    gateway = await start_gateway(max_queued_requests=1)
    async with Events(gateway.url, DIALECTS["chat"]):
        for body in (dialect.body, {**dialect.body, "stream": True}):
            reply = await gateway.post(dialect.path, body)
            assert (reply.status, reply.json["error"]["type"]) == (429, "rate_limit_error")
            assert int(reply.headers["retry-after"]) >= 1
