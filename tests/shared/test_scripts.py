"""The scripts against a real Redis: each verb of the protocol, twice, and by those who may not."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from shared.broker import (
    GATEWAY_TTL_S,
    RETENTION_S,
    Broker,
    Claim,
    Delivery,
    QueueBounds,
    QueueFull,
    QueueReader,
    StepCommit,
    StepReply,
    new_id,
)
from shared.keys import LaneKeys
from shared.messages import Delta, Outcome, StepItem, WorkerCard, decode_items
from shared.redis_clients import pubsub_client

KEYS = LaneKeys("lane")
BOUNDS = QueueBounds(requests=3, tokens=1000)
NOTHING = StepReply((), (), (), {})


async def submit(broker: Broker, request_id: str, cost: int = 10, deadline_ms: int = 0) -> None:
    await broker.submit(request_id, b"body", gateway="g", cost=cost, bounds=BOUNDS, deadline_ms=deadline_ms)


async def take(broker: Broker, worker_id: str = "w") -> Delivery:
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


async def test_a_request_that_is_submitted_twice_is_accepted_once(broker: Broker) -> None:
    await submit(broker, "r")
    await submit(broker, "r")
    assert await broker.queued() == (1, 10)
    assert await broker.client.xlen(KEYS.queue()) == 1
    assert await broker.client.hget(KEYS.totals, "accepted") == b"1"


async def test_the_queue_is_bounded_by_requests_and_by_tokens(broker: Broker) -> None:
    for index in range(3):
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
    delivery = Delivery("standard", (await broker.client.hget(KEYS.request("r"), "entry")).decode(), "r", 10)  # type: ignore
    await broker.commit_step("w", [step(old, 0, (1,))])
    new = await broker.claim(delivery, "w2", new_id())
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
    assert await broker.client.hget(KEYS.request("r"), "deliveries") == b"1"
    assert await broker.queued() == (0, 0)


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
    await broker.retire("w")
    assert await client.exists(KEYS.worker("w")) == 0


async def test_the_lease_of_a_gateway_ends_by_itself(broker: Broker, client: Redis) -> None:
    await broker.refresh_gateway("g")
    assert 0 < await client.ttl("quire:gateway:g:alive") <= GATEWAY_TTL_S


def test_all_keys_of_a_lane_share_one_hash_tag() -> None:
    keys = [KEYS.queue(), KEYS.request("r"), KEYS.output("r"), KEYS.load, KEYS.totals, KEYS.workers]
    keys += [KEYS.worker("w"), KEYS.mailbox("w"), KEYS.channel("g")]
    assert all(key.startswith("quire:{lane}:") for key in keys)
