"""The scripts against a real Redis: each verb of the protocol, twice, and by those who may not."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from quire.shared.broker import (
    GATEWAY_TTL_S,
    IDEMPOTENCY_S,
    MAX_DEATHS,
    RETENTION_S,
    Attachment,
    Broker,
    Claim,
    IdempotencyConflict,
    QueueBounds,
    QueueFull,
    QueueReader,
    StepCommit,
    StepReply,
    StreamEntry,
    new_id,
)
from quire.shared.keys import GROUP, HANDED, QUEUES, LaneKeys
from quire.shared.messages import Delta, Outcome, StepItem, WorkerCard, decode_items
from quire.shared.redis.clients import blocking_client, pubsub_client

KEYS = LaneKeys("lane")
BOUNDS = QueueBounds(requests=3, tokens=1000)
NOTHING = StepReply((), (), (), {})


async def submit(broker: Broker, request_id: str, cost: int = 10, deadline_ms: int = 0) -> None:
    await broker.submit(request_id, b"body", gateway="g", cost=cost, bounds=BOUNDS, deadline_ms=deadline_ms)


async def take(broker: Broker, worker_id: str = "w") -> StreamEntry:
    await broker.create_groups()
    [delivery] = await QueueReader(broker.client, "lane", worker_id).read(1, 0)
    return delivery


async def start(broker: Broker, request_id: str = "r", worker_id: str = "w") -> Claim:
    await submit(broker, request_id)
    claim = await broker.claim(await take(broker, worker_id), worker_id, new_id())
    assert claim is not None
    return claim


def step(claim: Claim, start: int, tokens: tuple[int, ...], outcome: str | None = None) -> StepCommit:
    end = Outcome(outcome) if outcome else None
    return StepCommit(claim.attempt, StepItem(claim.request_id, start, (Delta(0, tokens, outcome),), end))


async def go_stale(broker: Broker, request_id: str = "r", worker_id: str = "w", queue: str = "standard") -> None:
    """Let the lease of a request run out."""
    entry = await broker.client.hget(KEYS.request(request_id), "entry")
    assert entry is not None
    await broker.client.xclaim(KEYS.queue(queue), GROUP, worker_id, 0, [entry], idle=60_000, justid=True)


async def take_over(broker: Broker, worker_id: str = "w2", queue: str = "standard") -> Claim | None:
    """The lease of "r" runs out, and another worker reclaims and claims it."""
    await go_stale(broker, queue=queue)
    [delivery] = await broker.reclaim(worker_id, 30_000, 10)
    return await broker.claim(delivery, worker_id, new_id(), new_id())


async def outcome_of(broker: Broker, request_id: str = "r") -> str:
    *_, last = await broker.read_output(request_id)
    assert last.outcome is not None
    return last.outcome.name


async def test_a_request_that_is_submitted_twice_is_accepted_once(broker: Broker) -> None:
    await submit(broker, "r")
    await submit(broker, "r")
    assert await broker.queued() == (1, 10)
    assert await broker.client.xlen(KEYS.queue()) == 1
    assert await broker.client.hget(KEYS.totals, "accepted") == b"1"


async def test_times_are_milliseconds_of_the_clock_of_redis(broker: Broker, client: Redis) -> None:
    before = await client.time()
    await submit(broker, "r")
    after = await client.time()
    created = int((await client.hget(KEYS.request("r"), "created")) or 0)
    assert before[0] * 1000 + before[1] // 1000 <= created <= after[0] * 1000 + after[1] // 1000


async def test_the_queue_is_bounded_by_requests_and_by_tokens(broker: Broker) -> None:
    await submit(broker, "r0")
    with pytest.raises(QueueFull):
        await submit(broker, "large", cost=991)
    for index in range(1, 3):
        await submit(broker, f"r{index}")
    with pytest.raises(QueueFull) as full:
        await submit(broker, "r3")
    assert (full.value.requests, full.value.tokens) == (3, 30)
    await broker.cancel("r0")
    with pytest.raises(QueueFull):
        await submit(broker, "large", cost=990)
    await submit(broker, "r4")


async def test_a_request_over_the_token_bound_fits_an_empty_queue(broker: Broker) -> None:
    await submit(broker, "large", cost=100_000)
    assert await broker.queued() == (1, 100_000)


async def test_tokens_are_logged_and_published_in_one_step(broker: Broker, redis_url: str) -> None:
    client = pubsub_client(redis_url)
    pubsub = client.pubsub()
    await pubsub.subscribe(KEYS.channel("g"))
    assert (await pubsub.get_message(timeout=5))["type"] == "subscribe"  # type: ignore[index]
    first, second = await start(broker, "a"), await start(broker, "b")
    await broker.commit_step("w", [step(first, 0, (1, 2)), step(second, 0, (3,), "stop")])
    message = await pubsub.get_message(timeout=5)
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
    """It slept between read and claim, and another one has the request by now: that one goes on undisturbed."""
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
    assert await broker.read_recoveries() == {}


async def test_who_was_slow_drops_nothing_of_the_new_owner(broker: Broker, client: Redis) -> None:
    """Its entry has not been claimed by the new owner either, and the request was cancelled meanwhile."""
    await submit(broker, "r")
    slow = await take(broker)
    await go_stale(broker)
    [delivery] = await broker.reclaim("w2", 30_000, 10)
    await client.hset(KEYS.request("r"), "cancel", 1)
    assert await broker.claim(slow, "w", new_id()) is None
    assert (await client.xpending(KEYS.queue(), GROUP))["pending"] == 1
    assert await broker.claim(delivery, "w2", new_id()) is None
    assert await outcome_of(broker) == "cancelled"


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
    assert await broker.read_recoveries() == {"migrations": 2, "fenced": 1, "repairs": 4}


async def test_a_worker_that_is_ahead_learns_where_the_log_ends(broker: Broker) -> None:
    claim = await start(broker)
    await broker.commit_step("w", [step(claim, 0, (1,))])
    assert (await broker.commit_step("w", [step(claim, 3, (4,))])).behind == {"r": 1}
    assert await broker.commit_step("w", [step(claim, 1, (2, 3, 4))]) == NOTHING


async def test_a_waiting_request_is_cancelled_at_once(broker: Broker) -> None:
    await submit(broker, "r")
    assert await broker.cancel("r") == "cancelled"
    assert await broker.cancel("r") == "done"
    [item] = await broker.read_output("r")
    assert (item.start, item.deltas, item.outcome) == (0, (), Outcome("cancelled"))
    assert await broker.queued() == (0, 0)
    assert await broker.client.xlen(KEYS.queue()) == 0
    assert await broker.client.hget(KEYS.totals, "cancelled") == b"1"


async def test_a_running_request_is_cancelled_through_its_worker(broker: Broker) -> None:
    claim = await start(broker)
    assert await broker.cancel("r") == "flagged"
    assert "r" in (await broker.commit_step("w", [step(claim, 0, (1,))])).cancelled
    await broker.commit_step("w", [StepCommit(claim.attempt, StepItem("r", 1, (), Outcome("cancelled")))])
    assert await broker.cancel("r") == "done"
    assert (await broker.read_output("r", after=1))[0].outcome == Outcome("cancelled")


async def test_a_cancel_of_what_nobody_knows_is_harmless(broker: Broker) -> None:
    assert await broker.cancel("nothing") == "unknown"
    assert await broker.client.dbsize() == 0


async def test_a_request_past_its_deadline_is_not_begun(broker: Broker, client: Redis) -> None:
    await submit(broker, "r", deadline_ms=1)
    delivery = await take(broker)
    await client.hset(KEYS.request("r"), "deadline", 1)
    assert await broker.claim(delivery, "w", new_id()) is None
    [item] = await broker.read_output("r")
    assert item.outcome is not None
    assert item.outcome.name == "deadline"


async def test_a_waiting_request_past_its_deadline_is_ended_without_any_worker(broker: Broker, client: Redis) -> None:
    await submit(broker, "r", deadline_ms=3_600_000)
    assert await broker.expire("r") == "early"
    await client.hset(KEYS.request("r"), "deadline", 1)
    assert await broker.expire("r") == "expired"
    for _ in range(2):
        assert await broker.expire("r") == "done"
    [item] = await broker.read_output("r")
    assert item.outcome == Outcome("deadline", "the deadline passed while the request was waiting")
    assert await broker.read_totals() == {"accepted": 1, "deadline": 1}
    assert (await broker.queued(), await client.xlen(KEYS.queue())) == ((0, 0), 0)
    assert await broker.expire("unknown") == "unknown"
    assert await client.exists(KEYS.request("unknown")) == 0


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


async def test_a_request_is_told_to_have_expired_once(broker: Broker, client: Redis, redis_url: str) -> None:
    subscriber = pubsub_client(redis_url)
    pubsub = subscriber.pubsub()
    await pubsub.subscribe(KEYS.channel("g"))
    assert (await pubsub.get_message(timeout=5))["type"] == "subscribe"  # type: ignore[index]
    await submit(broker, "r")
    await client.hset(KEYS.request("r"), "deadline", 1)
    for _ in range(3):
        await broker.expire("r")
    await client.publish(KEYS.channel("g"), b"the end")
    frames = [await pubsub.get_message(timeout=5) for _ in range(2)]
    assert [frame and frame["data"] == b"the end" for frame in frames] == [False, True]
    await pubsub.aclose()
    await subscriber.aclose()


async def test_a_notice_stays_until_it_was_obeyed(broker: Broker) -> None:
    """The reply that had it was lost: the same call again has it again. Nothing else would tell: there is no item."""
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
    """It was cut off when the request was cancelled, or its deadline passed, and another worker's claim ended it."""
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


