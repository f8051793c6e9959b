"""All commands of a client share one connection. The client replaces a broken connection."""

from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import ResponseError

from quire.shared.redis.clients import blocking_client, command_client
from quire.shared.redis.lane_client import LaneClient
from tests.support.redis_server import RedisServer


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


async def test_any_number_of_commands_at_once_takes_one_connection(redis_url: str, redis_server: RedisServer) -> None:
    client = command_client(redis_url, connections=1)
    assert await asyncio.gather(*(client.incr("count") for _ in range(2000))) == list(range(1, 2001))
    with redis_server.client() as other:
        assert len(other.client_list()) == 1 + 1
    pipe = client.pipeline(transaction=False)  # a pipeline takes its own connection
    pipe.get("count")
    assert await pipe.execute() == [b"2000"]
    await client.aclose()
    with redis_server.client() as other:
        assert len(other.client_list()) == 1


async def test_who_leaves_while_the_connection_is_made_leaves_it_to_the_others(redis_url: str) -> None:
    client = command_client(redis_url)
    leaves, stays = asyncio.create_task(client.client_id()), asyncio.create_task(client.client_id())
    await asyncio.sleep(0)
    leaves.cancel()
    assert await stays == await client.client_id()
    await client.aclose()


async def test_who_was_slow_to_hear_where_the_lane_is_uses_what_others_have_opened(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = command_client(redis_url)
    await client.ping()
    broken, answer = client._link, asyncio.Event()
    assert broken is not None
    answers = iter((answer,))

    async def recheck() -> None:
        if (waits := next(answers, None)) is not None:
            await waits.wait()

    monkeypatch.setattr(client._place, "recheck", recheck)
    slow = asyncio.create_task(client.client_id())
    await asyncio.sleep(0)  # the task asks where the lane is
    broken.close()
    opened = await client.client_id()
    answer.set()
    assert await slow == opened == await client.client_id()
    await client.aclose()


async def test_a_client_that_is_closed_while_it_connects_leaves_no_connection(
    redis_url: str, redis_server: RedisServer
) -> None:
    client: LaneClient = command_client(redis_url)
    waiting = asyncio.create_task(client.client_id())
    await asyncio.sleep(0)
    await client.aclose()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with redis_server.client() as other:
        for _ in range(500):  # until the server has closed the connection
            if len(other.client_list()) == 1:
                break
            await asyncio.sleep(0.01)
        assert len(other.client_list()) == 1
