"""Buffers of output: order, gaps, limits and silence."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.gateway.stream import buffer as module
from quire.gateway.stream.buffer import MAX_TAKEN, MAX_WAITING, OutputBuffer
from quire.gateway.stream.cursor import SILENCE_S, Cursor, cut, split, weight
from quire.gateway.stream.router import FrameRouter
from quire.shared.protocol.broker import Claim
from quire.shared.protocol.messages import BY_TOKEN, Delta, Outcome, StepItem
from tests.support.gateway.running import RunningGateway, until
from tests.support.hand_worker import IDS, TEXT, HandWorker, one_each, run

# --- A call's output buffer is bounded in tokens ----------------------------------------------------------------------


# The size of the log-probability record of a token with 20 alternatives.
SCORED = bytes(4 + 8 * 20)


class Log:
    """A stand-in for a broker whose logs have these items."""

    def __init__(self, items: list[StepItem]) -> None:
        self.items = items
        self.asked: list[int] = []  # the entries that each read asks for, and those that it gets
        self.read: list[int] = []

    async def read_output(self, request_id: str, after: int, count: int) -> list[StepItem]:
        found = [item for item in self.items if item.end > after][:count]
        self.asked.append(count)
        self.read.append(len(found))
        return found


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


def open_one(items: list[StepItem]) -> tuple[FrameRouter, OutputBuffer, Any]:
    """Open the buffer of a request whose log has these items. Returns the log, too."""
    log: Any = Log(items)
    router = FrameRouter(log, keepalive_s=60.0)
    found = router.open(["r"])
    found.accept(None, is_logged=False)
    return router, found, log


@pytest.mark.parametrize("choices", [1, 2, 7, 128])
async def test_what_waits_for_a_slow_client_is_bounded_in_tokens(choices: int) -> None:
    items = steps(20 + 2000 // choices, choices)
    router, buffer, _ = open_one(items)
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
    _, buffer, _ = open_one(items)
    buffer.suspect()
    assert count_tokens(await buffer.next()) == 12
    assert buffer.came_at == 0.0, "no frame came"
    assert count_tokens(await buffer.next()) == 12
    assert buffer.cursors["r"].next == 24


async def test_the_end_that_comes_while_the_log_is_read_is_not_slept_through() -> None:
    router, buffer, log = open_one([])
    asks, answers = asyncio.Event(), asyncio.Event()

    async def read_output(*_: Any) -> list[StepItem]:
        asks.set()
        await answers.wait()
        return []

    log.read_output = read_output
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
    await asyncio.wait_for(reading, 60)  # the task still has to end the answer


async def test_a_request_ends_once_though_its_end_comes_while_redis_is_asked() -> None:
    router, buffer, log = open_one([])
    [item] = steps(1, 1)

    async def expire(_: str) -> str:
        router.feed([item], 0.0)
        raise ConnectionError("Redis is away")

    log.expire = expire
    buffer.overdue_at = 0.0
    buffer.suspect()
    assert await buffer.next() == [item]
    assert (buffer.to_expire, buffer.unfinished) == ([], [])


async def test_a_log_of_large_entries_is_read_in_small_pages() -> None:
    items = steps(40, 128)
    _, buffer, log = open_one(items)
    buffer.suspect()
    given: list[StepItem] = []
    while not given or given[-1].outcome is None:
        given += await buffer.next()
    assert given == items
    assert log.asked[0] == module.PAGE
    assert set(log.asked[1:]) == {4}


def scored_steps(count: int, request_id: str = "r") -> list[StepItem]:
    return [StepItem(request_id, at, (Delta(0, (at,), logprobs=SCORED),)) for at in range(count)]


async def test_of_entries_with_log_probabilities_few_are_read_that_there_is_no_room_for() -> None:
    items = scored_steps(1000)
    _, buffer, log = open_one(items)
    buffer.suspect()
    given: list[StepItem] = []
    while len(given) < len(items):
        given += await buffer.next()
    assert given == items
    assert sum(log.read) < 2.5 * len(items)


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
    router, buffer, _ = open_one([])
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
            assert (await asyncio.wait_for(call, 60)).status == 500
    call.cancel()
    assert gateway.gateway.router.stats.corrupt_logs == 2
    assert gateway.gateway.subscription.corrupt == 3
    assert caplog.text.count("output log") == 1
    assert caplog.text.count("published frame") == 1


# --- A cursor takes every token once and in order, and cuts items without losing a token ------------------------------


# The size of the log-probability record of a token with 20 alternatives.


@given(st.lists(st.integers(0, len(IDS) - 1), max_size=60), st.data())
def test_a_cursor_takes_every_token_once_and_in_order(order: list[int], data: st.DataObject) -> None:
    """Items arrive in any order. With reads of the log where the cursor asks for them, the output is complete."""
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
    """After Redis lost the end of a log, a worker sends the tokens again, in other portions."""
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


def test_a_long_item_costs_each_of_its_parts_the_same() -> None:
    """The bytes copied for all parts together grow linearly with the item's size."""
    copied = []

    class Records(bytes):
        def __getitem__(self, key: Any) -> Any:
            found = Records(super().__getitem__(key))
            copied.append(len(found))
            return found

    count = 10_000
    rest = [StepItem("r", 0, (Delta(0, tuple(range(count)), "length", logprobs=Records(SCORED * count)),), None)]
    parts = []
    while rest:
        some, rest = cut(rest, MAX_TAKEN)
        parts += some
    assert sum(copied) < 20 * len(SCORED) * count
    assert [token for part in parts for token in part.deltas[0].token_ids] == list(range(count))
    assert [part.start for part in parts[1:]] == [part.end for part in parts[:-1]]