async def test_a_release_keeps_a_cancel_that_was_not_obeyed(broker: Broker) -> None:
    claim = await start(broker)
    await broker.cancel("r")
    await broker.release([("r", claim.attempt)])
    assert await broker.claim(await take(broker, "w2"), "w2", new_id()) is None
    assert await outcome_of(broker) == "cancelled"
    assert await broker.queued() == (0, 0)


async def test_a_request_is_published_where_it_was_attached_last(broker: Broker, redis_url: str) -> None:
    client = pubsub_client(redis_url)
    pubsub = client.pubsub()
    await pubsub.subscribe(KEYS.channel("other"))
    assert (await pubsub.get_message(timeout=5))["type"] == "subscribe"  # type: ignore[index]
    await broker.submit("r", b"body", gateway="g", cost=10, bounds=BOUNDS, about=b"about")
    claim = await broker.claim(await take(broker), "w", new_id())
    assert claim is not None
    await broker.commit_step("w", [step(claim, 0, (1,))])
    assert await broker.attach("r", "other") == Attachment(False, b"about")
    assert await broker.listeners_of(["r"]) == {"r": ["g", "other"]}
    await broker.commit_step("w", [step(claim, 1, (2,), "stop")])
    message = await pubsub.get_message(timeout=5)
    assert message is not None
    assert [item.start for item in decode_items(message["data"])] == [1]
    assert await broker.attach("r", "g") == Attachment(True, b"about")
    assert await broker.attach("unknown", "g") is None
    assert await broker.client.exists(KEYS.request("unknown")) == 0
    await pubsub.aclose()
    await client.aclose()


