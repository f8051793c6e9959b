"""The commit of a step: the fence, the log, the published frame, and the mailbox of notices."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from quire.shared.broker import Broker, new_id
from quire.shared.keys import GROUP, RETENTION_S
from quire.shared.messages import Outcome, decode_items
from quire.shared.redis.clients import pubsub_client
from tests.support.broker_calls import KEYS, NOTHING, outcome_of, recoveries_of, start, step, take, take_over


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
