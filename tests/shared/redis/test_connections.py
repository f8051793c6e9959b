"""Connections to Redis: clients, clocks, checks, cancellation, and the link of scripts."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from redis.exceptions import ClusterDownError, MovedError, ReadOnlyError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from quire.shared.redis import check
from quire.shared.redis.cancellation import check_cancelled
from quire.shared.redis.check import check_redis
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
from quire.shared.redis.clock import unix_time
from quire.shared.redis.connections import NotTheServer, is_elsewhere
from quire.shared.redis.link import Link
from quire.shared.redis.url import BrokerUnavailable
from tests.support.redis_server import RedisServer

# --- clients ----------------------------------------------------------------------------------------------------------
# The factories: timeouts, number of connections, and no retries.


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


# --- connections ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "elsewhere"),
    [
        (ReadOnlyError("You can't write against a read only replica."), True),
        (ClusterDownError("CLUSTERDOWN Hash slot not served"), True),
        (MovedError("1234 127.0.0.1:7000"), True),
        (ResponseError("NOREPLICAS Not enough good replicas to write."), True),
        (ResponseError("UNBLOCKED force unblock from blocking operation"), True),
        (ResponseError("ERR Error running script: READONLY You can't write"), True),
        (ResponseError("WRONGTYPE Operation against a key"), False),
        (ResponseError("OOM command not allowed"), False),
    ],
)
def test_errors_by_which_a_server_does_not_serve_the_lane(error: ResponseError, elsewhere: bool) -> None:
    assert is_elsewhere(error) == elsewhere


async def test_such_an_error_breaks_the_connection_and_the_next_command_has_a_new_one(redis_url: str) -> None:
    client = pubsub_client(redis_url)
    pipe = client.pipeline(transaction=False)  # takes a connection from the pool
    pipe.eval("return redis.error_reply('READONLY You can not write')", 0)
    with pytest.raises(NotTheServer, match="ReadOnlyError"):
        await pipe.execute()
    assert await client.ping()  # over a new connection
    await client.aclose()


# --- check ------------------------------------------------------------------------------------------------------------


async def test_a_usable_redis_is_named_with_its_version(redis_url: str) -> None:
    name, version = (await check_redis(redis_url)).split()
    assert name in ("Redis", "Valkey")
    assert tuple(int(part) for part in version.split(".")[:2]) >= check.MINIMUM_VERSION


async def test_a_redis_that_is_away_is_refused_with_the_remedy() -> None:
    with pytest.raises(BrokerUnavailable, match=r"no Redis at redis://127\.0\.0\.1:1.*--redis-url"):
        await check_redis("redis://127.0.0.1:1/0")


async def test_an_old_redis_is_refused_with_its_version(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "MINIMUM_VERSION", (99, 0))
    with pytest.raises(BrokerUnavailable, match=r"has version \d+\.\d+.*Update it"):
        await check_redis(redis_url)


# --- clock ------------------------------------------------------------------------------------------------------------
# The time of Redis, from a real one.


async def test_the_time_is_that_of_redis(redis_url: str) -> None:
    client = command_client(redis_url)
    try:
        assert await unix_time(client) == pytest.approx(time.time(), abs=2)
    finally:
        await client.aclose()


# --- cancellation -----------------------------------------------------------------------------------------------------
# A cancellation that an awaited command swallows is carried out at the next check.


async def test_a_task_that_is_not_cancelled_goes_on() -> None:
    check_cancelled()


async def test_a_cancellation_that_was_swallowed_is_raised() -> None:
    async def swallow() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(10)
        check_cancelled()
        pytest.fail("the cancellation is lost")

    task = asyncio.create_task(swallow())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- link -------------------------------------------------------------------------------------------------------------
# Replies belong to their commands, and a connection that breaks fails all commands on it.


async def test_the_answer_to_a_cancelled_command_does_not_pass_for_the_next_one(redis_url: str) -> None:
    client = command_client(redis_url)
    await client.mset({"a": "A", "b": "B"})
    for _ in range(20):
        given_up = asyncio.create_task(client.get("a"))
        kept = asyncio.create_task(client.get("b"))
        await asyncio.sleep(0)  # both are sent
        given_up.cancel()
        assert await kept == b"B"
        assert given_up.cancelled()
    await client.aclose()


async def test_a_connection_that_breaks_fails_all_that_wait_and_the_next_command_has_a_new_one(redis_url: str) -> None:
    client, other = command_client(redis_url), command_client(redis_url)
    broken = await client.client_id()
    waiting = [asyncio.create_task(client.blpop(["nothing"], timeout=0)), asyncio.create_task(client.get("key"))]
    await asyncio.sleep(0)
    await other.client_kill_filter(_id=str(broken))
    for task in waiting:
        with pytest.raises(RedisConnectionError, match="closed the connection"):
            await task
    assert await client.client_id() != broken
    for one in (client, other):
        await one.aclose()


async def test_a_server_that_is_silent_fails_all_that_wait_in_time(
    redis_url: str, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.shared.redis.clients.COMMAND_TIMEOUT_S", 0.3)
    client = command_client(redis_url)
    await client.set("key", "value")
    with redis_server.stopped():
        loop = asyncio.get_running_loop()
        began = loop.time()
        found = await asyncio.gather(*(client.get("key") for _ in range(5)), return_exceptions=True)
        assert [type(one) for one in found] == [RedisTimeoutError] * 5
        assert loop.time() - began > 0.29
        opens = 0

        async def counted() -> Link:
            nonlocal opens
            opens += 1
            return await open_link()

        open_link, client.open_link = client.open_link, counted  # type: ignore[method-assign]
        # Commands that wait for a connection share one attempt, and its failure.
        found = await asyncio.gather(*(client.get("key") for _ in range(5)), return_exceptions=True)
        assert all(isinstance(one, (RedisTimeoutError, RedisConnectionError)) for one in found), found
        assert opens == 1
    assert await client.get("key") == b"value"
    await client.aclose()


async def test_what_is_no_answer_of_redis_ends_the_connection() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" if b"GET" in data else b"+OK\r\n" * data.count(b"*"))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = command_client(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
    answers = await asyncio.gather(*(client.get(key) for key in "abc"), return_exceptions=True)
    assert [str(answer)[:29] for answer in answers] == ["what came is no answer of Redi"[:29]] * 3, answers
    await client.aclose()
    server.close()
