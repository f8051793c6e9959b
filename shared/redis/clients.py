"""The three kinds of Redis clients of a process: for commands, for one blocking read, and for pub/sub.

The defaults of redis-py suit a cache, not a queue: it repeats commands that may have been carried out, ends blocking
reads after five seconds, and resubscribes silently. Clients made here never retry, a blocking read has a connection of
its own whose timeout exceeds its BLOCK time, and a lost subscription can be seen (docs/protocol.md).

All keys of a lane are on one server, also with Sentinels and in a cluster, so each client speaks to that server only
(`shared/redis/places.py`). redis-py's client for clusters repeats commands and is not used.
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
# Time that one blocking read waits for work, and the additional time until its socket gives up.
BLOCK_S = 1.0
BLOCK_MARGIN_S = 3.0
# Shorter with Sentinels or a cluster, where another server may have taken over from a silent one.
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
    """Return a client for commands and scripts. The effect of a failed call is unknown: repeat only repeatable calls.

    lane: the lane whose keys are used; in a cluster the client reaches no other keys. connections: largest number of
    connections for pipelines; commands share one more. Raise BrokerUnavailable for a wrong URL.
    """
    return _client(place_of(url, lane), COMMAND_TIMEOUT_S, connections)


def blocking_client(url: str, lane: str = "") -> LaneClient:
    """Return a client for one reader that blocks up to BLOCK_S. Never cancel its reads: an entry would be lost."""
    return _client(place_of(url, lane), BLOCK_S + BLOCK_MARGIN_S, 1)


def pubsub_client(url: str, lane: str = "") -> LaneClient:
    """Return a client for one subscription. Heed subscribe messages: a second subscribe message tells of a loss."""
    return _client(place_of(url, lane), COMMAND_TIMEOUT_S, 1)


async def node_clients(url: str) -> list[LaneClient]:
    """Return a client for each server that has lanes: the masters of a cluster, else the one server."""
    place = place_of(url, "")
    if not isinstance(place, ClusterPlace):
        return [_client(place, COMMAND_TIMEOUT_S, 2)]
    return [_client(_Node(place, node), COMMAND_TIMEOUT_S, 2) for node in await place.masters()]


class _Node(Place):
    """One node of a cluster, with a fixed address."""

    def __init__(self, cluster: Place, node: Address) -> None:
        super().__init__(cluster.url)
        self._node = node

    async def locate(self) -> Address:
        return self._node
