"""Requests that are corrupt in Redis end as errors, and stop no other request."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from quire.shared.accounts.account import Account
from quire.shared.accounts.charge import Charge, Price
from quire.shared.accounts.limits import AccountLimits
from quire.shared.broker import Broker, ComputedTokens, QueueReader, StreamEntry, new_id
from quire.shared.keys import GROUP, QUEUES, RETENTION_S, AccountKeys
from quire.shared.share import ANONYMOUS_TENANT, COUNTER_UNITS, OUTPUT_COST
from tests.support.broker_calls import BOUNDS, KEYS, go_stale, recoveries_of, start, step, submit, take

CORRUPT = (b"", b"-1", b"nan", b"9" * 40)


def corruptions() -> list[tuple[str, bytes | None]]:
    """Fields of a request with what they cannot be; None for a field that is missing."""
    numbers = ("deadline", "cost", "created", "emitted", "deliveries")
    found: list[tuple[str, bytes | None]] = [(name, data) for name in numbers for data in CORRUPT]
    found += [(name, b"x") for name in ("class", "queue", "entry", "state", "deaths", "died_at", "all_deaths")]
    fields = (
        "deadline",
        "cost",
        "created",
        "emitted",
        "class",
        "queue",
        "entry",
        "state",
        "body",
        "gateway",
        "metadata",
    )
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
    assert await recoveries_of(broker) == {"corrupt": 1}


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
        assert await broker.claim(delivery, "w", new_id()) is None or name in ("body", "metadata")
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


@pytest.mark.parametrize(("name", "data"), [("none", b""), *corruptions()])
async def test_tokens_that_were_computed_for_a_corrupt_request_stop_no_commit_and_are_charged_once(
    broker: Broker, client: Redis, name: str, data: bytes | None
) -> None:
    """The budget of the request suffices for three tokens. The reply is lost, so its worker commits the step again."""
    account = Account(kind="key", id="a" * 16, name="a", limits=AccountLimits(tokens_per_day=13))
    charge = Charge((account,), "model", Price(), park_s=60)
    await broker.submit("r", b"body", gateway="g", cost=40, bounds=BOUNDS, charge=charge, prompt_tokens=10)
    claim = await broker.claim(await take(broker), "w", new_id())
    assert claim is not None
    ranked, plain = await start(broker, "ranked"), await start(broker, "plain")
    served = KEYS.served("standard")
    before = int(await client.hget(served, ANONYMOUS_TENANT) or 0)
    await broker.commit_step("w", [], (), [ComputedTokens("r", claim.attempt, 2)])
    await corrupt_field(client, name, data)
    computed = [ComputedTokens("r", claim.attempt, 7), ComputedTokens("ranked", ranked.attempt, 5)]
    for _ in range(2):
        reply = await broker.commit_step("w", [step(plain, 0, (1,))], (), computed)
        assert set(reply.lost) == {("r", claim.attempt)}
        charged = int(await client.hget(served, ANONYMOUS_TENANT) or 0) - before
        assert charged == (2 + 5 + 1) * OUTPUT_COST * COUNTER_UNITS
        spent = await client.hmget(AccountKeys().spent(account.place), "open", "day_tokens")
        # A corrupt state is found by the next attempt, which settles the request.
        assert spent == ([b"1", b"13"] if name == "state" else [b"0", b"12"])
    assert await client.hget(KEYS.request("ranked"), "computed") == b"5"
    assert [item.end for item in await broker.read_output("plain")] == [1]


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