async def test_a_request_is_published_to_who_is_left(broker: Broker, client: Redis) -> None:
    await submit(broker, "r")
    await broker.attach("r", "b")
    await broker.attach("r", "g")
    for _ in range(2):
        assert await broker.detach("r", "g") == ["b"]
        assert await client.hget(KEYS.request("r"), "gateway") == b"b"
    assert await broker.detach("r", "b") == []
    assert await broker.listeners_of(["r"]) == {"r": []}
    await broker.attach("r", "g")
    assert await broker.listeners_of(["r"]) == {"r": ["g"]}
    await broker.cancel("r")
    assert await broker.attach("r", "b") == Attachment(True, b"")
    assert (await broker.detach("r", "g"), await broker.detach("unknown", "g")) == ([], [])
    assert await client.exists(KEYS.request("unknown")) == 0


async def test_a_request_is_not_cancelled_while_somebody_else_listens(broker: Broker) -> None:
    await submit(broker, "r")
    await broker.attach("r", "dead")
    await broker.attach("r", "new")
    assert await broker.cancel("r", unless_beside=["g", "dead"]) == "wanted"
    assert await broker.cancel("r", unless_beside=[]) == "wanted"
    await broker.detach("r", "new")
    assert await broker.cancel("r", unless_beside=["g", "dead"]) == "cancelled"
    assert await broker.cancel("r", unless_beside=[]) == "done"
    await submit(broker, "alone")
    await broker.detach("alone", "g")
    assert await broker.cancel("alone", unless_beside=[]) == "cancelled"


