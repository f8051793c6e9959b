"""Connections that are kept at hand between commands: never with an answer that belongs to another command."""

from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import ResponseError

from shared.redis_clients import blocking_client, command_client
from tests.shared.redis_server import RedisServer


async def test_commands_one_after_the_other_use_one_connection_also_behind_an_error(redis_url: str) -> None:
    client = command_client(redis_url)
    first = await client.client_id()
    await client.set("text", "x")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await client.hget("text", "field")
    assert await client.client_id() == first
    await client.aclose()


async def test_a_connection_that_the_server_closed_in_between_costs_no_command(redis_url: str) -> None:
    client, blocking, other = command_client(redis_url), blocking_client(redis_url), command_client(redis_url)
    for one in (client, blocking):
        closed = await one.client_id()
        await other.client_kill_filter(_id=str(closed))
        assert str(closed) not in {entry["id"] for entry in await other.client_list()}
        assert await one.client_id() != closed
    for one in (client, blocking, other):
        await one.aclose()


async def test_the_answer_to_a_cancelled_command_does_not_pass_for_the_next_one(redis_url: str) -> None:
    client = command_client(redis_url)
    await client.set("key", "value")
    waiting = asyncio.create_task(client.blpop(["nothing"], timeout=5))
    await client.rpush("something", "1")  # over another connection: the first one is in use
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await client.rpush("nothing", "1")
    assert [await client.get("key") for _ in range(3)] == [b"value"] * 3
    await client.aclose()


async def test_more_commands_at_once_than_connections_are_all_answered(
    redis_url: str, redis_server: RedisServer
) -> None:
    client = command_client(redis_url, connections=4)
    assert sorted(await asyncio.gather(*(client.incr("count") for _ in range(50)))) == list(range(1, 51))
    pipe = client.pipeline(transaction=False)  # which takes a connection by itself
    pipe.get("count")
    assert await pipe.execute() == [b"50"]
    with redis_server.client() as other:
        assert len(other.client_list()) <= 1 + 4
    await client.aclose()
    with redis_server.client() as other:
        assert len(other.client_list()) == 1


async def test_who_waits_for_a_connection_is_not_overtaken_for_ever(redis_url: str) -> None:
    """Others begin all the time, and each of them would have a connection at hand."""
    client = command_client(redis_url, connections=2)
    blocked = [asyncio.create_task(client.blpop([f"list{index}"], timeout=5)) for index in range(2)]
    await asyncio.sleep(0)
    waiting = asyncio.create_task(client.incr("count"))
    await asyncio.sleep(0)
    other = command_client(redis_url)
    await other.rpush("list0", "1")
    await blocked[0]
    async with asyncio.timeout(2):
        await waiting
    await other.rpush("list1", "1")
    await blocked[1]
    for one in (client, other):
        await one.aclose()
