"""The verbs about parked requests, against a real Redis."""

from __future__ import annotations

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from quire.shared.accounts.account import Account
from quire.shared.accounts.limits import AccountLimits
from quire.shared.protocol.broker import (
    Admission,
    Broker,
    NoRoom,
    QueueBounds,
    QueueFull,
    QueueReader,
    StepCommit,
    new_id,
)
from quire.shared.protocol.broker.parking import NO_BOUNDS
from quire.shared.protocol.charge import LimitReached, packed_limits
from quire.shared.protocol.keys import GROUP, LOG_BYTES_PER_TOKEN, PARKING_S, RETENTION_S, STORED_BYTES
from quire.shared.protocol.messages import Outcome, StepItem
from tests.support.broker_calls import BOUNDS, KEYS, outcome_of, recoveries_of, start, step, submit, take


async def state_of(broker: Broker, request_id: str = "r") -> str:
    return ((await broker.client.hget(KEYS.request(request_id), "state")) or b"").decode()  # type: ignore[union-attr]


async def test_a_waiting_request_leaves_the_queue_at_once(broker: Broker, client: Redis) -> None:
    await submit(broker, "r")
    assert await broker.park("r") == "parked"
    assert (await broker.queued(), await client.xlen(KEYS.queue())) == ((0, 0), 0)
    assert await state_of(broker) == "parked"
    assert await broker.unended() == []
    assert await client.ttl(KEYS.request("r")) == -1


async def test_a_running_request_is_parked_at_once_and_its_worker_told(broker: Broker, client: Redis) -> None:
    claim = await start(broker)
    await broker.commit_step("w", [step(claim, 0, (1, 2))])
    assert await broker.park("r") == "parked"
    assert (await client.xpending(KEYS.queue(), GROUP))["pending"] == 0
    reply = await broker.commit_step("w", [step(claim, 2, (3,))])
    assert ("r", claim.attempt) in reply.lost
    assert [item.end for item in await broker.read_output("r")] == [2]
    assert await broker.renew("w", [("r", claim.attempt)]) == [("r", claim.attempt)]
    assert await broker.release([("r", claim.attempt)]) == 0
    assert await state_of(broker) == "parked"


async def test_the_next_attempt_gets_the_tokens(broker: Broker) -> None:
    claim = await start(broker)
    await broker.commit_step("w", [step(claim, 0, (1, 2))])
    await broker.park("r")
    assert await broker.unpark("r") == "queued"
    assert await broker.queued() == (1, 10)
    again = await broker.claim(await take(broker, "other"), "other", new_id())
    assert again is not None
    assert (again.emitted, again.deaths, again.deliveries, again.before) == (2, 0, 2, claim.attempt)
    await broker.commit_step("other", [step(again, 2, (3,), "stop")])
    assert [item.end for item in await broker.read_output("r")] == [2, 3]
    assert await broker.read_totals() == {"accepted": 1, "stop": 1}
    assert await recoveries_of(broker) == {"parked": 1, "unparked": 1, "migrations": 1}


async def test_to_park_or_unpark_twice_changes_nothing_more(broker: Broker, client: Redis) -> None:
    await submit(broker, "r")
    await broker.park("r", retention_s=100)
    until = await broker.parked_until("r")
    assert await broker.park("r", retention_s=5000) == "parked"
    assert await broker.parked_until("r") == until
    assert await broker.unpark("r") == "queued"
    assert await broker.unpark("r") == "active"
    assert (await broker.queued(), await client.xlen(KEYS.queue())) == ((1, 10), 1)


async def test_an_unparked_request_waits_behind_those_of_its_class(broker: Broker) -> None:
    for name in ("first", "second"):
        await submit(broker, name)
    await broker.park("first")
    await broker.unpark("first")
    await broker.create_groups()
    assert [one.request_id for one in await QueueReader(broker.client, "lane", "w").read(2, 0)] == ["second", "first"]


