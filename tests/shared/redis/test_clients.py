"""Commands of many callers over one connection: never with an answer that belongs to another command."""

from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from quire.shared.broker.lane import Script
from quire.shared.redis.clients import LaneClient, blocking_client, command_client
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


async def test_any_number_of_commands_at_once_takes_one_connection(redis_url: str, redis_server: RedisServer) -> None:
    client = command_client(redis_url, connections=1)
    assert await asyncio.gather(*(client.incr("count") for _ in range(2000))) == list(range(1, 2001))
    with redis_server.client() as other:
        assert len(other.client_list()) == 1 + 1
    pipe = client.pipeline(transaction=False)  # which takes a connection by itself
    pipe.get("count")
    assert await pipe.execute() == [b"2000"]
    await client.aclose()
    with redis_server.client() as other:
        assert len(other.client_list()) == 1


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
        # Those that wait for a connection share one, and its failure.
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
    await asyncio.sleep(0)  # it asks
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
        for _ in range(500):  # until the server has seen the end
            if len(other.client_list()) == 1:
                break
            await asyncio.sleep(0.01)
        assert len(other.client_list()) == 1


async def test_a_script_is_sent_again_to_a_server_that_has_lost_it(redis_url: str) -> None:
    client = command_client(redis_url)
    add = Script(client, "return redis.call('INCRBY', KEYS[1], ARGV[1])")
    assert await add(keys=["sum"], args=[3]) == 3
    await client.script_flush()
    assert await add(keys=["sum"], args=[4]) == 7
    assert await add(keys=["sum"], args=[5]) == 12
    await client.aclose()
