"""Calls that end early, and the doors of a served model."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from quire.gateway.model.served_model import load_model
from quire.gateway.serving import model_directory, service
from quire.gateway.serving.service import Gateway
from quire.shared.accounts.limits import AccountLimits
from quire.shared.protocol.keys import LaneKeys
from quire.shared.protocol.messages import Delta, GenerationRequest, Outcome
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import FakeWorker, Steps, emit, endless
from tests.support.gateway.running import (
    MODEL,
    RunningGateway,
    chat_body,
    raw_request,
    running_gateway,
    tokens,
    until,
    write_model,
)
from tests.support.registrations import discovering_gateway, register

# --- The request of a client that disconnects is cancelled: streaming or not, queued or running, at any time ----------


CHAT = "/v1/chat/completions"


def call(**parameters: Any) -> bytes:
    return raw_request("POST", CHAT, json.dumps(chat_body(**parameters)).encode())


async def outcome(gateway: RunningGateway, name: str) -> int:
    keys = LaneKeys(MODEL)
    return int(await gateway.gateway.broker.client.hget(keys.totals, name) or 0)


async def started(worker: FakeWorker) -> None:
    async def begun() -> bool:
        return bool(worker.steps)

    await until(begun)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_waiting_request_is_taken_out_of_the_queue(gateway: RunningGateway, stream: bool) -> None:
    _, writer = await gateway.connect(call(stream=stream))

    async def queued() -> bool:
        return await gateway.queued() == 1

    async def empty() -> bool:
        return await gateway.queued() == 0

    await until(queued)
    writer.close()
    await until(empty)
    assert await outcome(gateway, "cancelled") == 1
    async with gateway.worker(emit(tokens("a"))) as worker:
        assert (await gateway.chat()).status == 200
        assert len(worker.claimed) == 1


async def test_what_is_open_when_the_gateway_ends_is_cancelled_if_its_client_cannot_return(
    start_gateway: Start,
) -> None:
    first = await start_gateway()
    async with first.worker(endless(65)) as worker:
        async with running_gateway(replace(first.settings, drain_s=0.1)) as second:
            _, stream = await second.connect(call(stream=True))
            await started(worker)
            _, whole = await second.connect(call())

            async def both() -> bool:
                return len(worker.claimed) == 2

            await until(both)
        assert await asyncio.wait_for(worker.cancelled.get(), 60) == worker.claimed[1].id
        for writer in (stream, whole):
            writer.close()
        broker = first.gateway.broker
        running, cancelled = worker.claimed[0].id, worker.claimed[1].id
        assert await broker.client.hget(broker.keys.request(cancelled), "outcome") == b"cancelled"
        assert await broker.client.hmget(broker.keys.request(running), "state", "cancel") == [b"running", None]
        await broker.cancel(running)


@pytest.mark.alone
async def test_streams_that_are_open_when_the_gateway_ends_get_as_long_as_it_says(start_gateway: Start) -> None:
    first = await start_gateway()
    clock, drain_s = asyncio.get_running_loop().time, 1.0
    async with first.worker(endless(65)) as worker:
        async with running_gateway(replace(first.settings, drain_s=drain_s)) as second:
            reader, writer = await second.connect(call(stream=True))
            await started(worker)
            told_at = clock()
            cut = asyncio.create_task(reader.read())
            cut.add_done_callback(lambda _: took.append(clock() - told_at))
            took: list[float] = []
        events = (await cut).decode()
        writer.close()
        await first.gateway.broker.cancel(worker.claimed[0].id)
    # The last event says what to do; without an id, so that the client resumes after the event before it.
    *_, before, last = (block for block in events.split("\n\n") if "data: " in block)
    assert "id: " in before
    assert "id: " not in last
    assert '"code":"shutting_down"' in last.replace(" ", "")
    assert "resume it after its last event" in last
    assert 0.9 * drain_s < took[0] < 1.5 * drain_s


async def test_a_whole_answer_that_takes_longer_than_the_gateway_has_gets_a_503(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The answer ends at once, and a busy machine has a minute to send the 503.
    monkeypatch.setattr(model_directory, "WRITE_S", 60.0)
    monkeypatch.setattr(model_directory, "WRITE_SHARE", 1.0)
    first = await start_gateway()
    async with first.worker(endless(65)) as worker:
        async with running_gateway(replace(first.settings, drain_s=60.0)) as second:
            waiting = asyncio.create_task(second.post(CHAT, chat_body()))
            await started(worker)
        reply = await waiting
        assert (reply.status, reply.error["code"]) == (503, "shutting_down")
        assert reply.headers["retry-after"] == "1"
        assert await asyncio.wait_for(worker.cancelled.get(), 60) == worker.claimed[0].id


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
async def test_the_calls_of_a_revoked_key_end(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(model_directory, "LOOK_S", 0.1)
    gateway = await start_gateway()
    store = gateway.gateway.process.keys.ring.store
    keys = [await store.create("acme", "web", name, AccountLimits()) for name in ("leaving", "staying")]
    headers = {keys[index][0].id: {"Authorization": f"Bearer {keys[index][1]}"} for index in range(2)}
    leaving, staying = headers
    async with gateway.worker(endless(65)) as worker, aiohttp.ClientSession(gateway.url) as session:
        body = chat_body(stream=stream)
        calls = {key: asyncio.create_task(session.post(CHAT, json=body, headers=headers[key])) for key in headers}

        async def both_run() -> bool:
            return len(worker.claimed) == 2

        await until(both_run)
        await store.revoke(leaving)
        async with await asyncio.wait_for(calls[leaving], 60) as reply:
            text = await asyncio.wait_for(reply.text(), 60)
        assert reply.status == (200 if stream else 401)
        assert f"The API key {leaving} has expired or was revoked" in text
        assert "invalid_api_key" in text
        ended = await asyncio.wait_for(worker.cancelled.get(), 60)
        broker = gateway.gateway.broker
        assert await broker.client.hget(broker.keys.request(ended), "account") == leaving.encode()
        [other] = {request.id for request in worker.claimed} - {ended}
        assert await broker.client.hmget(broker.keys.request(other), "account", "state", "cancel") == [
            *(staying.encode(), b"running"),
            None,
        ]
        await broker.cancel(other)
        (await calls[staying]).close()


async def test_without_time_for_open_streams_a_gateway_ends_at_once(start_gateway: Start) -> None:
    first = await start_gateway()
    async with first.worker(endless(65)) as worker:
        async with asyncio.timeout(60), running_gateway(replace(first.settings, drain_s=0)) as second:
            _, writer = await second.connect(call(stream=True))
            await started(worker)
        writer.close()
        await first.gateway.broker.cancel(worker.claimed[0].id)


@pytest.fixture
def long_silences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no gateway read a log only because a request was silent."""
    for module in ("buffer", "cursor"):
        monkeypatch.setattr(f"quire.gateway.stream.{module}.SILENCE_S", 60.0)


