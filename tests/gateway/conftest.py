from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from quire.gateway.settings import GatewaySettings
from tests.support.gateway.running import RunningGateway, running_gateway, write_model
from tests.support.gateway.trials import forked_trials
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


@pytest.fixture(scope="session", autouse=True)
def trials() -> Iterator[None]:
    with forked_trials():
        yield


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "test-model")


class Start:
    """Starts gateways that end with the test."""

    def __init__(self, stack: AsyncExitStack, **defaults: Any) -> None:
        self._stack = stack
        self._defaults = defaults

    async def __call__(self, **settings: Any) -> RunningGateway:
        return await self._stack.enter_async_context(
            running_gateway(GatewaySettings(**{**self._defaults, "port": 0, **settings}))
        )


@pytest.fixture
async def start_gateway(redis_url: str, model_folder: Path) -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:
        yield Start(stack, model=str(model_folder), redis_url=redis_url)


@pytest.fixture
async def gateway(start_gateway: Start) -> RunningGateway:
    return await start_gateway()


@pytest.fixture
async def server(start_gateway: Start) -> AsyncIterator[RunningGateway]:
    """A gateway whose queue must still be untouched when the test is over."""
    gateway = await start_gateway(max_body_bytes=100_000, body_timeout_s=0.2, max_n=4, max_prompts=8, max_choices=16)
    yield gateway
    assert await gateway.accepted() == 0
