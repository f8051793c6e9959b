"""WebSockets at /v1/responses, opened by aiohttp's client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import ClientWebSocketResponse, WSMsgType, WSServerHandshakeError

from quire.gateway.features.websocket import connections, incoming
from quire.shared.accounts.limits import AccountLimits
from quire.shared.protocol.messages import Delta, GenerationRequest, Outcome
from tests.gateway.api.test_conversation import answering
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import Steps, emit
from tests.support.gateway.response_calls import PATH, TOOL, WHOLE, prompt, raw_events
from tests.support.gateway.response_fixtures import folder, gateway
from tests.support.gateway.running import MODEL, RunningGateway, raw_request, running_gateway, until
from tests.support.gateway.seeing import data_url, response, response_part, write_seeing_model
from tests.support.pictures import noise, saved

__all__ = ["folder", "gateway"]

ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


class Socket:
    """An open connection."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self.socket = socket

    async def send(self, **parameters: Any) -> None:
        await self.socket.send_json({"type": "response.create", "model": MODEL, "input": "Hello", **parameters})

    async def next(self) -> dict[str, Any]:
        """Return the next event."""
        message = await self.socket.receive(60)
        assert message.type is WSMsgType.TEXT, message
        event: dict[str, Any] = json.loads(message.data)
        return event

    async def events(self) -> list[dict[str, Any]]:
        """Return the events of a response, or the error."""
        found = [await self.next()]
        while found[-1]["type"] not in ENDS:
            found.append(await self.next())
        return found

    async def ask(self, **parameters: Any) -> dict[str, Any]:
        """Create a response; return the last event."""
        await self.send(**parameters)
        return (await self.events())[-1]

    async def refused(self, **parameters: Any) -> tuple[int, str, str | None]:
        """Return status, code and parameter of the error with which a message is refused."""
        event = await self.ask(**parameters)
        assert event["type"] == "error", event
        assert event["error"]["message"]
        return event["status"], event["error"]["code"], event["error"]["param"]

    async def closed(self) -> int | None:
        """Return the code with which the server closes the connection."""
        async with asyncio.timeout(60):
            while not self.socket.closed:
                await self.socket.receive()
        return self.socket.close_code


async def slow(request: GenerationRequest) -> Steps:
    """Emit one token after the other, for much longer than a test takes."""
    while True:
        yield (Delta(0, (65,)),), None
        await asyncio.sleep(0.1)


@asynccontextmanager
async def connected(gateway: RunningGateway, **headers: str) -> AsyncIterator[Socket]:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        aiohttp.ClientSession(headers=given) as session,
        session.ws_connect(gateway.url + PATH, max_msg_size=0) as socket,
    ):
        yield Socket(socket)


async def metrics(gateway: RunningGateway, outcome: str) -> int:
    return gateway.gateway.meters.calls["response", "new", outcome]


@pytest.mark.parametrize("step", [1, 1000])
async def test_a_message_has_the_events_of_a_post(gateway: RunningGateway, step: int) -> None:
    asked = {"tools": [TOOL], "metadata": {"k": "v"}}
    async with gateway.worker(answering(WHOLE, step)), connected(gateway) as socket:
        await socket.send(**asked)
        events = await socket.events()
        body = {"model": MODEL, "input": "Hello", "stream": True, **asked}
        posted = await raw_events(gateway, PATH, body)
        stored = (await gateway.get(f"{PATH}/{events[-1]['response']['id']}")).json
    assert stored == events[-1]["response"]
    own, other = events[0]["response"], posted[0]["response"]
    text = json.dumps(posted).replace(other["id"][5:], own["id"][5:])
    for name in ("created_at",):
        text = text.replace(f'"{name}": {other[name]}', f'"{name}": {own[name]}')
    assert [event["type"] for event in events] == [event["type"] for event in posted]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event, expected in zip(events, json.loads(text), strict=True):
        # The ids of calls follow from that of the response by a hash.
        assert {**event, "item": 0, "response": 0} == {**expected, "item": 0, "response": 0}


