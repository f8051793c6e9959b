"""The verbs of model hosts: their cards, leases on loads, and the demand for each model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from redis.asyncio import Redis

from quire.shared.protocol.broker.lane import text
from quire.shared.protocol.broker.scripts import load_script
from quire.shared.protocol.keys import HOST_TTL_S, LaneKeys, RegistryKeys
from quire.shared.protocol.messages.codec import MessageError
from quire.shared.protocol.messages.host_card import MAX_HOST_CARD_BYTES, HostCard

# Hosts that are read at most.
MAX_HOSTS = 256
# Lanes in one call of the script: Redis does nothing else meanwhile.
LANES_PER_CALL = 64


class HostRegistry:
    """The cards and leases of hosts, over one client of the lane REGISTRY_LANE. Raises RedisError when Redis fails."""

    def __init__(self, client: Redis) -> None:
        self.client = client
        self.keys = RegistryKeys()

    async def beat(self, host_id: str, card: HostCard) -> int:
        """Publish the card of a host for HOST_TTL_S. Return the Redis time in milliseconds."""
        seconds, micros = await self.client.time()
        now_ms = 1000 * seconds + micros // 1000
        pipe = self.client.pipeline(transaction=True)
        pipe.set(self.keys.host(host_id), card.encode(), ex=HOST_TTL_S)
        pipe.zadd(self.keys.hosts, {host_id: now_ms})
        pipe.zremrangebyscore(self.keys.hosts, 0, now_ms - 1000 * HOST_TTL_S)
        await pipe.execute()
        return int(now_ms)

    async def retire(self, host_id: str) -> None:
        """Remove the card of a host that ends."""
        await self.client.delete(self.keys.host(host_id))
        await self.client.zrem(self.keys.hosts, host_id)

    async def card(self, host_id: str) -> HostCard | None:
        """Return the card of a host; None if it has none, or one that cannot be read."""
        data = await self.client.get(self.keys.host(host_id))
        try:
            return HostCard.decode(data) if isinstance(data, bytes) else None
        except MessageError:
            return None

    async def cards(self) -> list[HostCard]:
        """Return the cards of all live hosts; one that cannot be read is left out."""
        names = [text(name) for name in await self.client.zrevrange(self.keys.hosts, 0, MAX_HOSTS - 1)]
        if not names:
            return []
        pipe = self.client.pipeline(transaction=False)
        for name in names:
            pipe.getrange(self.keys.host(name), 0, MAX_HOST_CARD_BYTES)
        cards = []
        for data in await pipe.execute(raise_on_error=False):
            try:
                cards += [HostCard.decode(data)] if isinstance(data, bytes) and data else []
            except MessageError:
                continue
        return cards

    async def take_load(self, model: str, host_id: str) -> bool:
        """Take or renew the lease to load a model for HOST_TTL_S; return False if another host has it."""
        key = self.keys.loading(model)
        if await self.client.set(key, host_id, nx=True, ex=HOST_TTL_S):
            return True
        if await self.client.get(key) != host_id.encode():
            return False
        await self.client.expire(key, HOST_TTL_S)
        return True

    async def claims(self, models: Sequence[str]) -> list[str]:
        """Return for each model the host that has the lease on its load; empty if none has."""
        if not models:
            return []
        return [text(host or b"") for host in await self.client.mget([self.keys.loading(name) for name in models])]

    async def end_load(self, model: str, host_id: str) -> None:
        """Give the lease back, if this host has it."""
        if await self.client.get(self.keys.loading(model)) == host_id.encode():
            await self.client.delete(self.keys.loading(model))


class Demand(NamedTuple):
    """The requests of a lane that have not ended, and its live workers other than the one that asks."""

    open: int
    others: int


class DemandReader:
    """Reads the demand of lanes that are on one server, over a client of any of them. Raises RedisError."""

    def __init__(self, client: Redis, worker_id: str) -> None:
        """worker_id: of the workers that do not count as others."""
        self._read = load_script(client, "demand")
        self._worker_id = worker_id

    async def read(self, lanes: Sequence[str]) -> dict[str, Demand]:
        """Return the demand of each lane."""
        found: dict[str, Demand] = {}
        for at in range(0, len(lanes), LANES_PER_CALL):
            some = lanes[at : at + LANES_PER_CALL]
            prefixes = [LaneKeys(lane).prefix for lane in some]
            counts = await self._read(keys=[LaneKeys(some[0]).queue()], args=[self._worker_id, *prefixes])
            found |= {lane: Demand(*pair) for lane, pair in zip(some, counts, strict=True)}
        return found
