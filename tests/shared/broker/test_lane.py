"""A lane: its models, adapters, registered workers, state, and what operators read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from quire.shared.model.adapter_names import Announcement
from quire.shared.protocol.broker import Broker, DeadRequest, LastBeat, QueueReader
from quire.shared.protocol.broker import adapters as module
from quire.shared.protocol.broker.lane_state import read_lane
from quire.shared.protocol.broker.models import PIECE, ModelRegistry
from quire.shared.protocol.keys import GROUP, MODEL_TTL_S, QUEUES, REGISTRY_LANE
from quire.shared.protocol.messages import OUTCOMES, MessageError, WorkerCard
from quire.shared.protocol.messages.manifest import MAX_MANIFEST_BYTES, FileEntry, ModelManifest
from quire.shared.protocol.registered_files import manifest_of
from quire.shared.redis.clients import command_client
from tests.support.broker_calls import KEYS, go_stale, start, step, submit, take

# --- lane state -------------------------------------------------------------------------------------------------------


async def test_a_lane_that_nothing_was_sent_to_is_empty(broker: Broker) -> None:
    state = await read_lane(broker)
    assert (state.accepted, state.running, state.dead) == (0, 0, 0)
    assert state.ended == dict.fromkeys(OUTCOMES, 0)
    assert set(state.waiting.values()) == set(state.tokens.values()) == set(state.oldest_s.values()) == {0}


async def test_accepted_is_the_sum_of_the_ended_waiting_running_and_parked(broker: Broker) -> None:
    ended = await start(broker, "ended")
    await broker.commit_step("w", [step(ended, 0, (1,), "stop")])
    await start(broker, "running")
    await submit(broker, "parked")
    await broker.park("parked")
    await submit(broker, "waiting", cost=7)
    state = await read_lane(broker)
    assert state.accepted == 4
    assert (state.ended["stop"], state.waiting["standard"], state.running, state.parked) == (1, 1, 1, 1)
    assert state.tokens == {"interactive": 0, "standard": 7, "batch": 0}


async def test_the_oldest_entry_is_the_first_that_no_worker_has_read(broker: Broker, client: Redis) -> None:
    seconds, _ = await client.time()
    age_s = 100
    await client.xadd(KEYS.queue("batch"), {"id": "old", "cost": 1}, id=f"{1000 * (seconds - age_s)}-0")
    assert age_s <= (await read_lane(broker)).oldest_s["batch"] < age_s + 10
    await take(broker)  # creates the group and reads the entry
    assert (await read_lane(broker)).oldest_s["batch"] == 0


async def test_requests_in_lines_are_counted_as_waiting(broker: Broker, client: Redis) -> None:
    await start(broker, "running")
    for index in range(2):
        await submit(broker, f"waiting{index}", cost=7)
    assert await client.xlen(KEYS.queue("waiting:standard")) == 2
    state = await read_lane(broker)
    assert (state.accepted, state.waiting["standard"], state.running) == (3, 2, 1)
    assert state.tenants == {"interactive": 0, "standard": 1, "batch": 0}
    seconds, _ = await client.time()
    await client.delete(KEYS.queue("waiting:batch"))
    await client.xadd(KEYS.queue("waiting:batch"), {"id": "old", "cost": 1}, id=f"{1000 * (seconds - 100)}-0")
    assert 100 <= (await read_lane(broker)).oldest_s["batch"] < 110


async def test_a_request_that_waited_alone_keeps_its_age(broker: Broker, client: Redis) -> None:
    await submit(broker, "first")
    [(entry, _)] = await client.xrange(KEYS.queue())
    await submit(broker, "second")
    assert entry in [one for one, _ in await client.xrange(KEYS.queue("waiting:standard"))]


# --- models -----------------------------------------------------------------------------------------------------------
# The model registry: contents under their digests, and who may replace a manifest.


FILES = {"config.json": b"{}", "tokenizer.json": bytes(range(256)) * (PIECE // 100)}


@pytest.fixture
async def registry(redis_url: str) -> AsyncIterator[ModelRegistry]:
    client = command_client(redis_url, REGISTRY_LANE)
    yield ModelRegistry(client)
    await client.aclose()


async def test_files_are_stored_once_and_read_in_pieces(registry: ModelRegistry) -> None:
    one, two = manifest_of("one", (), FILES), manifest_of("two", ("b",), FILES)
    assert await registry.register(one, FILES, replaces=True)
    assert await registry.register(two, FILES, replaces=False)
    assert await registry.registered() == {"two": two.encode(), "one": one.encode()}
    for entry in one.files:
        assert await registry.read(entry) == FILES[entry.name]
        assert 0 < await registry.client.ttl(registry.keys.file(entry.digest)) <= MODEL_TTL_S
    assert len(await registry.client.keys("*:file:*")) == 2, "no draft is left"


async def test_what_a_worker_that_is_gone_has_registered_expires(
    registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest, its name, its files, and a file that it has written in part."""
    client = registry.client
    await client.zadd(registry.keys.models, {"old": 1})
    manifest = manifest_of("one", (), FILES)
    await registry.register(manifest, FILES, replaces=True)
    assert await client.zrange(registry.keys.models, 0, -1) == [b"one"]
    seconds, _ = await client.time()
    assert 0 <= seconds - (await client.zscore(registry.keys.models, "one") or 0) // 1000 < 60
    keys = [registry.keys.manifest("one"), *(registry.keys.file(entry.digest) for entry in manifest.files)]
    for key in keys:
        assert MODEL_TTL_S - 60 < await client.ttl(key) <= MODEL_TTL_S
    await client.delete(*keys)
    monkeypatch.setattr(client, "rename", None)
    with pytest.raises(TypeError):
        await registry.register(manifest, FILES, replaces=True)
    [draft] = await client.keys("*:file:*")
    assert 0 < await client.ttl(draft) <= 60


