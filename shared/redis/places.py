"""The address of a lane's Redis: fixed, the master that Sentinels name, or the cluster node of the lane's slot.

Each new connection asks for the address, and so finds the new master after a failover. The clients of one process share
a place: when one connection finds that the lane has moved, the others follow before their next command.
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

from quire.shared.redis.url import Address, RedisUrl, parse_redis_url

# Timeout of one Sentinel or node of the cluster, after which the next is asked.
ASK_TIMEOUT_S = 1.0
# Interval at which Sentinels are asked again without any failure. After a planned failover the old master accepts
# writes for many seconds, until the Sentinels make it a replica; these writes are lost.
RECHECK_S = 0.5
# Largest number of nodes of a cluster that are remembered.
MAX_NODES = 64

ReadReply = Callable[[Address, Any], Address]


class Place:
    """One Redis with a fixed address. The server at that address may change (DNS, a proxy)."""

    def __init__(self, url: RedisUrl) -> None:
        self.url = url
        self.moves = 0
        self._last: Address | None = None
        # The nodes to ask for the address, the most trusted first.
        self._nodes = list(url.nodes)

    async def locate(self) -> Address:
        """Return the address to connect to. Raise redis-py's ConnectionError if no node knows it."""
        return self.url.nodes[0]

    async def recheck(self) -> None:
        """Ask for the address again if that is due. Called before each command."""

    async def verify(self, ask: Callable[..., Awaitable[Any]]) -> None:
        """Raise ConnectionError if a new connection leads to a wrong server; `ask` sends a command to it."""

    def doubt(self, error: BaseException | None = None, asked: Address | None = None) -> None:
        """Note that the last answer of `locate` was wrong: ask another node first, or follow a MOVED `error`."""
        if self._nodes:
            self._nodes.append(self._nodes.pop(0))

    def _located(self, address: Address) -> Address:
        if address != self._last:
            self._last = address
            self.moves += 1
        return address

    async def _ask_nodes(self, options: dict[str, Any], read: ReadReply, *command: str) -> Address:
        """Ask the nodes until one knows the address. `read` decodes a reply, or raises LookupError."""
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
            with suppress(RedisError, OSError):  # without a Sentinel that answers, the last master stays
                await self.locate()

    async def locate(self) -> Address:
        def read(_: Address, reply: Any) -> Address:
            if reply is None:
                raise LookupError(f"knows no service {self.url.service!r}")
            return Address(reply[0].decode(), int(reply[1]))

        self._checked_at = time.monotonic()
        command = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.url.service)
        return self._located(await self._ask_nodes(self.url.sentinel_options, read, *command))

    async def verify(self, ask: Callable[..., Awaitable[Any]]) -> None:
        # For a while after a failover a Sentinel may name the old master, or a server that is not a master yet.
        role = (await ask("ROLE"))[0].decode()
        if role != "master":
            raise RedisConnectionError(f"{self._last} is a {role} and not the master of {self.url.service}")


class ClusterPlace(Place):
    """The master of one slot of a Redis Cluster; `slot` None is any master."""

    def __init__(self, url: RedisUrl, slot: int | None) -> None:
        super().__init__(url)
        self._slot = slot
        # The address in the last MOVED error, until it proves wrong.
        self._hint: Address | None = None

    async def locate(self) -> Address:
        return self._located(self._hint or await self._ask_nodes(self.url.options, self._read, "CLUSTER", "SLOTS"))

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
        """Return all masters that have slots."""
        addresses: dict[Address, None] = {}

        def read(asked: Address, reply: Any) -> Address:
            addresses.update((_address(master, asked), None) for _, _, master, *_ in reply)
            return asked

        await self._ask_nodes(self.url.options, read, "CLUSTER", "SLOTS")
        return list(addresses)


@lru_cache(maxsize=64)
def place_of(url: str, lane: str) -> Place:
    """Return the place of a lane, one object per process; without a lane, of any node. Raise BrokerUnavailable."""
    parsed = parse_redis_url(url)
    if parsed.kind == "sentinel":
        return SentinelPlace(parsed)
    if parsed.kind == "cluster":
        # All keys of a lane have its name as their hash tag.
        return ClusterPlace(parsed, key_slot(f"{{{lane}}}".encode()) if lane else None)
    return Place(parsed)


def _address(node: Any, asked: Address) -> Address:
    # An empty host is the node that was asked: it does not know its address for clients.
    return Address(node[0].decode() if node[0] else asked.host, int(node[1]))


async def _ask(node: Address, is_tls: bool, options: dict[str, Any], *command: str) -> Any:
    """Send one command on a connection of its own."""
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