async def test_a_response_that_is_not_stored_can_be_continued_on_its_connection(gateway: RunningGateway) -> None:
    async with gateway.worker(answering("one")) as worker, connected(gateway) as socket, connected(gateway) as other:
        first = (await socket.ask(store=False))["response"]
        assert first["store"] is False
        missing = (400, "previous_response_not_found", "previous_response_id")
        assert await other.refused(store=False, previous_response_id=first["id"]) == missing
        assert (await gateway.get(f"{PATH}/{first['id']}")).status == 404
        second = (await socket.ask(store=False, input="b", previous_response_id=first["id"]))["response"]
        # The last response alone is kept.
        assert await socket.refused(store=False, previous_response_id=first["id"]) == missing
        # A stored response may follow, and is continued by any other call.
        third = (await socket.ask(input="c", previous_response_id=second["id"]))["response"]
        fourth = await gateway.post(PATH, {"model": MODEL, "input": "d", "previous_response_id": third["id"]})
    assert fourth.status == 200
    last = prompt(worker.claimed[-1])
    assert [last.count(f"<|im_start|>{role}") for role in ("user", "assistant")] == [4, 4]
    assert last.count("one") == 3


@pytest.mark.parametrize("store", [False, True])
async def test_a_warm_up_computes_its_prompt_and_can_be_continued(gateway: RunningGateway, store: bool) -> None:
    asked: dict[str, Any] = {"store": store, "tools": [TOOL], "tool_choice": "required", "max_output_tokens": 9}
    async with gateway.worker(answering(WHOLE)) as worker, connected(gateway) as socket:
        await socket.send(**asked, generate=False, context_management=[{"type": "compaction", "compact_threshold": 1}])
        events = await socket.events()
        warm = events[-1]["response"]
        stored = await gateway.get(f"{PATH}/{warm['id']}")
        following = await socket.ask(**asked, input="b", previous_response_id=warm["id"])
        # A warm-up may continue a response, and have no input.
        again = await socket.ask(**asked, input=[], generate=False, previous_response_id=warm["id"] if store else None)
        last = await socket.ask(**asked, input="c", previous_response_id=again["response"]["id"])
    assert [event["type"] for event in events] == [f"response.{n}" for n in ("created", "in_progress", "completed")]
    assert (warm["status"], warm["output"], warm["max_output_tokens"]) == ("completed", [], 9)
    tokens = len(worker.claimed[0].prompt)
    assert {**warm["usage"], "input_tokens_details": 0} == {
        "input_tokens": tokens,
        "input_tokens_details": 0,
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens,
    }
    assert (stored.status, stored.json == warm) == ((200, True) if store else (404, False))
    assert [request.sampling.max_tokens for request in worker.claimed] == [1, 9, 1, 9]
    # The next prompt begins with the prompt that was computed, up to the end of its message.
    assert following["response"]["output"]
    told = [prompt(request) for request in worker.claimed]
    assert "Hello" in told[0]
    assert told[1].startswith(told[0].partition("Hello")[0] + "Hello")
    assert [text.count("<|im_start|>user") for text in told] == [1, 2, 1, 2 if store else 1]
    assert last["type"] == "response.completed"


async def test_a_warm_up_reads_its_conversation_and_adds_nothing(gateway: RunningGateway) -> None:
    items = [{"role": "user", "content": "Remember blue."}]
    made = (await gateway.post("/v1/conversations", {"items": items})).json["id"]
    async with gateway.worker(answering("one")) as worker, connected(gateway) as socket:
        warm = (await socket.ask(conversation=made, input="a", generate=False))["response"]
        await socket.ask(conversation=made, input="b")
        continued = await socket.ask(input="c", previous_response_id=warm["id"])
    assert continued["type"] == "response.completed"
    told = [prompt(request) for request in worker.claimed]
    assert ["Remember blue." in text for text in told] == [True] * 3
    assert [text.count("<|im_start|>user") for text in told] == [2, 2, 3]
    listed = (await gateway.get(f"/v1/conversations/{made}/items")).json["data"]
    assert [item["role"] for item in reversed(listed)] == ["user", "user", "assistant"]


