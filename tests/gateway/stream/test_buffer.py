"""A call's output buffer is bounded in tokens. A large item is passed on in parts; the log has the remaining items."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest

from quire.gateway.stream import buffer as module
from quire.gateway.stream.buffer import MAX_WAITING, OutputBuffer
from quire.gateway.stream.cursor import weight
from quire.gateway.stream.router import FrameRouter
from quire.shared.broker import Claim
from quire.shared.messages import Delta, Outcome, StepItem
from tests.gateway.conftest import Start
from tests.support.gateway.running import RunningGateway
from tests.support.hand_worker import TEXT, HandWorker, run

# The size of the log-probability record of a token with 20 alternatives.
SCORED = bytes(4 + 8 * 20)


class Log:
    """A stand-in for a broker whose logs have these items."""

    def __init__(self, items: list[StepItem]) -> None:
        self.items = items

    async def read_output(self, request_id: str, after: int, count: int) -> list[StepItem]:
        return [item for item in self.items if item.end > after][:count]


def steps(count: int, choices: int) -> list[StepItem]:
    """Return `count` steps of one request, each with a token for every choice; the last step ends the request."""
    items = []
    for step in range(count):
        is_last = step == count - 1
        deltas = tuple(Delta(choice, (step,), "length" if is_last else None) for choice in range(choices))
        items.append(StepItem("r", step * choices, deltas, Outcome("length") if is_last else None))
    return items


def count_tokens(items: list[StepItem]) -> int:
    return sum(item.end - item.start for item in items)


def open_one(items: list[StepItem]) -> tuple[FrameRouter, OutputBuffer]:
    log: Any = Log(items)
    router = FrameRouter(log, keepalive_s=60.0)
    found = router.open(["r"])
    found.accept(None, is_logged=False)
    return router, found


@pytest.mark.parametrize("choices", [1, 2, 7, 128])
async def test_what_waits_for_a_slow_client_is_bounded_in_tokens(choices: int) -> None:
    items = steps(20 + 2000 // choices, choices)
    router, buffer = open_one(items)
    for item in items:
        router.feed([item], 0.0)
    given: list[StepItem] = []
    while not given or given[-1].outcome is None:
        some = await buffer.next()
        assert count_tokens(some) < MAX_WAITING + choices
        given += some
    assert [delta for item in given for delta in item.deltas] == [delta for item in items for delta in item.deltas]
    assert router.stats.repairs == 0  # nothing was lost


async def test_a_page_of_the_log_is_taken_as_far_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 10)
    items = steps(20, 3)
    _, buffer = open_one(items)
    buffer.suspect()
    assert count_tokens(await buffer.next()) == 12
    assert count_tokens(await buffer.next()) == 12
    assert buffer.cursors["r"].next == 24


async def test_a_sink_that_has_no_room_leaves_it_to_the_task() -> None:
    router, buffer = open_one([])
    buffer.sink = lambda: False
    waiting = asyncio.create_task(buffer.next())
    await asyncio.sleep(0)
    [item] = steps(1, 1)
    router.feed([item], 0.0)
    assert await asyncio.wait_for(waiting, 5) == [item]


async def test_the_end_that_comes_while_the_log_is_read_is_not_slept_through() -> None:
    router, buffer = open_one([])
    asks, answers = asyncio.Event(), asyncio.Event()

    async def read_output(*_: Any) -> list[StepItem]:
        asks.set()
        await answers.wait()
        return []

    buffer._broker.read_output = read_output  # type: ignore[method-assign]
    given = []

    def sink() -> bool:
        given.extend(buffer.take())
        return not given[-1].outcome

    buffer.sink = sink
    buffer.suspect()
    reading = asyncio.create_task(buffer.ready())
    await asks.wait()
    [item] = steps(1, 1)
    router.feed([item], 0.0)
    await asyncio.sleep(0)
    assert given == [item]
    answers.set()
    await asyncio.wait_for(reading, 5)  # the task still has to end the answer


async def test_a_request_ends_once_though_its_end_comes_while_redis_is_asked() -> None:
    router, buffer = open_one([])
    [item] = steps(1, 1)

    async def expire(_: str) -> str:
        router.feed([item], 0.0)
        raise ConnectionError("Redis is away")

    buffer._broker.expire = expire  # type: ignore[method-assign]
    buffer.overdue_at = 0.0
    buffer.suspect()
    assert await buffer.next() == [item]
    assert (buffer.to_expire, buffer.unfinished) == ([], [])


async def test_a_log_of_large_entries_is_read_in_small_pages() -> None:
    counts = []
    items = steps(40, 128)
    _, buffer = open_one(items)
    log = buffer._broker
    read = log.read_output

    async def read_output(request_id: str, after: int, count: int) -> list[StepItem]:
        counts.append(count)
        return await read(request_id, after, count)

    log.read_output = read_output  # type: ignore[method-assign]
    buffer.suspect()
    given: list[StepItem] = []
    while not given or given[-1].outcome is None:
        given += await buffer.next()
    assert given == items
    assert counts[0] == module.PAGE
    assert set(counts[1:]) == {4}


def scored_steps(count: int, request_id: str = "r") -> list[StepItem]:
    return [StepItem(request_id, at, (Delta(0, (at,), logprobs=SCORED),)) for at in range(count)]


async def test_of_entries_with_log_probabilities_few_are_read_that_there_is_no_room_for() -> None:
    entries = 0
    items = scored_steps(1000)
    _, buffer = open_one(items)
    log = buffer._broker
    read = log.read_output

    async def read_output(request_id: str, after: int, count: int) -> list[StepItem]:
        nonlocal entries
        found = await read(request_id, after, count)
        entries += len(found)
        return found

    log.read_output = read_output  # type: ignore[method-assign]
    buffer.suspect()
    given: list[StepItem] = []
    while len(given) < len(items):
        given += await buffer.next()
    assert given == items
    assert entries < 2.5 * len(items)


@pytest.mark.parametrize("logprobs", [None, SCORED])
@pytest.mark.parametrize("choices", [1, 3])
async def test_a_large_answer_that_comes_at_once_is_taken_in_parts(logprobs: bytes | None, choices: int) -> None:
    """Other calls get their turn before each part. The parts together are the whole answer."""
    count = 2000
    records = logprobs and b"".join(struct.pack("<f", -at) + logprobs[4:] for at in range(count))
    ids = tuple(range(count))
    whole = StepItem(
        "r",
        0,
        tuple(Delta(choice, ids, "length", None, -0.5 - choice, records) for choice in range(choices)),
        Outcome("length"),
    )
    router, buffer = open_one([])
    router.feed([whole], 0.0)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    given: list[StepItem] = []
    while not given or given[-1].outcome is None:
        before = turns
        some = await buffer.next()
        assert turns > before or not given
        assert sum(map(weight, some)) <= module.MAX_TAKEN + 21
        given += some
    task.cancel()
    assert given[-1].outcome == Outcome("length")
    assert [item.start for item in given[1:]] == [item.end for item in given[:-1]]
    for choice in range(choices):
        parts = [delta for item in given for delta in item.deltas if delta.choice == choice]
        assert tuple(token for part in parts for token in part.token_ids) == ids
        assert b"".join(part.logprobs or b"" for part in parts) == (records or b"")
        [end] = {part[2:5] for part in parts if part.finish_reason}
        assert end == ("length", None, -0.5 - choice)
    assert buffer._waiting_tokens == 0


async def test_a_large_answer_goes_through_a_sink_in_parts_too() -> None:
    router, buffer = open_one([])
    given: list[StepItem] = []

    def sink() -> bool:
        given.extend(buffer.take())
        return True

    buffer.sink = sink
    waiting = asyncio.create_task(buffer.ready())
    await asyncio.sleep(0)
    router.feed([StepItem("r", 0, (Delta(0, tuple(range(3000))),))], 0.0)
    while not given or given[-1].end < 3000:
        await asyncio.wait_for(waiting, 5)  # the task passes on the remaining parts
        sink()
        waiting = asyncio.create_task(buffer.ready())
    waiting.cancel()
    assert [item.end for item in given] == [1024, 2048, 3000]


async def test_the_end_that_comes_while_others_have_their_turn_is_not_slept_through() -> None:
    router, buffer = open_one([])
    given: list[StepItem] = []

    def sink() -> bool:
        given.extend(buffer.take())
        return not given[-1].outcome

    buffer.sink = sink
    router.feed([StepItem("r", 0, (Delta(0, tuple(range(1500))),))], 0.0)
    await asyncio.sleep(0)
    assert given[-1].end == module.MAX_TAKEN
    resting = asyncio.create_task(buffer.ready())
    router.feed([StepItem("r", 1500, (), Outcome("stop"))], 0.0)
    await asyncio.sleep(0)
    assert given[-1].outcome
    await asyncio.wait_for(resting, 5)  # the task still has to end the answer


async def test_what_is_left_of_large_items_is_bounded_while_more_of_them_come() -> None:
    ids = [f"r{index}" for index in range(4)]
    log: Any = Log([])
    router = FrameRouter(log, keepalive_s=60.0)
    buffer = router.open(ids)
    buffer.accept(None, is_logged=False)
    count = 100
    together = len(ids) * count * (1 + len(SCORED) // 8)
    for at in range(0, 40 * count, count):
        token_ids = tuple(range(at, at + count))
        router.feed([StepItem(one, at, (Delta(0, token_ids, logprobs=SCORED * count),)) for one in ids], 0.0)
        buffer.take()
        assert sum(map(weight, buffer._waiting)) <= module.MAX_TAKEN + together
    assert all(cursor.behind for cursor in buffer.cursors.values())


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
        if entry.get("item") != b"":  # an empty entry has no item, and is not an error
            assert (await asyncio.wait_for(call, 20)).status == 500
    call.cancel()
    assert gateway.gateway.router.stats.corrupt_logs == 2
    assert gateway.gateway.subscription.corrupt == 3
    assert caplog.text.count("output log") == 1
    assert caplog.text.count("published frame") == 1


async def test_a_client_that_reads_slowly_gets_everything_and_holds_little(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items that do not fit the client's bounded queue wait in the log."""
    monkeypatch.setattr(module, "MAX_WAITING", 4)
    monkeypatch.setattr(module, "PAGE", 8)
    gateway = await start_gateway()

    async def act(worker: HandWorker, claim: Claim, items: list[StepItem]) -> None:
        await worker.log(claim, items)
        await worker.publish(b"".join(item.encode() for item in items))  # far more than fits, at once

    assert await run(gateway, act) == TEXT
    assert gateway.gateway.router.stats.repairs == 0  # nothing was lost