async def test_what_has_ended_or_is_about_to_is_not_parked(broker: Broker, client: Redis) -> None:
    assert await broker.park("nothing") == "unknown"
    assert await broker.unpark("nothing") == "unknown"
    claim = await start(broker)
    await broker.cancel("r")
    assert await broker.park("r") == "ending"
    await broker.commit_step("w", [StepCommit(claim.attempt, StepItem("r", 0, (), Outcome("cancelled")))])
    assert (await broker.park("r"), await broker.unpark("r")) == ("done", "done")
    await submit(broker, "late", deadline_ms=3_600_000)
    await client.hset(KEYS.request("late"), "deadline", 1)
    assert await broker.park("late") == "ending"
    assert await client.exists(KEYS.parked) == 0


async def test_a_worker_parks_only_its_own_attempt(broker: Broker) -> None:
    claim = await start(broker)
    assert await broker.park("r", attempt=new_id()) == "lost"
    assert await broker.park("r", attempt=claim.attempt) == "parked"
    assert await broker.park("r", attempt=claim.attempt) == "parked"


async def test_a_parked_request_is_cancelled_at_once(broker: Broker, client: Redis) -> None:
    await submit(broker, "r")
    await broker.park("r")
    assert await broker.cancel("r", unless_beside=()) == "wanted"  # its client has left
    assert await broker.cancel("r") == "cancelled"
    assert await outcome_of(broker) == "cancelled"
    assert await client.exists(KEYS.parked) == 0
    assert 0 < await client.ttl(KEYS.request("r")) <= RETENTION_S
    assert await broker.queued() == (0, 0)


async def test_a_deadline_stands_still_while_a_request_is_parked(broker: Broker, client: Redis) -> None:
    await submit(broker, "r", deadline_ms=3_600_000)
    await broker.park("r")
    assert await client.hget(KEYS.request("r"), "deadline") == b"0"
    assert await broker.expire("r") == "early"
    await client.hset(KEYS.request("r"), "left", 1234)
    await broker.unpark("r")
    seconds, micros = await client.time()
    left_ms = int((await client.hget(KEYS.request("r"), "deadline")) or 0) - 1000 * seconds - micros // 1000
    assert 0 < left_ms <= 1234


async def test_a_request_without_a_deadline_gets_none(broker: Broker, client: Redis) -> None:
    await submit(broker, "r")
    await broker.park("r")
    await broker.unpark("r")
    assert await client.hget(KEYS.request("r"), "deadline") == b"0"


async def test_after_its_retention_a_parked_request_ends_once(broker: Broker, client: Redis) -> None:
    for name in ("r", "other"):
        await submit(broker, name)
        await broker.park(name, retention_s=100)
    assert await broker.lapsed() == []
    await client.zadd(KEYS.parked, {"r": 1})
    assert await broker.lapsed() == ["r"]
    await client.zadd(KEYS.parked, {"another": 2})
    assert await broker.lapsed(count=1) == ["r"]
    await client.zrem(KEYS.parked, "another")
    assert await broker.expire("r") == "expired"
    assert (await broker.expire("r"), await broker.unpark("r")) == ("done", "done")
    [item] = await broker.read_output("r")
    assert item.outcome == Outcome("deadline", "the request was parked for longer than its retention")
    assert await broker.read_totals() == {"accepted": 2, "deadline": 1}
    assert await broker.parked_ids() == ["other"]


async def test_to_unpark_after_the_retention_ends_a_request(broker: Broker, client: Redis) -> None:
    await submit(broker, "r")
    await broker.park("r")
    await client.zadd(KEYS.parked, {"r": 1})
    assert await broker.unpark("r") == "done"
    assert await outcome_of(broker) == "deadline"


async def test_a_lost_hash_does_not_stay_among_the_parked(broker: Broker, client: Redis) -> None:
    await submit(broker, "r")
    await broker.park("r")
    await client.delete(KEYS.request("r"))
    assert await broker.expire("r") == "unknown"
    assert await client.exists(KEYS.parked) == 0


