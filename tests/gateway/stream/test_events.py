"""Events: how they are written, routed and received."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from redis import Redis

from quire.gateway.stream.buffer import ClosedOutcome
from quire.gateway.stream.router import FrameRouter
from quire.gateway.stream.sse import BEGINNING, EventId, dumps, event, quote, takes_ids
from quire.gateway.stream.subscription import Subscription
from quire.gateway.stream.writer import PART_CHARACTERS, EventRenderer
from quire.shared.protocol.broker import Claim
from quire.shared.protocol.messages import Delta, StepItem
from quire.shared.redis.clients import pubsub_client
from quire.shared.redis.lane_client import LaneClient
from quire.shared.redis.link import Link
from tests.gateway.stream.test_buffer import SCORED, Log, open_one, scored_steps, steps
from tests.support.broker_calls import recoveries_of
from tests.support.gateway.fake_worker import emit, endless
from tests.support.gateway.running import (
    RunningGateway,
    chat_body,
    parse_events,
    raw_request,
    read_reply,
    texts,
    tokens,
    until,
)
from tests.support.hand_worker import BODY, IDS, TEXT, HandWorker, one_each, run
from tests.support.redis_server import RedisServer

# --- Ids of events are read strictly and ordered; clients that fail on ids get none -----------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", EventId(0)),
        ("12", EventId(12)),
        ("0.1", EventId(0, 1)),
        ("9999999999.999999", EventId(9999999999, 999999)),
        ("12.0", None),
        ("012", None),
        ("12.01", None),
        ("12.", None),
        (".1", None),
        ("-1", None),
        ("+1", None),
        (" 1", None),
        ("1\n", None),
        ("١", None),
        ("10000000000", None),
        ("1.1000000", None),
        ("", None),
    ],
)
def test_an_id_is_read_strictly_and_written_as_it_was(text: str, expected: EventId | None) -> None:
    found = EventId.parse(text)
    assert found == expected
    if found is not None:
        assert str(found) == text


def test_ids_are_ordered_by_tokens_then_by_what_follows_them() -> None:
    texts = ["0", "0.1", "0.2", "1", "1.1", "9", "10", "10.2", "10.10"]
    ids = [EventId.parse(text) for text in texts]
    assert None not in ids
    assert ids == sorted(ids)  # type: ignore[type-var]
    assert ids[0] == BEGINNING


@pytest.mark.parametrize(
    ("agent", "accept", "expected"),
    [
        ("", "", True),
        ("OpenAI/Python 1.0", "application/json", True),
        ("Python/3.11 aiohttp/3.9", "*/*", False),
        ("Python/3.11 aiohttp/3.9", "text/event-stream", True),
    ],
)
def test_bare_aiohttp_gets_ids_only_if_it_accepts_event_streams(agent: str, accept: str, expected: bool) -> None:
    assert takes_ids({"User-Agent": agent, "Accept": accept}) is expected
    assert takes_ids({})


def test_no_text_can_end_the_line_of_an_event() -> None:
    text = 'a\nb\r\n\u2028\u2029\x85\x00"\\ \ud800 😀'
    data = f'{{"text":{quote(text)},"list":{dumps([1, 2])}}}'
    written = event(data)
    assert written.splitlines() == [f"data: {data}", ""]
    assert written.isascii()
    assert json.loads(written.removeprefix("data: ")) == {"text": text, "list": [1, 2]}


# --- The writer sends answers at once, in order and completely --------------------------------------------------------


async def test_a_fault_of_the_gateway_in_the_middle_of_a_stream_is_its_last_event(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
        stream = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 60)
        # The connection still serves the next request.
        assert (await asyncio.wait_for(read_reply(reader), 60)).json == {"status": "ok"}
        writer.close()
        assert await asyncio.wait_for(worker.cancelled.get(), 60) == worker.claimed[0].id
    assert stream.count(b"HTTP/1.1") == 1
    last = stream.decode().split("data: ")[-1]
    assert json.loads(last.split("\n")[0])["error"]["code"] == "internal"
    assert "secret" not in last
    assert "a secret detail" in caplog.text


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
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
    assert answer.count(b"HTTP/1.1") == 1
    assert not answer.endswith(b"0\r\n\r\n")


async def test_a_client_of_http_1_0_gets_the_events_until_its_connection_is_closed(gateway: RunningGateway) -> None:
    request = raw_request("POST", "/v1/chat/completions", json.dumps(chat_body(stream=True)).encode())
    async with gateway.worker(emit(tokens("abc"))):
        reader, writer = await gateway.connect(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
        writer.close()
    assert b"chunked" not in head
    events = parse_events(body.decode())
    assert "".join(texts(events)) == "abc"
    assert events[-1].data == "[DONE]"


async def test_tokens_that_come_together_with_the_end_of_a_stream_are_written_before_it(
    gateway: RunningGateway,
) -> None:
    worker, router = HandWorker(gateway), gateway.gateway.router
    reader, writer = await gateway.connect(raw_request("POST", "/v1/completions", json.dumps(BODY).encode()))
    claim = await worker.claim()

    async def is_accepted() -> bool:
        return router.owners == set() and all(buffer.accepted for buffer in router._open)

    await until(is_accepted)
    router.feed(one_each(claim.request_id)[:3], 0.0)
    router.close_streams(ClosedOutcome(ClosedOutcome.NAME, "the gateway ends"))
    stream = (await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 10)).decode()
    writer.close()
    *before, end = [json.loads(line) for line in re.findall(r"^data: (.+)$", stream, re.M)]
    text = "".join(one["choices"][0]["text"] for one in before)
    assert text
    assert TEXT.startswith(text)
    assert "the gateway ends" in end["error"]["message"]


async def test_headers_come_as_soon_as_the_request_is_accepted(gateway: RunningGateway) -> None:
    # Without a worker no token comes: this request would hang if the headers waited for the first token.
    async with aiohttp.ClientSession() as session:
        url = gateway.url + "/v1/chat/completions"
        async with session.post(url, json=chat_body(stream=True)) as response:
            assert response.status == 200
            assert len(response.headers["x-request-id"]) == 32
            assert await gateway.queued() == 1


# --- Every token reaches its client once and in order, whatever pub/sub loses, repeats or reorders --------------------


async def test_frames_that_are_lost_are_read_from_the_log(gateway: RunningGateway) -> None:
    async def act(worker: HandWorker, claim: Claim, items: list[StepItem]) -> None:
        await worker.log(claim, items)
        for index in (0, 3, 4, len(items) - 1):
            await worker.publish(items[index].encode())

    assert await run(gateway, act) == TEXT
    assert gateway.gateway.router.stats.repairs >= 1

    async def noted() -> bool:
        return await recoveries_of(gateway.gateway.broker) == {"repairs": gateway.gateway.router.stats.repairs}

    await until(noted)


async def test_frames_that_were_at_hand_together_are_given_together() -> None:
    router, buffer, _ = open_one([])
    given = []

    def sink() -> bool:
        given.append(buffer.take())
        return True

    buffer.sink = sink
    items = steps(5, 1)
    for item in items[:3]:
        router.feed([item], 0.0)
    assert given == []
    await asyncio.sleep(0)
    assert given == [items[:3]]
    router.feed([items[3]], 0.0)
    await asyncio.sleep(0)
    assert given == [items[:3], [items[3]]]


async def test_what_came_together_for_many_prompts_is_not_read_from_the_log() -> None:
    """A client that reads has taken all earlier items, so all new items fit the buffer, however many they are."""
    ids = [f"r{index}" for index in range(64)]
    log: Any = Log([])
    router = FrameRouter(log, keepalive_s=60.0)
    buffer = router.open([*ids, "first"])
    buffer.accept(None, is_logged=False)
    router.feed(scored_steps(1, "first"), 0.0)  # the others have no item yet
    assert len(buffer.take()) == 1
    for together in zip(*(scored_steps(5, one) for one in ids), strict=True):
        router.feed(together, 0.0)
        given = buffer.take()
        while len(given) < len(ids):
            await buffer.ready()
            given += buffer.take()
        assert given == list(together)
    # For a client that no longer reads, the buffer keeps one item per prompt.
    for at in (5, 6):
        router.feed([StepItem(one, at, (Delta(0, (at,), logprobs=SCORED),)) for one in ids], 0.0)
    assert len(buffer._waiting) == len(ids)
    assert all(buffer.cursors[one].behind for one in ids)


# --- The subscription of a gateway over a connection that fails it without being closed -------------------------------


@asynccontextmanager
async def subscription(client: LaneClient) -> AsyncIterator[Subscription]:
    one = Subscription(client, "channel", lambda items, now: None, lambda: 0)
    one.start()
    try:
        yield one
    finally:
        await one.close()
        await client.aclose()


def _refusals(client: Redis) -> int:
    return int(client.info("commandstats").get("cmdstat_subscribe", {}).get("rejected_calls", 0))  # type: ignore[union-attr]


async def test_a_subscription_that_redis_refuses_is_tried_again(redis_url: str, redis_server: RedisServer) -> None:
    """Such as while it is busy with a script."""
    with redis_server.client() as other:
        other.execute_command("ACL", "SETUSER", "default", "resetchannels")
        other.config_resetstat()
        try:
            async with subscription(pubsub_client(redis_url)) as one:
                async with asyncio.timeout(60):
                    while _refusals(other) < 3:  # noqa: ASYNC110 - Redis tells nobody
                        await asyncio.sleep(0.01)
                assert not one.ready.is_set()
                other.execute_command("ACL", "SETUSER", "default", "allchannels")
                async with asyncio.timeout(60):
                    await one.ready.wait()
        finally:
            other.execute_command("ACL", "SETUSER", "default", "allchannels")


class Pings:
    """Counts the pings of a client's connections, and those that Redis has answered."""

    def __init__(self, client: LaneClient, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open_link = client.open_link
        self.sent = self._answered = 0
        monkeypatch.setattr(client, "open_link", self._open)

    async def _open(self) -> Link:
        link = await self._open_link()
        write, listen = link.write, link.listen

        def counted(*command: Any) -> None:
            self.sent += command == ("PING",)
            write(*command)

        def listened(push: Any) -> None:
            def noted(reply: Any) -> None:
                self._answered += reply[0] == b"pong"
                push(reply)

            listen(noted)

        link.write, link.listen = counted, listened  # type: ignore[method-assign]
        return link

    async def answered(self) -> None:
        """Wait for the answers. A busy machine may take longer for one than a connection may be silent."""
        async with asyncio.timeout(60):
            while self._answered < self.sent:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@pytest.mark.slow
async def test_a_connection_is_not_given_up_before_it_was_pinged(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes to hear where the lane is."""
    monkeypatch.setattr("quire.gateway.stream.subscription.PING_AFTER_S", 0.05)
    client = pubsub_client(redis_url)
    pings, is_current = Pings(client, monkeypatch), client.is_current
    looks = asyncio.Semaphore(0)

    async def slowly(link: object) -> bool:
        await asyncio.sleep(0.15)
        await pings.answered()
        looks.release()
        return await is_current(link)  # type: ignore[arg-type]

    monkeypatch.setattr(client, "is_current", slowly)
    async with subscription(client) as one:
        await one.ready.wait()
        while pings.sent < 2:
            await looks.acquire()
        assert one.subscribes == 1


@pytest.mark.slow
async def test_an_answer_within_a_tick_of_the_clock_is_one(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks of event loops have milliseconds, and a Redis on the same machine answers a ping in less."""
    monkeypatch.setattr("quire.gateway.stream.subscription.PING_AFTER_S", 0.2)
    monkeypatch.setattr("quire.gateway.stream.subscription.LOOK_S", 0.05)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: int(10 * time.monotonic()) / 10)
    client = pubsub_client(redis_url)
    pings, is_current = Pings(client, monkeypatch), client.is_current
    looks = asyncio.Semaphore(0)

    async def counted(link: object) -> bool:
        await pings.answered()
        looks.release()
        return await is_current(link)  # type: ignore[arg-type]

    monkeypatch.setattr(client, "is_current", counted)
    async with subscription(client) as one:
        await one.ready.wait()
        while pings.sent < 4:
            await looks.acquire()
        assert one.subscribes == 1


async def test_a_corrupt_frame_is_counted_and_dropped(gateway: RunningGateway) -> None:
    async def act(worker: HandWorker, claim: Claim, items: list[StepItem]) -> None:
        await worker.log(claim, items)
        for item in items:
            await worker.publish(b"\xc1 this is not msgpack")
            await worker.publish(item.encode()[:-1])
            await worker.publish(item.encode())

    assert await run(gateway, act) == TEXT
    assert gateway.gateway.subscription.corrupt == 2 * len(IDS)


async def test_a_subscription_that_was_cut_is_made_again_and_every_stream_repaired(gateway: RunningGateway) -> None:
    async def act(worker: HandWorker, claim: Claim, items: list[StepItem]) -> None:
        middle = len(items) // 2
        for item in items[:middle]:
            await worker.log(claim, [item])
            await worker.publish(item.encode())
        before = gateway.gateway.subscription.subscribes
        await worker.broker.client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        await worker.log(claim, items[middle:])

        async def subscribed() -> bool:
            return gateway.gateway.subscription.subscribes > before

        await until(subscribed)

    assert await run(gateway, act) == TEXT