async def test_a_post_has_no_warm_up(gateway: RunningGateway) -> None:
    """`generate` belongs to WebSockets, as at OpenAI, and to one message alone."""
    async with gateway.worker(answering("x")), connected(gateway) as socket:
        reply = await gateway.post(PATH, {"model": MODEL, "input": "a", "generate": False})
        assert (reply.status, reply.json["error"]["param"]) == (400, "generate")
        assert (await socket.ask(generate=False))["response"]["output"] == []
        assert (await socket.ask())["response"]["output"] != []


async def test_images_of_a_response_that_is_not_stored_are_seen_again(start_gateway: Start, tmp_path: Path) -> None:
    gateway = await start_gateway(model=str(write_seeing_model(tmp_path / "test-model")))
    _, body = response(response_part(image_url=data_url(saved(noise("RGB", 300, 200, 1), "PNG"))))
    async with gateway.worker(emit([5, 6])) as worker, connected(gateway) as socket:
        first = (await socket.ask(store=False, input=body["input"]))["response"]
        second = (await socket.ask(store=False, previous_response_id=first["id"]))["response"]
        # A stored response keeps the files.
        third = (await socket.ask(previous_response_id=second["id"]))["response"]
        fourth = await gateway.post(PATH, {"model": MODEL, "input": "d", "previous_response_id": third["id"]})
    assert fourth.status == 200
    digests = [[image.digest for image in request.images] for request in worker.claimed]
    assert digests == 4 * [digests[0]]
    assert len(digests[0]) == 1


async def test_a_continuation_that_is_refused_ends_the_chain(gateway: RunningGateway) -> None:
    async with gateway.worker(answering("x")), connected(gateway) as socket:
        first = (await socket.ask(store=False))["response"]
        output = {"type": "function_call_output", "call_id": "call_x", "output": "x"}
        follows = {"store": False, "previous_response_id": first["id"]}
        assert (await socket.refused(**follows, input=[output]))[0] == 400
        assert (await socket.refused(**follows))[1] == "previous_response_not_found"


async def test_what_connections_keep_is_bounded(start_gateway: Start, folder: Any) -> None:
    gateway = await start_gateway(model=str(folder), max_bodies_bytes=1024 * 1024, max_conversation_bytes=500_000)
    noise = "".join(chr(0x4E00 + at * 7919 % 20_000) for at in range(40_000))  # 120 kB that do not compress well
    async with (
        gateway.worker(answering("x")),
        connected(gateway) as first,
        connected(gateway) as second,
        connected(gateway) as third,
    ):
        ids = []
        for socket in (first, second, third):
            asked = {"store": False, "truncation": "auto", "instructions": "", "metadata": {}}
            event = await socket.ask(
                **asked, input=[{"role": "user", "content": noise}, {"role": "user", "content": "x"}]
            )
            assert event["type"] == "response.completed", event
            ids.append(event["response"]["id"])
        # The next message of a connection waits until its last response is kept.
        assert (await third.ask(store=False, previous_response_id=ids[2], truncation="auto"))["type"] == ENDS[0]
        assert (await first.refused(store=False, previous_response_id=ids[0]))[1] == "previous_response_not_found"


# --- the way of a message ---------------------------------------------------------------------------------------------


