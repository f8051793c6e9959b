"""Every token once and in order, whatever pub/sub lost, doubled or reordered."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.gateway.stream import buffer
from quire.gateway.stream.cursor import Cursor
from quire.shared.broker import Claim, QueueReader, StepCommit, new_id
from quire.shared.messages import Delta, Outcome, StepItem
from tests.gateway.conftest import Start
from tests.gateway.running import MODEL, RunningGateway, parse_events, texts, tokens, until

TEXT = "The quick brown fox 😀 jumps over the lazy dog."
IDS = tokens(TEXT)
BODY = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 100}


def one_each(request_id: str, outcome: str = "stop") -> list[StepItem]:
    """An item per token, the last one terminal."""
    last = len(IDS) - 1
    return [
        StepItem(
            request_id,
            index,
            (Delta(0, (token,), outcome if index == last else None),),
            Outcome(outcome) if index == last else None,
        )
        for index, token in enumerate(IDS)
    ]


@given(st.lists(st.integers(0, len(IDS) - 1), max_size=60), st.data())
def test_a_cursor_takes_every_token_once_and_in_order(order: list[int], data: st.DataObject) -> None:
    """Whatever arrives in whatever order: with the log read where the cursor asks for it, the result is the whole."""
    log = one_each("r")
    cursor = Cursor("r", 0.0)
    taken: list[int] = []

    def take(item: StepItem) -> None:
        new = cursor.take(item)
        if new is not None:
            taken.extend(token for delta in new.deltas for token in delta.token_ids)

    for index in order:
        take(log[index])
        if cursor.behind and data.draw(st.booleans()):
            cursor.behind = False
            for item in log[cursor.next : index + 1]:
                take(item)
    for item in log[cursor.next :]:
        take(item)
    assert taken == IDS
    assert cursor.ended


@given(st.lists(st.integers(0, 12), min_size=2, max_size=2, unique=True), st.integers(0, 12))
def test_items_that_overlap_are_cut(bounds: list[int], have: int) -> None:
    """After Redis lost its tail a worker sends tokens again, in other portions."""
    start, end = sorted(bounds)
    item = StepItem("r", start, (Delta(0, tuple(range(start, end)), "length"),), Outcome("length"))
    cursor = Cursor("r", 0.0)
    cursor.next = have
    new = cursor.take(item)
    if start > have:
        assert new is None
        assert cursor.behind
    else:
        assert new is not None
        assert [token for delta in new.deltas for token in delta.token_ids] == list(range(have, end))
        assert new.deltas[-1].finish_reason == "length"
        assert cursor.next == max(have, end)


def test_a_cut_goes_through_the_choices_in_order() -> None:
    cursor = Cursor("r", 0.0)
    cursor.next = 3
    new = cursor.take(StepItem("r", 0, (Delta(0, (1, 2)), Delta(1, (3, 4)), Delta(2, (5,), "stop"))))
    assert new is not None
    assert (new.start, new.deltas) == (3, (Delta(1, (4,)), Delta(2, (5,), "stop")))


# --- a worker by hand: it logs, and publishes what the test wants -----------------------------------------------------


class HandWorker:
    """Logs the tokens of one request by the real scripts, to a channel that nobody hears, and publishes by hand."""

    def __init__(self, gateway: RunningGateway) -> None:
        self.broker = gateway.gateway.broker
        self.channel = self.broker.keys.channel(gateway.gateway.id)

    async def claim(self) -> Claim:
        await self.broker.create_groups()
        reader = QueueReader(self.broker.client, MODEL, "hand")
        deliveries: list[Any] = []

        async def some() -> bool:
            deliveries.extend(await reader.read(1, 0))
            return bool(deliveries)

        await until(some)
        claim = await self.broker.claim(deliveries[0], "hand", new_id())
        assert claim is not None
        await self.broker.client.hset(self.broker.keys.request(claim.request_id), "gateway", "nobody")
        return claim

    async def log(self, claim: Claim, items: list[StepItem]) -> None:
        for item in items:
            await self.broker.commit_step("hand", [StepCommit(claim.attempt, item)])

    async def publish(self, data: bytes) -> None:
        assert await self.broker.client.publish(self.channel, data) == 1


async def run(gateway: RunningGateway, act: Any) -> str:
    """The text that a client gets while `act(worker, claim, items)` plays the worker."""
    worker = HandWorker(gateway)
    call = asyncio.create_task(gateway.events("/v1/completions", BODY))
    claim = await worker.claim()
    await act(worker, claim, one_each(claim.request_id))
    events = await asyncio.wait_for(call, 20)
    assert events[-1].data == "[DONE]"
    assert events[-1].id.tokens == len(IDS)
    assert [event.id for event in events] == sorted(event.id for event in events)
    return "".join(texts(events))


async def test_frames_that_are_lost_are_read_from_the_log(gateway: RunningGateway) -> None:
    async def act(worker: HandWorker, claim: Claim, items: list[StepItem]) -> None:
        await worker.log(claim, items)
        for index in (0, 3, 4, len(items) - 1):
            await worker.publish(items[index].encode())

    assert await run(gateway, act) == TEXT
    assert gateway.gateway.fanout.repairs >= 1

    async def noted() -> bool:
        return await gateway.gateway.broker.read_recoveries() == {"repairs": gateway.gateway.fanout.repairs}

    await until(noted)


async def test_frames_that_come_twice_or_in_disorder_change_nothing(gateway: RunningGateway) -> None:
    async def act(worker: HandWorker, claim: Claim, items: list[StepItem]) -> None:
        await worker.log(claim, items)
        for item in [items[2], items[0], items[0], items[1], items[2], *reversed(items), *items]:
            await worker.publish(item.encode())

    assert await run(gateway, act) == TEXT


async def test_frames_of_other_portions_than_the_log_are_cut_to_fit(gateway: RunningGateway) -> None:
    async def act(worker: HandWorker, claim: Claim, items: list[StepItem]) -> None:
        await worker.log(claim, items)
        await worker.publish(items[0].encode() + items[1].encode())
        await worker.publish(StepItem(claim.request_id, 0, (Delta(0, tuple(IDS[:5])),)).encode())
        tail = (Delta(0, tuple(IDS[3:]), "stop"),)
        await worker.publish(StepItem(claim.request_id, 3, tail, Outcome("stop")).encode())

    assert await run(gateway, act) == TEXT


async def test_when_the_last_frame_is_lost_silence_reveals_it(gateway: RunningGateway) -> None:
    async def act(worker: HandWorker, claim: Claim, items: list[StepItem]) -> None:
        await worker.log(claim, items)
        for item in items[:-1]:
            await worker.publish(item.encode())

    began = asyncio.get_running_loop().time()
    assert await run(gateway, act) == TEXT
    assert asyncio.get_running_loop().time() - began < 2


async def test_when_no_frame_comes_at_all_the_log_is_enough(gateway: RunningGateway) -> None:
    async def act(worker: HandWorker, claim: Claim, items: list[StepItem]) -> None:
        await worker.log(claim, items)

    assert await run(gateway, act) == TEXT


async def test_a_corrupt_frame_is_counted_and_dropped(gateway: RunningGateway) -> None:
    async def act(worker: HandWorker, claim: Claim, items: list[StepItem]) -> None:
        await worker.log(claim, items)
        for item in items:
            await worker.publish(b"\xc1 this is not msgpack")
            await worker.publish(item.encode()[:-1])
            await worker.publish(item.encode())

    assert await run(gateway, act) == TEXT
    assert gateway.gateway.subscription.corrupt == 2 * len(IDS)


async def test_frames_for_requests_that_nobody_waits_for_are_ignored(gateway: RunningGateway) -> None:
    async def act(worker: HandWorker, claim: Claim, items: list[StepItem]) -> None:
        await worker.log(claim, items)
        for item in items:
            stranger = StepItem("stranger", item.start, item.deltas, item.outcome)
            await worker.publish(stranger.encode() + item.encode())

    assert await run(gateway, act) == TEXT


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


async def test_a_request_that_redis_forgot_ends_with_an_error(gateway: RunningGateway) -> None:
    worker = HandWorker(gateway)
    call = asyncio.create_task(gateway.complete(max_tokens=5))
    await worker.claim()
    await worker.broker.client.flushall()
    reply = await asyncio.wait_for(call, 20)
    assert (reply.status, reply.error["code"]) == (500, "generation_failed")
    assert "lost" in reply.error["message"]


async def test_a_corrupt_log_ends_the_stream_with_an_error(gateway: RunningGateway) -> None:
    worker = HandWorker(gateway)
    call = asyncio.create_task(gateway.complete(max_tokens=5))
    claim = await worker.claim()
    await worker.broker.client.xadd(worker.broker.keys.output(claim.request_id), {"item": b"\xc1"}, id="1-0")
    reply = await asyncio.wait_for(call, 20)
    assert (reply.status, reply.error["code"]) == (500, "generation_failed")
    assert "corrupt" in reply.error["message"]


async def test_what_is_corrupt_is_counted_and_said_once_per_kind(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    worker = HandWorker(gateway)
    for entry in ({"item": b"\xc1"}, {"other": b"1"}, {"item": b""}):
        call = asyncio.create_task(gateway.complete(max_tokens=5))
        claim = await worker.claim()
        await worker.publish(b"\xc1")
        await worker.broker.client.xadd(worker.broker.keys.output(claim.request_id), dict(entry), id="1-0")
        if entry.get("item") != b"":  # nothing at all is no item, and nothing wrong either
            assert (await asyncio.wait_for(call, 20)).status == 500
    call.cancel()
    assert gateway.gateway.fanout.corrupt_logs == 2
    assert gateway.gateway.subscription.corrupt == 3
    assert caplog.text.count("output log") == 1
    assert caplog.text.count("published frame") == 1


async def test_a_client_that_reads_slowly_gets_everything_and_holds_little(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit its bounded queue waits in the log."""
    monkeypatch.setattr(buffer, "MAX_WAITING", 4)
    monkeypatch.setattr(buffer, "PAGE", 8)
    gateway = await start_gateway()

    async def act(worker: HandWorker, claim: Claim, items: list[StepItem]) -> None:
        await worker.log(claim, items)
        await worker.publish(b"".join(item.encode() for item in items))  # far more than fits, at once

    assert await run(gateway, act) == TEXT
    assert gateway.gateway.fanout.repairs == 0  # nothing was lost


async def test_a_stream_survives_while_redis_is_away(gateway: RunningGateway, redis_server: Any) -> None:
    """Redis stops answering for a while; the stream stays open and goes on."""
    worker = HandWorker(gateway)
    async with (
        aiohttp.ClientSession(headers={"Accept": "text/event-stream"}) as session,
        session.post(gateway.url + "/v1/completions", json=BODY) as response,
    ):
        claim = await worker.claim()
        items = one_each(claim.request_id)
        await worker.log(claim, items[:3])
        await worker.publish(items[0].encode())
        first = await response.content.readuntil(b"\n\n")
        # Every connection is cut, and new ones are refused for as long as the limit stands.
        client = worker.broker.client
        await client.config_set("maxclients", 1)
        try:
            await client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        finally:
            await client.config_set("maxclients", 1000)
        await worker.log(claim, items[3:])
        rest = await asyncio.wait_for(response.content.read(), 20)
    events = parse_events((first + rest).decode())
    assert "".join(texts(events)) == TEXT
    assert events[-1].data == "[DONE]"