def test_an_item_is_cut_in_two_only_inside() -> None:
    item = StepItem("r", 3, (Delta(0, (1, 2)), Delta(1, (3,), "stop")), Outcome("stop"))
    for at in (0, 3, 6, 9):
        assert split(item, at) == (item,)
    for at in (4, 5):
        first, second = split(item, at)
        assert (first.start, first.end, second.start, second.end) == (3, at, at, 6)
        assert (first.outcome, second.outcome) == (None, item.outcome)
        assert all(delta.finish_reason is None for delta in first.deltas)
        assert second.deltas[-1].finish_reason == "stop"


def test_a_choice_that_ends_where_an_item_is_cut_ends_with_its_last_token() -> None:
    ended = Delta(0, (1, 2), "stop", BY_TOKEN)
    first, second = split(StepItem("r", 0, (ended, Delta(1, (3,)))), 2)
    assert (first.deltas, second.deltas[-1]) == ((ended,), Delta(1, (3,)))


# --- Silence of a request reveals lost frames, and costs little while nothing is lost ---------------------------------


def the_cursor(gateway: RunningGateway) -> Cursor:
    [buffer] = gateway.gateway.router._open
    [cursor] = buffer.cursors.values()
    return cursor


@pytest.mark.slow
async def test_a_silent_request_is_not_read_and_what_is_lost_after_it_is_found_soon(gateway: RunningGateway) -> None:

    async def act(worker: HandWorker, claim: Claim, items: list[StepItem]) -> None:
        router, cursor = gateway.gateway.router, the_cursor(gateway)
        [buffer] = router._open

        async def is_patient() -> bool:
            return cursor.silence_s >= 8 * SILENCE_S

        async def has_heard() -> bool:
            return cursor.next > 0

        await until(is_patient)
        assert gateway.gateway.router.stats.log_reads == 0
        await worker.log(claim, items)
        await worker.publish(items[0].encode())
        await until(has_heard)
        # The interval starts over: it is not the one that had grown before.
        assert cursor.silence_s == SILENCE_S
        assert router.silence._due.get(buffer, 0.0) <= cursor.heard_at + SILENCE_S

    assert await run(gateway, act) == TEXT
    assert gateway.gateway.router.stats.repairs == 1


async def test_what_was_never_published_is_found_however_many_are_silent(gateway: RunningGateway) -> None:
    """More than are asked about at once."""
    streams = [asyncio.create_task(gateway.complete(max_tokens=5)) for _ in range(70)]
    worker = HandWorker(gateway)
    claims = [await worker.claim() for _ in streams]
    for claim in claims:
        await worker.log(claim, [StepItem(claim.request_id, 0, (Delta(0, (), "stop"),), Outcome("stop"))])
    replies = await asyncio.wait_for(asyncio.gather(*streams), 60)
    assert {reply.status for reply in replies} == {200}
    assert gateway.gateway.router.stats.log_reads <= 2 * len(streams)


async def test_a_call_that_is_over_is_not_fed_and_not_checked() -> None:
    router, buffer, _ = open_one([])
    router.close(buffer)
    router.feed(steps(1, 1), 0.0)
    await asyncio.sleep(0)
    assert buffer.take() == []
    buffer.check = pytest.fail  # type: ignore[method-assign,assignment]
    router.silence._tick(asyncio.get_running_loop().time() + 3600)
