"""Parking and unparking over HTTP, in every dialect, with a real Redis and a worker that follows a script."""

from __future__ import annotations

import asyncio
from typing import Any

from quire.shared.protocol.messages import Delta, GenerationRequest, Outcome
from tests.gateway.conftest import Start
from tests.gateway.test_dialects import EACH, Dialect, Events, resumed, said_in
from tests.support.gateway.fake_worker import Script, Steps, emit
from tests.support.gateway.running import MODEL, RunningGateway, Stream, chat_body, raw_request, texts, tokens, until

ANSWER = tokens("The answer has several words, so that it can be parked.")
WHOLE = "The answer has several words, so that it can be parked."
CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"


def body(path: str, **parameters: Any) -> dict[str, Any]:
    if path == COMPLETIONS:
        return {"model": MODEL, "prompt": "Hello", **parameters}
    if path == RESPONSES:
        return {"model": MODEL, "input": "Hello", **parameters}
    extra = {"max_tokens": 200} if path == MESSAGES else {}
    return {**chat_body(), **extra, **parameters}


class Halting:
    """A script that emits ANSWER from the token that the request has, and halts before token `at` until `go_on`."""

    def __init__(self, at: int = 10) -> None:
        self.at = at
        self.go_on = asyncio.Event()
        self.starts: list[int] = []
        self.emitted: dict[str, int] = {}

    def script(self) -> Script:
        async def script(request: GenerationRequest) -> Steps:
            first = self.emitted.get(request.id, 0)
            self.starts.append(first)
            for index in range(first, len(ANSWER)):
                if index == self.at:
                    await self.go_on.wait()
                last = index == len(ANSWER) - 1
                self.emitted[request.id] = index + 1
                yield (Delta(0, (ANSWER[index],), "length" if last else None),), Outcome("length") if last else None

        return script


async def emitted(gateway: RunningGateway, request_id: str) -> int:
    broker = gateway.gateway.broker
    return int(await broker.client.hget(broker.keys.request(request_id), "emitted") or 0)


async def wait_emitted(gateway: RunningGateway, request_id: str, count: int) -> None:
    async def has_them() -> bool:
        return await emitted(gateway, request_id) >= count

    await until(has_them)


async def read(gateway: RunningGateway, path: str) -> bytes:
    """Return a whole stream as the client gets it."""
    async with gateway.stream(path) as stream:
        return await stream.response.content.read()


def call_of(stream: Stream) -> str:
    return stream.response.headers["X-Quire-Request-Id"]


@EACH
async def test_a_parked_stream_ends_with_an_error_and_goes_on_at_the_same_token(
    start_gateway: Start, dialect: Dialect
) -> None:
    gateway, other = await start_gateway(), await start_gateway()
    halting = Halting()
    async with gateway.worker(halting.script()) as worker:
        async with Events(gateway.url, dialect) as stream:
            call = dialect.id_of((await stream.begin())[0].data)
            call_id, name = worker.claimed[0].id, f"{dialect.path}/{call}"
            await wait_emitted(gateway, call_id, 10)
            parked = await other.post(f"{name}/park", b"")
            assert (parked.status, parked.json["parked"], parked.json["ended"]) == (200, True, False)
            assert parked.json["id"] == call
            assert parked.json["expires_at"] > 0
            assert "parked" in error_codes((await stream.rest())[-1].data)
        assert await gateway.accepted() == 1
        # The client has left; nothing was cancelled.
        assert (await other.post(f"{name}/park", b"")).json == parked.json
        assert "parked" in error_codes((await resumed(other.url, dialect, call))[-1].data)
        halting.emitted[call_id], halting.at = 10, -1
        neither = {"id": call, "parked": False, "expires_at": None}
        unparked = await other.post(f"{name}/unpark", b"")
        assert (unparked.status, unparked.json) == (200, {**neither, "ended": False})
        assert said_in(dialect, await resumed(other.url, dialect, call)).text == WHOLE
        assert len(worker.claimed) == 2
    assert (await other.post(f"{name}/park", b"")).json == {**neither, "ended": True}
    assert (await other.post(f"{name}/unpark", b"")).json["ended"] is True


