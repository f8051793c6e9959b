"""The scripts: loading, corrupt requests, and steps of the clock."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgpack
import pytest
from redis.asyncio import Redis

from quire.shared.accounts.account import Account
from quire.shared.accounts.limits import AccountLimits
from quire.shared.protocol import keys, share
from quire.shared.protocol.broker import (
    Admission,
    Broker,
    ComputedTokens,
    QueueBounds,
    QueueReader,
    StreamEntry,
    new_id,
)
from quire.shared.protocol.broker.scripts import Script, constants, load_script
from quire.shared.protocol.charge import LimitReached, RateState
from quire.shared.protocol.keys import GROUP, QUEUES, RETENTION_S, AccountKeys
from quire.shared.protocol.messages import VERSION
from quire.shared.protocol.share import ANONYMOUS_TENANT, COUNTER_UNITS, OUTPUT_COST
from quire.shared.redis.clients import command_client
from tests.support.broker_calls import BOUNDS as CORRUPT_BOUNDS
from tests.support.broker_calls import KEYS, NOTHING, go_stale, recoveries_of, start, step, submit, take
from tests.support.limits_machine import CLOCK
from tests.support.protocol_driver import Lane, finished
from tests.support.redis_server import RedisServer

# --- scripts ----------------------------------------------------------------------------------------------------------


async def test_lua_has_the_constants_of_python(client: Redis) -> None:
    names = re.findall(r"^local (\w+) = ", constants(), re.M)
    packed = await client.eval(constants() + f"return cmsgpack.pack({{{', '.join(names)}}})", 0)  # type: ignore[misc]
    found = dict(zip(names, msgpack.unpackb(packed), strict=True))
    assert found.pop("MESSAGE_VERSION") == VERSION
    assert found.pop("FORGET_WORKER_MS") == 1000 * keys.FORGET_WORKER_S
    expected = {name: getattr(keys if hasattr(keys, name) else share, name) for name in found}
    assert found == {name: list(value) if isinstance(value, tuple) else value for name, value in expected.items()}


async def test_a_script_is_sent_once_and_then_called_by_its_hash(client: Redis) -> None:
    await client.script_flush()
    script = load_script(client, "cancel")
    calls_before = await _calls(client)
    for _ in range(3):
        assert await script(keys=["quire:{lane}:req:none"], args=["quire:{lane}:", "none", 1, ""]) == b"unknown"
    calls = {name: count - calls_before.get(name, 0) for name, count in (await _calls(client)).items()}
    assert (calls["eval"], calls["evalsha"]) == (1, 3)


async def test_a_script_is_sent_again_to_a_server_that_has_lost_it(redis_url: str) -> None:
    client = command_client(redis_url)
    add = Script(client, "return redis.call('INCRBY', KEYS[1], ARGV[1])")
    assert await add(keys=["sum"], args=[3]) == 3
    await client.script_flush()
    assert await add(keys=["sum"], args=[4]) == 7
    assert await add(keys=["sum"], args=[5]) == 12
    await client.aclose()


async def _calls(client: Redis) -> dict[str, int]:
    """Return the number of times that the server ran each command."""
    stats = await client.info("commandstats")
    return {name.removeprefix("cmdstat_"): entry["calls"] for name, entry in stats.items()}


# --- clock steps ------------------------------------------------------------------------------------------------------
# Limits after the clock of Redis was set back: buckets fill at their rate, and no budget is renewed twice.


HOUR_MS, DAY_MS = 3_600_000, 86_400_000
# Ten minutes before midnight.
START_MS = int(datetime(2026, 3, 4, 23, 50, tzinfo=UTC).timestamp() * 1000)
BOUNDS = QueueBounds(requests=1000, tokens=10**9)


class Key:
    """Submits requests of one API key at times of Redis that the test chooses."""

    def __init__(self, lane: Lane, **limits: int) -> None:
        self.lane = lane
        self.account = Account(kind="key", id="a" * 16, name="a", limits=AccountLimits.of(limits))
        self.count = 0

    def submit(self, now_ms: int, tokens: int = 10) -> LimitReached | str:
        """Return the id of the request, or the limit that refuses it."""
        self.count += 1
        request_id = f"r{self.count}"
        self.lane.client.set("now", now_ms)
        submission = self.lane.broker.submit(
            request_id,
            b"body",
            Admission(
                gateway="g",
                cost=tokens,
                bounds=BOUNDS,
                metadata=b"metadata",
                accounts=(self.account,),
                prompt_tokens=tokens,
            ),
        )
        try:
            finished(submission)
        except LimitReached as reached:
            return reached
        return request_id

    def spent(self, name: str) -> int:
        value: Any = self.lane.client.hget(AccountKeys().spent(self.account.place), name)
        return int(float(value))


@pytest.fixture
def lane(redis_server: RedisServer) -> Iterator[Lane]:
    lane = Lane(redis_server, ("g",), CLOCK)
    yield lane
    lane.close()


@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute"])
def test_a_bucket_fills_at_its_rate_after_the_clock_was_set_back(lane: Lane, limit: str) -> None:
    key = Key(lane, **{limit: 30 if limit == "requests_per_minute" else 300})
    for _ in range(30):
        assert isinstance(key.submit(START_MS), str)
    # Two hours back, the bucket is as empty as before: a call has to wait two seconds, and then it is allowed.
    back = START_MS - 2 * HOUR_MS
    for passed, is_allowed in ((0, False), (1_000, False), (2_000, True), (2_001, False), (4_000, True)):
        reply = key.submit(back + passed)
        assert isinstance(reply, str) == is_allowed, (passed, reply)


def test_the_smallest_limits_per_minute_have_a_state(lane: Lane) -> None:
    lane.client.set("now", START_MS)
    limits = AccountLimits(requests_per_minute=1, tokens_per_minute=1)
    account = Account(kind="key", id="a" * 16, name="a", limits=limits)
    with pytest.raises(LimitReached) as reached:  # no time helps a request that is larger than the limit
        finished(lane.broker.submit("large", b"", Admission(gateway="g", cost=2, bounds=BOUNDS, accounts=(account,))))
    assert (reached.value.limit, reached.value.account) == ("tokens_per_minute", account.place)
    assert reached.value.wait_ms == -1
    submitted = finished(
        lane.broker.submit("r", b"", Admission(gateway="g", cost=1, bounds=BOUNDS, accounts=(account,)))
    )
    assert submitted.rates == dict.fromkeys(("calls", "tokens"), RateState(1, 0, 60_000))
    with pytest.raises(LimitReached) as reached:  # one as large as the limit waits until all of it is free
        finished(lane.broker.submit("next", b"", Admission(gateway="g", cost=1, bounds=BOUNDS, accounts=(account,))))
    assert (reached.value.account, reached.value.wait_ms) == (account.place, 60_000)


def test_a_budget_of_a_day_is_not_renewed_twice(lane: Lane) -> None:
    key = Key(lane, tokens_per_day=100)
    tomorrow = START_MS + HOUR_MS
    assert isinstance(key.submit(START_MS, 100), str)
    assert isinstance(key.submit(tomorrow, 60), str)
    # Back over midnight, and over it again: 60 of the 100 tokens are still spent.
    for now in (START_MS + 1, tomorrow - 1, tomorrow + 1):
        assert isinstance(key.submit(now, 60), LimitReached), now
        assert key.spent("day_tokens") == 60
    # What a request reserved after the step is settled on the same day.
    request_id = key.submit(START_MS + 2, 40)
    assert isinstance(request_id, str)
    assert key.spent("day_tokens") == 100
    finished(lane.broker.cancel(request_id))
    assert key.spent("day_tokens") == 60
    assert isinstance(key.submit(tomorrow + DAY_MS, 100), str)


def test_a_clock_that_was_far_ahead_freezes_no_budget(lane: Lane) -> None:
    key = Key(lane, tokens_per_day=100)
    assert isinstance(key.submit(START_MS + 40 * DAY_MS, 100), str)
    assert isinstance(key.submit(START_MS, 100), str)


# --- corrupt requests -------------------------------------------------------------------------------------------------
# Requests that are corrupt in Redis end as errors, and stop no other request.


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


@pytest.mark.parametrize("name", ["owner", "attempt", "incarnation"])
async def test_a_running_request_that_nobody_owns_ends_as_an_error_with_its_next_attempt(
    broker: Broker, client: Redis, name: str
) -> None:
    await start(broker)
    await corrupt_field(client, name, None)
    await go_stale(broker)
    [delivery] = await broker.reclaim("w2", 30_000, 1)
    assert await broker.claim(delivery, "w2", new_id()) is None
    await assert_ended_as_error(broker)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("tenant", None),
        ("tenant", b"x"),
        ("tenant", b"standard 0 acme"),
        ("user", None),
        ("user", b"x"),
        ("user", b"-1 aa"),
    ],
)
async def test_a_request_whose_share_is_corrupt_is_served(
    broker: Broker, client: Redis, name: str, data: bytes | None, waits: bool
) -> None:
    """It is charged to nobody. waits: in a line, behind another one."""
    if waits:
        await submit(broker, "first")
    await submit(broker, "r")
    await corrupt_field(client, name, data)
    await broker.create_groups()
    deliveries = await QueueReader(client, "lane", "w").read(2, 0)
    delivery = deliveries[-1]
    claim = await broker.claim(delivery, "w", new_id())
    assert claim is not None
    assert claim.request_id == "r"
    assert await broker.commit_step("w", [step(claim, 0, (1,))]) == NOTHING
    assert await broker.release([("r", claim.attempt)]) == 1
    assert await broker.cancel("r") == "cancelled"
    counters = await client.hvals(KEYS.served("standard"))
    assert all(counter.isdigit() for counter in counters)
    assert (await broker.read_totals())["cancelled"] == 1
    assert await broker.queued() == ((1, 10) if waits else (0, 0))


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


@pytest.mark.parametrize(("name", "data"), [("none", b""), *corruptions()])
async def test_tokens_that_were_computed_for_a_corrupt_request_stop_no_commit_and_are_charged_once(
    broker: Broker, client: Redis, name: str, data: bytes | None
) -> None:
    """The budget of the request suffices for three tokens. The reply is lost, so its worker commits the step again."""
    account = Account(kind="key", id="a" * 16, name="a", limits=AccountLimits(tokens_per_day=13))
    await broker.submit(
        "r",
        b"body",
        Admission(gateway="g", cost=40, bounds=CORRUPT_BOUNDS, accounts=(account,), park_s=60, prompt_tokens=10),
    )
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
    await broker.submit("r", b"body", Admission(gateway="g", cost=10, bounds=CORRUPT_BOUNDS, priority_class="batch"))
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
