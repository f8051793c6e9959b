"""What an open call does while nothing comes: checks, deadlines, and requests that are lost, parked or given up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from quire.gateway.stream.buffer import (
    OVERDUE_S,
    ClosedOutcome,
    NoWorkerOutcome,
    OutputBuffer,
    ParkedOutcome,
    RevokedOutcome,
    StreamStats,
)
from quire.gateway.stream.cursor import MAX_SILENCE_S, SILENCE_S, Cursor, weight
from quire.gateway.stream.router import FrameRouter
from quire.gateway.stream.subscription import Subscription
from quire.shared.protocol.broker import Broker
from quire.shared.protocol.messages import Delta, Outcome, PromptReport, StepItem
from quire.shared.protocol.states import OutcomeName
from quire.shared.redis.clients import command_client, pubsub_client
from tests.support.broker_calls import KEYS, start, step, submit
from tests.support.gateway.running import until


@pytest.fixture
async def broker(redis_url: str) -> AsyncIterator[Broker]:
    client = command_client(redis_url)
    yield Broker(client, "lane")
    await client.aclose()


class Call:
    """The buffer of a call with one request, and the times at which it asks to be checked."""

    def __init__(self, broker: Broker, keepalive_s: float = 60.0, stats: StreamStats | None = None) -> None:
        self.checks: list[float] = []
        self.stats = stats or StreamStats()
        self.buffer = OutputBuffer(broker, ["r"], keepalive_s, self.stats, lambda _, due: self.checks.append(due))
        [self.cursor] = self.buffer.cursors.values()
        self.begin = self.buffer.opened_at

    def check(self, after: float) -> tuple[float, bool]:
        """Check at a time after the opening: when to check again, and whether the request is silent."""
        due, silent = self.buffer.check(self.begin + after)
        assert silent in ([], [self.cursor])
        return round(due - self.begin, 6), bool(silent)


def token_of(request_id: str, at: int = 0) -> StepItem:
    return StepItem(request_id, at, (Delta(0, (at,)),))


async def end_of(buffer: OutputBuffer) -> Outcome:
    """Return the outcome with which the stream ends."""
    async with asyncio.timeout(60):
        while True:
            for item in await buffer.next():
                if item.outcome is not None:
                    return item.outcome


# --- Checks -----------------------------------------------------------------------------------------------------------


async def test_a_call_is_checked_when_silence_a_keepalive_or_its_deadline_is_due(broker: Broker) -> None:
    call = Call(broker, keepalive_s=2.0)
    assert call.check(SILENCE_S) == (2 * SILENCE_S, False)  # not accepted yet
    call.buffer.accept(5.0, is_logged=False)
    call.buffer.overdue_at = call.begin + 5
    assert call.check(SILENCE_S / 2) == (SILENCE_S, False)
    assert call.check(SILENCE_S) == (2 * SILENCE_S, True)
    assert call.check(1.5 * SILENCE_S) == (2 * SILENCE_S, False)
    for _ in range(10):
        call.cursor.wait_longer()
    assert call.cursor.silence_s == MAX_SILENCE_S
    assert call.check(1.0) == (2.0, False)
    assert not call.buffer.keepalive_due
    assert call.check(2.0) == (4.0, False)
    assert call.buffer.keepalive_due
    assert call.check(3.5) == (SILENCE_S + MAX_SILENCE_S, False)
    assert call.check(4.5) == (5.0, True)
    assert call.check(5.0) == (5.0 + SILENCE_S, False)


async def test_an_item_ends_the_patience_with_a_request(broker: Broker) -> None:
    call = Call(broker)
    now = call.begin + 1
    call.buffer.feed(token_of("r"), now)
    assert call.checks == []  # it is due as soon already
    for _ in range(3):
        call.cursor.wait_longer()
    call.buffer.feed(token_of("r", 1), now + 1)
    assert (call.checks, call.cursor.silence_s) == ([now + 1 + SILENCE_S], SILENCE_S)


async def test_a_silent_request_that_is_known_to_be_behind_is_read_at_once(broker: Broker) -> None:
    claim = await start(broker)
    await broker.commit_step("w", [step(claim, 0, (1, 2))])
    call = Call(broker)
    call.buffer.accept(None, is_logged=False)
    call.buffer.feed(token_of("r", 2), call.begin)
    assert call.check(SILENCE_S) == (2 * SILENCE_S, False)
    async with asyncio.timeout(60):
        assert [item.end for item in await call.buffer.next()] == [2]
    assert call.stats.repairs == 1


async def test_silence_is_noticed_and_its_cause_found(broker: Broker) -> None:
    """One request has ended without a message, and one waits."""
    claim = await start(broker)
    await submit(broker, "waits")
    await broker.commit_step("w", [step(claim, 0, (1, 2), "stop")])
    router = FrameRouter(broker, keepalive_s=60.0)
    ended, waits = router.open(["r"]), router.open(["waits"])
    for buffer in (ended, waits):
        buffer.accept(None, is_logged=False)
    router.silence.start()
    assert (await end_of(ended)).name == OutcomeName.STOP

    async def is_patient() -> bool:
        return waits.cursors["waits"].silence_s > SILENCE_S

    await until(is_patient)
    assert router.stats.log_reads == 1
    await router.silence.close()


async def test_what_a_call_finds_in_the_log_when_it_begins_was_not_lost(broker: Broker) -> None:
    claim = await start(broker)
    await broker.commit_step("w", [step(claim, 0, (1, 2), "stop")])
    call = Call(broker)
    call.buffer.accept(None, is_logged=True)
    assert (await end_of(call.buffer)).name == OutcomeName.STOP
    assert (call.stats.log_reads, call.stats.repairs) == (1, 0)


# --- Requests without a worker ----------------------------------------------------------------------------------------


async def test_a_request_that_waits_or_runs_is_only_waited_for_longer(broker: Broker) -> None:
    await submit(broker, "r")
    call = Call(broker)
    call.buffer.accept(None, is_logged=False)
    call.buffer.read_log_of(call.cursor)
    waiting = asyncio.create_task(call.buffer.next())

    async def is_patient() -> bool:
        return call.cursor.silence_s == 2 * SILENCE_S

    await until(is_patient)
    assert not waiting.done()
    assert call.stats.repairs == 0
    waiting.cancel()


@pytest.mark.parametrize("is_logged", [True, False])
async def test_a_request_that_has_ended_or_is_lost_ends_its_stream(broker: Broker, is_logged: bool) -> None:
    claim = await start(broker)
    await broker.commit_step("w", [step(claim, 0, (1, 2), "stop")])
    if not is_logged:
        await broker.drop_output(["r"])
    call = Call(broker)
    call.buffer.accept(None, is_logged=False)
    call.buffer.read_log_of(call.cursor)
    outcome = await end_of(call.buffer)
    assert outcome.name == (OutcomeName.STOP if is_logged else OutcomeName.ERROR)
    # What is lost may yet run at a worker that does not know it.
    assert call.buffer.unfinished == ([] if is_logged else ["r"])


async def test_the_stream_of_a_parked_request_ends_behind_its_tokens(broker: Broker) -> None:
    claim = await start(broker)
    await broker.commit_step("w", [step(claim, 0, (1, 2))])
    await broker.park("r")
    call = Call(broker)
    call.buffer.accept(None, is_logged=False)
    call.buffer.is_responsible = True
    call.buffer.read_log_of(call.cursor)
    assert [item.end for item in await call.buffer.next()] == [2]
    call.buffer.read_log_of(call.cursor)
    assert type(await end_of(call.buffer)) is ParkedOutcome
    # Nothing is cancelled when the client leaves.
    assert (call.buffer.is_responsible, call.buffer.unfinished) == (False, [])


async def test_a_deadline_that_passes_ends_a_request_without_a_worker(broker: Broker) -> None:
    await submit(broker, "r", deadline_ms=3_600_000)
    call = Call(broker)
    call.buffer.accept(-OVERDUE_S - 1, is_logged=False)
    call.check(0)
    waiting = asyncio.create_task(end_of(call.buffer))

    async def is_early() -> bool:
        return bool(call.checks)

    await until(is_early)  # by the clock of Redis it has not passed: it is looked at again
    assert call.checks == [call.buffer.overdue_at]
    assert call.begin <= call.buffer.overdue_at - OVERDUE_S <= asyncio.get_running_loop().time()
    await broker.client.hset(KEYS.request("r"), "deadline", 1)
    call.buffer.overdue_at = 0.0
    call.check(0)
    assert (await waiting).name == OutcomeName.DEADLINE
    assert (await broker.read_totals())["deadline"] == 1
    assert (call.buffer.to_expire, call.buffer.unfinished) == ([], [])


async def test_a_call_that_waits_too_long_is_given_up_unless_it_has_a_token_or_no_client(broker: Broker) -> None:
    router = FrameRouter(broker, keepalive_s=60.0)
    waits, begun, background, early = (router.open([name]) for name in ("waits", "begun", "background", "early"))
    for buffer in (waits, begun, background):
        buffer.accept(None, is_logged=False)
        buffer.is_responsible = buffer is not background
    early.is_responsible = True
    router.feed([token_of("begun")], 0.0)
    assert [item.end for item in await begun.next()] == [1]
    router.give_up_queued(waited_s=3600)
    assert all(not cursor.ended for buffer in (waits, early) for cursor in buffer.cursors.values())
    router.give_up_queued(waited_s=0)
    outcome = await end_of(waits)
    assert (type(outcome), outcome.name) == (NoWorkerOutcome, OutcomeName.ERROR)
    assert "send it again" in outcome.detail
    assert waits.unfinished == ["waits"]
    for buffer in (begun, background, early):
        assert not any(cursor.ended for cursor in buffer.cursors.values())


async def test_streams_are_closed_by_the_key_of_their_client(broker: Broker) -> None:
    router = FrameRouter(broker, keepalive_s=60.0)
    owners: tuple[str | None, ...] = ("a", "b", "", None)
    buffers = [router.open([f"r{index}"], owner) for index, owner in enumerate(owners)]
    early = router.open(["early"], "a")
    for buffer in buffers:
        buffer.accept(None, is_logged=False)
    assert (router.owners, router.calls) == ({"a", "b"}, 5)

    def closed() -> list[bool]:
        return [cursor.ended for buffer in (*buffers, early) for cursor in buffer.cursors.values()]

    router.close_streams(RevokedOutcome(RevokedOutcome.NAME, "revoked"), "a")
    assert closed() == [True, False, False, False, False]
    router.close_streams(ClosedOutcome(ClosedOutcome.NAME, "the gateway ends"))
    assert closed() == [True, True, True, False, False]
    assert [type(await end_of(buffer)) for buffer in buffers[:2]] == [RevokedOutcome, ClosedOutcome]
    assert buffers[0].unfinished == ["r0"]


async def test_all_calls_that_listen_to_a_request_get_its_items_until_they_are_closed(broker: Broker) -> None:
    router = FrameRouter(broker, keepalive_s=60.0)
    first, second = router.open(["a", "b"]), router.open(["b"])
    router.feed([token_of("a"), token_of("b"), token_of("nobody")], 0.0)
    assert [item.request_id for item in await first.next()] == ["a", "b"]
    before = time.perf_counter()
    assert [item.request_id for item in await second.next()] == ["b"]
    assert 0 < second.came_at <= before
    assert second.take() == []
    assert second.came_at == 0
    for _ in range(2):
        router.close(first)
    assert (router.has("a"), router.has("b"), router.calls) == (False, True, 1)
    router.feed([token_of("a", 1), token_of("b", 1)], 0.0)
    assert [item.start for item in await second.next()] == [1]
    assert first.take() == []
    assert router.suspect_all() == 1
    assert second.cursors["b"].behind


# --- Cursors ----------------------------------------------------------------------------------------------------------


def test_what_a_client_has_is_no_item_for_it_any_more() -> None:
    cursor = Cursor("r", 0.0)
    item = StepItem("r", 0, (Delta(0, (1, 2)),))
    assert cursor.take(item) is item
    for again in (item, token_of("r"), token_of("r", 1), StepItem("r", 2, ())):
        assert cursor.take(again) is None
    assert not cursor.behind
    end = StepItem("r", 2, (), Outcome("stop"))
    assert cursor.take(end) is end
    assert cursor.take(end) is None


def test_the_weight_of_an_item_is_its_tokens_and_its_log_probabilities() -> None:
    scored = Delta(1, (3,), logprobs=bytes(4 + 8 * 20))
    assert weight(StepItem("r", 0, ())) == 0
    assert weight(StepItem("r", 0, (Delta(0, (1, 2)), scored))) == 3 + 20
    report = PromptReport(0, b"", bytes(8 * 30))
    assert weight(StepItem("r", 0, (Delta(0, (1,)),), report=report)) == 1 + 30
    assert weight(StepItem("r", 0, (Delta(0, (1,)),), report=PromptReport(7, b"", None))) == 1


# --- The subscription -------------------------------------------------------------------------------------------------


async def test_a_subscription_that_was_lost_says_so_and_one_that_is_closed_leaves_no_subscriber(
    redis_url: str, broker: Broker
) -> None:
    client, again, frames = pubsub_client(redis_url), [], []
    one = Subscription(client, "channel", lambda items, now: frames.append(items), lambda: again.append(1) or 1)
    one.start()
    async with asyncio.timeout(60):
        await one.ready.wait()
    assert (one.subscribes, again) == (1, [])
    await broker.client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")

    async def is_back() -> bool:
        return one.subscribes == 2

    await until(is_back)
    assert again == [1]
    await broker.client.publish("channel", token_of("r").encode() + token_of("r", 1).encode())

    async def has_frame() -> bool:
        return bool(frames)

    await until(has_frame)
    assert frames == [[token_of("r"), token_of("r", 1)]]
    await one.close()
    assert not one.ready.is_set()

    async def nobody() -> bool:
        return await broker.client.publish("channel", b"") == 0

    await until(nobody)
    await client.aclose()
