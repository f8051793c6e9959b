"""The verbs about parked requests, against a real Redis."""

from __future__ import annotations

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from quire.shared.accounts.account import Account
from quire.shared.accounts.limits import AccountLimits
from quire.shared.protocol.broker import Admission, Broker, NoRoom, QueueBounds, new_id
from quire.shared.protocol.charge import LimitReached, packed_limits
from quire.shared.protocol.keys import STORED_BYTES
from quire.shared.protocol.messages import Outcome
from tests.support.broker_calls import BOUNDS, KEYS, outcome_of, start, step, submit, take


async def state_of(broker: Broker, request_id: str = "r") -> str:
    return ((await broker.client.hget(KEYS.request(request_id), "state")) or b"").decode()  # type: ignore[union-attr]


async def test_to_park_or_unpark_twice_changes_nothing_more(broker: Broker, client: Redis) -> None:
    await submit(broker, "r")
    await broker.park("r", retention_s=100)
    until = await broker.parked_until("r")
    assert await broker.park("r", retention_s=5000) == "parked"
    assert await broker.parked_until("r") == until
    assert await broker.unpark("r") == "queued"
    assert await broker.unpark("r") == "active"
    assert (await broker.queued(), await client.xlen(KEYS.queue())) == ((1, 10), 1)


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
    await submit(broker, "without")
    await broker.park("without")
    await broker.unpark("without")
    assert await client.hget(KEYS.request("without"), "deadline") == b"0"


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


async def test_a_parked_request_ends_when_it_is_cancelled_or_taken_up_too_late(broker: Broker, client: Redis) -> None:
    for name in ("r", "late"):
        await submit(broker, name)
        await broker.park(name, retention_s=100)
    assert (await broker.cancel("r"), await state_of(broker)) == ("cancelled", "done")
    await client.zadd(KEYS.parked, {"late": 1})
    assert (await broker.unpark("late"), await state_of(broker, "late")) == ("done", "done")
    assert await broker.read_totals() == {"accepted": 2, "cancelled": 1, "deadline": 1}


async def test_a_lost_hash_does_not_stay_among_the_parked(broker: Broker, client: Redis) -> None:
    await submit(broker, "r")
    await broker.park("r")
    await client.delete(KEYS.request("r"))
    assert await broker.expire("r") == "unknown"
    assert await client.exists(KEYS.parked) == 0


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


async def test_the_requests_of_a_worker_are_those_that_it_owns(broker: Broker) -> None:
    await start(broker, "running", "w")
    await submit(broker, "waiting")
    assert await broker.unended() == ["running", "waiting"]
    assert await broker.unended("w") == ["running"]
    assert await broker.unended("other") == []
