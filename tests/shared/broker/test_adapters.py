"""Announcements of adapters, in a real Redis."""

from __future__ import annotations

from quire.shared.broker import Broker
from quire.shared.broker import adapters as module
from quire.shared.model.adapter_names import Announcement
from quire.shared.redis.clients import command_client


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
    assert broker.corrupt["adapter"] == 2
    monkeypatch.setattr(module, "MAX_ANNOUNCEMENTS", 2)
    assert await broker.announced_adapters() == {}
    await client.aclose()
