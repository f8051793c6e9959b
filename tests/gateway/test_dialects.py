"""The contract of every dialect: streams, whole answers, resumed streams, log probabilities, tool calls, cancellation,
calls in the background, idempotency keys, errors and limits.
"""

from __future__ import annotations

import asyncio
import json
import signal
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from quire.shared.protocol.messages import Delta, GenerationRequest, Outcome
from tests.gateway.api.test_conversation import TEMPLATE
from tests.gateway.conftest import Start
from tests.gateway.server.test_main import running, settings
from tests.support.gateway.fake_worker import FakeWorker, Script, Steps, endless
from tests.support.gateway.response_calls import TOOL, WHOLE
from tests.support.gateway.running import (
    MODEL,
    TIMEOUT,
    RunningGateway,
    chat_body,
    raw_request,
    tokens,
    until,
    write_model,
)

# A text that would end an event or a stream, if it were not quoted.
TEXT = 'Hello 😀, "how"\r\n\r\ndata: [DONE]\n\n\u2028are\u2029 you?'
FUNCTION = {name: TOOL[name] for name in ("name", "description", "parameters")}
# The calls of WHOLE.
CITIES = ("Köln", "Bonn")


@dataclass
class Said:
    """What a client reads of an answer. calls: id, name and arguments of each tool call."""

    text: str = ""
    calls: list[list[str]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def content(self) -> tuple[str, list[tuple[str, Any]], list[float]]:
        """Return everything except the ids of the calls, which differ between two requests."""
        return self.text, [(name, json.loads(arguments)) for _, name, arguments in self.calls], self.scores


def of_chunks(chunks: list[Any]) -> Said:
    said = Said()
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        said.text += choice["delta"].get("content") or ""
        said.scores += [one["logprob"] for one in (choice["logprobs"] or {"content": ()})["content"]]
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                said.calls.append([call["id"], call["function"]["name"], ""])
            said.calls[call["index"]][2] += call["function"]["arguments"]
    return said


def of_chat(answer: Any) -> Said:
    [choice] = answer["choices"]
    calls = [[one["id"], *one["function"].values()] for one in choice["message"].get("tool_calls", ())]
    scores = [one["logprob"] for one in (choice["logprobs"] or {"content": ()})["content"]]
    return Said(choice["message"]["content"], calls, scores)


def of_completion(answer: Any) -> Said:
    """Read a whole answer or a chunk, which have the same form."""
    said = Said()
    for choice in answer["choices"]:
        said.text += choice["text"]
        said.scores += (choice["logprobs"] or {"token_logprobs": ()})["token_logprobs"]
    return said


def of_completions(chunks: list[Any]) -> Said:
    parts = [of_completion(chunk) for chunk in chunks]
    return Said("".join(part.text for part in parts), [], [score for part in parts for score in part.scores])


def of_response_events(events: list[Any]) -> Said:
    said = Said()
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_text.delta":
                said.text += event["delta"]
                said.scores += [one["logprob"] for one in event["logprobs"]]
            case "output_item.added" if event["item"]["type"] == "function_call":
                said.calls.append([event["item"]["call_id"], event["item"]["name"], ""])
            case "function_call_arguments.delta":
                said.calls[-1][2] += event["delta"]
    return said


def of_response(answer: Any) -> Said:
    said = Said()
    for item in answer["output"]:
        if item["type"] == "function_call":
            said.calls.append([item["call_id"], item["name"], item["arguments"]])
        elif item["type"] == "message":
            said.text += item["content"][0]["text"]
            said.scores += [one["logprob"] for one in item["content"][0]["logprobs"]]
    return said


def of_message_events(events: list[Any]) -> Said:
    said = Said()
    for event in events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            said.calls.append([event["content_block"]["id"], event["content_block"]["name"], ""])
        elif event["type"] == "content_block_delta":
            said.text += event["delta"].get("text", "")
            if "partial_json" in event["delta"]:
                said.calls[-1][2] += event["delta"]["partial_json"]
    return said


def of_message(answer: Any) -> Said:
    blocks = answer["content"]
    calls = [[one["id"], one["name"], json.dumps(one["input"])] for one in blocks if one["type"] == "tool_use"]
    return Said("".join(one["text"] for one in blocks if one["type"] == "text"), calls)


@dataclass(frozen=True)
class Dialect:
    """How a client calls, finds the id of an answer, and reads it.

    resume:   path of a stream, and how it is taken up
    streamed: reads the events of a stream; `whole` reads an answer in one piece
    scored:   the parameters with which a call gets log probabilities, if it can
    tools:    the tools of a call, if it can have them
    """

    path: str
    body: dict[str, Any]
    id_of: Callable[[Any], str]
    streamed: Callable[[list[Any]], Said]
    whole: Callable[[Any], Said]
    resume: str = "{path}/{id}/stream?"
    scored: dict[str, Any] | None = None
    tools: list[Any] | None = None


DIALECTS = {
    "chat": Dialect(
        "/v1/chat/completions",
        chat_body(),
        lambda data: data["id"],
        of_chunks,
        of_chat,
        scored={"logprobs": True},
        tools=[{"type": "function", "function": FUNCTION}],
    ),
    "completion": Dialect(
        "/v1/completions",
        {"model": MODEL, "prompt": "Hello"},
        lambda data: data["id"],
        of_completions,
        of_completion,
        scored={"logprobs": 0},
    ),
    "response": Dialect(
        "/v1/responses",
        {"model": MODEL, "input": "Hello"},
        lambda data: data["response"]["id"],
        of_response_events,
        of_response,
        resume="{path}/{id}?stream=true&",
        scored={"include": ["message.output_text.logprobs"]},
        tools=[{"type": "function", **FUNCTION}],
    ),
    "message": Dialect(
        "/v1/messages",
        {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": "Hello"}]},
        lambda data: data["message"]["id"],
        of_message_events,
        of_message,
        tools=[{"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}],
    ),
}
EACH = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)


@dataclass(frozen=True)
class Event:
    id: str
    data: Any


class Events:
    """The events of a stream: of a new call with more parameters, or of one that is taken up after an event.

    after: id of the event, in a header, or as a parameter of the query
    """

    def __init__(
        self, url: str, dialect: Dialect, call: str = "", after: str = "", in_query: bool = False, **asked: Any
    ) -> None:
        self._url, self._dialect, self._call, self._asked = url, dialect, call, asked
        self._headers = {"Last-Event-ID": after} if after and not in_query else {}
        self._query = f"starting_after={after}" if in_query else ""

    async def __aenter__(self) -> Events:
        dialect = self._dialect
        headers = {"Accept": "text/event-stream", **self._headers}
        self._session = aiohttp.ClientSession(headers=headers, timeout=TIMEOUT)
        if self._call:
            path = dialect.resume.format(path=dialect.path, id=self._call)
            self._response = await self._session.get(self._url + path + self._query)
        else:
            body = {**dialect.body, "stream": True, **self._asked}
            self._response = await self._session.post(self._url + dialect.path, json=body)
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
        """Return the first events, with a part of the answer."""
        return [await anext(self._iterator) for _ in range(5)]

    async def rest(self) -> list[Event]:
        return [event async for event in self._iterator]


def said_in(dialect: Dialect, events: list[Event]) -> Said:
    return dialect.streamed([event.data for event in events])


async def resumed(url: str, dialect: Dialect, call: str, after: str = "", in_query: bool = False) -> list[Event]:
    async with Events(url, dialect, call, after, in_query) as stream:
        return await stream.rest()


def halting(go_on: asyncio.Event, text: str = TEXT) -> Script:
    """Return a script that emits a text token by token, with scores if they are asked for, and halts in its middle."""

    async def script(request: GenerationRequest) -> Steps:
        ids = [*tokens(text), 2]
        for index, token in enumerate(ids):
            if index == len(ids) // 2:
                await go_on.wait()
            scores = struct.pack("<f", -index / 4) if request.sampling.logprobs else None
            reason = "stop" if index == len(ids) - 1 else None
            yield (Delta(0, (token,), reason, logprobs=scores),), Outcome(reason) if reason else None

    return script


# What a call asks for, and what the model answers.
FORMS: dict[str, tuple[Dialect, dict[str, Any], str]] = {
    **{name: (dialect, {}, TEXT) for name, dialect in DIALECTS.items()},
    **{f"{name} with scores": (one, one.scored, TEXT) for name, one in DIALECTS.items() if one.scored},
    **{f"{name} with calls": (one, {"tools": one.tools}, WHOLE) for name, one in DIALECTS.items() if one.tools},
}


@pytest.mark.parametrize(("dialect", "asked", "text"), FORMS.values(), ids=FORMS)
async def test_a_stream_is_the_whole_answer_and_resumes_after_each_event(
    start_gateway: Start, tmp_path: Path, dialect: Dialect, asked: dict[str, Any], text: str
) -> None:
    """At both gateways, while it runs and when it has ended. A repeated call gets the same answer, ids included."""
    given: dict[str, Any] = {}
    if asked.get("tools"):
        folder = write_model(tmp_path / MODEL, chat_template=TEMPLATE)
        given = {"model": str(folder), "tool_call_format": "hermes", "reasoning_format": "think"}
    here, there = await start_gateway(**given), await start_gateway(**given)
    go_on = asyncio.Event()
    async with here.worker(halting(go_on, text)) as worker:
        async with Events(here.url, dialect, **asked) as stream:
            begun = await stream.begin()
            call = dialect.id_of(begun[0].data)
            early = asyncio.create_task(resumed(there.url, dialect, call, begun[-1].id))
            go_on.set()
            whole = [*begun, *await stream.rest()]
        assert await early == whole[len(begun) :]
        assert await resumed(there.url, dialect, call) == whole
        for index, event in enumerate(whole[:-1]):
            url = (here, there)[index % 2].url
            assert await resumed(url, dialect, call, event.id, in_query=index % 4 > 1) == whole[index + 1 :]
        one, two = [
            await gateway.post(dialect.path, {**dialect.body, **asked}, Idempotency_Key="k")
            for gateway in (here, there)
        ]
        assert len(worker.claimed) == 2
    assert one.json == two.json
    said = said_in(dialect, whole)
    assert said.content() == dialect.whole(one.json).content()
    if text == TEXT:
        assert (said.text, said.calls) == (TEXT, [])
    else:
        assert said.content()[:2] == ("Let me see.", [("weather", {"city": city}) for city in CITIES])
        assert len({call_id for call_id, _, _ in said.calls}) == len(CITIES)
    count = len(tokens(TEXT)) if asked and asked == dialect.scored else 0
    assert said.scores[:count] == [-index / 4 for index in range(count)]
    assert bool(said.scores) == bool(count)


@EACH
@pytest.mark.parametrize("is_exact", [True, False])
async def test_an_answer_that_is_not_exact_says_so_at_its_end(
    start_gateway: Start, dialect: Dialect, is_exact: bool
) -> None:
    async def script(request: GenerationRequest) -> Steps:
        yield (Delta(0, tuple(tokens("Hello"))),), None
        yield (Delta(0, (2,), "stop"),), Outcome("stop", is_exact=is_exact)

    gateway = await start_gateway()
    async with gateway.worker(script), Events(gateway.url, dialect) as stream:
        events = await stream.rest()
        whole = await gateway.post(dialect.path, dialect.body)
    call = dialect.id_of(events[0].data)
    assert await resumed(gateway.url, dialect, call) == events
    marked = [event.data.get("response", event.data).get("quire") for event in events]
    assert [mark for mark in marked if mark is not None] == ([] if is_exact else [{"exact": False}])
    assert is_exact or marked[-2:] != [None, None], "at the end"
    answers = [whole.json]
    if call.startswith("resp_"):
        answers.append((await gateway.get(f"{dialect.path}/{call}")).json)
    assert [answer.get("quire") for answer in answers] == [None if is_exact else {"exact": False}] * len(answers)


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
                assert said_in(dialect, begun[name] + rest).text == TEXT
                assert await resumed(there, dialect, call) == begun[name] + rest

            async def has_ended() -> bool:
                nonlocal reply
                reply = await (await session.get(f"{there}{response.path}/{reply['id']}")).json()
                return bool(reply["status"] == "completed")

            await until(has_ended)
            assert response.whole(reply).text == TEXT
        second.send_signal(signal.SIGTERM)


@EACH
@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_request_is_cancelled_when_its_client_leaves(
    gateway: RunningGateway, dialect: Dialect, is_stream: bool
) -> None:
    async with gateway.worker(endless(65)) as worker:
        body = json.dumps({**dialect.body, "stream": is_stream}).encode()
        _, writer = await gateway.connect(raw_request("POST", dialect.path, body))

        async def has_begun() -> bool:
            return bool(worker.steps)

        await until(has_begun)
        writer.close()
        assert await asyncio.wait_for(worker.cancelled.get(), 60) == worker.claimed[0].id


@EACH
async def test_in_the_background_a_call_runs_on_without_clients_until_it_is_cancelled(
    start_gateway: Start, dialect: Dialect
) -> None:
    here, there = await start_gateway(), await start_gateway()
    go_on = asyncio.Event()

    async def nobody_listens() -> bool:
        return here.gateway.router.calls + there.gateway.router.calls == 0

    async def has_ended() -> bool:
        return (await there.gateway.broker.read_totals()).get("stop") == 1

    async with here.worker(halting(go_on)) as worker:
        async with Events(here.url, dialect, background=True) as stream:
            call = dialect.id_of((await stream.begin())[0].data)
        async with Events(there.url, dialect, call) as stream:  # who joins and leaves does not cancel it either
            await stream.begin()
        await until(nobody_listens)
        go_on.set()
        await until(has_ended)
        assert said_in(dialect, await resumed(there.url, dialect, call)).text == TEXT
        assert worker.cancelled.empty()
    async with here.worker(endless(65)) as worker:
        async with Events(here.url, dialect, background=True) as stream:
            call = dialect.id_of((await stream.begin())[0].data)
            reply = await there.post(f"{dialect.path}/{call}/cancel", b"")
            assert (reply.status, reply.json["id"]) == (200, call)
            await stream.rest()
        assert await asyncio.wait_for(worker.cancelled.get(), 60) == worker.claimed[0].id


# By outcome of a request: the status of a whole answer, and the code of the error.
FAILURES = {
    "error": (500, "generation_failed"),
    "quarantined": (500, "quarantined"),
    "deadline": (504, "deadline_exceeded"),
    "cancelled": (499, "cancelled"),
}


@EACH
@pytest.mark.parametrize("outcome", FAILURES)
async def test_a_failure_is_an_error_also_in_a_stream_and_when_it_is_taken_up(
    start_gateway: Start, dialect: Dialect, outcome: str
) -> None:
    here, there = await start_gateway(), await start_gateway()

    async def failing(request: GenerationRequest) -> Steps:
        yield (Delta(0, tuple(tokens("begun"))),), None
        yield (), Outcome(outcome, "the reason")

    async with here.worker(failing):
        reply = await here.post(dialect.path, dialect.body)
        async with Events(here.url, dialect) as stream:
            events = await stream.rest()
    error = reply.json["error"]
    code = error["code"] if "code" in error else error["details"]["error_code"]
    assert (reply.status, code) == FAILURES[outcome]
    assert error["message"] == "the reason"
    assert said_in(dialect, events[:-1]).text == "begun"
    last = events[-1].data
    assert "error" in last or last["response"]["status"] in ("failed", "cancelled")
    assert ("the reason" in json.dumps(last)) == ("error" in last or outcome != "cancelled")
    assert await resumed(there.url, dialect, dialect.id_of(events[0].data)) == events


@EACH
async def test_a_full_queue_is_a_429_that_says_when(start_gateway: Start, dialect: Dialect) -> None:
    gateway = await start_gateway(max_queued_requests=1)
    async with Events(gateway.url, DIALECTS["chat"]):
        for body in (dialect.body, {**dialect.body, "stream": True}):
            reply = await gateway.post(dialect.path, body)
            assert (reply.status, reply.json["error"]["type"]) == (429, "rate_limit_error")
            assert "queue_full" in reply.body.decode()
            assert 1 <= int(reply.headers["retry-after"]) <= 60
