"""The three Redis connections that a process has: commands, one blocking read, pub/sub.

redis-py's defaults suit a cache, not a queue: it repeats commands that may have been carried out, cuts blocking reads
after five seconds, and resubscribes in silence. Here nothing is retried behind the caller's back, a blocking read has
its own connection with a timeout above its BLOCK time, and a lost subscription can be seen (docs/protocol.md).

All keys of a lane are at one server, behind Sentinels and in a cluster too, so each client speaks to that one alone. A
server that says that it is not the one (any more) counts as a broken connection; the next connection looks anew where
the lane is (`shared/redis/places.py`). redis-py's own client for clusters repeats commands and is not used.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MasterDownError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from quire.shared.redis.link import Link
from quire.shared.redis.places import ClusterPlace, Place, place_of
from quire.shared.redis.url import Address, BrokerUnavailable, parse_redis_url, redact

__all__ = [
    "BLOCK_S",
    "COMMAND_TIMEOUT_S",
    "BrokerUnavailable",
    "LaneClient",
    "blocking_client",
    "check_redis",
    "command_client",
    "node_clients",
    "pubsub_client",
    "redact",
]

COMMAND_TIMEOUT_S = 5.0
# How long one blocking read waits for work, and how much longer its socket does.
BLOCK_S = 1.0
BLOCK_MARGIN_S = 3.0
# Where another server may have taken over, a silent one is not waited for as long.
FAILOVER_CONNECT_TIMEOUT_S = 2.0
# Streams with consumer groups, XAUTOCLAIM, and scripts as the broker uses them.
MINIMUM_VERSION = (6, 2)

# How a server says that it cannot serve the lane now, and that another one may. Nothing was carried out.
_ELSEWHERE = (ReadOnlyError, AskError, TryAgainError, ClusterDownError, MasterDownError)  # MOVED is an AskError
# The same without a class of redis-py's, and as Redis 6.2 wraps what a script has run into.
_ELSEWHERE_TEXTS = ("NOREPLICAS ", "UNBLOCKED ", "READONLY ", "non local key in a cluster")


def is_elsewhere(error: ResponseError) -> bool:
    """Whether a server says that it cannot serve the lane now, and that another one may."""
    return isinstance(error, _ELSEWHERE) or any(text in str(error) for text in _ELSEWHERE_TEXTS)


class NotTheServer(RedisConnectionError):
    """The server answered that the lane is not its own to serve, or not now."""


class _Watched(AbstractConnection):
    """A connection to the server of a lane, wherever that is."""

    def __init__(self, *, place: Place, **options: Any) -> None:
        super().__init__(**options)
        self._place = place
        self.moves = 0

    async def connect(self) -> None:
        if self.is_connected:
            await self._place.recheck()
        # The server closed it, or the lane is elsewhere by now.
        if self.is_connected and (self._is_closed or self.moves != self._place.moves):
            await self.disconnect(nowait=True)
        await super().connect()  # type: ignore[no-untyped-call]

    @property
    def _is_closed(self) -> bool:
        assert self._reader is not None
        assert self._writer is not None
        return self._reader.at_eof() or self._writer.is_closing()

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        await super().on_connect_check_health(check_health)
        try:
            await self._place.verify(self._ask)
        except RedisError:
            self._place.doubt()
            raise

    async def _ask(self, *command: str) -> Any:
        await self.send_command(*command, check_health=False)
        return await self.read_response()

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except ResponseError as error:
            if not is_elsewhere(error):
                raise
            self.doubt(error)
            await self.disconnect(nowait=True)
            raise NotTheServer(f"{type(error).__name__}: {error}") from error

    def doubt(self, error: ResponseError) -> None:
        """The server says that it is not the one."""
        self._place.doubt(error, getattr(self, "address", None))


class _Tcp(_Watched, Connection):
    """Asks where to connect to."""

    address: Address

    async def _connect(self) -> None:
        self.address = await self._place.locate()
        self.moves = self._place.moves
        self.host, self.port = self.address
        try:
            await super()._connect()  # type: ignore[no-untyped-call]
        except BaseException:
            self._place.doubt()
            raise


class _Tls(_Tcp, SSLConnection):
    pass


class _Unix(_Watched, UnixDomainSocketConnection):
    pass


class LaneClient(Redis):
    """Sends all commands over one `Link`; what takes connections by itself, such as pipelines, has the pool's.

    A command that blocks holds up those behind it: `blocking_client` has a link for it alone.
    """

    def __init__(self, place: Place, pool: BlockingConnectionPool, timeout_s: float) -> None:
        super().__init__(connection_pool=pool)
        self.auto_close_connection_pool = True
        self._place = place
        self._timeout_s = timeout_s
        self._link: Link | None = None
        # Under way for all that wait for it.
        self._opening: asyncio.Task[Link] | None = None

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        link = await self._current_link()
        try:
            reply = await link.send(*args[0].split(), *args[1:])  # a name can be two words
        except ResponseError as error:
            if not is_elsewhere(error):
                raise
            connection: Any = link.connection
            connection.doubt(error)
            link.retire()
            raise NotTheServer(f"{type(error).__name__}: {error}") from error
        read = self.response_callbacks.get(args[0])
        options.pop("keys", None)  # as redis-py does
        return reply if read is None else read(reply, **options)

    async def open_link(self) -> Link:
        """A new connection to where the lane is now, for one caller."""
        connection = self.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.connect()
            return Link(connection, self._timeout_s)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise

    async def is_current(self, link: Link) -> bool:
        """Whether a connection is open and goes to where the lane is now."""
        await self._place.recheck()
        connection: Any = link.connection
        return link.is_open and connection.moves == self._place.moves

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._link is not None:
            self._link.close()
        await super().aclose(close_connection_pool)

    async def _current_link(self) -> Link:
        while (link := self._link) is not None:
            if await self.is_current(link):
                return link
            if link is self._link:  # no other caller has found that out meanwhile
                break
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    async def _open(self) -> Link:
        old, self._link = self._link, None
        if old is not None:
            old.retire()
        self._link = await self.open_link()
        return self._link

    def _opened(self, opening: asyncio.Task[Link]) -> None:
        self._opening = None
        if not opening.cancelled():
            opening.exception()  # it was seen, even if nobody waits any more


def _client(place: Place, timeout_s: float, connections: int) -> LaneClient:
    url = place.url
    kind = _Unix if url.path else _Tls if url.is_tls else _Tcp
    options: dict[str, Any] = url.options | ({"path": url.path} if url.path else {})
    pool = BlockingConnectionPool(
        connection_class=kind,
        max_connections=connections,
        timeout=COMMAND_TIMEOUT_S,
        socket_timeout=timeout_s,
        socket_connect_timeout=COMMAND_TIMEOUT_S if url.kind == "single" else FAILOVER_CONNECT_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
        protocol=2,
        place=place,
        **options,
    )
    return LaneClient(place, pool, timeout_s)


def command_client(url: str, lane: str = "", connections: int = 16) -> LaneClient:
    """For commands and scripts. A failed call is unknown, not undone: only what is repeatable may be repeated.

    lane: whose keys it is for; in a cluster it reaches no others. connections: for pipelines, beside the one of all
    commands. Raises BrokerUnavailable for a wrong URL.
    """
    return _client(place_of(url, lane), COMMAND_TIMEOUT_S, connections)


def blocking_client(url: str, lane: str = "") -> LaneClient:
    """For one reader that blocks up to BLOCK_S. Never cancel a read of it: a message would be delivered and lost."""
    return _client(place_of(url, lane), BLOCK_S + BLOCK_MARGIN_S, 1)


def pubsub_client(url: str, lane: str = "") -> LaneClient:
    """For one subscription. Do not ignore subscribe messages: a second one says that messages were lost."""
    return _client(place_of(url, lane), COMMAND_TIMEOUT_S, 1)


async def node_clients(url: str) -> list[LaneClient]:
    """A client for each server that has lanes: the masters of a cluster, or the one that there is."""
    place = place_of(url, "")
    if not isinstance(place, ClusterPlace):
        return [_client(place, COMMAND_TIMEOUT_S, 2)]
    return [_client(_Node(place, node), COMMAND_TIMEOUT_S, 2) for node in await place.masters()]


class _Node(Place):
    """One node of a cluster, for as long as it takes to look through it."""

    def __init__(self, cluster: Place, node: Address) -> None:
        super().__init__(cluster.url)
        self._node = node

    async def locate(self) -> Address:
        return self._node


async def check_redis(url: str, lane: str = "") -> str:
    """The server's name and version. Raises BrokerUnavailable with a remedy if it is not there or of no use to us."""
    parsed = parse_redis_url(url)
    client = _client(place_of(url, lane), COMMAND_TIMEOUT_S, 1)
    try:
        info: dict[str, Any] = await client.info("server")
    except (RedisError, OSError) as error:
        raise BrokerUnavailable(
            f"no Redis at {parsed.shown}: {str(error).rstrip('.')}; start one, or pass --redis-url (QUIRE_REDIS_URL)"
        ) from error
    finally:
        with suppress(RedisError, OSError):
            await client.aclose()
    mode = str(info.get("redis_mode") or info.get("server_mode") or "standalone")
    if mode != ("cluster" if parsed.kind == "cluster" else "standalone"):
        form = {
            "cluster": "redis+cluster://host:port,host:port",
            "sentinel": "redis+sentinel://host:port,host:port/service",
        }
        raise BrokerUnavailable(
            f"the Redis at {parsed.shown} runs as {mode}. Give --redis-url (QUIRE_REDIS_URL) as "
            f"{form.get(mode, 'redis://host:6379/0')}."
        )
    version = str(info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM_VERSION:
        raise BrokerUnavailable(
            f"the Redis at {parsed.shown} has version {version}, and Quire needs 6.2 or newer. Update it, or give "
            "another with --redis-url (QUIRE_REDIS_URL)."
        )
    return f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {version}"