async def test_the_number_of_parked_requests_is_bounded(broker: Broker) -> None:
    for name in ("a", "b"):
        await submit(broker, name)
    assert await broker.park("a", max_parked=1) == "parked"
    assert await broker.park("b", max_parked=1) == "full"
    assert await broker.park("a", max_parked=1) == "parked"  # a repetition
    assert await state_of(broker, "b") == "queued"
    assert await broker.park("b") == "parked"


async def test_a_full_queue_takes_no_parked_request(broker: Broker) -> None:
    await submit(broker, "r")
    await broker.park("r")
    for index in range(3):
        await submit(broker, f"r{index}")
    for bounds in (BOUNDS, QueueBounds(4, 39)):
        with pytest.raises(QueueFull) as full:
            await broker.unpark("r", bounds)
        assert (full.value.requests, full.value.tokens) == (3, 30)
    assert await state_of(broker) == "parked"
    for index in range(1, 3):
        await broker.cancel(f"r{index}")
    with pytest.raises(QueueFull):
        await broker.unpark("r", QueueBounds(1, 1000))
    assert await broker.unpark("r", QueueBounds(2, 20)) == "queued"


async def test_a_limit_of_its_caller_keeps_a_request_parked(broker: Broker) -> None:
    account = Account(kind="key", id="a" * 16, name="a")
    for name in ("r", "other"):
        await broker.submit(name, b"", Admission(gateway="g", cost=1, bounds=BOUNDS, accounts=(account,)))
    await broker.park("r")
    bounded = replace(account, limits=AccountLimits(concurrent_requests=1))
    with pytest.raises(LimitReached) as reached:
        await broker.unpark("r", limits=packed_limits([bounded]))
    assert (reached.value.limit, reached.value.account) == ("concurrent_requests", account.place)
    assert reached.value.wait_ms == 0
    assert await state_of(broker) == "parked"
    await broker.cancel("other")
    assert await broker.unpark("r", limits=packed_limits([bounded])) == "queued"


async def test_an_unparked_request_needs_no_client_and_stays_for_the_rest_of_its_time(
    broker: Broker, client: Redis
) -> None:
    await submit(broker, "r")
    await broker.park("r", retention_s=5000)
    await broker.unpark("r")
    assert await broker.listeners_of(["r"]) == {}
    claim = await broker.claim(await take(broker), "w", new_id())
    assert claim is not None
    await broker.commit_step("w", [step(claim, 0, (1,), "stop")])
    for key in (KEYS.request("r"), KEYS.output("r")):
        assert 4900 < await client.ttl(key) <= 5000
    assert await client.hget(KEYS.held, "r") == b"%d " % (STORED_BYTES + LOG_BYTES_PER_TOKEN)


async def test_the_parked_requests_of_a_key_are_bounded(broker: Broker) -> None:
    async def add(request_id: str, owner: str) -> None:
        await broker.submit(request_id, b"", Admission(gateway="g", cost=1, bounds=NO_BOUNDS, owner=owner))

    for index in range(3):
        await add(f"a{index}", "key a")
        await add(f"b{index}", "key b")
    for request_id, expected in (("a0", "parked"), ("a1", "key_full"), ("a0", "parked"), ("b0", "parked")):
        assert await broker.park(request_id, max_parked_of_key=1) == expected
    small = QueueBounds(10, 100, key_bytes=int(1.5 * STORED_BYTES))
    assert await broker.park("b1", bounds=small) == "no_room"
    # Whatever ends the parking makes place.
    await broker.unpark("a0")
    assert await broker.park("a1", max_parked_of_key=1) == "parked"
    await broker.cancel("a1")
    assert await broker.park("a2", max_parked_of_key=1) == "parked"