def error_codes(event: dict[str, Any]) -> set[str]:
    """Return the code of an event with an error, which each dialect has in another place."""
    error = event.get("error") or event
    return {error.get("code", ""), error.get("details", {}).get("error_code", "")}


async def test_a_whole_answer_that_is_parked_is_a_409_that_is_not_tried_again(gateway: RunningGateway) -> None:
    async with gateway.worker(Halting().script()) as worker:
        task = asyncio.create_task(gateway.chat())
        await until(lambda: asyncio.sleep(0, bool(worker.claimed)))
        call_id = worker.claimed[0].id
        await wait_emitted(gateway, call_id, 5)
        await gateway.post(f"{CHAT}/chatcmpl-{call_id}/park", b"")
        reply = await task
    assert (reply.status, reply.error["code"], reply.headers["x-should-retry"]) == (409, "parked", "false")
    assert gateway.gateway.meters.calls["chat", "new", "parked"] == 1


async def test_a_waiting_call_is_parked_before_any_worker_sees_it(gateway: RunningGateway) -> None:
    async with gateway.stream(CHAT, body(CHAT, stream=True)) as stream:
        call_id = call_of(stream)
        assert (await gateway.post(f"{CHAT}/chatcmpl-{call_id}/park", b"")).json["parked"] is True
        assert await gateway.queued() == 0
    async with gateway.worker(emit(ANSWER)) as worker:
        assert (await gateway.complete()).status == 200  # a later call, which the worker has read
        assert call_id not in [request.id for request in worker.claimed]
        await gateway.post(f"{CHAT}/chatcmpl-{call_id}/unpark", b"")
        async with gateway.stream(f"{CHAT}/chatcmpl-{call_id}/stream") as stream:
            assert "".join(texts(await stream.rest())) == WHOLE


async def test_a_call_with_several_prompts_is_parked_with_all_of_them(gateway: RunningGateway) -> None:
    task = asyncio.create_task(gateway.complete(prompt=["a", "b"]))
    await until(lambda: _is(gateway.queued(), 2))
    broker = gateway.gateway.broker
    [call_id] = {id_.split("-")[0] for id_ in await broker.unended()}
    await gateway.post(f"{COMPLETIONS}/cmpl-{call_id}/park", b"")
    assert (await task).status == 409
    assert len(await broker.parked_ids()) == 2
    await gateway.post(f"{COMPLETIONS}/cmpl-{call_id}/unpark", b"")
    assert await gateway.queued() == 2


async def test_the_other_prompts_of_a_call_run_on_if_one_is_parked(gateway: RunningGateway) -> None:
    """An operator who parks the requests of one worker parks a part of a call."""
    task = asyncio.create_task(gateway.post(COMPLETIONS, body(COMPLETIONS, prompt=["a", "b"]), Idempotency_Key="k"))
    await until(lambda: _is(gateway.queued(), 2))
    broker = gateway.gateway.broker
    [call_id] = {id_.split("-")[0] for id_ in await broker.unended()}
    await broker.park(f"{call_id}-1")
    assert (await task).error["code"] == "parked"
    assert await broker.unended() == [call_id]
    await gateway.post(f"{COMPLETIONS}/cmpl-{call_id}/unpark", b"")
    async with gateway.worker(emit(ANSWER)):
        again = await gateway.post(COMPLETIONS, body(COMPLETIONS, prompt=["a", "b"]), Idempotency_Key="k")
    assert [choice["text"] for choice in again.json["choices"]] == [WHOLE, WHOLE]
    assert await broker.read_totals() == {"accepted": 2, "length": 2}


async def _is(value: Any, expected: Any) -> bool:
    return await value == expected


