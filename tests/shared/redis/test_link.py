"""Replies belong to their commands, and a connection that breaks fails all commands on it."""

from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from quire.shared.redis.clients import command_client
from tests.support.redis_server import RedisServer


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
        assert 0.29 < loop.time() - began < 2
        # Commands that wait for a connection share one attempt, and its failure.
        found = await asyncio.gather(*(client.get("key") for _ in range(5)), return_exceptions=True)
        assert all(isinstance(one, (RedisTimeoutError, RedisConnectionError)) for one in found), found
        assert loop.time() - began < 4
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
