"""What waits for a client is bounded in tokens, what came together is given together, and silence costs little."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest

from quire.gateway.stream import buffer as module
from quire.gateway.stream.buffer import MAX_WAITING, OutputBuffer
from quire.gateway.stream.cursor import SILENCE_S, Cursor, cut, weight
from quire.gateway.stream.router import FrameRouter
from quire.shared.broker import Claim
from quire.shared.messages import Delta, Outcome, StepItem
from tests.gateway.running import RunningGateway, until
from tests.gateway.test_gateway_streams import TEXT, HandWorker, run


class Log:
    """Stands for a broker whose logs have these items."""

    def __init__(self, items: list[StepItem]) -> None:
        self.items = items

    async def read_output(self, request_id: str, after: int, count: int) -> list[StepItem]:
        return [item for item in self.items if item.end > after][:count]


def steps(count: int, choices: int) -> list[StepItem]:
    """So many steps of one request, each with a token for every choice; the last one ends it."""
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
    fanout = FrameRouter(log, keepalive_s=60.0)
    found = fanout.open(["r"])
    found.accept(None, is_logged=False)
    return fanout, found


@pytest.mark.parametrize("choices", [1, 2, 7, 128])
async def test_what_waits_for_a_slow_client_is_bounded_in_tokens(choices: int) -> None:
    items = steps(20 + 2000 // choices, choices)
    fanout, outputs = open_one(items)
    for item in items:
        fanout.feed([item], 0.0)
    given: list[StepItem] = []
    while not given or given[-1].outcome is None:
        some = await outputs.next()
        assert count_tokens(some) < MAX_WAITING + choices
        given += some
    assert [delta for item in given for delta in item.deltas] == [delta for item in items for delta in item.deltas]
    assert fanout.repairs == 0  # nothing was lost


async def test_a_page_of_the_log_is_taken_as_far_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 10)
    items = steps(20, 3)
    _, outputs = open_one(items)
    outputs.suspect()
    assert count_tokens(await outputs.next()) == 12
    assert count_tokens(await outputs.next()) == 12
    assert outputs.cursors["r"].next == 24


async def test_frames_that_were_at_hand_together_are_given_together() -> None:
    fanout, outputs = open_one([])
    given = []

    def sink() -> bool:
        given.append(outputs.take())
        return True

    outputs.sink = sink
    items = steps(5, 1)
    for item in items[:3]:
        fanout.feed([item], 0.0)
    assert given == []
    await asyncio.sleep(0)
    assert given == [items[:3]]
    fanout.feed([items[3]], 0.0)
    await asyncio.sleep(0)
    assert given == [items[:3], [items[3]]]


async def test_a_sink_that_has_no_room_leaves_it_to_the_task() -> None:
    fanout, outputs = open_one([])
    outputs.sink = lambda: False
    waiting = asyncio.create_task(outputs.next())
    await asyncio.sleep(0)
    [item] = steps(1, 1)
    fanout.feed([item], 0.0)
    assert await asyncio.wait_for(waiting, 5) == [item]


async def test_the_end_that_comes_while_the_log_is_read_is_not_slept_through() -> None:
    fanout, outputs = open_one([])
    asks, answers = asyncio.Event(), asyncio.Event()

    async def read_output(*_: Any) -> list[StepItem]:
        asks.set()
        await answers.wait()
        return []

    outputs._broker.read_output = read_output  # type: ignore[method-assign]
    given = []

    def sink() -> bool:
        given.extend(outputs.take())
        return not given[-1].outcome

    outputs.sink = sink
    outputs.suspect()
    reading = asyncio.create_task(outputs.ready())
    await asks.wait()
    [item] = steps(1, 1)
    fanout.feed([item], 0.0)
    await asyncio.sleep(0)
    assert given == [item]
    answers.set()
    await asyncio.wait_for(reading, 5)  # the task has what is left to do: to end the answer


async def test_a_request_ends_once_though_its_end_comes_while_redis_is_asked() -> None:
    fanout, outputs = open_one([])
    [item] = steps(1, 1)

    async def expire(_: str) -> str:
        fanout.feed([item], 0.0)
        raise ConnectionError("Redis is away")

    outputs._broker.expire = expire  # type: ignore[method-assign]
    outputs.overdue_at = 0.0
    outputs.suspect()
    assert await outputs.next() == [item]
    assert (outputs.late, outputs.unfinished) == ([], [])


async def test_a_log_of_large_entries_is_read_in_small_pages() -> None:
    counts = []
    items = steps(40, 128)
    _, outputs = open_one(items)
    log = outputs._broker
    read = log.read_output

    async def read_output(request_id: str, after: int, count: int) -> list[StepItem]:
        counts.append(count)
        return await read(request_id, after, count)

    log.read_output = read_output  # type: ignore[method-assign]
    outputs.suspect()
    given: list[StepItem] = []
    while not given or given[-1].outcome is None:
        given += await outputs.next()
    assert given == items
    assert counts[0] == module.PAGE
    assert set(counts[1:]) == {4}


# As many bytes as the log-probabilities of a token with 20 alternatives have.
SCORED = bytes(4 + 8 * 20)


def scored_steps(count: int, request_id: str = "r") -> list[StepItem]:
    return [StepItem(request_id, at, (Delta(0, (at,), logprobs=SCORED),)) for at in range(count)]


async def test_of_entries_with_log_probabilities_few_are_read_that_there_is_no_room_for() -> None:
    entries = 0
    items = scored_steps(1000)
    _, outputs = open_one(items)
    log = outputs._broker
    read = log.read_output

    async def read_output(request_id: str, after: int, count: int) -> list[StepItem]:
        nonlocal entries
        found = await read(request_id, after, count)
        entries += len(found)
        return found

    log.read_output = read_output  # type: ignore[method-assign]
    outputs.suspect()
    given: list[StepItem] = []
    while len(given) < len(items):
        given += await outputs.next()
    assert given == items
    assert entries < 2.5 * len(items)


async def test_what_came_together_for_many_prompts_is_not_read_from_the_log() -> None:
    """However much it is: it is there, and a client that reads has had all that came before."""
    ids = [f"r{index}" for index in range(64)]
    log: Any = Log([])
    fanout = FrameRouter(log, keepalive_s=60.0)
    outputs = fanout.open(ids)
    outputs.accept(None, is_logged=False)
    for together in zip(*(scored_steps(5, one) for one in ids), strict=True):
        fanout.feed(together, 0.0)
        given = outputs.take()
        while len(given) < len(ids):
            await outputs.ready()
            given += outputs.take()
        assert given == list(together)
    # Of a client that does not read any more only so much is kept.
    for at in (5, 6):
        fanout.feed([StepItem(one, at, (Delta(0, (at,), logprobs=SCORED),)) for one in ids], 0.0)
    assert len(outputs._waiting) == len(ids)
    assert all(cursor.behind for cursor in outputs.cursors.values())


@pytest.mark.parametrize("logprobs", [None, SCORED])
@pytest.mark.parametrize("choices", [1, 3])
async def test_a_large_answer_that_comes_at_once_is_taken_in_parts(logprobs: bytes | None, choices: int) -> None:
    """Others get their turn before each, and the parts are the whole."""
    count = 2000
    records = logprobs and b"".join(struct.pack("<f", -at) + logprobs[4:] for at in range(count))
    ids = tuple(range(count))
    whole = StepItem(
        "r",
        0,
        tuple(Delta(choice, ids, "length", None, -0.5 - choice, records) for choice in range(choices)),
        Outcome("length"),
    )
    fanout, outputs = open_one([])
    fanout.feed([whole], 0.0)
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
        some = await outputs.next()
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
    assert outputs._waiting_tokens == 0


async def test_a_large_answer_goes_through_a_sink_in_parts_too() -> None:
    fanout, outputs = open_one([])
    given: list[StepItem] = []

    def sink() -> bool:
        given.extend(outputs.take())
        return True

    outputs.sink = sink
    waiting = asyncio.create_task(outputs.ready())
    await asyncio.sleep(0)
    fanout.feed([StepItem("r", 0, (Delta(0, tuple(range(3000))),))], 0.0)
    while not given or given[-1].end < 3000:
        await asyncio.wait_for(waiting, 5)  # the task has the rest
        sink()
        waiting = asyncio.create_task(outputs.ready())
    waiting.cancel()
    assert [item.end for item in given] == [1024, 2048, 3000]


async def test_the_end_that_comes_while_others_have_their_turn_is_not_slept_through() -> None:
    fanout, outputs = open_one([])
    given: list[StepItem] = []

    def sink() -> bool:
        given.extend(outputs.take())
        return not given[-1].outcome

    outputs.sink = sink
    fanout.feed([StepItem("r", 0, (Delta(0, tuple(range(1500))),))], 0.0)
    await asyncio.sleep(0)
    assert given[-1].end == module.MAX_TAKEN
    resting = asyncio.create_task(outputs.ready())
    fanout.feed([StepItem("r", 1500, (), Outcome("stop"))], 0.0)
    await asyncio.sleep(0)
    assert given[-1].outcome
    await asyncio.wait_for(resting, 5)  # the task has what is left to do: to end the answer


async def test_what_is_left_of_large_items_is_bounded_while_more_of_them_come() -> None:
    ids = [f"r{index}" for index in range(4)]
    log: Any = Log([])
    fanout = FrameRouter(log, keepalive_s=60.0)
    outputs = fanout.open(ids)
    outputs.accept(None, is_logged=False)
    count = 100
    together = len(ids) * count * (1 + len(SCORED) // 8)
    for at in range(0, 40 * count, count):
        token_ids = tuple(range(at, at + count))
        fanout.feed([StepItem(one, at, (Delta(0, token_ids, logprobs=SCORED * count),)) for one in ids], 0.0)
        outputs.take()
        assert sum(map(weight, outputs._waiting)) <= module.MAX_TAKEN + together
    assert all(cursor.behind for cursor in outputs.cursors.values())


def test_a_long_item_costs_each_of_its_parts_the_same() -> None:
    """The records that are copied for all parts together grow with the item, and not with its square."""
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
        some, rest = cut(rest, module.MAX_TAKEN)
        parts += some
    assert sum(copied) < 20 * len(SCORED) * count
    assert [token for part in parts for token in part.deltas[0].token_ids] == list(range(count))
    assert [part.start for part in parts[1:]] == [part.end for part in parts[:-1]]


async def test_a_call_that_is_over_is_not_fed_and_not_checked() -> None:
    fanout, outputs = open_one([])
    fanout.close(outputs)
    fanout.feed(steps(1, 1), 0.0)
    await asyncio.sleep(0)
    assert outputs.take() == []
    outputs.check = pytest.fail  # type: ignore[method-assign,assignment]
    fanout.watch._tick(asyncio.get_running_loop().time() + 3600)


def the_cursor(gateway: RunningGateway) -> Cursor:
    [outputs] = gateway.gateway.fanout._open
    [cursor] = outputs.cursors.values()
    return cursor


@pytest.mark.slow
async def test_a_silent_request_is_not_read_and_what_is_lost_after_it_is_found_soon(gateway: RunningGateway) -> None:
    loop = asyncio.get_running_loop()
    since = 0.0

    async def act(worker: HandWorker, claim: Claim, items: list[StepItem]) -> None:
        nonlocal since

        async def is_patient() -> bool:
            return the_cursor(gateway).patience_s >= 8 * SILENCE_S

        await until(is_patient)
        assert gateway.gateway.fanout.log_reads == 0
        await worker.log(claim, items)
        await worker.publish(items[0].encode())
        since = loop.time()

    assert await run(gateway, act) == TEXT
    # Not what the patience had grown to.
    assert loop.time() - since < 4 * SILENCE_S
    assert gateway.gateway.fanout.repairs == 1


async def test_what_was_never_published_is_found_however_many_are_silent(gateway: RunningGateway) -> None:
    """More than are asked about at once."""
    streams = [asyncio.create_task(gateway.complete(max_tokens=5)) for _ in range(70)]
    worker = HandWorker(gateway)
    claims = [await worker.claim() for _ in streams]
    for claim in claims:
        await worker.log(claim, [StepItem(claim.request_id, 0, (Delta(0, (), "stop"),), Outcome("stop"))])
    replies = await asyncio.wait_for(asyncio.gather(*streams), 20)
    assert {reply.status for reply in replies} == {200}
    assert gateway.gateway.fanout.log_reads <= 2 * len(streams)