async def test_a_parked_call_is_cancelled_for_good(gateway: RunningGateway) -> None:
    async with gateway.stream(CHAT, body(CHAT, stream=True)) as stream:
        name = f"{CHAT}/chatcmpl-{call_of(stream)}"
        await gateway.post(f"{name}/park", b"")
    assert (await gateway.post(f"{name}/cancel", b"")).json["cancelled"] is True
    assert (await gateway.post(f"{name}/unpark", b"")).json["ended"] is True
    assert await gateway.gateway.broker.read_totals() == {"accepted": 1, "cancelled": 1}
    assert b'"cancelled"' in await read(gateway, f"{name}/stream")


async def test_an_idempotency_key_of_a_parked_call_tells_so_and_makes_no_second_one(gateway: RunningGateway) -> None:
    headers = {"Idempotency_Key": "k"}
    task = asyncio.create_task(gateway.post(CHAT, chat_body(), **headers))
    await until(lambda: _is(gateway.queued(), 1))
    [call_id] = await gateway.gateway.broker.unended()
    await gateway.post(f"{CHAT}/chatcmpl-{call_id}/park", b"")
    assert (await task).status == 409
    again = await gateway.post(CHAT, chat_body(), **headers)
    assert (again.status, again.error["code"]) == (409, "parked")
    assert again.headers["x-quire-request-id"] == call_id
    await gateway.post(f"{CHAT}/chatcmpl-{call_id}/unpark", b"")
    async with gateway.worker(emit(ANSWER)):
        reply = await gateway.post(CHAT, chat_body(), **headers)
    assert reply.json["choices"][0]["message"]["content"] == WHOLE
    assert await gateway.accepted() == 1


async def test_a_parked_response_is_queued_and_goes_on(gateway: RunningGateway) -> None:
    made = await gateway.post(RESPONSES, body(RESPONSES, background=True))
    name = f"{RESPONSES}/{made.json['id']}"
    parked = await gateway.post(f"{name}/park", b"")
    assert (parked.json["id"], parked.json["parked"]) == (made.json["id"], True)
    assert (await gateway.get(name)).json["status"] == "queued"
    previous = await gateway.post(RESPONSES, body(RESPONSES, previous_response_id=made.json["id"]))
    assert previous.error["code"] == "previous_response_in_progress"
    await gateway.post(f"{name}/unpark", b"")
    async with gateway.worker(emit(ANSWER)):
        await until(lambda: _has_status(gateway, name, "incomplete"))
    assert (await gateway.get(name)).json["output"][0]["content"][0]["text"] == WHOLE


async def _has_status(gateway: RunningGateway, name: str, status: str) -> bool:
    return bool((await gateway.get(name)).json["status"] == status)


async def test_a_parked_response_is_cancelled_and_deleted(gateway: RunningGateway) -> None:
    for action in ("cancel", "delete"):
        made = await gateway.post(RESPONSES, body(RESPONSES, background=True))
        name = f"{RESPONSES}/{made.json['id']}"
        await gateway.post(f"{name}/park", b"")
        if action == "cancel":
            assert (await gateway.post(f"{name}/cancel", b"")).json["status"] == "cancelled"
        else:
            assert (await gateway.send(raw_request("DELETE", name))).json["deleted"] is True
            assert (await gateway.get(name)).status == 404
        assert await gateway.gateway.broker.parked_ids() == []


async def test_a_full_parking_lot_refuses(start_gateway: Start) -> None:
    gateway = await start_gateway(max_parked_requests=1)
    names = []
    for _ in range(2):
        made = await gateway.post(RESPONSES, body(RESPONSES, background=True))
        names.append(f"{RESPONSES}/{made.json['id']}")
    assert (await gateway.post(f"{names[0]}/park", b"")).status == 200
    refused = await gateway.post(f"{names[1]}/park", b"")
    assert (refused.status, refused.error["code"]) == (429, "parking_full")
    assert (await gateway.get(names[1])).json["status"] == "queued"