async def test_messages_are_served_one_after_the_other(gateway: RunningGateway) -> None:
    async with gateway.worker(answering("abcdef")) as worker, connected(gateway) as socket:
        for text in ("a", "b", "c"):
            await socket.send(input=text)
        ends = [await socket.events() for _ in range(3)]
    for text, events, request in zip("abc", ends, worker.claimed, strict=True):
        assert f"user\n{text}<" in prompt(request)
        numbers = [event["sequence_number"] for event in events]
        assert numbers == list(range(len(events)))


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"type": "response.cancel"}, (400, "invalid_value", "type")),
        ({"type": None}, (400, "invalid_value", "type")),
        ({"type": ["response.create"]}, (400, "invalid_value", "type")),
        ({"stream": False}, (400, "invalid_value", "stream")),
        ({"background": True}, (400, "invalid_value", "background")),
        ({"generate": 0}, (400, "invalid_value", "generate")),
        (
            {"generate": False, "input": [{"role": "user", "content": "a"}, {"type": "compaction_trigger"}]},
            (400, "invalid_value", "generate"),
        ),
        ({"stream_id": "a"}, (400, "invalid_value", "stream_id")),
        ({"temperature": -1}, (400, "invalid_value", "temperature")),
        ({"model": "other"}, (404, "model_not_found", "model")),
        ({"inputs": "x"}, (400, "unknown_parameter", "inputs")),
        ({"previous_response_id": "resp_x"}, (400, "previous_response_not_found", "previous_response_id")),
    ],
)
async def test_a_message_is_checked_as_a_body(
    gateway: RunningGateway, parameters: dict[str, Any], expected: tuple[int, str, str]
) -> None:
    async with gateway.worker(answering("x")) as worker, connected(gateway) as socket:
        assert await socket.refused(**parameters) == expected
        # The connection stays open, and takes parameters with the only value that they may have.
        fixed = {"stream": True, "background": False, "generate": True, "stream_id": None}
        assert (await socket.ask(**fixed))["type"] == "response.completed"
    assert len(worker.claimed) == 1
    assert await metrics(gateway, "stop") == 1


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (b"{}", "invalid_json"),
        ("", "invalid_json"),
        ("[]", "invalid_json"),
        ("{", "invalid_json"),
        ('{"type": "response.create", "type": "response.create"}', "duplicate_key"),
        ('{"type": "response.create", "input": ' + "[" * 30_000 + "]" * 30_000 + "}", "invalid_json"),
        ('{"type": "response.create", "input": "\\ud800"}', "invalid_unicode"),
        ('{"type": "response.create", "top_p": NaN}', "invalid_json"),
    ],
)
async def test_a_hostile_message_gets_an_error(server: RunningGateway, message: str | bytes, code: str) -> None:
    async with connected(server) as socket:
        for _ in range(2):
            send = socket.socket.send_str if isinstance(message, str) else socket.socket.send_bytes
            await send(message)  # type: ignore[arg-type]
            event = await socket.next()
            assert (event["type"], event["status"], event["error"]["code"]) == ("error", 400, code)
            assert len(event["headers"]["x-request-id"]) == 32


async def test_text_that_is_no_utf8_ends_a_connection_or_is_refused(server: RunningGateway) -> None:
    async with connected(server) as socket:
        await socket.socket._writer.send_frame(b'{"type": "\xff"}', WSMsgType.TEXT)
        message = await socket.socket.receive(60)
        assert message.type in (WSMsgType.TEXT, WSMsgType.CLOSE)


async def test_a_message_over_the_limit_closes_the_connection(server: RunningGateway) -> None:
    limit = server.settings.max_body_bytes
    async with connected(server) as socket:
        await socket.socket.send_str(" " * limit)
        assert (await socket.next())["error"]["code"] == "invalid_json"
        await socket.socket.send_str(" " * (limit + 1))
        assert await socket.closed() == 1009


