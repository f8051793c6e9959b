"""The three Redis connections that a process has: commands, one blocking read, pub/sub.

redis-py's defaults suit a cache, not a queue: it repeats commands that may have been carried out, cuts blocking reads
after five seconds, and resubscribes in silence. Here nothing is retried behind the caller's back, a blocking read has
its own connection with a socket timeout above its BLOCK time, and a lost subscription can be seen (docs/protocol.md).
"""

from __future__ import annotations

import re

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

COMMAND_TIMEOUT_S = 5.0
# How long one blocking read waits for work, and how much longer its socket does.
BLOCK_S = 1.0
BLOCK_MARGIN_S = 3.0


class BrokerUnavailable(ConnectionError):
    """Redis does not answer, or not as a Redis that can hold the queue: what, where and the remedy."""


def _client(url: str, timeout_s: float, connections: int) -> Redis:
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=COMMAND_TIMEOUT_S,
        socket_timeout=timeout_s,
        socket_connect_timeout=COMMAND_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
        protocol=2,
    )
    return Redis.from_pool(pool)


def command_client(url: str, connections: int = 16) -> Redis:
    """For commands and scripts. A failed call is unknown, not undone: only what is repeatable may be repeated."""
    return _client(url, COMMAND_TIMEOUT_S, connections)


def blocking_client(url: str) -> Redis:
    """For one reader that blocks up to BLOCK_S. Never cancel a read of it: a message would be delivered and lost."""
    return _client(url, BLOCK_S + BLOCK_MARGIN_S, 1)


def pubsub_client(url: str) -> Redis:
    """For one subscription. Do not ignore subscribe messages: a second one says that messages were lost."""
    return _client(url, COMMAND_TIMEOUT_S, 1)


async def check_redis(url: str) -> str:
    """The server's version. Raises BrokerUnavailable with a remedy if it is not there or refuses us."""
    try:
        client = _client(url, COMMAND_TIMEOUT_S, 1)
    except ValueError as error:
        raise BrokerUnavailable(
            f"{redact(url)!r} is not a Redis URL: {error}. Give --redis-url (QUIRE_REDIS_URL) as redis://host:6379/0."
        ) from error
    try:
        info = await client.info("server")
        return str(info["redis_version"])
    except (RedisError, OSError) as error:
        raise BrokerUnavailable(
            f"no Redis at {redact(url)}: {error}. Start one, or pass --redis-url (QUIRE_REDIS_URL)."
        ) from error
    finally:
        await client.aclose()


def redact(url: str) -> str:
    """A Redis URL without its password."""
    url = re.sub(r"(?<=[?&]password=)[^&]*", "***", url)
    scheme, separator, rest = url.partition("://")
    credentials, at, host = rest.rpartition("@")
    return f"{scheme}{separator}{credentials.split(':')[0] + ':***@' if at else ''}{host}"
