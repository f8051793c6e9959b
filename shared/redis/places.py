"""Where the Redis of a lane is now: fixed, whom the Sentinels call master, or the cluster's node for the lane's slot.

Every connection asks anew when it is made, and so finds the new master after a failover. Clients of one process share a
place: when one of their connections finds that the lane has moved, the others follow before their next command.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

from redis.asyncio import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError, RedisError

from quire.shared.keys import LaneKeys
from quire.shared.redis.url import Address, RedisUrl, parse_redis_url

# For one answer of a Sentinel or of a node of the cluster. The next one is asked after that.
ASK_TIMEOUT_S = 1.0
# How often Sentinels are asked again though all is well. After a failover on purpose the old master goes on for many
# seconds, until they make it a replica; what it accepts until then is lost.
RECHECK_S = 0.5
# Nodes of a cluster that are remembered.
MAX_NODES = 64

ReadReply = Callable[[Address, Any], Address]


class Place:
    """One Redis whose address does not change, though another server may stand behind it (DNS, a proxy)."""

    def __init__(self, url: RedisUrl) -> None:
        self.url = url
        self.moves = 0
        self._last: Address | None = None
        # Whom to ask, the most trusted first.
        self._nodes = list(url.nodes)

    async def locate(self) -> Address:
        """Where to connect to. Raises redis-py's ConnectionError if nobody knows."""
        return self.url.nodes[0]

    async def recheck(self) -> None:
        """Called before each command: ask again, if it is time to, where that should go."""

    async def verify(self, ask: Callable[..., Awaitable[Any]]) -> None:
        """Raises ConnectionError if the server of a new connection is not the one; `ask` sends it a command."""

    def doubt(self, error: BaseException | None = None, asked: Address | None = None) -> None:
        """The last answer of `locate` was of no use: ask somebody else first, or go where a MOVED `error` says."""
        if self._nodes:
            self._nodes.append(self._nodes.pop(0))

    def _found(self, address: Address) -> Address:
        if address != self._last:
            self._last = address
            self.moves += 1
        return address

    async def _ask_nodes(self, options: dict[str, Any], read: ReadReply, *command: str) -> Address:
        """The first useful answer. `read` makes it of a reply, or raises LookupError."""
        problems = []
        for node in list(self._nodes):
            try:
                return read(node, await _ask(node, self.url.is_tls, options, *command))
            except (RedisError, OSError, LookupError) as error:
                problems.append(f"{node}: {error}")
                if node in self._nodes:
                    self._nodes.remove(node)
                    self._nodes.append(node)
        raise RedisConnectionError("; ".join(problems)[:500])


class SentinelPlace(Place):
    """The master of a service that Sentinels watch."""

    def __init__(self, url: RedisUrl) -> None:
        super().__init__(url)
        self._checked_at = 0.0

    async def recheck(self) -> None:
        if time.monotonic() - self._checked_at > RECHECK_S:
            with suppress(RedisError, OSError):  # with no Sentinel to ask the master is who it was
                await self.locate()

    async def locate(self) -> Address:
        def read(_: Address, reply: Any) -> Address:
            if reply is None:
                raise LookupError(f"knows no service {self.url.service!r}")
            return Address(reply[0].decode(), int(reply[1]))

        self._checked_at = time.monotonic()
        command = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.url.service)
        return self._found(await self._ask_nodes(self.url.sentinel_options, read, *command))

    async def verify(self, ask: Callable[..., Awaitable[Any]]) -> None:
        # For a while after a failover a Sentinel may name a server that is no master any more, or not yet.
        role = (await ask("ROLE"))[0].decode()
        if role != "master":
            raise RedisConnectionError(f"{self._last} is a {role} and not the master of {self.url.service}")


class ClusterPlace(Place):
    """The master of one slot of a Redis Cluster; `slot` None is any master."""

    def __init__(self, url: RedisUrl, slot: int | None) -> None:
        super().__init__(url)
        self._slot = slot
        # Where a MOVED has sent us, for as long as that proves right.
        self._hint: Address | None = None

    async def locate(self) -> Address:
        return self._found(self._hint or await self._ask_nodes(self.url.options, self._read, "CLUSTER", "SLOTS"))

    def doubt(self, error: BaseException | None = None, asked: Address | None = None) -> None:
        super().doubt()
        self._hint = None
        if isinstance(error, MovedError) and asked is not None:
            self._hint = Address(error.host or asked.host, error.port)

    def _read(self, asked: Address, reply: Any) -> Address:
        owner: Address | None = None
        for first, last, master, *replicas in reply:
            nodes = [_address(node, asked) for node in (master, *replicas)]
            for node in nodes:
                if node not in self._nodes and len(self._nodes) < MAX_NODES:
                    self._nodes.append(node)
            if self._slot is None or first <= self._slot <= last:
                owner = owner or nodes[0]
        if owner is None:
            raise LookupError("no node serves the slot" if reply else "the cluster has no slots")
        return owner

    async def masters(self) -> list[Address]:
        """All masters that have slots."""
        found: dict[Address, None] = {}

        def read(asked: Address, reply: Any) -> Address:
            found.update((_address(master, asked), None) for _, _, master, *_ in reply)
            return asked

        await self._ask_nodes(self.url.options, read, "CLUSTER", "SLOTS")
        return list(found)


@lru_cache(maxsize=64)
def place_of(url: str, lane: str) -> Place:
    """The place of a lane, one per process. Without a lane: of any node. Raises BrokerUnavailable for a wrong URL."""
    parsed = parse_redis_url(url)
    if parsed.kind == "sentinel":
        return SentinelPlace(parsed)
    if parsed.kind == "cluster":
        return ClusterPlace(parsed, key_slot(LaneKeys(lane).load.encode()) if lane else None)
    return Place(parsed)


def _address(node: Any, asked: Address) -> Address:
    # No host: the node does not know how we reach it, and it is the one that was asked.
    return Address(node[0].decode() if node[0] else asked.host, int(node[1]))


async def _ask(node: Address, is_tls: bool, options: dict[str, Any], *command: str) -> Any:
    """One command on a connection of its own."""
    kind = SSLConnection if is_tls else Connection
    connection = kind(
        host=node.host,
        port=node.port,
        socket_timeout=ASK_TIMEOUT_S,
        socket_connect_timeout=ASK_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        **options,
    )
    try:
        await connection.connect()  # type: ignore[no-untyped-call]
        await connection.send_command(*command)
        return await connection.read_response()
    finally:
        await connection.disconnect(nowait=True)
