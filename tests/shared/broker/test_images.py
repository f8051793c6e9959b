"""Files of images in Redis: one for all requests that name it, as long as one of them is there."""

from __future__ import annotations

import random

import pytest
from redis.asyncio import Redis

from quire.shared.protocol.broker import Admission, Broker, NoRoom, QueueBounds
from quire.shared.protocol.keys import RETENTION_S, STORED_BYTES, image_name
from tests.support.broker_calls import KEYS

BOUNDS = QueueBounds(requests=10_000, tokens=100_000, stored_bytes=100_000)


async def send(
    broker: Broker,
    request_id: str,
    images: dict[str, bytes],
    owner: str = "",
    bounds: QueueBounds = BOUNDS,
    retention_s: int = 0,
    counts: bool = True,
) -> None:
    terms = Admission(
        gateway="g",
        cost=1,
        bounds=bounds,
        images=tuple(images),
        owner=owner,
        retention_s=retention_s,
        counts_stored=counts,
    )
    await broker.submit(request_id, b"body", terms, list(images.values()))


async def held(client: Redis) -> int:
    return int(await client.hget(KEYS.held, "") or 0)


async def images_of(client: Redis) -> set[str]:
    return {key.decode().removeprefix(KEYS.image("")) async for key in client.scan_iter(KEYS.image("*"))}


async def test_requests_of_a_tenant_share_a_file_until_the_last_of_them_is_gone(broker: Broker, client: Redis) -> None:
    await send(broker, "a", {"one": b"1" * 1000, "two": b"2" * 500})
    await send(broker, "b", {"one": b"1" * 1000})
    assert await client.mget(KEYS.image("one"), KEYS.image("two")) == [b"1" * 1000, b"2" * 500]
    assert await held(client) == 1500 + 2 * (STORED_BYTES + 4)
    assert await client.ttl(KEYS.image("one")) == -1
    await broker.cancel("a")
    assert await client.ttl(KEYS.image("one")) == -1
    assert RETENTION_S - 2 <= await client.ttl(KEYS.image("two")) <= RETENTION_S
    await send(broker, "c", {"two": b"2" * 500})
    assert await client.ttl(KEYS.image("two")) == -1
    for request_id in "abc":
        await broker.cancel(request_id)
        await broker.delete(request_id)
    assert await images_of(client) == set()
    assert await held(client) == 0
    assert await client.zcard(KEYS.due) == 0


async def test_a_file_that_redis_has_is_not_sent_again(broker: Broker, client: Redis) -> None:
    file = bytes(1_000_000)
    await send(broker, "a", {"one": file}, bounds=QueueBounds(10_000, 100_000, 10_000_000))
    before = (await client.info("stats"))["total_net_input_bytes"]
    await send(broker, "b", {"one": file, "two": b"2"}, bounds=QueueBounds(10_000, 100_000, 10_000_000))
    assert (await client.info("stats"))["total_net_input_bytes"] - before < len(file) // 2
    assert await client.mget(KEYS.image("one"), KEYS.image("two")) == [file, b"2"]


async def test_a_file_that_made_room_for_itself_is_sent(broker: Broker, client: Redis) -> None:
    """The only request that named it goes, because there is no room for both."""
    file = bytes(1000)
    bounds = QueueBounds(10_000, 100_000, 1000 + 2 * STORED_BYTES)
    await send(broker, "a", {"one": file}, bounds=bounds, retention_s=5000)
    await broker.cancel("a")
    await client.zadd(KEYS.ended(""), {"a": 0})
    await send(broker, "b", {"one": file}, bounds=bounds)
    assert not await client.exists(KEYS.request("a"))
    assert await client.get(KEYS.image("one")) == file


