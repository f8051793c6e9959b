"""The verbs of a gateway: submit, attach, detach, cancel, expire, and reading the output log."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from quire.shared.protocol.broker import (
    Admission,
    Broker,
    IdempotencyConflict,
    NoRoom,
    QueueBounds,
    QueueFull,
    StepCommit,
)
from quire.shared.protocol.keys import (
    GATEWAY_TTL_S,
    GROUP,
    IDEMPOTENCY_S,
    LARGE_BYTES,
    RETENTION_S,
    STORED_BYTES,
    VIEW_TTL_S,
)
from quire.shared.protocol.messages import Outcome, StepItem, WorkerCard
from tests.support.broker_calls import BOUNDS, KEYS, outcome_of, recoveries_of, start, step, submit

# A stored request of these tests, and room for four of a key.
SIZE = STORED_BYTES + 8000
STORED = QueueBounds(100, 1000, stored_bytes=100 * SIZE, key_bytes=4 * SIZE)


async def is_there(broker: Broker, request_id: str) -> bool:
    return bool(await broker.client.exists(KEYS.request(request_id), KEYS.conversation(request_id)))


async def test_what_nobody_knows_changes_nothing(broker: Broker, client: Redis) -> None:
    calls = (broker.cancel, broker.expire, broker.delete, broker.park, broker.unpark)
    assert {await call("nothing") for call in calls} == {"unknown"}
    assert (await broker.attach("nothing", "g"), await broker.detach("nothing", "g")) == (None, [])
    assert await client.dbsize() == 0


async def test_times_are_milliseconds_of_the_clock_of_redis(broker: Broker, client: Redis) -> None:
    before = await client.time()
    await submit(broker, "r")
    after = await client.time()
    created = int((await client.hget(KEYS.request("r"), "created")) or 0)
    assert before[0] * 1000 + before[1] // 1000 <= created <= after[0] * 1000 + after[1] // 1000


async def test_the_queue_is_bounded_by_tokens(broker: Broker) -> None:
    await submit(broker, "r")
    with pytest.raises(QueueFull) as full:
        await submit(broker, "large", cost=991)
    assert (full.value.requests, full.value.tokens) == (1, 10)
    await submit(broker, "as large as fits", cost=990)


async def test_a_request_over_the_token_bound_fits_an_empty_queue(broker: Broker) -> None:
    await submit(broker, "large", cost=100_000)
    assert await broker.queued() == (1, 100_000)


async def test_a_queued_request_past_its_deadline_is_ended(broker: Broker, client: Redis) -> None:
    await submit(broker, "r", deadline_ms=3_600_000)
    assert await broker.expire("r") == "early"
    await client.hset(KEYS.request("r"), "deadline", 1)
    assert await broker.expire("r") == "expired"
    assert await outcome_of(broker) == "deadline"
    assert await broker.queued() == (0, 0)


async def test_a_running_request_past_its_deadline_is_ended_and_its_worker_told(broker: Broker, client: Redis) -> None:
    """The worker was cut off, or its step takes too long; its prompt may yet have no token, so that it commits none."""
    claim = await start(broker)
    await broker.commit_step("w", [step(claim, 0, (1,))])
    assert await broker.expire("r") == "early"  # it has none
    await client.hset(KEYS.request("r"), "deadline", 1)
    assert await broker.expire("r") == "expired"
    assert [item.end for item in await broker.read_output("r")] == [1, 1]
    assert await outcome_of(broker) == "deadline"
    assert (await broker.commit_step("w", [])).lost == (("r", claim.attempt),)
    assert ("r", claim.attempt) in (await broker.commit_step("w", [step(claim, 1, (2,), "stop")])).lost
    assert await broker.read_totals() == {"accepted": 1, "deadline": 1}
    assert (await client.xpending(KEYS.queue(), GROUP))["pending"] == 0


async def test_the_listeners_of_a_request_are_bounded(broker: Broker, client: Redis) -> None:
    await submit(broker, "r")
    for index in range(100):
        await broker.attach("r", f"g{index}")
    assert (await broker.submit("r", b"body", Admission(gateway="one more", cost=10, bounds=BOUNDS))).id == "r"
    listeners = (await broker.listeners_of(["r"]))["r"]
    assert listeners == [f"g{index}" for index in range(36, 100)]
    for corrupt in (b"\xc1", b"\x01"):
        await client.hset(KEYS.request("r"), "gateways", corrupt)
        assert await broker.listeners_of(["r"]) == {"r": []}


async def keyed(broker: Broker, request_id: str, fingerprint: str = "f", key: str = "key") -> str:
    terms = Admission(gateway="g", cost=10, bounds=BOUNDS, idempotency_key=key, fingerprint=fingerprint)
    return (await broker.submit(request_id, b"body", terms)).id


async def test_an_idempotency_key_stands_for_one_request(broker: Broker, client: Redis) -> None:
    assert [await keyed(broker, request_id) for request_id in ("a", "a", "b")] == ["a", "a", "a"]
    assert await keyed(broker, "c", key="another") == "c"
    assert await broker.queued() == (2, 20)
    assert 0 < await client.ttl(KEYS.idempotency("key")) <= IDEMPOTENCY_S
    with pytest.raises(IdempotencyConflict, match="key"):
        await keyed(broker, "b", fingerprint="another")
    await broker.cancel("a")
    assert await keyed(broker, "b") == "a"


async def test_the_log_is_read_from_any_token_on_and_in_pages(broker: Broker) -> None:
    claim = await start(broker)
    for index in range(5):
        await broker.commit_step("w", [step(claim, index, (index,))])
    await broker.commit_step("w", [StepCommit(claim.attempt, StepItem("r", 5, (), Outcome("stop")))])
    assert [item.end for item in await broker.read_output("r", after=3)] == [4, 5, 5]
    assert [item.end for item in await broker.read_output("r", after=0, count=2)] == [1, 2]
    assert [item.end for item in await broker.read_output("r", after=2, count=2)] == [3]
    assert [item.outcome for item in await broker.read_output("r", after=5)] == [Outcome("stop")]


async def test_the_logs_of_requests_are_dropped_before_their_time(broker: Broker) -> None:
    for name in ("a", "b", "c"):
        await submit(broker, name)
        await broker.cancel(name)
    await broker.drop_output(["a", "c"])
    assert [len(await broker.read_output(name)) for name in ("a", "b", "c")] == [0, 1, 0]


async def test_who_looks_at_a_worker_learns_what_waits(broker: Broker, client: Redis) -> None:
    assert not await broker.is_looked_at("w")
    assert await broker.look("w") == {"handed": 0, "interactive": 0, "standard": 0, "batch": 0}
    assert (await broker.is_looked_at("w"), await broker.is_looked_at("x")) == (True, False)
    assert 0 < await client.pttl(KEYS.view("w")) <= 1000 * VIEW_TTL_S
    await start(broker, "running", "w")
    await submit(broker, "waiting")
    await broker.submit("batch", b"", Admission(gateway="g", cost=1, bounds=BOUNDS, priority_class="batch"))
    await client.hset(KEYS.load, "requests:interactive", -1)  # a lost write
    assert await broker.look("w") == {"handed": 0, "interactive": 0, "standard": 1, "batch": 1}


async def test_the_cards_of_live_workers_are_seen(broker: Broker, client: Redis) -> None:
    card = WorkerCard("w", "1", "lane", 100, 64, 50, (2,), 16, 10, 5, 0, 0, 7)
    await broker.beat(card)
    assert await broker.live_workers() == [card]
    await client.hset(KEYS.worker("w"), "card", b"another version")
    assert await broker.live_workers() == []
    await broker.retire("w", "another")
    assert await client.exists(KEYS.worker("w")) == 1
    await broker.retire("w", "1")
    assert await client.exists(KEYS.worker("w")) == 0
    assert await client.zcard(KEYS.workers) == 0


async def test_cards_that_cannot_be_read_are_counted_and_said_once(
    broker: Broker, client: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    card = WorkerCard("w", "1", "lane", 100, 64, 50, (2,), 16, 10, 5, 0, 0, 7)
    for name in ("w", "x", "y"):
        await broker.beat(replace(card, worker_id=name))
    for name in ("x", "y"):
        await client.hset(KEYS.worker(name), "card", b"another version")
    for _ in range(2):
        assert await broker.live_workers() == [card]
    assert broker.corrupt["worker card"] == 4
    assert caplog.text.count("worker card") == 1


async def test_the_lease_of_a_gateway_ends_by_itself(broker: Broker, client: Redis) -> None:
    await broker.refresh_gateway("g")
    assert 0 < await client.ttl("quire:{lane}:gateway:g:alive") <= GATEWAY_TTL_S
    assert await broker.live_gateways(["g", "gone"]) == {"g"}
    assert (await broker.listeners_of([]), await broker.live_gateways([])) == ({}, set())


async def test_repairs_of_gateways_are_counted(broker: Broker) -> None:
    for count in (4, 1):
        await broker.note_repairs(count)
    assert await recoveries_of(broker) == {"repairs": 5}


async def store(broker: Broker, request_id: str, owner: str = "", bounds: QueueBounds = STORED) -> None:
    await broker.submit(
        request_id,
        b"",
        Admission(gateway="g", cost=1, bounds=bounds, retention_s=5000, conversation=b"x" * 8000, owner=owner),
    )


async def end_long_ago(broker: Broker, request_id: str, owner: str) -> None:
    """End a request more than RETENTION_S ago."""
    await broker.cancel(request_id)
    await broker.client.zadd(KEYS.ended(owner), {request_id: int(request_id[1:])})


async def test_a_key_that_stores_more_than_its_share_loses_its_own_old_requests_and_is_then_refused(
    broker: Broker, client: Redis
) -> None:
    """Of the key "a", a0 and a1 ended long ago, a2 just now, and a3 waits."""
    await store(broker, "b0", "b")
    await end_long_ago(broker, "b0", "b")
    for index in range(4):
        await store(broker, f"a{index}", "a")
    await end_long_ago(broker, "a1", "a")
    await end_long_ago(broker, "a0", "a")
    await broker.cancel("a2")
    for request_id in ("a4", "a5"):
        await store(broker, request_id, "a")
    with pytest.raises(NoRoom) as refused:
        await store(broker, "a6", "a")
    assert (refused.value.key, refused.value.held) == ("a", await client.zscore(KEYS.holders, "a"))
    assert 0 < refused.value.wait_ms <= 1000 * RETENTION_S
    left = {
        request_id for request_id in ("b0", *(f"a{index}" for index in range(7))) if await is_there(broker, request_id)
    }
    assert left == {"b0", "a2", "a3", "a4", "a5"}
    assert 4900 < await client.ttl(KEYS.conversation("b0")) <= 5000
    # What the error advises: delete one.
    await broker.delete("a2")
    await store(broker, "a6", "a")


@pytest.mark.parametrize("bound", ["key_bytes", "stored_bytes"])
@pytest.mark.parametrize("are_gone", [False, True])
async def test_room_is_made_in_parts_and_who_needs_more_is_refused_for_now(
    broker: Broker, client: Redis, monkeypatch: pytest.MonkeyPatch, bound: str, are_gone: bool
) -> None:
    """Redis serves nobody else during a script, so one call of it deletes few requests, or looks at few.

    The room is taken by 600 requests that ended long ago, or by two behind 20,000 whose keys are gone.
    """
    names = [f"a{index}" for index in range(2 if are_gone else 600)]
    for name in names:
        await broker.submit(name, b"", Admission(gateway="g", cost=1, bounds=BOUNDS, is_background=True, owner="a"))
        await broker.cancel(name)
    await client.zadd(KEYS.ended("a"), dict.fromkeys(names, 1))
    if are_gone:
        await client.zadd(KEYS.due, {f"gone{index}": 1 for index in range(20_000)})
    bounds = replace(BOUNDS, **{"stored_bytes": 0, "key_bytes": 0, bound: 2 * STORED_BYTES})
    owner = "a" if bound == "key_bytes" else "b"

    async def try_to_store() -> None:
        await broker.submit("r", b"", Admission(gateway="g", cost=1, bounds=bounds, is_background=True, owner=owner))

    monkeypatch.setattr("quire.shared.protocol.broker.gateway.ROOM_ATTEMPTS", 1)
    with pytest.raises(NoRoom) as refused:
        await try_to_store()
    assert refused.value.wait_ms == 0
    assert 0 < await client.zcard(KEYS.due) < (20_002 if are_gone else 600)
    monkeypatch.undo()
    await try_to_store()
    assert await client.hmget(KEYS.held, "", "r") == [b"%d" % (2 * STORED_BYTES), f"{STORED_BYTES} {owner}".encode()]


async def test_a_request_counts_until_redis_forgets_it_whoever_ended_it(broker: Broker, client: Redis) -> None:
    """Time ends the keys of a request without a script, and its hash may lose its owner."""
    for index in range(3):
        await store(broker, f"a{index}", "a")
    assert await client.hget(KEYS.held, "") == b"%d" % (3 * SIZE)
    await client.hdel(KEYS.request("a0"), "account")
    await broker.cancel("a0")
    assert await client.zscore(KEYS.holders, "a") == 3 * SIZE
    await client.delete(KEYS.request("a0"), KEYS.output("a0"), KEYS.conversation("a0"), KEYS.request("a1"))
    await client.zadd(KEYS.due, dict.fromkeys(("a0", "a1", "a2"), 1))  # the time at which they are looked at
    await broker.submit("last", b"", Admission(gateway="g", cost=1, bounds=STORED, is_background=True))
    held = await client.hgetall(KEYS.held)
    assert {name: value.decode() for name, value in held.items()} == {
        b"": f"{SIZE + STORED_BYTES}",
        b"a2": f"{SIZE} a",
        b"last": f"{STORED_BYTES} ",
    }
    assert await client.zscore(KEYS.due, "a2") > 1


async def test_a_request_that_counts_is_looked_at_when_its_keys_may_be_gone(broker: Broker, client: Redis) -> None:
    async def due_in() -> float:
        seconds, micros = await client.time()
        return ((await client.zscore(KEYS.due, "a0")) or 0) / 1000 - seconds - micros / 1e6

    await store(broker, "a0", "a")
    assert RETENTION_S - 60 < await due_in() <= RETENTION_S
    # It has not ended then, so it is looked at again.
    await client.zadd(KEYS.due, {"a0": 1})
    await store(broker, "a1", "a")
    assert RETENTION_S - 60 < await due_in() <= RETENTION_S
    await broker.cancel("a0")
    assert 4940 < await due_in() <= 5000.01
    for key in (KEYS.request("a0"), KEYS.output("a0")):
        await client.expire(key, 50)
    await client.zadd(KEYS.due, {"a0": 1})
    await store(broker, "a2", "a")
    assert 0 < await due_in() <= 50.01
    assert 4940 < await client.ttl(KEYS.ended("a")) <= 5001


@pytest.mark.parametrize(
    ("body", "more", "stays"),
    [
        (b"x" * (LARGE_BYTES - 1), {}, True),
        (b"x" * LARGE_BYTES, {}, False),
        (b"x" * LARGE_BYTES, {"retention_s": 50}, True),
        (b"x", {"counts_stored": False}, False),
    ],
)
async def test_a_request_keeps_its_body_after_its_end_if_a_bound_counts_it_or_it_is_small(
    broker: Broker, client: Redis, body: bytes, more: dict[str, Any], stays: bool
) -> None:
    await broker.submit("r", body, Admission(gateway="g", cost=1, bounds=BOUNDS, owner="a", **more))
    await broker.cancel("r")
    assert await client.hget(KEYS.request("r"), "body") == (body if stays else None)


@pytest.mark.parametrize(
    ("more", "counts"),
    [
        ({}, False),
        ({"is_background": True}, True),
        ({"retention_s": 50}, True),
        ({"metadata": b"x" * LARGE_BYTES}, True),
    ],
)
async def test_only_requests_that_stay_count(broker: Broker, client: Redis, more: dict[str, Any], counts: bool) -> None:
    await broker.submit("r", b"body", Admission(gateway="g", cost=1, bounds=BOUNDS, owner="a", **more))
    size = STORED_BYTES + len(b"body") + len(more.get("metadata", b""))
    assert await client.zscore(KEYS.holders, "a") == (size if counts else None)
    await broker.cancel("r")
    assert await client.zscore(KEYS.holders, "a") == (size if counts else None)
    await broker.delete("r")
    assert await client.exists(KEYS.holders, KEYS.due, KEYS.ended("a")) == 0