@pytest.mark.usefixtures("long_silences")
async def test_a_repeated_call_reads_what_is_logged_at_once(gateway: RunningGateway) -> None:
    async with gateway.worker(emit(tokens("The quick brown fox"))) as worker:
        replies = [await asyncio.wait_for(gateway.post(CHAT, chat_body(), idempotency_key="k"), 20) for _ in range(2)]
        assert len(worker.claimed) == 1
    assert [reply.status for reply in replies] == [200, 200]
    assert replies[0].json == replies[1].json
    assert replies[0].headers["x-request-id"] == replies[1].headers["x-request-id"]
    calls = gateway.gateway.meters.calls.items()
    assert {kind: count for (_, kind, _), count in calls if count} == {"new": 1, "joined": 1}


@pytest.mark.usefixtures("long_silences")
async def test_a_resumed_stream_reads_what_is_logged_at_once(gateway: RunningGateway) -> None:
    async with gateway.worker(emit(tokens("The quick brown fox"))):
        async with gateway.stream(CHAT, chat_body(stream=True)) as stream:
            events = await stream.rest()
        for seen in (0, 2):
            path = f"{CHAT}/{events[0].data['id']}/stream"
            async with gateway.stream(path, Last_Event_ID=str(events[seen].id)) as again:
                assert await asyncio.wait_for(again.rest(), 20) == events[seen + 1 :]
    calls = gateway.gateway.meters.calls
    assert sum(calls["chat", "resumed", outcome] for outcome in ("stop", "length")) == 2


async def test_a_call_of_which_one_prompt_has_ended_is_cancelled_all_the_same(gateway: RunningGateway) -> None:
    async def script(request: GenerationRequest) -> Steps:
        yield (Delta(0, tuple(tokens("a"))),), None
        if not request.id.endswith("-1"):
            yield (Delta(0, tuple(tokens("b")), "stop"),), Outcome("stop")
        while True:
            yield (Delta(0, tuple(tokens("a"))),), None

    body = {"model": MODEL, "prompt": ["one", "two"], "stream": True, "background": True}
    path = "/v1/completions"
    async with gateway.worker(script), gateway.stream(path, body) as stream:
        event = await stream.next()
        call_id = event.data["id"]
        while not event.data["choices"][0]["finish_reason"]:
            event = await stream.next()
        assert (await gateway.post(f"{CHAT}/{call_id}/cancel", b"")).status == 404  # wrong endpoint
        assert (await gateway.post(f"{path}/{call_id}/cancel", b"")).json["cancelled"] is True
        await stream.rest()
    assert [await outcome(gateway, name) for name in ("stop", "cancelled")] == [1, 1]
    assert (await gateway.post(f"{path}/{call_id}/cancel", b"")).json["cancelled"] is False


