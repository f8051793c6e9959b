"""Checks at the start of a process that its Redis can hold the queue."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from redis.exceptions import RedisError

from quire.shared.redis.clients import command_client
from quire.shared.redis.url import BrokerUnavailable, parse_redis_url

# First version with streams, XAUTOCLAIM and scripts as the broker uses them.
MINIMUM_VERSION = (6, 2)


async def check_redis(url: str, lane: str = "") -> str:
    """Return the server's name and version. Raise BrokerUnavailable if it cannot hold the queue."""
    parsed = parse_redis_url(url)
    client = command_client(url, lane, connections=1)
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
