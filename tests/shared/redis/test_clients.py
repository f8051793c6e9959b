"""The factories: timeouts, number of connections, and no retries."""

from __future__ import annotations

import pytest

from quire.shared.redis.clients import (
    BLOCK_MARGIN_S,
    BLOCK_S,
    COMMAND_TIMEOUT_S,
    FAILOVER_CONNECT_TIMEOUT_S,
    blocking_client,
    command_client,
    node_clients,
    pubsub_client,
)
from quire.shared.redis.url import BrokerUnavailable


async def test_a_blocking_read_has_more_time_than_it_blocks() -> None:
    blocking, commands = blocking_client("redis://127.0.0.1:1"), command_client("redis://127.0.0.1:1")
    assert blocking.connection_pool.connection_kwargs["socket_timeout"] == BLOCK_S + BLOCK_MARGIN_S > BLOCK_S
    assert commands.connection_pool.connection_kwargs["socket_timeout"] == COMMAND_TIMEOUT_S


async def test_nothing_is_retried_and_a_reader_and_a_subscriber_have_one_connection() -> None:
    clients = (command_client("redis://127.0.0.1:1"), blocking_client("redis://h"), pubsub_client("redis://h"))
    assert [client.connection_pool.max_connections for client in clients] == [16, 1, 1]
    assert {client.connection_pool.connection_kwargs["retry"].get_retries() for client in clients} == {0}


@pytest.mark.parametrize(
    ("url", "timeout_s"),
    [("redis://h", COMMAND_TIMEOUT_S), ("redis+cluster://h:1,h:2", FAILOVER_CONNECT_TIMEOUT_S)],
)
async def test_a_connection_attempt_is_shorter_where_another_server_may_take_over(url: str, timeout_s: float) -> None:
    assert command_client(url).connection_pool.connection_kwargs["socket_connect_timeout"] == timeout_s


async def test_a_single_redis_is_its_only_node(redis_url: str) -> None:
    [client] = await node_clients(redis_url)
    assert await client.ping()
    await client.aclose()


async def test_a_wrong_url_is_refused() -> None:
    with pytest.raises(BrokerUnavailable):
        command_client("http://host")