async def test_who_submits_what_another_gateway_has_made_up_listens_too(broker: Broker, client: Redis) -> None:
    """A second caller of several prompts under one key submits those that the first gateway has not come to yet."""
    for _ in range(2):
        await submit(broker, "r")
        assert await broker.submit("r", b"body", gateway="first", cost=10, bounds=BOUNDS) == "r"
        assert await broker.listeners_of(["r"]) == {"r": ["first", "g"]}
    assert await client.hget(KEYS.request("r"), "gateway") == b"g"
    assert await broker.queued() == (1, 10)
    # The second caller leaves: the first one's gateway gets the output, and keeps the request alive.
    assert await broker.detach("r", "g") == ["first"]
    assert await client.hget(KEYS.request("r"), "gateway") == b"first"
    assert await broker.cancel("r", unless_beside=[]) == "wanted"
    await broker.detach("r", "first")
    await broker.cancel("r")
    await submit(broker, "r")
    assert (await client.hget(KEYS.request("r"), "state"), await broker.detach("r", "g")) == (b"done", [])


async def test_what_is_made_up_for_another_gateway_is_wanted_there(broker: Broker) -> None:
    """Before that gateway has come to it."""
    await submit(broker, "call")
    for gateway in ("second", "g"):
        await broker.attach("call", gateway)
    for beside, expected in (("call", ["g", "second"]), ("gone", ["second"])):
        prompt = f"prompt beside {beside}"
        await broker.submit(prompt, b"body", gateway="second", cost=10, bounds=BOUNDS, beside=beside)
        assert await broker.listeners_of([prompt]) == {prompt: expected}
    assert await broker.detach("prompt beside call", "second") == ["g"]
    assert await broker.cancel("prompt beside call", unless_beside=[]) == "wanted"


async def test_the_listeners_of_a_request_are_bounded(broker: Broker, client: Redis) -> None:
    await submit(broker, "r")
    for index in range(100):
        await broker.attach("r", f"g{index}")
    assert await broker.submit("r", b"body", gateway="one more", cost=10, bounds=BOUNDS) == "r"
    listeners = (await broker.listeners_of(["r"]))["r"]
    assert listeners == [f"g{index}" for index in range(36, 100)]
    for corrupt in (b"\xc1", b"\x01"):
        await client.hset(KEYS.request("r"), "gateways", corrupt)
        assert await broker.listeners_of(["r"]) == {"r": []}


async def keyed(broker: Broker, request_id: str, fingerprint: str = "f", key: str = "key") -> str:
    return await broker.submit(
        request_id, b"body", gateway="g", cost=10, bounds=BOUNDS, idempotency_key=key, fingerprint=fingerprint
    )


async def test_an_idempotency_key_stands_for_one_request(broker: Broker, client: Redis) -> None:
    assert [await keyed(broker, request_id) for request_id in ("a", "a", "b")] == ["a", "a", "a"]
    assert await keyed(broker, "c", key="another") == "c"
    assert await broker.queued() == (2, 20)
    assert 0 < await client.ttl(KEYS.idempotency("key")) <= IDEMPOTENCY_S
    await broker.cancel("a")
    assert await keyed(broker, "b") == "a"


async def test_an_idempotency_key_cannot_stand_for_another_call(broker: Broker) -> None:
    await keyed(broker, "a")
    with pytest.raises(IdempotencyConflict):
        await keyed(broker, "b", fingerprint="another")
    assert await keyed(broker, "b") == "a"
    assert await broker.queued() == (1, 10)