async def test_a_file_lives_as_long_as_the_stored_response(broker: Broker, client: Redis) -> None:
    await send(broker, "a", {"one": b"1"}, retention_s=5000)
    await send(broker, "b", {"one": b"1"})
    for request_id in "ab":
        await broker.cancel(request_id)
    assert abs(await client.pttl(KEYS.image("one")) - await client.pttl(KEYS.request("a"))) < 1000
    await broker.delete("a")
    assert abs(await client.pttl(KEYS.image("one")) - await client.pttl(KEYS.request("b"))) < 1000


async def test_a_request_that_is_deleted_before_its_end_keeps_its_files_to_its_end(
    broker: Broker, client: Redis
) -> None:
    await send(broker, "a", {"one": b"1"}, retention_s=5000)
    assert await broker.delete("a") == "hidden"
    assert await client.ttl(KEYS.image("one")) == -1
    await broker.cancel("a")
    assert 0 < await client.ttl(KEYS.image("one")) <= 60


async def test_files_take_room_once_and_a_call_without_room_leaves_none(broker: Broker, client: Redis) -> None:
    small = QueueBounds(100, 1000, stored_bytes=10_000 + 2 * (STORED_BYTES + 4), key_bytes=0)
    await send(broker, "a", {"one": b"1" * 10_000}, "key", small)
    await send(broker, "b", {"one": b"1" * 10_000}, "key", small)
    with pytest.raises(NoRoom):
        await send(broker, "c", {"two": b"2"}, "key", small)
    assert await images_of(client) == {"one", "one:users"}
    for request_id in "ab":
        await broker.cancel(request_id)
        await client.zadd(KEYS.ended("key"), {request_id: 1})
    # Requests that ended long ago go, and their files with them.
    await send(broker, "c", {"two": b"2" * 9000}, "key", small)
    assert await images_of(client) == {"two", "two:users"}
    assert await held(client) == 9000 + STORED_BYTES + 4


async def test_a_call_that_is_sent_again_changes_nothing(broker: Broker, client: Redis) -> None:
    for _ in range(2):
        await send(broker, "a", {"one": b"1" * 100})
    assert await held(client) == 100 + STORED_BYTES + 4
    assert await client.zcard(KEYS.image("one:users")) == 1


async def test_files_of_requests_that_redis_has_lost_go_when_they_are_due(broker: Broker, client: Redis) -> None:
    await send(broker, "lost", {"one": b"1" * 100, "two": b"2"})
    await send(broker, "b", {"two": b"2"})
    await client.delete(KEYS.request("lost"))
    await client.zadd(KEYS.due, dict.fromkeys(await client.zrange(KEYS.due, 0, -1), 1))
    await send(broker, "c", {})
    await send(broker, "d", {}, retention_s=10)
    assert await images_of(client) == {"two", "two:users"}


async def test_no_file_stays_of_many_calls(broker: Broker, client: Redis) -> None:
    """Calls with shared files end in all orders, some deleted before their end, some in batches."""
    chance = random.Random(1)
    files = {f"file{index}": bytes([index]) * chance.randrange(1, 300) for index in range(12)}
    alive: list[str] = []
    for number in range(10_000):
        if alive and chance.random() < 0.5:
            name = alive.pop(chance.randrange(len(alive)))
            if chance.random() < 0.3:
                await broker.delete(name)
            await broker.cancel(name)
            await broker.delete(name)
        else:
            names = chance.sample(sorted(files), chance.randrange(3))
            await send(
                broker,
                f"r{number}",
                {name: files[name] for name in names},
                chance.choice(("", "a", "b")),
                counts=chance.random() < 0.8,
            )
            alive.append(f"r{number}")
    for name in alive:
        await broker.cancel(name)
        await broker.delete(name)
    hidden = [key async for key in client.scan_iter(KEYS.request("*"))]
    for key in hidden:  # deleted before their end: they expire soon
        await broker.delete(key.decode().removeprefix(KEYS.request("")))
    assert await images_of(client) == set()
    assert await held(client) == 0


def test_tenants_do_not_share_files() -> None:
    assert image_name("a", "0" * 64) != image_name("b", "0" * 64)
    assert image_name("a", "0" * 64) == image_name("a", "0" * 64)