@pytest.mark.parametrize("outcome", ["stop", "cancelled", "deadline"])
async def test_the_answer_of_a_parked_line_of_a_batch_makes_no_room_before_it_was_read(
    broker: Broker, client: Redis, outcome: str
) -> None:
    """It counts from its parking on, although the requests of batches do not count otherwise."""
    bounds = QueueBounds(10, 100, key_bytes=STORED_BYTES)

    async def store() -> None:
        await broker.submit("r", b"", Admission(gateway="g", cost=1, bounds=bounds, is_background=True, owner="a"))

    await broker.submit(
        "line", b"", Admission(gateway="g", cost=1, bounds=bounds, retention_s=5000, counts_stored=False, owner="a")
    )
    assert await client.zscore(KEYS.holders, "a") is None
    await broker.park("line")
    assert await client.zscore(KEYS.holders, "a") == STORED_BYTES
    if outcome == "stop":
        await broker.unpark("line")
        claim = await broker.claim(await take(broker), "w", new_id())
        assert claim is not None
        await broker.commit_step("w", [step(claim, 0, (1,), outcome)])
    elif outcome == "cancelled":
        await broker.cancel("line")
    else:
        await client.zadd(KEYS.parked, {"line": 1})
        await broker.expire("line")
    for _ in range(2):
        await client.zadd(KEYS.ended("a"), {"line": 1}, xx=True)  # as if it had ended long ago
        with pytest.raises(NoRoom) as refused:
            await store()
        assert refused.value.wait_ms == -1  # no time helps
        await client.zadd(KEYS.due, {"line": 1})  # the time at which it is looked at
    assert await outcome_of(broker, "line") == outcome
    await broker.delete("line")
    await store()
    assert await client.zscore(KEYS.holders, "a") == STORED_BYTES


@pytest.mark.parametrize(
    ("name", "is_parked"),
    [(name, False) for name in ("emitted", "deadline")]
    + [(name, True) for name in ("class", "cost", "emitted", "left", "tenant", "user")],
)
async def test_a_corrupt_request_ends_instead(broker: Broker, client: Redis, name: str, is_parked: bool) -> None:
    await submit(broker, "r")
    if is_parked:
        await broker.park("r")
    await client.hset(KEYS.request("r"), name, "x")
    assert await (broker.unpark("r") if is_parked else broker.park("r")) == "done"
    assert await outcome_of(broker) == "error"
    assert await broker.read_totals() == {"accepted": 1, "error": 1}
    assert (await broker.queued(), await client.exists(KEYS.parked)) == ((0, 0), 0)


async def test_an_entry_that_was_delivered_before_the_parking_is_not_claimed(broker: Broker) -> None:
    await submit(broker, "r")
    delivery = await take(broker)
    await broker.park("r")
    assert await broker.claim(delivery, "w", new_id()) is None
    await broker.unpark("r")
    assert await broker.claim(delivery, "w", new_id()) is None
    assert await broker.queued() == (1, 10)


async def test_parked_requests_are_listed_by_the_time_that_is_left(broker: Broker) -> None:
    claim = await start(broker, "late")
    await broker.commit_step("w", [step(claim, 0, (1, 2))])
    await broker.park("late", retention_s=900)
    await submit(broker, "soon")
    await broker.park("soon", retention_s=90)
    soon, late = await broker.read_parked(10)
    assert (soon.request_id, soon.emitted, soon.priority_class, soon.metadata) == ("soon", 0, "standard", b"")
    assert (late.request_id, late.emitted) == ("late", 2)
    assert 80 < soon.left_s <= 90
    assert [one.request_id for one in await broker.read_parked(1)] == ["soon"]
    # One whose hash is lost or corrupt is listed, so that an operator sees it.
    await broker.client.delete(KEYS.request("soon"))
    await broker.client.hset(KEYS.request("late"), mapping={"emitted": "x", "metadata": "about"})
    soon, late = await broker.read_parked(10)
    assert (soon.emitted, soon.priority_class, soon.metadata) == (0, "", b"")
    assert (late.emitted, late.priority_class, late.metadata) == (0, "standard", b"about")
    assert PARKING_S == 7 * 86_400


async def test_the_requests_of_a_worker_are_those_that_it_owns(broker: Broker) -> None:
    await start(broker, "running", "w")
    await submit(broker, "waiting")
    assert await broker.unended() == ["running", "waiting"]
    assert await broker.unended("w") == ["running"]
    assert await broker.unended("other") == []
