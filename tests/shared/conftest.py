from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from quire.shared.protocol.broker import Broker
from quire.shared.redis.clients import command_client
from tests.support.redis_server import RedisServer, running_redis


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    with redis_server.client() as client:
        client.flushall()
    return redis_server.url


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    client = command_client(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def broker(client: Redis) -> Broker:
    return Broker(client, "lane")