async def test_who_does_not_read_small_answers_loses_the_connection(start_gateway: Start) -> None:
    gateway = await start_gateway(write_timeout_s=0.2)
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
    # Send requests with small answers until the socket buffers are full.
    asks = 200 * raw_request("GET", "/v1/models")
    with suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(60):
            while True:
                writer.write(asks)
                await writer.drain()

    async def closed() -> bool:
        return not gateway.connections

    await until(closed)
    writer.transport.abort()


# --- Which model a request reaches, before its handler runs -----------------------------------------------------------


async def test_a_broken_body_is_counted_as_a_refused_call(redis_url: str, tmp_path: Path) -> None:
    await register(redis_url, "one", write_model(tmp_path / "one"))
    async with discovering_gateway(redis_url) as gateway, FakeWorker(redis_url, "one", emit([5])).running():
        await gateway.until_names("one")
        reply = await gateway.post("/v1/chat/completions", b'{"model": ')
        assert (reply.status, reply.error["code"]) == (400, "invalid_json")
        error = (await gateway.complete(model="two")).error
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        reply = await gateway.complete(model=5)
        assert (reply.status, reply.error["param"]) == (400, "model")
        calls = gateway.directory.process.meters.calls
        assert calls["chat", "new", "refused"] == 1
        assert calls["completion", "new", "refused"] == 2
        # A single model needs no name, as with a model folder.
        assert (await gateway.post("/tokenize", {"prompt": "Hi"})).status == 200


async def test_without_any_model_every_call_is_refused(redis_url: str) -> None:
    async with discovering_gateway(redis_url) as gateway:
        assert (await gateway.post("/v1/chat/completions", b"{")).error["code"] == "invalid_json"
        assert (await gateway.chat()).error["code"] == "model_not_found"
        assert (await gateway.get(f"/v1/responses/resp_{'a' * 32}")).status == 404
        assert (await gateway.get("/v1/responses/resp_x")).status == 404
        assert (await gateway.post(f"/v1/completions/cmpl-{'a' * 32}/cancel", {})).error["code"] == "not_found"
        assert (await gateway.get("/status")).json["workers"] == 0
        assert (await gateway.get("/engine/workers")).status == 404
        assert (await gateway.get("/openapi.json")).status == 200
        unnamed = await gateway.post("/tokenize", {"prompt": "Hi"})
        assert (unnamed.status, unnamed.error["code"]) == (404, "model_not_found")
        ready = await gateway.get("/readyz")
        assert (ready.status, ready.json["problems"]) == (503, ["no worker makes progress"])


async def test_an_unknown_model_is_refused_with_at_most_sixteen_names(redis_url: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "one")
    async with discovering_gateway(redis_url) as gateway, FakeWorker(redis_url, "m00", emit([5])).running():
        for count, end in ((16, "'m15'."), (17, "'m15', ....")):
            names = [f"m{index:02}" for index in range(count)]
            await register(redis_url, names[0], folder, *names[1:])
            await gateway.until_names(*names)
            message = (await gateway.complete(model="other")).error["message"]
            listed = f"{', '.join(map(repr, names[:15]))}, {end}"
            assert message == f"There is no model 'other' here; this server has {listed}"


async def test_a_request_without_a_name_needs_a_key_for_the_only_model(gateway: RunningGateway) -> None:
    store = gateway.gateway.process.keys.ring.store
    for models, status in (([MODEL], 200), (["other"], 404), ([], 200)):
        _, secret = await store.create("acme", "web", "test", AccountLimits.of({"models": models}))
        reply = await gateway.post("/tokenize", {"prompt": "Hi"}, authorization=f"Bearer {secret}")
        assert reply.status == status, models


# --- The wiring of a gateway: its parts live from start to close, and leave nothing behind ----------------------------


async def test_a_gateway_that_is_closed_leaves_no_task_behind(gateway: RunningGateway) -> None:
    settings = gateway.settings
    before = asyncio.all_tasks()
    other = Gateway(settings, load_model(settings.model, settings.name))
    await other.start()
    await asyncio.wait_for(other.subscription.ready.wait(), 60)
    assert other.redis_problems() == []
    await other.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before


async def test_a_gateway_ends_although_redis_does_not_answer_its_cancellations(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "CANCEL_TIMEOUT_S", 0.1)
    settings = gateway.settings
    other = Gateway(settings, load_model(settings.model, settings.name))
    await other.start()
    asked = asyncio.Event()

    async def never(*args: Any, **kwargs: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(other.broker, "cancel", never)
    other.canceller.cancel(["a" * 32])
    await asyncio.wait_for(asked.wait(), 10)
    await asyncio.wait_for(other.close(), 10)
