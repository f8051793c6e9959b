"""The time of Redis, from a real one."""

from __future__ import annotations

import time

import pytest

from quire.shared.redis.clients import command_client
from quire.shared.redis.clock import unix_time


async def test_the_time_is_that_of_redis(redis_url: str) -> None:
    client = command_client(redis_url)
    try:
        assert await unix_time(client) == pytest.approx(time.time(), abs=2)
    finally:
        await client.aclose()
