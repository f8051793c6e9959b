"""Stored responses: in the background, read again, streamed again, cancelled, deleted, expired."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from quire.shared.protocol.keys import RETENTION_S
from quire.shared.protocol.messages import Delta, GenerationRequest, Outcome
from tests.gateway.api.test_conversation import answering
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import Steps, endless
from tests.support.gateway.response_calls import PATH, TEXT, create, events_of
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
