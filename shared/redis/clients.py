"""The three Redis connections that a process has: commands, one blocking read, pub/sub.

redis-py's defaults suit a cache, not a queue: it repeats commands that may have been carried out, cuts blocking reads
after five seconds, and resubscribes in silence. Here nothing is retried behind the caller's back, a blocking read has
its own connection with a timeout above its BLOCK time, and a lost subscription can be seen (docs/protocol.md).

All keys of a lane are at one server, behind Sentinels and in a cluster too, so each client speaks to that one alone. A
server that says that it is not the one (any more) counts as a broken connection; the next connection looks anew where
the lane is (`shared/redis/places.py`). redis-py's own client for clusters repeats commands and is not used.
"""

from __future__ import annotations

from typing import Any

from redis.asyncio import BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from quire.shared.redis.connections import TcpConnection, TlsConnection, UnixConnection
from quire.shared.redis.lane_client import LaneClient
from quire.shared.redis.places import ClusterPlace, Place, place_of
from quire.shared.redis.url import Address

COMMAND_TIMEOUT_S = 5.0
# How long one blocking read waits for work, and how much longer its socket does.
BLOCK_S = 1.0
BLOCK_MARGIN_S = 3.0
# Where another server may have taken over, a silent one is not waited for as long.
FAILOVER_CONNECT_TIMEOUT_S = 2.0


def _client(place: Place, timeout_s: float, connections: int) -> LaneClient:
    url = place.url
    kind = UnixConnection if url.path else TlsConnection if url.is_tls else TcpConnection
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
