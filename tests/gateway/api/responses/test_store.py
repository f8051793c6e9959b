"""Stored responses: in the background, read again, streamed again, cancelled, deleted, expired."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from quire.shared.protocol.keys import RETENTION_S
from quire.shared.protocol.messages import Delta, GenerationRequest, Outcome
from tests.gateway.api.test_conversation import answering
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import Steps, endless
from tests.support.gateway.response_calls import PATH, TEXT, TOOL, WHOLE, create, events_of, raw_events
from tests.support.gateway.running import MODEL, RunningGateway, tokens, until


async def test_background_poll_and_read_again(gateway: RunningGateway, client: Any) -> None:
    go_on = asyncio.Event()

    async def script(request: GenerationRequest) -> Steps:
        yield (Delta(0, tuple(tokens("Hello"))),), None
        await go_on.wait()
        yield (Delta(0, (*tokens(" you"), 2), "stop"),), Outcome("stop")

    response = await client.responses.create(model=MODEL, input="Hello", background=True)
    assert (response.status, response.background, response.output) == ("queued", True, [])
    assert (await client.responses.retrieve(response.id)).status == "queued"
    async with gateway.worker(script):

        async def shows_a_part() -> bool:
            found = await client.responses.retrieve(response.id)
            return bool(found.status == "in_progress" and found.output_text == "Hello")

        await until(shows_a_part)
        go_on.set()

        async def has_ended() -> bool:
            return bool((await client.responses.retrieve(response.id)).status == "completed")

        await until(has_ended)
    assert (await client.responses.retrieve(response.id)).output_text == "Hello you"
    stream = await client.responses.retrieve(response.id, stream=True, starting_after=2)
    events = await events_of(stream)
    assert [event.sequence_number for event in events] == list(range(3, 3 + len(events)))
    assert events[-1].type == "response.completed"


async def test_a_background_stream_goes_on_without_its_client(gateway: RunningGateway, client: Any) -> None:
    halted, go_on = asyncio.Event(), asyncio.Event()

    async def script(request: GenerationRequest) -> Steps:
        for index, token in enumerate(tokens(TEXT)):
            if index == 5:
                halted.set()
                await go_on.wait()
            yield (Delta(0, (token,)),), None
        yield (Delta(0, (2,), "stop"),), Outcome("stop")

    async with gateway.worker(script):
        stream = await client.responses.create(model=MODEL, input="Hello", background=True, stream=True)
        begun: list[Any] = []
        async for event in stream:
            begun.append(event)
            if event.sequence_number == 6:
                break
        await stream.close()
        assert [event.type for event in begun[:3]] == ["response.created", "response.queued", "response.in_progress"]
        await halted.wait()

        async def is_alone() -> bool:
            return gateway.gateway.router.calls == 0

        await until(is_alone)
        rest = asyncio.create_task(raw_events(gateway, f"{PATH}/{begun[0].response.id}?stream=true&starting_after=6"))
        go_on.set()
        events = await rest
    assert [event["sequence_number"] for event in events] == list(range(7, 7 + len(events)))
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert TEXT.endswith(text)
    assert text
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == TEXT


async def test_every_place_of_a_stream_gives_the_events_after_it(start_gateway: Start, folder: Path) -> None:
    given = {"model": str(folder), "tool_call_format": "hermes", "reasoning_format": "think"}
    here, there = await start_gateway(**given), await start_gateway(**given)
    async with here.worker(answering(WHOLE, 3)):
        whole = await raw_events(here, PATH, {"model": MODEL, "input": "Hello", "tools": [TOOL], "stream": True})
    path = f"{PATH}/{whole[0]['response']['id']}?stream=true"
    assert await raw_events(there, path) == whole
    for place in range(len(whole)):
        found = await raw_events(there, f"{path}&starting_after={place}")
        assert found == whole[place + 1 :]
    assert await raw_events(there, path, **{"Last-Event-ID": "4"}) == whole[5:]
    late = await there.get(f"{path}&starting_after={len(whole)}")
    assert (late.status, late.error["param"], late.error["code"]) == (400, "starting_after", "invalid_event_id")


@pytest.mark.parametrize("is_running", [True, False])
async def test_cancel(gateway: RunningGateway, client: Any, is_running: bool) -> None:
    response = await client.responses.create(model=MODEL, input="Hello", background=True)
    if is_running:
        async with gateway.worker(endless(70)) as worker:

            async def has_begun() -> bool:
                return bool(worker.steps)

            await until(has_begun)
            cancelled = await client.responses.cancel(response.id)
            assert cancelled.output[0].status == "incomplete"
    else:
        cancelled = await client.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    assert cancelled.error is None
    assert await client.responses.cancel(response.id) == cancelled
    assert await client.responses.retrieve(response.id) == cancelled
    *_, last = await events_of(await client.responses.retrieve(response.id, stream=True))
    assert (last.type, last.response) == ("response.failed", cancelled)


async def test_only_background_responses_can_be_cancelled(gateway: RunningGateway, client: Any) -> None:
    async with gateway.worker(answering("x")):
        response = await client.responses.create(model=MODEL, input="Hello")
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel(response.id)


@pytest.mark.parametrize("is_running", [True, False])
async def test_delete(gateway: RunningGateway, client: Any, is_running: bool) -> None:
    async with gateway.worker(endless(70) if is_running else answering("x")) as worker:
        response = await client.responses.create(model=MODEL, input="Hello", background=is_running)
        if is_running:

            async def has_begun() -> bool:
                return bool(worker.steps)

            await until(has_begun)
        await client.responses.delete(response.id)
        if is_running:
            await asyncio.wait_for(worker.cancelled.get(), 60)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            await call(response.id)
    keys, redis = gateway.gateway.broker.keys, gateway.gateway.broker.client
    call_id = response.id.removeprefix("resp_")
    assert await redis.get(keys.conversation(call_id)) is None
    if is_running:
        for key in (keys.request(call_id), keys.output(call_id)):
            # -2: gone, because the response had ended when it was deleted.
            assert await redis.ttl(key) in (-2, *range(61))
    else:
        assert await redis.exists(keys.request(call_id), keys.output(call_id)) == 0


async def test_retention(start_gateway: Start, folder: Path) -> None:
    gateway = await start_gateway(model=str(folder), response_retention_s=7000)
    keys, redis = gateway.gateway.broker.keys, gateway.gateway.broker.client
    async with gateway.worker(answering("x")):
        stored, other = [(await create(gateway, store=store)).json["id"][5:] for store in (True, False)]
    for key in (keys.request, keys.output, keys.conversation):
        assert 6900 < await redis.ttl(key(stored)) <= 7000
    assert 0 < await redis.ttl(keys.request(other)) <= RETENTION_S
    assert not await redis.exists(keys.conversation(other))
    await redis.delete(keys.request(stored))  # as if it had expired
    assert (await gateway.get(f"{PATH}/resp_{stored}")).status == 404


async def test_a_response_that_is_not_stored_cannot_be_read(gateway: RunningGateway) -> None:
    for path in ["", "?stream=true", "/input_items"]:
        async with gateway.worker(answering("x")):
            reply = await create(gateway, store=False)
        assert reply.json["store"] is False
        found = await gateway.get(f"{PATH}/{reply.json['id']}{path}")
        assert found.status == 404
        assert found.error["code"] == "not_found"


async def test_a_chat_is_no_response(gateway: RunningGateway) -> None:
    async with gateway.worker(answering("x")):
        chat = (await gateway.chat()).json["id"].removeprefix("chatcmpl-")
        response = (await create(gateway)).json["id"].removeprefix("resp_")
    assert (await gateway.get(f"{PATH}/resp_{chat}")).status == 404
    assert (await gateway.get(f"/v1/chat/completions/chatcmpl-{response}/stream")).status == 404


async def test_a_repeated_idempotency_key_gives_the_same_response(gateway: RunningGateway) -> None:
    for is_stream in [True, False]:
        body = {"model": MODEL, "input": "Hello", "stream": is_stream}
        bodies = []
        async with gateway.worker(answering(TEXT)) as worker:
            for _ in range(2):
                async with gateway.stream(PATH, body, Idempotency_Key=f"k{is_stream}") as stream:
                    bodies.append(await stream.response.text())
        assert bodies[0] == bodies[1]
        assert json.dumps(TEXT) in bodies[0]
        assert len(worker.claimed) == 1


async def test_a_repeated_background_call_tells_the_status_now(gateway: RunningGateway) -> None:
    body = {"model": MODEL, "input": "Hello", "background": True}
    first = await gateway.post(PATH, body, Idempotency_Key="k")
    async with gateway.worker(answering(TEXT)):

        async def has_ended() -> bool:
            return bool((await gateway.get(f"{PATH}/{first.json['id']}")).json["status"] == "completed")

        await until(has_ended)
    second = await gateway.post(PATH, body, Idempotency_Key="k")
    assert (first.json["status"], second.json["status"]) == ("queued", "completed")
    assert first.json["id"] == second.json["id"]


async def test_wrong_queries_are_refused(gateway: RunningGateway) -> None:
    for query, param in [
        ("?stream=maybe", "stream"),
        ("?starting_after=3", "starting_after"),
        ("?stream=true&starting_after=-1", "starting_after"),
        ("?stream=true&starting_after=99999999999", "starting_after"),
        ("?stream=true&include_obfuscation=true", "include_obfuscation"),
        ("?include=nothing", "include"),
        ("?other=1", "other"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=nothing", "after"),
        ("/input_items?stream=true", "stream"),
    ]:
        async with gateway.worker(answering("x")):
            response_id = (await create(gateway)).json["id"]
        reply = await gateway.get(f"{PATH}/{response_id}{query}")
        assert (reply.status, reply.error["param"]) == (400, param)
