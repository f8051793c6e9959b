"""Responses of /v1/responses survive their processes: streamed ones go on elsewhere, those in the background need only
Redis."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import aiohttp
import openai
import pytest

from tests.support.faults.calls import FAST
from tests.support.faults.stack import KEYS, FaultStack

MODEL = "tiny"
TOKENS = 60


def asked(stack: FaultStack, **more: Any) -> dict[str, Any]:
    """A request whose answer has TOKENS tokens: the end token is banned."""
    end = json.loads((stack.model / "config.json").read_text())["eos_token_id"]
    extra = {"seed": 7, "logit_bias": {str(end): -100}}
    return {"model": MODEL, "input": "w10 w20 w30", "max_output_tokens": TOKENS, "extra_body": extra, **more}


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60)


@pytest.mark.faults
def test_a_response_in_the_background_needs_only_redis(stack: FaultStack) -> None:
    """All gateways and workers are killed in the middle of it; new ones end it with the same tokens."""
    gateway, url = stack.gateway()
    worker = stack.worker("a", *FAST)
    with client(url) as here:
        expected = here.responses.create(**asked(stack)).output_text
        response = here.responses.create(**asked(stack, background=True))
        assert response.status == "queued"
        stack.wait(lambda: len(here.responses.retrieve(response.id).output_text) > 20)
    for process in (gateway, worker):
        os.kill(process.pid, signal.SIGKILL)
    _, other = stack.gateway()
    with client(other) as there:
        assert there.responses.retrieve(response.id).status == "in_progress"
        stack.worker("b", *FAST)
        stack.wait(lambda: there.responses.retrieve(response.id).status == "incomplete", 30)
        ended = there.responses.retrieve(response.id)
        following = there.responses.create(**asked(stack, previous_response_id=response.id))
    assert ended.output_text == expected
    assert ended.usage is not None
    assert ended.usage.output_tokens == TOKENS
    assert following.usage is not None
    assert following.usage.input_tokens > ended.usage.total_tokens
    call_id = response.id.removeprefix("resp_")
    assert stack.redis.ttl(KEYS.conversation(call_id)) > 0
    stack.assert_invariants()


@pytest.mark.faults
@pytest.mark.promise
def test_a_streamed_response_of_a_killed_worker_goes_on_without_a_gap(stack: FaultStack) -> None:
    _, url = stack.gateway()
    workers = {name: stack.worker(name, *FAST) for name in "ab"}
    with client(url) as here:
        whole = here.responses.create(**asked(stack))
        events: list[Any] = []
        for event in here.responses.create(**asked(stack, stream=True)):
            events.append(event)
            if len(events) == 15:
                owner = stack.redis.hget(KEYS.request(events[0].response.id.removeprefix("resp_")), "owner")
                assert owner is not None
                os.kill(workers[owner.decode()].pid, signal.SIGKILL)
        again = here.responses.retrieve(events[0].response.id)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response == again
    assert again.output_text == whole.output_text
    stack.assert_invariants()


def message(stack: FaultStack, **more: Any) -> dict[str, Any]:
    """The message of a WebSocket with the parameters of `asked`."""
    body = asked(stack, **more)
    return {"type": "response.create", **body.pop("extra_body"), **body}


async def next_event(connection: aiohttp.ClientWebSocketResponse) -> dict[str, Any]:
    event: dict[str, Any] = await connection.receive_json(timeout=60)
    return event


@pytest.mark.faults
async def test_a_response_over_a_websocket_outlives_its_worker_and_can_be_continued(stack: FaultStack) -> None:
    _, url = stack.gateway()
    workers = {name: stack.worker(name, *FAST) for name in "ab"}
    with client(url) as here:
        whole = await asyncio.to_thread(here.responses.create, **asked(stack))
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/v1/responses") as connection:
        await connection.send_json(message(stack, store=False))
        events = [await next_event(connection)]
        call_id = events[0]["response"]["id"].removeprefix("resp_")
        while events[-1]["type"] != "response.incomplete":
            events.append(await next_event(connection))
            if len(events) == 15:
                owner = stack.redis.hget(KEYS.request(call_id), "owner")
                assert owner is not None
                os.kill(workers[owner.decode()].pid, signal.SIGKILL)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == whole.output_text
        await connection.send_json(message(stack, store=False, previous_response_id=f"resp_{call_id}"))
        while (event := await next_event(connection))["type"] != "response.incomplete":
            assert event["type"] != "error", event
        assert event["response"]["usage"]["input_tokens"] > events[-1]["response"]["usage"]["total_tokens"]
    stack.assert_invariants()


@pytest.mark.faults
async def test_a_response_of_a_websocket_whose_gateway_is_killed_is_streamed_by_another_one(stack: FaultStack) -> None:
    gateway, url = stack.gateway()
    _, other = stack.gateway()
    stack.worker("a", *FAST)
    async with aiohttp.ClientSession() as session:
        async with session.ws_connect(f"{url}/v1/responses") as connection:
            await connection.send_json(message(stack))
            events = [await next_event(connection) for _ in range(15)]
            os.kill(gateway.pid, signal.SIGKILL)
            async for late in connection:
                events.append(late.json())
        path = f"{other}/v1/responses/{events[0]['response']['id']}"
        place = {"stream": "true", "starting_after": str(events[-1]["sequence_number"])}
        async with session.get(path, params=place) as response:
            assert response.status == 200
            text = await response.text()
        rest = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        async with session.get(path) as response:
            stored = await response.json()
    events += rest
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"] == stored
    stack.assert_invariants()
