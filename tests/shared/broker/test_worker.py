"""The broker's side of workers: claims, leases, commits, and the reader of the queue."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from quire.shared.protocol.broker import MAX_DEATHS, Admission, Broker, Claim, QueueBounds, QueueReader, new_id
from quire.shared.protocol.keys import GROUP, HANDED, RETENTION_S
from quire.shared.protocol.messages import Outcome, decode_items
from quire.shared.redis.clients import blocking_client, pubsub_client
from tests.support.broker_calls import (
    BOUNDS,
    KEYS,
    NOTHING,
    go_stale,
    outcome_of,
    recoveries_of,
    start,
    step,
    submit,
    take,
    take_over,
)

# --- worker -----------------------------------------------------------------------------------------------------------
# The verbs of a worker: claim, begin, renew, release and reclaim, and how deaths are counted.


async def test_a_claim_can_be_repeated_with_the_same_token(broker: Broker) -> None:
    await submit(broker, "r")
    delivery = await take(broker)
    first = await broker.claim(delivery, "w", "token")
    again = await broker.claim(delivery, "w", "token")
    assert first is not None
    assert again is not None
    assert again.deliveries == 1
    assert await broker.queued() == (0, 0)


async def test_who_was_slow_to_claim_has_lost_the_entry(broker: Broker) -> None:
    """The worker slept between read and claim. The late claim does not disturb the worker that has the request now."""
    await submit(broker, "r")
    slow = await take(broker)
    new = await take_over(broker)
    assert new is not None
    assert await broker.claim(slow, "w", new_id(), "slow") is None
    assert await broker.commit_step("w2", [step(new, 0, (1,))]) == NOTHING
    assert (await broker.commit_step("w", [])).lost == ()
    assert await broker.client.hget(KEYS.request("r"), "deaths") is None
    await broker.commit_step("w2", [step(new, 1, (2,), "stop")])
    assert await broker.claim(slow, "w", new_id(), "slow") is None
    assert await recoveries_of(broker) == {}


async def test_who_was_slow_drops_nothing_of_the_new_owner(broker: Broker, client: Redis) -> None:
    """The new owner has not claimed the entry yet either. The request was cancelled in the meantime."""
    await submit(broker, "r")
    slow = await take(broker)
    await go_stale(broker)
    [delivery] = await broker.reclaim("w2", 30_000, 10)
    await client.hset(KEYS.request("r"), "cancel", 1)
    assert await broker.claim(slow, "w", new_id()) is None
    assert (await client.xpending(KEYS.queue(), GROUP))["pending"] == 1
    assert await broker.claim(delivery, "w2", new_id()) is None
    assert await outcome_of(broker) == "cancelled"


async def test_a_request_past_its_deadline_is_not_begun(broker: Broker, client: Redis) -> None:
    await submit(broker, "r", deadline_ms=1)
    delivery = await take(broker)
    await client.hset(KEYS.request("r"), "deadline", 1)
    assert await broker.claim(delivery, "w", new_id()) is None
    [item] = await broker.read_output("r")
    assert item.outcome is not None
    assert item.outcome.name == "deadline"


async def test_a_renewed_request_is_not_reclaimed(broker: Broker) -> None:
    claim = await start(broker)
    await go_stale(broker)
    assert await broker.renew("w", [("r", claim.attempt)]) == []
    assert await broker.reclaim("w2", 30_000, 10) == []


async def test_renew_names_what_is_lost_and_keeps_the_rest(broker: Broker) -> None:
    old, kept = await start(broker), await start(broker, "kept")
    new = await take_over(broker)
    assert new is not None
    await go_stale(broker, "r", "w2")
    await go_stale(broker, "kept")
    for _ in range(2):
        lost = await broker.renew("w", [("r", old.attempt), ("kept", kept.attempt), ("unknown", "token")])
        assert lost == [("r", old.attempt), ("unknown", "token")]
    assert [delivery.request_id for delivery in await broker.reclaim("w3", 30_000, 10)] == ["r"]
    assert await broker.renew("w", []) == []


async def test_renew_says_nothing_of_what_its_own_attempt_ended(broker: Broker) -> None:
    claim = await start(broker)
    await broker.commit_step("w", [step(claim, 0, (1,), "stop")])
    assert await broker.renew("w", [("r", claim.attempt)]) == []


async def test_only_what_is_idle_is_reclaimed_and_no_more_than_asked_for(broker: Broker) -> None:
    for request_id in ("a", "b", "c"):
        await start(broker, request_id)
    assert await broker.reclaim("w2", 30_000, 10) == []
    await go_stale(broker, "a")
    await go_stale(broker, "c")
    assert [delivery.request_id for delivery in await broker.reclaim("w2", 30_000, 1)] == ["a"]
    assert [delivery.request_id for delivery in await broker.reclaim("w2", 30_000, 10)] == ["c"]
    assert await broker.reclaim("w2", 30_000, 10) == []


async def test_a_reclaimed_request_goes_on_behind_its_tokens(broker: Broker) -> None:
    old = await start(broker)
    await broker.commit_step("w", [step(old, 0, (1, 2))])
    new = await take_over(broker)
    assert new is not None
    assert (new.emitted, new.deaths, [item.end for item in new.items()]) == (2, 1, [2])
    assert (await broker.commit_step("w", [])).lost == (("r", old.attempt),)
    assert await broker.commit_step("w2", [step(new, 2, (3,), "stop")]) == NOTHING


async def test_a_released_request_is_handed_to_the_next_worker_first(broker: Broker, client: Redis) -> None:
    claim = await start(broker)
    await broker.commit_step("w", [step(claim, 0, (1,))])
    await submit(broker, "earlier")
    assert await broker.release([("r", claim.attempt)]) == 1
    assert await broker.release([("r", claim.attempt)]) == 0
    assert await broker.queued() == (2, 20)
    assert (await broker.commit_step("w", [step(claim, 1, (9,))])).lost == (("r", claim.attempt),)
    delivery = await take(broker, "w2")
    assert (delivery.request_id, delivery.queue, delivery.cost) == ("r", HANDED, 10)
    again = await broker.claim(delivery, "w2", new_id())
    assert again is not None
    assert (again.emitted, again.deaths, again.priority_class) == (1, 0, "standard")
    assert await client.hget(KEYS.request("r"), "all_deaths") is None
    assert await broker.queued() == (1, 10)
    await broker.commit_step("w2", [step(again, 1, (2,), "stop")])
    assert await client.xlen(KEYS.queue(HANDED)) == 0


async def test_only_the_current_attempt_can_release(broker: Broker) -> None:
    old = await start(broker)
    new = await take_over(broker)
    assert new is not None
    assert await broker.release([("r", old.attempt), ("unknown", "token")]) == 0
    assert await broker.commit_step("w2", [step(new, 0, (1,))]) == NOTHING
    assert await broker.release([]) == 0


async def test_a_released_request_can_be_cancelled_while_it_waits(broker: Broker) -> None:
    claim = await start(broker)
    await broker.release([("r", claim.attempt)])
    assert await broker.cancel("r") == "cancelled"
    assert await broker.queued() == (0, 0)
    assert await QueueReader(broker.client, "lane", "w2").read(1, 0) == []


@pytest.mark.parametrize("act", ["cancel", "expire", "park"])
async def test_a_released_request_leaves_the_load_of_its_class_however_it_leaves(
    broker: Broker, client: Redis, act: str
) -> None:
    await broker.submit("r", b"body", Admission(gateway="g", cost=7, bounds=BOUNDS, priority_class="batch"))
    claim = await broker.claim(await take(broker), "w", new_id())
    assert claim is not None
    await broker.release([("r", claim.attempt)])
    assert await client.hmget(KEYS.load, "requests:batch", "tokens:batch") == [b"1", b"7"]
    if act == "expire":
        await client.hset(KEYS.request("r"), "deadline", 1)
    assert await getattr(broker, act)("r") in ("cancelled", "expired", "parked")
    assert set(await client.hvals(KEYS.load)) == {b"0"}


async def test_a_release_keeps_a_cancel_that_was_not_obeyed(broker: Broker) -> None:
    claim = await start(broker)
    await broker.cancel("r")
    await broker.release([("r", claim.attempt)])
    assert await broker.claim(await take(broker, "w2"), "w2", new_id()) is None
    assert await outcome_of(broker) == "cancelled"
    assert await broker.queued() == (0, 0)


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


async def test_the_death_of_a_worker_does_not_count_for_who_waited_there_to_run_alone(broker: Broker) -> None:
    await start(broker)
    claims = [await take_over(broker, f"worker {index}") for index in range(1, 20)]
    assert [claim.deaths for claim in claims if claim] == [1] + 18 * [MAX_DEATHS - 1]
    assert [claim.runs_alone for claim in claims if claim] == [False] + 18 * [True]
    assert claims[-1] is not None
    # An isolated attempt begins in its turn. The next death is then the last. An attempt that has ended cannot begin.
    assert claims[-2] is not None
    assert not await broker.begin(claims[-2])
    assert (await take_over(broker, "another")) is not None
    assert not await broker.begin(claims[-1])
    claim = await take_over(broker, "one more")
    assert claim is not None
    assert await broker.begin(claim)
    assert await broker.begin(claim)
    assert await take_over(broker) is None
    assert await outcome_of(broker) == "quarantined"
    assert not await broker.begin(claim)


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


async def test_a_request_that_made_progress_need_not_run_alone(broker: Broker) -> None:
    """Two workers died with the request at one token, it made progress, and was then taken over again."""
    await start(broker)
    for deaths in (1, 2):
        claim = await take_over(broker, f"worker {deaths}")
        assert claim is not None
        assert claim.deaths == deaths
    assert claim is not None
    await broker.commit_step("worker 2", [step(claim, 0, (1,))])
    await broker.release([("r", claim.attempt)])
    claim = await broker.claim(await take(broker, "w3"), "w3", new_id())
    assert claim is not None
    assert claim.deaths == 0
    claim = await take_over(broker, "w4", HANDED)
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


@pytest.mark.parametrize(
    ("priority_class", "is_background", "traceparent"), [("standard", False, ""), ("batch", True, "00-1-2-01")]
)
async def test_a_claim_has_what_was_submitted_and_what_was_before(
    broker: Broker, priority_class: str, is_background: bool, traceparent: str
) -> None:
    await broker.submit(
        "r",
        b"body",
        Admission(
            gateway="g",
            cost=10,
            bounds=BOUNDS,
            priority_class=priority_class,
            is_background=is_background,
            traceparent=traceparent,
        ),
    )
    claim = await broker.claim(await take(broker), "w", "first")
    assert claim is not None
    first = Claim("r", "first", "g", priority_class, b"body", 0, claim.waited_ms, 0, ())
    first = replace(first, traceparent=traceparent, is_background=is_background)
    assert claim == first
    assert claim.is_unwatched == is_background
    # Unless they say otherwise, two workers are two processes: the first one has died.
    await go_stale(broker, queue=priority_class)
    [delivery] = await broker.reclaim("x", 30_000, 1)
    claim = await broker.claim(delivery, "x", "second")
    assert claim is not None
    later = replace(first, waited_ms=claim.waited_ms, attempt="second", before="first", deaths=1, deliveries=2)
    assert claim == later


async def test_a_worker_that_takes_its_own_request_again_has_not_died(broker: Broker) -> None:
    await submit(broker, "r")
    reader = QueueReader(broker.client, "lane", "w")
    await broker.claim(await take(broker), "w", new_id(), "this process")
    for _ in range(2 * MAX_DEATHS):
        [delivery] = await reader.pending()
        claim = await broker.claim(delivery, "w", new_id(), "this process")
        assert claim is not None
        assert claim.deaths == 0
    [delivery] = await reader.pending()
    claim = await broker.claim(delivery, "w", new_id(), "the next process")
    assert claim is not None
    assert claim.deaths == 1


async def test_a_request_in_the_background_has_no_gateway_to_live_for(broker: Broker) -> None:
    await broker.submit("back", b"body", Admission(gateway="g", cost=10, bounds=BOUNDS, is_background=True))
    await submit(broker, "front")
    await broker.refresh_gateway("g")
    assert await broker.listeners_of(["back", "front", "unknown"]) == {"front": ["g"]}
    assert await broker.live_gateways(["g", "gone"]) == {"g"}
    assert (await broker.listeners_of([]), await broker.live_gateways([])) == ({}, set())


# --- commit -----------------------------------------------------------------------------------------------------------
# The commit of a step: the fence, the log, the published frame, and the mailbox of notices.


async def test_tokens_are_logged_and_published_in_one_step(broker: Broker, redis_url: str) -> None:
    client = pubsub_client(redis_url)
    pubsub = client.pubsub()
    await pubsub.subscribe(KEYS.channel("g"))
    assert (await pubsub.get_message(timeout=60))["type"] == "subscribe"  # type: ignore[index]
    first, second = await start(broker, "a"), await start(broker, "b")
    await broker.commit_step("w", [step(first, 0, (1, 2)), step(second, 0, (3,), "stop")])
    message = await pubsub.get_message(timeout=60)
    assert message is not None
    assert [item.request_id for item in decode_items(message["data"])] == ["a", "b"]
    assert [item.end for item in await broker.read_output("a")] == [2]
    await pubsub.aclose()
    await client.aclose()


async def test_a_step_that_is_committed_twice_is_logged_once(broker: Broker) -> None:
    claim = await start(broker)
    for _ in range(2):
        assert await broker.commit_step("w", [step(claim, 0, (1,))]) == NOTHING
    for _ in range(2):
        assert await broker.commit_step("w", [step(claim, 1, (2,), "length")]) == NOTHING
    assert [(item.start, item.end) for item in await broker.read_output("r")] == [(0, 1), (1, 2)]


async def test_only_the_current_attempt_can_append(broker: Broker) -> None:
    old = await start(broker)
    await broker.commit_step("w", [step(old, 0, (1,))])
    new = await take_over(broker)
    assert new is not None
    assert (new.emitted, [item.end for item in new.items()]) == (1, [1])
    assert (await broker.commit_step("w", [step(old, 1, (9,))])).lost.count(("r", old.attempt)) >= 1
    assert await broker.commit_step("w2", [step(new, 1, (2,))]) == NOTHING
    assert [item.deltas[0].token_ids for item in await broker.read_output("r")] == [(1,), (2,)]


async def test_migrations_and_what_was_fenced_are_counted(broker: Broker) -> None:
    old = await start(broker)
    new = await take_over(broker)
    assert new is not None
    assert (old.deliveries, new.deliveries) == (1, 2)
    await broker.commit_step("w", [step(old, 0, (1,))])
    await broker.release([("r", new.attempt)])
    last = await broker.claim(await take(broker, "w3"), "w3", new_id())
    assert last is not None
    assert last.deliveries == 3
    await broker.note_repairs(4)
    assert await recoveries_of(broker) == {"migrations": 2, "fenced": 1, "repairs": 4}


async def test_a_worker_that_is_ahead_learns_where_the_log_ends(broker: Broker) -> None:
    claim = await start(broker)
    await broker.commit_step("w", [step(claim, 0, (1,))])
    assert (await broker.commit_step("w", [step(claim, 3, (4,))])).behind == {"r": 1}
    assert await broker.commit_step("w", [step(claim, 1, (2, 3, 4))]) == NOTHING


async def test_a_notice_stays_until_it_was_obeyed(broker: Broker) -> None:
    """The reply with the notice was lost: the repeated call returns the notice again. No log item has the notice."""
    await start(broker)
    await broker.cancel("r")
    for _ in range(3):
        reply = await broker.commit_step("w", [])
        assert (reply.cancelled, reply.notices) == (("r",), (("r", "cancel"),))
    for _ in range(2):
        assert await broker.commit_step("w", [], reply.notices) == NOTHING


async def test_a_notice_that_an_attempt_is_over_stays_until_it_was_obeyed(broker: Broker) -> None:
    claim = await start(broker)
    await take_over(broker)
    for obeyed in ([], [("r", "another")], [("other", claim.attempt)]):
        assert (await broker.commit_step("w", [], obeyed)).lost == (("r", claim.attempt),)
    assert await broker.commit_step("w", [], [("r", claim.attempt)]) == NOTHING


async def test_a_worker_is_told_when_another_ended_its_request(broker: Broker, client: Redis) -> None:
    """The worker was cut off while the request was cancelled or expired, and the claim of another worker ended it."""
    claim = await start(broker)
    await broker.commit_step("w", [step(claim, 0, (1,))])
    await client.hset(KEYS.request("r"), "deadline", 1)
    assert await take_over(broker) is None
    assert await outcome_of(broker) == "deadline"
    assert (await broker.commit_step("w", [step(claim, 1, (2,))])).lost == (("r", claim.attempt),)
    assert (await broker.commit_step("w", [step(claim, 0, (1,))])) == NOTHING


async def test_the_mailbox_of_a_worker_that_is_gone_expires(broker: Broker, client: Redis) -> None:
    await start(broker)
    await broker.cancel("r")
    assert 0 < await client.ttl(KEYS.mailbox("w")) <= RETENTION_S
    await client.delete(KEYS.mailbox("w"))
    await client.hdel(KEYS.request("r"), "cancel")
    await take_over(broker)
    assert 0 < await client.ttl(KEYS.mailbox("w")) <= RETENTION_S


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


async def test_requests_that_come_back_are_read_by_their_rows(broker: Broker) -> None:
    """Requests that a worker hands back, those that it leaves behind, and parked ones."""
    await broker.create_groups()
    bounds = QueueBounds(requests=100, tokens=1000)
    for name in ("a", "b", "c"):
        await broker.submit(name, b"body", Admission(gateway="g", cost=1, bounds=bounds, rows=3))
    claims = []
    for delivery in await QueueReader(broker.client, "lane", "w").read(9, 0):
        claim = await broker.claim(delivery, "w", new_id())
        assert claim is not None
        claims.append((claim.request_id, claim.attempt))
    await broker.release(claims[:2])
    heir = QueueReader(broker.client, "lane", "heir")
    for name in ("a", "b"):
        assert [(one.request_id, one.rows) for one in await heir.read(3, 0)] == [(name, 3)]
    # All three are old by now, and the leases of three rows are enough.
    for name, rows in (("a", 1), ("b", 3)):
        found = await broker.reclaim("third", 0, rows)
        assert [(one.request_id, one.rows) for one in found] == [(name, 3)]
        await broker.client.xack(broker.keys.queue(found[0].queue), GROUP, found[0].entry_id)
    await broker.park("c", retention_s=60)
    await broker.unpark("c", bounds)
    assert (await heir.read(2, 0), heir.too_wide) == ([], "c")


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