async def test_a_message_in_parts_counts_in_the_budget_of_bodies(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "UNCOUNTED", 10_000)
    gateway = await start_gateway(max_bodies_bytes=2**20, max_body_bytes=2**20, body_timeout_s=0.5)
    budget = gateway.gateway.process.bodies

    async def part(socket: Socket) -> None:
        writer: Any = socket.socket._writer
        writer.transport.write(b"\x01\xfe\xff\xff\0\0\0\0" + b" " * 65_535)  # the first frame of several

    async def taken(size: int) -> None:
        async def is_so() -> bool:
            return budget._taken == size

        await until(is_so)

    await budget.take("another caller", 2**20, None)
    async with connected(gateway) as socket:
        await part(socket)
        assert await socket.closed() == 1013
    budget.give_back("another caller", 2**20)
    async with connected(gateway) as socket:
        await part(socket)
        await taken(2**20)
        assert await socket.closed() == 1008  # the rest has not come in time
    await taken(0)


async def test_a_flood_of_messages_closes_the_connection(gateway: RunningGateway) -> None:
    async with connected(gateway) as socket:
        for _ in range(connections.MAX_WAITING + 3):
            await socket.send(input="x")
        assert await socket.closed() == 1008

        async def is_empty() -> bool:
            has_ended = await gateway.queued() == 0 and gateway.connections == 0
            return has_ended and gateway.gateway.process.bodies._taken == 0

        await until(is_empty)
    # The first one may have been accepted by then, and the others were not.
    assert await gateway.accepted() <= 1


# --- the life of a connection -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_rude", [True, False])
async def test_a_response_ends_when_its_client_leaves(gateway: RunningGateway, is_rude: bool) -> None:
    async with gateway.worker(slow) as worker:
        async with connected(gateway) as socket:
            await socket.send()
            while (await socket.next())["type"] != "response.output_text.delta":
                pass
            if is_rude:
                socket.socket._writer.transport.abort()
        assert await asyncio.wait_for(worker.cancelled.get(), 60) == worker.claimed[0].id


async def test_a_client_that_answers_no_pings_is_cut_off(start_gateway: Start) -> None:
    gateway = await start_gateway(keepalive_s=0.2)
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(gateway.url + PATH, autoping=False) as deaf,
        connected(gateway) as alive,
    ):
        pings = [await deaf.receive(60) for _ in range(connections.MAX_MISSED)]
        assert {message.type for message in pings} == {WSMsgType.PING}
        waiting = asyncio.create_task(alive.socket.receive())  # it answers pings

        async def is_alone() -> bool:
            return gateway.connections == 1

        await until(is_alone)
        assert not waiting.done()
        waiting.cancel()


async def test_pings_of_a_client_are_answered_while_a_response_runs(gateway: RunningGateway) -> None:
    async with (
        gateway.worker(slow),
        aiohttp.ClientSession() as session,
        session.ws_connect(gateway.url + PATH, autoping=False) as socket,
    ):
        await Socket(socket).send()
        await socket.receive()
        await socket.ping(b"here")
        async with asyncio.timeout(60):
            while (message := await socket.receive()).type is not WSMsgType.PONG:
                assert message.type is WSMsgType.TEXT
        assert message.data == b"here"