@pytest.mark.parametrize("gone", [KEYS.request("a"), KEYS.idempotency("key")])
async def test_an_idempotency_key_that_is_forgotten_is_unused(broker: Broker, client: Redis, gone: str) -> None:
    await keyed(broker, "a")
    await broker.cancel("a")
    await client.delete(gone)
    assert await keyed(broker, "b", fingerprint="another") == "b"
    assert await keyed(broker, "c", fingerprint="another") == "b"


async def test_a_key_whose_request_was_refused_is_unused(broker: Broker) -> None:
    for index in range(3):
        await submit(broker, f"r{index}")
    with pytest.raises(QueueFull):
        await keyed(broker, "a")
    await broker.cancel("r0")
    assert await keyed(broker, "b", fingerprint="another") == "b"


async def test_a_request_without_progress_is_quarantined_with_the_third_death(broker: Broker) -> None:
    await broker.submit("r", b"body", gateway="g", cost=10, bounds=BOUNDS, about=b"about")
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
    assert (dead.priority_class, dead.body, dead.about) == ("standard", b"body", b"about")
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
    # It begins once it is its turn, and then its death is the last; an attempt that is over begins nothing.
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
    """It has seen two workers die at one place, got further, and was then handed over."""
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


async def test_a_read_takes_from_the_first_queue_first_and_no_more_than_asked(broker: Broker) -> None:
    await broker.create_groups()
    for name in ("batch", "standard", "interactive"):
        for index in range(3):
            await broker.submit(
                f"{name}{index}",
                b"body",
                gateway="g",
                cost=1,
                bounds=QueueBounds(requests=100, tokens=1000),
                priority_class=name,
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


async def test_behind_a_read_that_waited_none_is_lost_or_waited_for(broker: Broker, redis_url: str) -> None:
    await broker.create_groups()
    client = blocking_client(redis_url)
    reader = QueueReader(client, "lane", "w")
    waiting = asyncio.create_task(reader.read(50, 5000))
    await waits(broker)
    bounds = QueueBounds(requests=100, tokens=1000)
    for index in range(20):
        await broker.submit(f"r{index}", b"body", gateway="g", cost=1, bounds=bounds)
    found = await waiting
    async with asyncio.timeout(2):
        while len(found) < 20:
            found += await reader.read(50, 5000)
    assert [one.request_id for one in found] == [f"r{index}" for index in range(20)]
    await client.aclose()


async def waits(broker: Broker) -> None:
    """Until somebody waits in a blocking command, for long enough that it did."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(10):
        while (await broker.client.info("clients"))["blocked_clients"] < 1:
            pass
        since = loop.time()
        while loop.time() - since < 0.01:
            await broker.client.ping()


async def test_a_request_in_the_background_has_no_gateway_to_live_for(broker: Broker) -> None:
    await broker.submit("back", b"body", gateway="g", cost=10, bounds=BOUNDS, is_background=True)
    await submit(broker, "front")
    await broker.refresh_gateway("g")
    assert await broker.listeners_of(["back", "front", "unknown"]) == {"front": ["g"]}
    assert await broker.live_gateways(["g", "gone"]) == {"g"}
    assert (await broker.listeners_of([]), await broker.live_gateways([])) == ({}, set())


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


async def test_when_all_is_done_only_keys_with_a_ttl_and_counters_are_left(broker: Broker, client: Redis) -> None:
    claim = await start(broker)
    await broker.commit_step("w", [step(claim, 0, (1,), "stop")])
    assert await client.hgetall(KEYS.load) == {
        b"requests": b"0",
        b"tokens": b"0",
        b"requests:standard": b"0",
        b"tokens:standard": b"0",
    }
    assert (await client.xpending(KEYS.queue(), "workers"))["pending"] == 0
    assert await client.xlen(KEYS.queue()) == 0
    for key in (KEYS.request("r"), KEYS.output("r")):
        assert 0 < await client.ttl(key) <= RETENTION_S
    assert await client.hexists(KEYS.request("r"), "body") is False


async def test_the_log_is_read_from_any_token_on_and_in_pages(broker: Broker) -> None:
    claim = await start(broker)
    for index in range(5):
        await broker.commit_step("w", [step(claim, index, (index,))])
    await broker.commit_step("w", [StepCommit(claim.attempt, StepItem("r", 5, (), Outcome("stop")))])
    assert [item.end for item in await broker.read_output("r", after=3)] == [4, 5, 5]
    assert [item.end for item in await broker.read_output("r", after=0, count=2)] == [1, 2]
    assert [item.end for item in await broker.read_output("r", after=2, count=2)] == [3]
    assert [item.outcome for item in await broker.read_output("r", after=5)] == [Outcome("stop")]


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


async def consumers(client: Redis) -> set[str]:
    """Who is known to the groups of the queues."""
    found = [one for name in QUEUES for one in await client.xinfo_consumers(KEYS.queue(name), GROUP)]
    return {one["name"].decode() for one in found}


async def test_workers_that_are_gone_leave_no_consumers_behind(broker: Broker, client: Redis) -> None:
    """Where each process has a name of its own they would be as many as there were processes."""
    ended, killed, last = (
        WorkerCard(name, "1", "lane", 100, 64, 50, (2,), 16, 10, 5, 0, 0, 7) for name in ("ended", "killed", "last")
    )
    await broker.create_groups()
    for card in (ended, killed, last):
        await broker.beat(card)
        await QueueReader(client, "lane", card.worker_id).pending()
    assert await consumers(client) == {"ended", "killed", "last"}
    await broker.retire("ended", "1")
    assert await consumers(client) == {"killed", "last"}
    await client.zadd(KEYS.workers, {"killed": 1})  # beat last very long ago
    await broker.beat(last)
    assert await consumers(client) == {"last"}
    assert await client.zrange(KEYS.workers, 0, -1) == [b"last"]


async def test_what_is_pending_for_a_worker_that_is_gone_keeps_its_consumer(broker: Broker, client: Redis) -> None:
    ended = WorkerCard("w", "1", "lane", 100, 64, 50, (2,), 16, 10, 5, 0, 0, 7)
    heir = replace(ended, worker_id="heir")
    await broker.beat(ended)
    claim = await start(broker)
    await broker.retire("w", "1")
    await client.zadd(KEYS.workers, {"w": 1})
    await broker.beat(heir)
    assert await consumers(client) == {"w"}
    await go_stale(broker)
    [delivery] = await broker.reclaim("heir", 1000, 1)
    assert delivery.request_id == claim.request_id
    await broker.beat(heir)
    assert await consumers(client) == {"heir"}


async def test_a_name_is_of_one_incarnation_at_a_time(broker: Broker, client: Redis) -> None:
    card = WorkerCard("w", "1", "lane", 100, 64, 50, (2,), 16, 10, 5, 0, 0, 7)
    assert await broker.holder("w") is None
    for _ in range(2):
        assert await broker.enlist("w", "1", "here", 0.5)
    assert await broker.beat(card, home="here", beat_s=0.5)
    assert not await broker.enlist("w", "2", "there", 0.5)
    assert not await broker.enlist("w", "2", "there", 0.5, before="0")
    holder = await broker.holder("w")
    assert holder is not None
    assert (holder.incarnation, holder.home, holder.beat_s) == ("1", "here", 0.5)
    assert await broker.enlist("w", "2", "there", 0.5, before="1")
    # The one before has lost it, and its card is gone until the new one beats.
    assert not await broker.beat(card)
    assert await broker.live_workers() == []
    assert 0 < await client.ttl(KEYS.worker("w")) <= 5
    new = replace(card, incarnation="2")
    assert await broker.beat(new, slowest_step_s=10)
    assert await broker.live_workers() == [new]
    assert 5 < await client.ttl(KEYS.worker("w")) <= 30


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


def test_all_keys_of_a_lane_share_one_hash_tag() -> None:
    keys = [KEYS.queue(), KEYS.request("r"), KEYS.output("r"), KEYS.load, KEYS.totals, KEYS.workers]
    keys += [KEYS.worker("w"), KEYS.mailbox("w"), KEYS.channel("g")]
    assert all(key.startswith("quire:{lane}:") for key in keys)


CORRUPT = (b"", b"-1", b"nan", b"9" * 40)


def corruptions() -> list[tuple[str, bytes | None]]:
    """Fields of a request with what they cannot be; None for a field that is missing."""
    numbers = ("deadline", "cost", "created", "emitted", "deliveries")
    found: list[tuple[str, bytes | None]] = [(name, data) for name in numbers for data in CORRUPT]
    found += [(name, b"x") for name in ("class", "queue", "entry", "state", "deaths", "died_at", "all_deaths")]
    fields = ("deadline", "cost", "created", "emitted", "class", "queue", "entry", "state", "body", "gateway", "about")
    return found + [(name, None) for name in fields]


async def corrupt_field(client: Redis, name: str, data: bytes | None, request_id: str = "r") -> None:
    if data is None:
        await client.hdel(KEYS.request(request_id), name)
    else:
        await client.hset(KEYS.request(request_id), name, data)


async def assert_ended_as_error(broker: Broker, request_id: str = "r") -> None:
    """Once, with its load and its entry gone, and with an end that its readers see."""
    client = broker.client
    assert await client.hmget(KEYS.request(request_id), "state", "outcome") == [b"done", b"error"]
    assert await broker.read_totals() == {"accepted": 1, "error": 1}
    assert set(await client.hvals(KEYS.load)) == {b"0"}
    for name in QUEUES:
        assert await client.xlen(KEYS.queue(name)) == 0
        assert (await client.xpending(KEYS.queue(name), GROUP))["pending"] == 0
    assert 0 < await client.ttl(KEYS.request(request_id)) <= RETENTION_S
    last = (await broker.read_output(request_id))[-1]
    assert last.outcome is not None
    assert last.outcome.name == "error"


@pytest.mark.parametrize(("name", "data"), corruptions())
async def test_a_request_that_is_corrupt_ends_as_an_error_when_it_is_claimed(
    broker: Broker, client: Redis, name: str, data: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    await submit(broker, "r")
    await corrupt_field(client, name, data)
    assert await broker.claim(await take(broker), "w", new_id()) is None
    await assert_ended_as_error(broker)
    assert broker.corrupt == {"request": 1}
    assert caplog.text.count("is corrupt") == 1
    assert await broker.read_recoveries() == {"corrupt": 1}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "data"), corruptions())
async def test_a_request_that_turns_corrupt_while_it_runs_ends_as_an_error_at_the_latest_with_its_next_attempt(
    broker: Broker, client: Redis, name: str, data: bytes | None
) -> None:
    """And costs the other requests of its worker nothing."""
    claim = await start(broker)
    await broker.commit_step("w", [step(claim, 0, (1, 2))])
    await corrupt_field(client, name, data)
    reply = await broker.commit_step("w", [step(claim, 2, (3,))])
    assert await broker.renew("w", [("r", claim.attempt)]) in ([], [("r", claim.attempt)])
    if await client.hget(KEYS.request("r"), "outcome") is None:
        delivery = StreamEntry("standard", (await client.xrange(KEYS.queue()))[0][0].decode(), "r", 10)
        assert await broker.claim(delivery, "w", new_id()) is None or name in ("body", "about")
    else:
        assert reply.lost == (("r", claim.attempt),)
    if await client.hget(KEYS.request("r"), "outcome") is not None:
        await assert_ended_as_error(broker)


@pytest.mark.slow
@pytest.mark.parametrize("act", ["cancel", "expire"])
@pytest.mark.parametrize(("name", "data"), [*corruptions(), ("gateways", b"\xc1"), ("gateways", b"\x01")])
async def test_a_request_that_is_corrupt_can_be_ended(
    broker: Broker, client: Redis, act: str, name: str, data: bytes | None
) -> None:
    await submit(broker, "r", deadline_ms=1)
    await broker.create_groups()
    await client.hset(KEYS.request("r"), "deadline", 1)
    await corrupt_field(client, name, data)
    await (broker.cancel("r", unless_beside=["g"]) if act == "cancel" else broker.expire("r"))
    if await client.hget(KEYS.request("r"), "state") != b"done":  # whoever takes it finds it
        await broker.claim(await take(broker), "w", new_id())
    assert await client.hget(KEYS.request("r"), "state") == b"done"
    assert set(await client.hvals(KEYS.load)) == {b"0"}


async def test_a_request_that_does_not_know_how_far_it_is_ends_behind_its_log(broker: Broker, client: Redis) -> None:
    claim = await start(broker)
    await broker.commit_step("w", [step(claim, 0, (1,)), step(claim, 1, (2,))])
    await corrupt_field(client, "emitted", b"x")
    await broker.commit_step("w", [step(claim, 2, (3,))])
    assert (await broker.read_output("r"))[-1].start == 2
    assert await client.hget(KEYS.request("r"), "emitted") == b"2"


async def test_a_request_without_a_class_leaves_the_load_of_its_queue(broker: Broker, client: Redis) -> None:
    await broker.submit("r", b"body", gateway="g", cost=10, bounds=BOUNDS, priority_class="batch")
    await corrupt_field(client, "class", b"x")
    await broker.create_groups()
    [delivery] = await QueueReader(client, "lane", "w").read(1, 0)
    assert await broker.claim(delivery, "w", new_id()) is None
    load = await client.hgetall(KEYS.load)
    assert load == {b"requests": b"0", b"tokens": b"0", b"requests:batch": b"0", b"tokens:batch": b"0"}


async def test_a_request_whose_log_does_not_fit_it_ends_as_an_error(broker: Broker, client: Redis) -> None:
    claim = await start(broker)
    await broker.commit_step("w", [step(claim, 0, (1, 2))])
    await client.delete(KEYS.output("r"))
    await go_stale(broker)
    [delivery] = await broker.reclaim("w2", 30_000, 1)
    assert await broker.claim(delivery, "w2", new_id()) is None
    await assert_ended_as_error(broker)


async def test_a_request_that_is_no_hash_any_more_stops_nobody_beside_it(broker: Broker, client: Redis) -> None:
    good, bad = await start(broker, "good"), await start(broker, "bad")
    await client.set(KEYS.request("bad"), "no hash")
    reply = await broker.commit_step("w", [step(bad, 0, (1,)), step(good, 0, (2,))])
    assert reply.lost == (("bad", bad.attempt),)
    assert [item.end for item in await broker.read_output("good")] == [1]
    attempts = [("bad", bad.attempt), ("good", good.attempt)]
    assert await broker.renew("w", attempts) == [("bad", bad.attempt)]
    assert await broker.attach("bad", "other") is None
    assert await broker.detach("bad", "other") == []
    assert (await broker.cancel("bad"), await broker.expire("bad")) == ("unknown", "unknown")
    assert not await broker.begin(bad)
    assert await broker.release(attempts) == 1


async def test_a_request_that_is_no_hash_and_entries_without_one_are_dropped(
    broker: Broker, client: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    await client.set(KEYS.request("r"), "not a hash")
    await client.xadd(KEYS.queue(), {"id": "r", "cost": 1})
    await client.xadd(KEYS.queue(), {"surprise": b"\xff"})
    for _ in range(2):
        assert await broker.claim(await take(broker), "w", new_id()) is None
    assert await client.xlen(KEYS.queue()) == 0
    assert not await client.exists(KEYS.request("r"))
    assert broker.corrupt == {"queue entry": 2}
    assert caplog.text.count("is corrupt") == 1


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


async def test_entries_of_the_dead_that_are_corrupt_are_left_out(
    broker: Broker, client: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    good = {"id": "r", "class": "batch", "worker": "w", "emitted": 3, "body": b"b", "about": b"a"}
    await client.xadd(KEYS.dead, good)
    for name, data in (("emitted", "x"), ("class", "none"), ("id", b"\xff")):
        await client.xadd(KEYS.dead, good | {name: data})
    await client.xadd(KEYS.dead, {"surprise": 1})
    [dead] = await broker.read_dead()
    assert (dead.request_id, dead.priority_class, dead.emitted) == ("r", "batch", 3)
    assert broker.corrupt == {"dead entry": 4}
    assert caplog.text.count("is corrupt") == 1
