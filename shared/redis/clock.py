"""The clock of Redis, which all processes share. The clock of a process may be wrong, so it decides nothing."""

from __future__ import annotations

from redis.asyncio import Redis


async def unix_time(client: Redis) -> float:
    """Return the unix time of Redis in seconds. Raise redis-py's RedisError or OSError when Redis fails."""
    seconds, micros = await client.time()
    return int(seconds) + int(micros) / 1_000_000