async def test_a_file_that_is_something_else_in_redis_is_written_again(registry: ModelRegistry) -> None:
    manifest = manifest_of("one", (), FILES)
    entry = manifest.files[0]
    await registry.client.lpush(registry.keys.file(entry.digest), "x")
    with pytest.raises(MessageError):
        await registry.read(entry)
    await registry.register(manifest, FILES, replaces=True)
    assert await registry.read(entry) == FILES[entry.name]


async def test_another_manifest_is_replaced_only_at_the_start_of_a_worker(registry: ModelRegistry) -> None:
    one = manifest_of("m", (), FILES)
    other = manifest_of("m", ("alias",), FILES)
    assert await registry.register(one, FILES, replaces=True)
    assert not await registry.register(other, FILES, replaces=False)
    assert await registry.registered() == {"m": one.encode()}
    assert await registry.register(other, FILES, replaces=True)
    assert not await registry.register(one, FILES, replaces=False)
    assert await registry.registered() == {"m": other.encode()}


async def test_what_redis_lost_is_written_again(registry: ModelRegistry) -> None:
    one = manifest_of("m", (), FILES)
    await registry.register(one, FILES, replaces=True)
    await registry.client.flushall()
    assert await registry.register(one, FILES, replaces=False)
    assert await registry.read(one.files[0]) == b"{}"


async def test_content_that_is_not_what_the_manifest_names_is_refused(registry: ModelRegistry) -> None:
    entry = FileEntry.of("config.json", b"{}")
    with pytest.raises(MessageError, match="Redis has 0"):
        await registry.read(entry)
    await registry.client.set(registry.keys.file(entry.digest), b"[]")
    with pytest.raises(MessageError, match="does not have the registered digest"):
        await registry.read(entry)


async def test_a_large_manifest_is_cut(registry: ModelRegistry) -> None:
    longest = "n" * 256
    await registry.client.zadd(registry.keys.models, {"m": 1, longest: 2, "n" * 257: 3, "lost": 4, "list": 5})
    await registry.client.set(registry.keys.manifest("m"), b"x" * 10 * MAX_MANIFEST_BYTES)
    for name in ("n" * 257, longest):
        await registry.client.set(registry.keys.manifest(name), b"x")
    await registry.client.lpush(registry.keys.manifest("list"), b"x")
    found = await registry.registered()
    assert list(found) == [longest, "m"]
    assert len(found["m"]) == MAX_MANIFEST_BYTES + 1
    with pytest.raises(MessageError, match="over the limit"):
        ModelManifest.decode(found["m"])


# --- registration -----------------------------------------------------------------------------------------------------
# Heartbeats, names of workers, and consumers that are forgotten.


async def consumers(client: Redis) -> set[str]:
    """Return the names of the consumers in the groups of all queues."""
    found = [one for name in QUEUES for one in await client.xinfo_consumers(KEYS.queue(name), GROUP)]
    return {one["name"].decode() for one in found}


async def test_workers_that_are_gone_leave_no_consumers_behind(broker: Broker, client: Redis) -> None:
    """Otherwise they would grow with every process that has a name of its own."""
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


