"""The verbs of a worker: claim, begin, renew, release and reclaim, and how deaths are counted."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from quire.shared.broker import MAX_DEATHS, Broker, Claim, QueueReader, new_id
from quire.shared.keys import GROUP, HANDED
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


async def test_a_release_keeps_a_cancel_that_was_not_obeyed(broker: Broker) -> None:
    claim = await start(broker)
    await broker.cancel("r")
    await broker.release([("r", claim.attempt)])
    assert await broker.claim(await take(broker, "w2"), "w2", new_id()) is None
    assert await outcome_of(broker) == "cancelled"
    assert await broker.queued() == (0, 0)


async def test_a_request_without_progress_is_quarantined_with_the_third_death(broker: Broker) -> None:
    await broker.submit("r", b"body", gateway="g", cost=10, bounds=BOUNDS, metadata=b"metadata")
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
    await broker.submit("back", b"body", gateway="g", cost=10, bounds=BOUNDS, is_background=True)
    await submit(broker, "front")
    await broker.refresh_gateway("g")
    assert await broker.listeners_of(["back", "front", "unknown"]) == {"front": ["g"]}
    assert await broker.live_gateways(["g", "gone"]) == {"g"}
    assert (await broker.listeners_of([]), await broker.live_gateways([])) == ({}, set())
