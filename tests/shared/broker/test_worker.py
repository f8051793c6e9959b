"""The broker's side of workers: claims, leases, commits, and the reader of the queue."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from quire.shared.protocol.broker import MAX_DEATHS, Admission, Broker, Claim, QueueBounds, QueueReader, new_id
from quire.shared.protocol.keys import GROUP
from quire.shared.protocol.messages import Outcome
from quire.shared.redis.clients import blocking_client
from tests.support.broker_calls import BOUNDS, KEYS, NOTHING, go_stale, outcome_of, start, step, submit, take, take_over

# --- worker -----------------------------------------------------------------------------------------------------------
# The verbs of a worker: claim, begin, renew, release and reclaim, and how deaths are counted.


async def test_a_request_without_progress_is_quarantined_with_the_third_death(broker: Broker) -> None:
    await broker.submit("r", b"body", Admission(gateway="g", cost=10, bounds=BOUNDS, metadata=b"metadata"))
    assert await broker.claim(await take(broker), "w", new_id())
    for deaths in range(1, MAX_DEATHS):
        claim = await take_over(broker, f"worker {deaths}")
        assert claim is not None
        assert claim.deaths == deaths
    assert claim.runs_alone
    assert await broker.begin(claim)
    assert await take_over(broker) is None
    assert await outcome_of(broker) == "quarantined"
    [dead] = await broker.read_dead()
    assert (dead.request_id, dead.worker, dead.emitted) == ("r", f"worker {MAX_DEATHS - 1}", 0)
    assert (dead.priority_class, dead.body, dead.metadata) == ("standard", b"body", b"metadata")
    assert (await broker.read_totals())["quarantined"] == 1
    assert await broker.drop_dead(dead.entry_id)
    assert not await broker.drop_dead(dead.entry_id)
    assert await broker.read_dead() == []


@pytest.mark.parametrize("outcome", ["cancelled", "deadline"])
async def test_what_nobody_wants_any_more_does_not_begin_to_run_alone(
    broker: Broker, client: Redis, outcome: str
) -> None:
    await start(broker)
    await take_over(broker, "w1")
    claim = await take_over(broker, "w2")
    assert claim is not None
    assert claim.runs_alone
    if outcome == "cancelled":
        assert await broker.cancel("r") == "flagged"
    else:
        await client.hset(KEYS.request("r"), "deadline", 1)
    assert not await broker.begin(claim)
    assert await outcome_of(broker) == outcome
    assert await client.hget(KEYS.request("r"), "outcome") == outcome.encode()
    assert (await client.xpending(KEYS.queue(), GROUP))["pending"] == await client.xlen(KEYS.queue()) == 0


async def test_a_claim_says_how_long_its_request_has_waited(broker: Broker, client: Redis) -> None:
    await submit(broker, "r")
    created = await client.hget(KEYS.request("r"), "created")
    assert created is not None
    await client.hset(KEYS.request("r"), "created", int(created) - 60_000)
    claim = await broker.claim(await take(broker), "w", new_id())
    assert claim is not None
    assert 60_000 <= claim.waited_ms < 120_000
    assert claim.traceparent == ""
    # Unless they say otherwise, two workers are two processes: the first one has died.
    await go_stale(broker)
    [delivery] = await broker.reclaim("x", 30_000, 1)
    claim = await broker.claim(delivery, "x", new_id())
    assert claim is not None
    assert claim.deaths == 1


async def test_progress_starts_the_count_of_deaths_anew_up_to_ten_in_all(broker: Broker) -> None:
    claim: Claim | None = await start(broker)
    for index in range(9):
        assert claim is not None
        await broker.commit_step("w", [step(claim, index, (1,))])
        claim = await take_over(broker)
        assert claim is not None
        assert claim.deaths == 1
    await broker.commit_step("w", [step(claim, 9, (1,))])
    assert await take_over(broker) is None
    assert await outcome_of(broker) == "quarantined"
    assert (await broker.read_dead())[0].emitted == 10


# --- commit -----------------------------------------------------------------------------------------------------------
# The commit of a step: the fence, the log, the published frame, and the mailbox of notices.


async def test_a_log_that_contradicts_the_state_ends_its_request_alone(broker: Broker, client: Redis) -> None:
    broken, sound = await start(broker, "broken"), await start(broker, "sound")
    await broker.commit_step("w", [step(broken, 0, (1, 2, 3))])
    await client.hset(KEYS.request("broken"), mapping={"emitted": 1, "deadline": 1})
    reply = await broker.commit_step("w", [step(broken, 1, (2,)), step(sound, 0, (1,))])
    assert (reply.lost, reply.expired) == ((("broken", broken.attempt),), ())
    assert await outcome_of(broker, "broken") == "error"
    assert [item.end for item in await broker.read_output("sound")] == [1]
    assert (await client.xpending(KEYS.queue(), GROUP))["pending"] == 1


async def test_a_log_that_is_none_ends_its_request_alone(broker: Broker, client: Redis) -> None:
    broken, sound = await start(broker, "broken"), await start(broker, "sound")
    await client.set(KEYS.output("broken"), "no stream")
    reply = await broker.commit_step("w", [step(broken, 0, (1,)), step(sound, 0, (1,))])
    assert reply.lost == (("broken", broken.attempt),)
    assert await outcome_of(broker, "broken") == "error"
    assert [item.end for item in await broker.read_output("sound")] == [1]


async def test_the_end_comes_behind_all_tokens_also_where_the_log_has_lost_them(broker: Broker, client: Redis) -> None:
    claim = await start(broker)
    await broker.commit_step("w", [step(claim, 0, (1, 2))])
    await broker.release([("r", claim.attempt)])
    await client.delete(KEYS.output("r"))
    await broker.cancel("r")
    [last] = await broker.read_output("r")
    assert (last.start, last.outcome) == (2, Outcome("cancelled"))


async def test_notices_that_are_none_are_counted_and_taken_away(
    broker: Broker, client: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    await client.hset(KEYS.mailbox("w"), mapping={b"\xff\xfe": b"\xc1", b"r": b"cancel", b"s": b"no token"})
    reply = await broker.commit_step("w", [])
    assert (reply.lost, reply.cancelled) == ((), ("r",))
    assert await broker.commit_step("w", [], reply.notices) == NOTHING
    assert not await client.exists(KEYS.mailbox("w"))
    assert broker.corrupt == {"notice": 2}
    assert caplog.text.count("is corrupt") == 1


# --- reader -----------------------------------------------------------------------------------------------------------
# Reading the queues: order, bounds, and reads that block.


async def test_a_read_takes_from_the_first_queue_first_and_no_more_than_asked(broker: Broker) -> None:
    await broker.create_groups()
    for name in ("batch", "standard", "interactive"):
        for index in range(3):
            await broker.submit(
                f"{name}{index}",
                b"body",
                Admission(
                    gateway="g",
                    cost=1,
                    bounds=QueueBounds(requests=100, tokens=1000),
                    priority_class=name,
                ),
            )
    reader = QueueReader(broker.client, "lane", "w")
    assert await reader.read(0, 0) == []
    found = await reader.read(5, 0)
    assert [one.request_id for one in found] == [
        "interactive0",
        "interactive1",
        "interactive2",
        "standard0",
        "standard1",
    ]
    assert [(one.queue, one.cost) for one in found[2:4]] == [("interactive", 1), ("standard", 1)]
    assert [one.request_id for one in await reader.read(1, 0, ("batch",))] == ["batch0"]
    assert len(await reader.read(100, 0)) == 3
    assert len(await reader.pending()) == 9


async def test_a_read_counts_rows_and_nothing_passes_a_request_that_is_too_wide(broker: Broker) -> None:
    await broker.create_groups()
    for index, rows in enumerate((1, 3, 2, 1)):
        await broker.submit(
            f"r{index}",
            b"body",
            Admission(gateway="g", cost=1, bounds=QueueBounds(requests=100, tokens=1000), rows=rows),
        )
    reader = QueueReader(broker.client, "lane", "w")
    found = []
    for rows, widest, expected, too_wide in (
        (3, None, ["r0"], "r1"),
        (2, None, [], "r1"),
        (3, None, ["r1"], ""),
        (1, 1, [], "r2"),
        (1, 4, ["r2"], ""),
        (5, None, ["r3"], ""),
    ):
        new = await reader.read(rows, 60_000 if too_wide else 0, widest=widest)  # it does not block either
        assert ([one.request_id for one in new], reader.too_wide) == (expected, too_wide)
        found += new
    assert [one.rows for one in found] == [1, 3, 2, 1]


async def test_behind_a_read_that_waited_none_is_lost_or_waited_for(broker: Broker, redis_url: str) -> None:
    await broker.create_groups()
    client = blocking_client(redis_url)
    reader = QueueReader(client, "lane", "w")
    waiting = asyncio.create_task(reader.read(50, 5000))
    await waits(broker)
    bounds = QueueBounds(requests=100, tokens=1000)
    for index in range(20):
        await broker.submit(f"r{index}", b"body", Admission(gateway="g", cost=1, bounds=bounds))
    found = await waiting
    async with asyncio.timeout(60):
        while len(found) < 20:
            found += await reader.read(50, 5000)
    assert [one.request_id for one in found] == [f"r{index}" for index in range(20)]
    await client.aclose()


async def test_a_read_that_cannot_be_ended_is_left_to_its_timeout(broker: Broker, redis_url: str) -> None:
    blocking = blocking_client(redis_url)
    reader = QueueReader(blocking, "lane", "w")
    await reader.unblock(broker.client)  # before its first read there is nothing to end
    await broker.create_groups()
    assert await reader.pending() == []
    reading = asyncio.create_task(reader.read(1, 60_000))
    await waits(broker)

    class Away:
        async def client_unblock(self, connection: int) -> None:
            raise ConnectionRefusedError

    await reader.unblock(Away())  # type: ignore[arg-type]
    assert not reading.done()
    await reader.unblock(broker.client)
    async with asyncio.timeout(60):
        assert await reading == []
    await blocking.aclose()


async def waits(broker: Broker) -> None:
    """Wait until a client has been in a blocking command for a while."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(60):
        while (await broker.client.info("clients"))["blocked_clients"] < 1:
            pass
        since = loop.time()
        while loop.time() - since < 0.01:
            await broker.client.ping()