async def test_beats_are_of_live_workers_and_by_the_clock_of_redis(broker: Broker, client: Redis) -> None:
    assert await broker.last_beats() == []
    card = WorkerCard("w", "1", "lane", 100, 64, 50, (2,), 16, 10, 5, 0, 0, 7)
    for name in ("w", "x", "y", "z"):
        await broker.beat(replace(card, worker_id=name), beat_s=0.5)
    assert all(0 <= one.age_s < 60 and one.every_s == 0.5 for one in await broker.last_beats())
    seconds, _ = await client.time()
    await client.hset(KEYS.worker("w"), "beat", 1000 * (seconds - 100))
    await client.hset(KEYS.worker("x"), "beat", 1000 * (seconds + 100))
    await client.hdel(KEYS.worker("y"), "card")  # enlisted, and did not beat yet
    await client.delete(KEYS.worker("z"))
    late, ahead = await broker.last_beats()
    assert 100 <= late.age_s < 160
    assert ahead == LastBeat(0, 0.5)


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
    seconds, _ = await client.time()
    assert 0 <= seconds - holder.beat_ms // 1000 < 60
    assert await broker.enlist("w", "2", "there", 0.5, before="1")
    # The one before has lost it, and its card is gone until the new one beats.
    assert not await broker.beat(card)
    assert await broker.live_workers() == []
    assert 0 < await client.ttl(KEYS.worker("w")) <= 5
    assert await broker.enlist("w", "2", "there", 10)
    assert 5 < await client.ttl(KEYS.worker("w")) <= 30
    new = replace(card, incarnation="2")
    assert await broker.beat(new, slowest_step_s=10)
    assert await broker.live_workers() == [new]
    assert 5 < await client.ttl(KEYS.worker("w")) <= 30


# --- adapters ---------------------------------------------------------------------------------------------------------
# Announcements of adapters, in a real Redis.


async def test_an_announcement_is_read_and_withdrawn(redis_url: str) -> None:
    client = command_client(redis_url)
    broker = Broker(client, "m")
    one, other = Announcement("a", "x/y", "1"), Announcement("a", "z", "2")
    assert await broker.announced_adapters() == {}
    assert await broker.announce_adapter(one)
    assert not await broker.announce_adapter(other)
    assert await broker.announced_adapters() == {"a": one}
    assert await Broker(client, "other").announced_adapters() == {}
    assert await broker.withdraw_adapter("a")
    assert not await broker.withdraw_adapter("a")
    await client.aclose()


async def test_corrupt_announcements_are_left_out_and_counted(redis_url: str, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    client = command_client(redis_url)
    broker = Broker(client, "m")
    await broker.announce_adapter(Announcement("a", "x", "1"))
    await client.hset(broker.keys.adapters, "b", '{"path": "../../etc", "stamp": "1"}')
    await client.hset(broker.keys.adapters, "c d", Announcement("c", "x", "1").encode())
    assert list(await broker.announced_adapters()) == ["a"]
    assert broker.corrupt == {"adapter": 2}
    for most, expected in ((3, ["a"]), (2, [])):
        monkeypatch.setattr(module, "MAX_ANNOUNCEMENTS", most)
        assert list(await broker.announced_adapters()) == expected
    assert broker.corrupt == {"adapter": 4, "adapters": 1}
    await client.aclose()


# --- operators --------------------------------------------------------------------------------------------------------
# The dead-letter stream as operators read it.


async def test_entries_of_the_dead_that_are_corrupt_are_left_out(
    broker: Broker, client: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    good = {"id": "r", "class": "batch", "worker": "w", "emitted": 3, "body": b"b", "metadata": b"a"}
    entry = await client.xadd(KEYS.dead, good | {"tenant": "batch 300 acme/web", "user": "12 ab"})
    for name, data in (("emitted", "x"), ("class", "none"), ("id", b"\xff")):
        await client.xadd(KEYS.dead, good | {name: data})
    await client.xadd(KEYS.dead, {"surprise": 1})
    dead = DeadRequest(entry.decode(), "r", "batch", "w", 3, b"b", b"a", "acme/web", 300, "ab")
    assert await broker.read_dead() == [dead]
    assert broker.corrupt == {"dead entry": 4}
    assert caplog.text.count("is corrupt") == 1
    # The newest ones come first; one without a share is read as well.
    for number in (4, 5):
        await client.xadd(KEYS.dead, good | {"emitted": number})
    assert [(one.emitted, one.tenant) for one in await broker.read_dead(count=2)] == [
        (5, "anonymous"),
        (4, "anonymous"),
    ]