async def test_an_old_connection_is_closed_after_its_response(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_AGE_S", 2.0)
    gateway = await start_gateway(keepalive_s=0.2)

    async def three_seconds(request: GenerationRequest) -> Steps:
        for _ in range(30):
            await asyncio.sleep(0.1)
            yield (Delta(0, (65,)),), None
        yield (Delta(0, (2,), "stop"),), Outcome("stop")

    async with gateway.worker(three_seconds), connected(gateway) as socket:
        assert (await socket.ask())["type"] == "response.completed"
        event = await socket.next()
        assert (event["status"], event["error"]["code"]) == (400, "websocket_connection_limit_reached")
        assert await socket.closed() == 1000


async def test_connections_are_closed_when_the_gateway_ends_and_its_response_runs_on(start_gateway: Start) -> None:
    first = await start_gateway()
    async with first.worker(slow) as worker:
        async with (
            running_gateway(replace(first.settings, drain_s=0.3)) as second,
            connected(second) as idle,
            connected(second) as busy,
        ):
            await busy.send()
            created = await busy.next()
            stopping = asyncio.create_task(second.shut_down())
            assert await idle.closed() == 1001
            await stopping
            assert not busy.socket.closed
            events = await busy.events()
            assert events[-1]["status"] == 503
            assert events[-1]["error"]["code"] == "shutting_down"
            assert events[-1]["sequence_number"] == events[-2]["sequence_number"]
            assert await busy.closed() == 1001
        response_id = created["response"]["id"]
        path = f"{PATH}/{response_id}?stream=true&starting_after={events[-1]['sequence_number']}"
        async with first.stream(path) as stream:
            line = await stream.response.content.readuntil(b"\n\n")
        assert f'"sequence_number":{events[-1]["sequence_number"] + 1},' in line.decode()
        await first.gateway.broker.cancel(worker.claimed[0].id)


# --- who may open one -------------------------------------------------------------------------------------------------


async def test_a_get_without_a_handshake_names_the_method(gateway: RunningGateway) -> None:
    reply = await gateway.get(PATH)
    assert (reply.status, reply.error["code"], reply.headers["allow"]) == (405, "method_not_allowed", "POST")
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "1"}
    reply = await gateway.send(raw_request("GET", PATH, headers={**headers, "Sec-WebSocket-Key": "x"}))
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("origins", "origin", "is_allowed"),
    [
        ("", "https://evil.example", False),
        ("", "null", False),
        ("https://app.example", "https://evil.example", False),
        ("https://app.example", "https://app.example", True),
        ("*", "https://evil.example", True),
        ("", "http://{own}", True),
        ("", "https://{own}.evil.example", False),
    ],
)
async def test_a_page_of_another_origin_opens_none(
    start_gateway: Start, origins: str, origin: str, is_allowed: bool
) -> None:
    gateway = await start_gateway(cors_origins=origins)
    origin = origin.format(own=gateway.url.partition("://")[2])
    if is_allowed:
        async with connected(gateway, Origin=origin) as socket:
            assert (await socket.refused(type="x"))[0] == 400
    else:
        with pytest.raises(WSServerHandshakeError) as refusal:
            async with connected(gateway, Origin=origin):
                pass
        assert refusal.value.status == 403


async def test_keys_and_their_limits_count_for_each_message(start_gateway: Start, folder: Any) -> None:
    gateway = await start_gateway(model=str(folder), require_keys=True)
    store = gateway.gateway.process.keys.ring.store
    few, own = [
        (await store.create(org, "web", "agent", AccountLimits(requests_per_minute=limit)))[1]
        for org, limit in (("acme", 2), ("other", 0))
    ]
    for key in ("", "sk-quire-wrong"):
        with pytest.raises(WSServerHandshakeError) as refusal:
            async with connected(gateway, Authorization=f"Bearer {key}"):
                pass
        assert refusal.value.status == 401
    async with (
        gateway.worker(answering("x")),
        connected(gateway, Authorization=f"Bearer {few}") as socket,
        connected(gateway, Authorization=f"Bearer {own}", Idempotency_Key="same") as other,
    ):
        first = (await socket.ask())["response"]
        # Another tenant reaches neither stored responses nor those of a connection.
        missing = (400, "previous_response_not_found", "previous_response_id")
        assert await other.refused(previous_response_id=first["id"]) == missing
        unstored = (await socket.ask(store=False, previous_response_id=first["id"]))["response"]
        assert await other.refused(previous_response_id=unstored["id"]) == missing
        event = await socket.ask()
        assert (event["status"], event["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(event["headers"]["retry-after"]) > 0
        # A key that the handshake gives for idempotency stands for no message.
        assert (await other.ask(input="a"))["response"]["id"] != (await other.ask(input="b"))["response"]["id"]
        await store.revoke(own[9:25])
        gateway.gateway.process.keys.ring.forget()
        assert await other.refused() == (401, "invalid_api_key", None)
        assert await other.closed() == 1008
