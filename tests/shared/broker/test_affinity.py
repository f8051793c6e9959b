"""Prefix affinity: which worker a request is left to, for how long, and what stays in Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import msgpack
import pytest
from redis.asyncio import Redis

from quire.shared.protocol.broker import Admission, Broker, Claim, QueueBounds, QueueReader, Submitted, new_id, scripts
from quire.shared.protocol.broker.affinity import AffinityVerbs
from quire.shared.protocol.keys import FORGET_WORKER_S, GROUP, QUEUES, WORKER_TTL_S
from quire.shared.protocol.messages import WorkerCard
from quire.shared.redis.clients import blocking_client
from tests.support.broker_calls import KEYS, outcome_of, step

BOUNDS = QueueBounds(requests=1000, tokens=100_000)
CHAT, SYSTEM, OTHER = b"c" * 12, b"s" * 12, b"o" * 12
BLOCK_MS = 5000
# As in _affinity.lua.
LEAST, MAX_LEFT = 2, 16


class Workers:
    """Workers w0, w1, ... that beat, and read with connections of their own."""

    def __init__(self, broker: Broker, url: str, count: int, rows: int) -> None:
        self.broker = broker
        self.names = [f"w{index}" for index in range(count)]
        self.cards = {name: card(name, rows) for name in self.names}
        self.clients = {name: blocking_client(url) for name in self.names}
        self.readers = {name: QueueReader(client, "lane", name) for name, client in self.clients.items()}
        self.reads: dict[str, asyncio.Task[list[Claim]]] = {}

    async def begin(self) -> None:
        await self.broker.create_groups()
        for name in self.names:
            await self.broker.beat(self.cards[name])
            assert await self.readers[name].pending() == []

    async def block(self, *names: str) -> None:
        """Let workers wait for requests; they claim what they get."""
        for name in names or self.names:
            self.reads[name] = asyncio.create_task(self.take(name))
        await asyncio.sleep(0.05)

    async def take(self, name: str, rows: int = 8, block_ms: int = BLOCK_MS) -> list[Claim]:
        found = []
        for entry in await self.readers[name].read(rows, block_ms):
            claim = await self.broker.claim(entry, name, new_id(), self.cards[name].incarnation)
            found += [] if claim is None else [claim]
        return found

    async def first(self) -> tuple[str, Claim]:
        """Wait for the first claim. Return the worker, and the claim."""
        done, _ = await asyncio.wait(self.reads.values(), timeout=60, return_when=asyncio.FIRST_COMPLETED)
        [name] = [name for name, read in self.reads.items() if read in done]
        [claim] = await self.reads.pop(name)
        return name, claim

    async def close(self) -> None:
        for name in self.reads:
            await self.readers[name].unblock(self.broker.client)
        await asyncio.gather(*self.reads.values())
        for client in self.clients.values():
            await client.aclose()


def card(name: str, rows: int = 8) -> WorkerCard:
    return WorkerCard(name, new_id(), "lane", 100, rows, 50, (2,), 16, 10, 5, 0, 0, 7)


@pytest.fixture
async def workers(broker: Broker, redis_url: str) -> AsyncIterator[Workers]:
    workers = Workers(broker, redis_url, count=3, rows=8)
    await workers.begin()
    yield workers
    await workers.close()


async def ask(
    broker: Broker, request_id: str, *prefixes: bytes, left_ms: int = 60_000, rows: int = 1, name: str = "standard"
) -> Submitted:
    terms = Admission(gateway="g", cost=10, bounds=BOUNDS, prefixes=prefixes, left_ms=left_ms, rows=rows)
    return await broker.submit(request_id, b"body", terms._replace(prompt_tokens=5, priority_class=name))


async def withdraw(broker: Broker, request_ids: list[str]) -> int:
    return await AffinityVerbs(broker.client, "lane").withdraw(request_ids)


async def hold(workers: Workers, name: str, *prefixes: bytes, ends: bool = True) -> Claim:
    """Let a worker take a request with these prefixes, which it holds then, whoever held them before."""
    request_id, client = new_id(), workers.broker.client
    await ask(workers.broker, request_id)
    await client.hset(KEYS.request(request_id), "prefixes", msgpack.packb(prefixes, use_bin_type=False))
    [claim] = await workers.take(name, block_ms=0)
    if ends:
        await end(workers.broker, name, claim)
    return claim


async def end(broker: Broker, name: str, claim: Claim) -> None:
    await broker.commit_step(name, [step(claim, 0, (1,), "stop")])


def changed(monkeypatch: pytest.MonkeyPatch, client: Redis, old: str, new: str) -> Broker:
    """Return a broker whose scripts have another constant."""
    source = scripts.script_source

    def other(name: str) -> str:
        assert name != "submit" or old in source(name)
        return source(name).replace(old, new)

    monkeypatch.setattr(scripts, "script_source", other)
    return Broker(client, "lane")


async def test_a_request_goes_to_the_holder_though_others_wait_longer(broker: Broker, workers: Workers) -> None:
    for holder in ("w2", "w0", "w1"):
        await hold(workers, holder, CHAT)
        others = [name for name in workers.names if name != holder]
        await workers.block(*others)
        await workers.block(holder)
        assert await ask(broker, f"r{holder}", CHAT) == Submitted(f"r{holder}", {}, is_left=True)
        name, claim = await workers.first()
        assert (name, claim.request_id, claim.placement, claim.holder) == (holder, f"r{holder}", "holder", holder)
        await end(broker, name, claim)
        assert await withdraw(broker, [claim.request_id]) == 0
        for other in others:
            await workers.readers[other].unblock(broker.client)
            assert await workers.reads.pop(other) == []


async def test_the_most_specific_prefix_with_a_live_holder_decides(broker: Broker, workers: Workers) -> None:
    await hold(workers, "w0", OTHER, SYSTEM)
    await hold(workers, "w1", CHAT)
    await ask(broker, "r", CHAT, SYSTEM)
    [claim] = await workers.take("w1")
    assert (claim.placement, claim.holder) == ("holder", "w1")
    await end(broker, "w1", claim)  # it holds SYSTEM by now, too
    await hold(workers, "w0", SYSTEM)
    await broker.retire("w1", workers.cards["w1"].incarnation)
    await ask(broker, "s", CHAT, SYSTEM)
    [claim] = await workers.take("w0")
    assert (claim.placement, claim.holder) == ("holder", "w0")


async def fork(broker: Broker, request_id: str, origin: str) -> Submitted:
    terms = Admission(gateway="g", cost=10, bounds=BOUNDS, prefixes=(OTHER,), left_ms=60_000, origin=origin)
    return await broker.submit(request_id, b"body", terms._replace(prompt_tokens=5))


@pytest.mark.parametrize("ends", [True, False])
async def test_a_fork_goes_to_the_owner_of_its_origin_whoever_holds_its_prefixes(
    broker: Broker, client: Redis, workers: Workers, ends: bool
) -> None:
    origin = await hold(workers, "w0", CHAT, SYSTEM, ends=ends)
    await hold(workers, "w1", CHAT, SYSTEM, OTHER)
    assert (await fork(broker, "f", origin.request_id)).is_left
    [claim] = await workers.take("w0")
    assert (claim.request_id, claim.placement, claim.holder) == ("f", "holder", "w0")
    # It has the prefixes of its origin, so a fork of it and the next turn follow it.
    packed = await client.hget(KEYS.request("f"), "prefixes")
    assert msgpack.unpackb(packed, raw=True) == [CHAT, SYSTEM]  # type: ignore[arg-type]
    await end(broker, "w0", claim)
    assert (await fork(broker, "g", "f")).is_left
    [claim] = await workers.take("w0")
    assert (claim.request_id, claim.holder) == ("g", "w0")


async def test_a_fork_whose_owner_is_gone_goes_to_the_holder_of_a_prefix(
    broker: Broker, client: Redis, workers: Workers
) -> None:
    origin = await hold(workers, "w0", CHAT, SYSTEM)
    await hold(workers, "w1", SYSTEM)
    await broker.retire("w0", workers.cards["w0"].incarnation)
    assert (await fork(broker, "f", origin.request_id)).is_left
    [claim] = await workers.take("w1")
    assert (claim.placement, claim.holder) == ("holder", "w1")
    # Nothing is known of this origin, so the prefixes that the gateway knows decide.
    await hold(workers, "w2", OTHER)
    assert (await fork(broker, "g", "unknown")).is_left
    [claim] = await workers.take("w2")
    assert claim.holder == "w2"
    assert not (await ask(broker, "h", b"n" * 12)).is_left


async def test_a_request_without_a_known_prefix_is_for_all(broker: Broker, workers: Workers) -> None:
    await hold(workers, "w0", CHAT)
    assert not (await ask(broker, "r", OTHER)).is_left
    [claim] = await workers.take("w1", block_ms=0)
    assert (claim.placement, claim.holder) == ("", "")
    assert not (await ask(broker, "s")).is_left


@pytest.mark.parametrize("is_gone", ["silent", "replaced"])
async def test_nothing_is_left_to_a_process_that_is_gone(
    broker: Broker, client: Redis, workers: Workers, is_gone: str
) -> None:
    await hold(workers, "w0", CHAT)
    if is_gone == "silent":
        await client.delete(KEYS.worker("w0"))
    else:
        old = workers.cards["w0"]
        assert await broker.enlist("w0", "another", "", 1, old.incarnation)
        assert await broker.beat(replace(old, incarnation="another"))
    assert not (await ask(broker, "r", CHAT)).is_left
    [claim] = await workers.take("w1", block_ms=0)
    assert claim.placement == ""


async def test_what_the_holder_does_not_take_is_withdrawn_for_others(
    broker: Broker, client: Redis, workers: Workers
) -> None:
    await hold(workers, "w0", CHAT)
    await workers.block("w1", "w2")
    await ask(broker, "r", CHAT, left_ms=1)
    await asyncio.sleep(0.05)
    assert not any(read.done() for read in workers.reads.values())
    assert await withdraw(broker, ["r", "unknown"]) == 1
    name, claim = await workers.first()
    assert name != "w0"
    assert (claim.request_id, claim.placement, claim.holder) == ("r", "waited", "w0")
    assert await withdraw(broker, ["r"]) == 0
    # This worker holds the prefix now.
    assert (await ask(broker, "s", CHAT)).is_left
    [second] = await workers.take(name)
    assert (second.placement, second.holder) == ("holder", name)
    # What was left to the holder means nothing when it reads at last.
    assert await workers.take("w0", block_ms=1) == []
    assert await workers.take("w0", block_ms=0) == []
    assert await client.xlen(KEYS.left("w0")) == 0
    assert (await client.xpending(KEYS.left("w0"), GROUP))["pending"] == 0
    for one in (claim, second):
        await end(broker, name, one)
        assert await outcome_of(broker, one.request_id) == "stop"
    await is_empty(client)


async def is_empty(client: Redis) -> None:
    for name in QUEUES:
        assert await client.xlen(KEYS.queue(name)) == 0
        assert (await client.xpending(KEYS.queue(name), GROUP))["pending"] == 0
    assert set(await client.hvals(KEYS.load)) <= {b"0"}


async def test_a_holder_that_does_not_read_is_busy_at_once_the_next_time(broker: Broker, workers: Workers) -> None:
    await hold(workers, "w0", CHAT)
    assert (await ask(broker, "first", CHAT, left_ms=5)).is_left
    assert (await ask(broker, "soon", CHAT, left_ms=60_000)).is_left
    await asyncio.sleep(0.02)
    assert not (await ask(broker, "later", CHAT, left_ms=5)).is_left
    [claim] = await workers.take("w1", block_ms=0)
    assert (claim.request_id, claim.placement, claim.holder) == ("later", "busy", "w0")
    # It reads again.
    for request_id in ("first", "soon"):
        [claim] = await workers.take("w0")
        assert claim.request_id == request_id
        await end(broker, "w0", claim)
    await workers.take("w0", block_ms=0)
    await hold(workers, "w0", CHAT)
    await workers.take("w0", block_ms=0)
    assert (await ask(broker, "again", CHAT, left_ms=5)).is_left


async def test_no_more_than_a_part_of_the_requests_is_left_to_one_worker(broker: Broker, workers: Workers) -> None:
    claims = [await hold(workers, "w0", CHAT, ends=False)]
    while (await ask(broker, new_id(), CHAT)).is_left:
        claims += await workers.take("w0")
        await workers.take("w0", block_ms=0)
    # It has the smallest number.
    assert len(claims) == LEAST
    [claim] = await workers.take("w1", block_ms=0)
    assert (claim.placement, claim.holder) == ("busy", "w0")
    # One of three workers may have 8 of 17 requests: 125 % of the mean, rounded up.
    await broker.beat(replace(workers.cards["w0"], max_num_seqs=100))
    for index in range(8):
        await hold(workers, "w2", bytes([index] * 12), ends=False)
    await hold(workers, "w0", CHAT, ends=False)
    while (await ask(broker, new_id(), CHAT)).is_left:
        claims += await workers.take("w0")
        await workers.take("w0", block_ms=0)
    assert len(claims) + 1 == 8
    # Other classes count on their own.
    assert (await ask(broker, "i", CHAT, name="interactive")).is_left


async def test_a_worker_whose_rows_are_taken_is_busy(broker: Broker, redis_url: str) -> None:
    workers = Workers(broker, redis_url, count=2, rows=1)
    await workers.begin()
    claim = await hold(workers, "w0", CHAT, ends=False)
    assert not (await ask(broker, "r", CHAT)).is_left
    await broker.cancel("r")
    await end(broker, "w0", claim)
    assert (await ask(broker, "s", CHAT)).is_left
    await workers.close()


async def test_a_worker_that_reads_slowly_is_left_a_bounded_number(
    broker: Broker, client: Redis, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = changed(monkeypatch, client, "PART, LEAST = 1.25, 2", "PART, LEAST = 1.25, 1000")
    assert await broker.beat(replace(workers.cards["w0"], max_num_seqs=1000))
    await hold(workers, "w0", CHAT)
    left = [(await ask(broker, f"r{index}", CHAT)).is_left for index in range(MAX_LEFT + 1)]
    assert left == [True] * MAX_LEFT + [False]
    assert await client.xlen(KEYS.left("w0")) == MAX_LEFT


async def test_requests_that_wait_in_lines_keep_their_order(broker: Broker, client: Redis, workers: Workers) -> None:
    await hold(workers, "w0", CHAT)
    for request_id in ("a", "b"):
        await ask(broker, request_id)
    assert not (await ask(broker, "r", CHAT)).is_left
    assert not (await ask(broker, "wide", CHAT, rows=2)).is_left
    taken = await workers.take("w1", block_ms=0)
    assert [claim.request_id for claim in taken] == ["a", "b", "r", "wide"]
    assert [claim.placement for claim in taken] == ["", "", "busy", "busy"]


async def test_a_request_that_is_left_can_be_cancelled_parked_and_charged_like_any_other(
    broker: Broker, client: Redis, workers: Workers
) -> None:
    await hold(workers, "w0", CHAT)
    before = await client.hget(KEYS.served("standard"), "anonymous")
    await ask(broker, "cancelled", CHAT)
    assert await client.hget(KEYS.served("standard"), "anonymous") != before
    assert await broker.cancel("cancelled") == "cancelled"
    assert await client.hget(KEYS.served("standard"), "anonymous") == before
    await ask(broker, "parked", CHAT)
    assert await broker.park("parked", retention_s=60) == "parked"
    assert await client.hget(KEYS.served("standard"), "anonymous") == before
    await ask(broker, "withdrawn", CHAT)
    once = await client.hget(KEYS.served("standard"), "anonymous")
    assert await withdraw(broker, ["cancelled", "parked", "withdrawn"]) == 1
    assert await client.hget(KEYS.served("standard"), "anonymous") == once
    assert await workers.take("w0", block_ms=0) != []
    # What is left of the others is nothing to the holder.
    assert await workers.take("w0", block_ms=1) == []
    await broker.unpark("parked", BOUNDS)
    [claim] = await workers.take("w1", block_ms=0)
    assert (claim.request_id, claim.placement) == ("parked", "waited")


async def test_a_withdrawn_request_takes_its_place_in_the_line(broker: Broker, client: Redis, workers: Workers) -> None:
    await hold(workers, "w0", CHAT)
    await ask(broker, "r", CHAT)
    for request_id in ("a", "b"):
        await ask(broker, request_id)
    assert await withdraw(broker, ["r"]) == 1
    taken = await workers.take("w1", block_ms=0)
    assert [claim.request_id for claim in taken] == ["r", "a", "b"]
    for claim in taken:
        await end(broker, "w1", claim)
    await is_empty(client)


async def test_a_lease_ends_also_for_what_is_left_to_a_dead_worker_by_a_dead_gateway(
    broker: Broker, client: Redis, workers: Workers
) -> None:
    await hold(workers, "w0", CHAT)
    await ask(broker, "r", CHAT)
    assert await broker.reclaim("w1", 1000, 8) == []
    await asyncio.sleep(0.03)
    [entry] = await broker.reclaim("w1", 20, 8)
    claim = await broker.claim(entry, "w1", new_id(), "1")
    assert claim is not None
    assert (claim.deaths, claim.placement, claim.holder) == (0, "waited", "w0")
    assert await withdraw(broker, ["r"]) == 0


async def test_a_worker_that_starts_again_finds_what_was_left_to_it(broker: Broker, workers: Workers) -> None:
    await hold(workers, "w0", CHAT)
    await ask(broker, "r", CHAT)
    assert len(await workers.readers["w0"].read(1, 1000)) == 1  # and dies
    reader = QueueReader(workers.clients["w0"], "lane", "w0")
    found = await reader.pending()
    assert {entry.request_id for entry in found} == {"r"}
    claims = [await broker.claim(entry, "w0", "the attempt", "new") for entry in found]
    assert claims[0] is not None


async def test_what_is_known_of_prefixes_is_bounded_and_ends_with_the_heartbeats(
    broker: Broker, client: Redis, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.broker = broker = changed(monkeypatch, client, "MAX_PREFIXES = 8192", "MAX_PREFIXES = 4")
    names = [bytes([index] * 12) for index in range(30)]
    sizes = []
    for name in names:
        await hold(workers, "w0", name)
        sizes.append(await client.hlen(KEYS.prefixes) + await client.hlen(KEYS.prefixes + ":before"))
    assert max(sizes) <= 10
    # The last ones are known, the first ones are not.
    assert (await ask(broker, "last", names[-1])).is_left
    assert (await ask(broker, "before", names[-5])).is_left
    assert not (await ask(broker, "first", names[0])).is_left
    await broker.cancel("first")
    await hold(workers, "w0", SYSTEM)
    for key in (KEYS.prefixes, KEYS.prefixes + ":before"):
        assert 0 < await client.ttl(key) <= WORKER_TTL_S
        await client.expire(key, 1)
    await broker.beat(workers.cards["w1"])
    for key in (KEYS.prefixes, KEYS.prefixes + ":before"):
        assert await client.ttl(key) == WORKER_TTL_S
    assert 0 < await client.ttl(KEYS.left("w1")) <= FORGET_WORKER_S
    await broker.retire("w1", workers.cards["w1"].incarnation)
    assert not await client.exists(KEYS.left("w1"))


async def test_a_clock_that_is_set_back_holds_up_nothing(broker: Broker, client: Redis, workers: Workers) -> None:
    """Entries of the streams are from the future then."""
    await hold(workers, "w0", CHAT)
    seconds, _ = await client.time()
    for stream in (KEYS.queue(), KEYS.left("w0")):
        await client.xadd(stream, {"id": "x"}, id=f"{1000 * (seconds + 1000)}-0")
        await client.xtrim(stream, 0)
    assert (await ask(broker, "r", CHAT)).is_left
    [claim] = await workers.take("w0")
    assert (claim.request_id, claim.placement) == ("r", "holder")


@pytest.mark.parametrize("fields", [{}, {"queue": "standard"}, {"queue": "none", "entry": "1-1"}, {"entry": "x"}])
async def test_entries_that_say_nothing_are_passed_over(
    client: Redis, workers: Workers, fields: dict[str, str]
) -> None:
    await client.xadd(KEYS.left("w0"), {"id": "r", **fields})
    assert await workers.take("w0", block_ms=50) == []
    await workers.take("w0", block_ms=0)
    assert await client.xlen(KEYS.left("w0")) == 0
