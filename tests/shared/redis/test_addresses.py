"""The URL of Redis, and which server of several a lane is at."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError, ResponseError

from quire.shared.redis import places
from quire.shared.redis.clients import blocking_client, command_client
from quire.shared.redis.lane_client import LaneClient
from quire.shared.redis.places import ClusterPlace, SentinelPlace, place_of
from quire.shared.redis.url import Address, BrokerUnavailable, parse_redis_url, redact
from tests.support.redis_server import RedisServer

# --- url --------------------------------------------------------------------------------------------------------------


def test_one_server() -> None:
    url = parse_redis_url("redis://user:p%40ss@host:6380/3")
    assert (url.kind, url.nodes, url.is_tls) == ("single", (Address("host", 6380),), False)
    assert url.options == {"username": "user", "password": "p@ss", "db": 3}
    assert parse_redis_url("redis://").nodes == (Address("localhost", 6379),)
    assert parse_redis_url("redis://[::1]:7000").nodes == (Address("::1", 7000),)


def test_a_unix_socket() -> None:
    url = parse_redis_url("unix:///run/with%20space/redis.sock?db=2&password=x")
    assert (url.path, url.options) == ("/run/with space/redis.sock", {"db": 2, "password": "x"})


def test_sentinels() -> None:
    url = parse_redis_url("redis+sentinel://:hidden@a,b:7,[::1]:8/my%20master/2?sentinel_password=other")
    assert (url.kind, url.service) == ("sentinel", "my master")
    assert url.nodes == (Address("a", 26379), Address("b", 7), Address("::1", 8))
    assert url.options == {"password": "hidden", "db": 2}
    assert url.sentinel_options == {"password": "other"}
    assert "hidden" not in url.shown
    assert "other" not in url.shown


def test_a_cluster_with_tls() -> None:
    url = parse_redis_url("rediss+cluster://a:1,b:2?ssl_ca_certs=/ca.pem&ssl_check_hostname=false&password=x")
    assert (url.kind, url.is_tls) == ("cluster", True)
    assert url.options == {"ssl_ca_certs": "/ca.pem", "ssl_check_hostname": False, "password": "x"}


def test_sentinels_are_asked_over_tls_too() -> None:
    assert parse_redis_url("rediss+sentinel://a/s?ssl_ca_certs=/ca.pem").sentinel_options == {"ssl_ca_certs": "/ca.pem"}


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://host", "http scheme"),
        ("host:6379", "scheme"),
        ("redis://a:1,b:2", r"several hosts need redis\+sentinel"),
        ("redis://host:0", "'host:0' is not host:port"),
        ("redis://host:70000", "is not host:port"),
        ("redis+cluster://a:1,,b:x", "is not host:port"),
        ("redis://host/one", "'one' is not the number of a database"),
        ("redis://host/0/1", "says more than a database"),
        ("redis://host/1?db=2", "two databases, 1 and 2"),
        ("redis+cluster://host/1", "a cluster has the database 0 only, not 1"),
        ("redis+sentinel://host", "the service that the Sentinels watch is missing"),
        ("redis+sentinel://host/s/x", "'x' is not the number"),
        ("redis://host?socket_timeout=1", "socket_timeout is not an option; there are db, password"),
        ("redis://host?retry_on_timeout=yes", "retry_on_timeout is not an option"),
        ("redis://host?ssl_ca_certs=/x", "ssl_ca_certs needs rediss://"),
        ("rediss://host?ssl_cert_reqs=maybe", "none, optional, required"),
        ("rediss://host?ssl_check_hostname=maybe", "true or false"),
        ("redis://host?sentinel_password=x", "for redis.sentinel"),
        ("redis://host?db=1&db=1", "db is there twice"),
        ("redis://host?db", "bad query field"),
        ("redis://user:a@host?username=other", "two usernames"),
        ("redis://:a#b@host", "write that of a password as %23"),
        ("unix://run/redis.sock", "third slash"),
    ],
)
def test_what_is_wrong_is_named_with_the_remedy(url: str, why: str) -> None:
    with pytest.raises(BrokerUnavailable, match=why) as raised:
        parse_redis_url(url)
    assert "Give --redis-url (QUIRE_REDIS_URL) as redis://host:6379/0" in str(raised.value)


def test_passwords_are_not_shown() -> None:
    url = "redis+sentinel://user:one@a,b/s?password=two&sentinel_password=three&db=1"
    assert redact(url) == "redis+sentinel://user:***@a,b/s?password=***&sentinel_password=***&db=1"
    with pytest.raises(BrokerUnavailable) as raised:
        parse_redis_url("redis://:secret@host:x")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hid/den@host:6379/0",
        "redis://:12/hidden@host",
        "redis://:hid?den@host",
        "redis://:hid?den=1@host",
        "redis://user:p@hidden/hidden@host",
        "redis://user:hid[den@host",
        "redis+sentinel://:hid/den@host/s",
        "redis:/:hidden@host",
        ":hidden@host:6379",
        "user:hidden@host:6379",
        "redis://host?PASSWORD=hidden",
    ],
)
def test_no_part_of_a_password_that_is_not_written_as_it_must_be_is_shown(url: str) -> None:
    with pytest.raises(BrokerUnavailable) as raised:
        parse_redis_url(url)
    shown = str(raised.value)
    assert not any(part in shown for part in ("hid/", "hid?", "'hid", ":hid", "hidden", "den@", "den=")), shown
    assert "%2F" in shown or "PASSWORD is not an option" in shown


def test_an_at_sign_is_no_end_of_a_password_in_the_query() -> None:
    assert parse_redis_url("redis://host/0?password=a@b").options["password"] == "a@b"
    with pytest.raises(BrokerUnavailable, match="'one' is not the number of a database"):
        parse_redis_url("redis://host/one?password=a@b")


# --- places -----------------------------------------------------------------------------------------------------------
# Places without servers; tests/faults has failovers of real clusters and Sentinels.


A, B, C = Address("a", 1), Address("b", 2), Address("c", 3)
SLOTS = [[0, 99, [b"a", 1, b"id"]], [100, 16383, [b"b", 2, b"id"], [b"c", 3, b"id"]]]


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> dict[Address, Any]:
    """Replies of the nodes; a node without one does not answer."""
    found: dict[Address, Any] = {}

    async def ask(node: Address, is_tls: bool, options: dict[str, Any], *command: str) -> Any:
        if node not in found:
            raise RedisConnectionError("silent")
        return found[node]

    monkeypatch.setattr(places, "_ask", ask)
    return found


async def test_a_fixed_place_is_its_url() -> None:
    assert await place_of("redis://a:1", "lane").locate() == A
    assert place_of("redis://a:1", "lane") is place_of("redis://a:1", "lane")


async def test_sentinels_are_asked_until_one_answers(replies: dict[Address, Any]) -> None:
    place = place_of("redis+sentinel://a:1,b:2/service", "")
    assert isinstance(place, SentinelPlace)
    replies[B] = [b"c", b"3"]
    assert (await place.locate(), place.moves) == (C, 1)
    replies[B] = [b"a", b"1"]
    assert (await place.locate(), place.moves) == (A, 2)
    replies[B] = None
    with pytest.raises(RedisConnectionError, match="knows no service 'service'"):
        await place.locate()


async def test_a_sentinel_that_names_a_replica_is_not_believed(replies: dict[Address, Any]) -> None:
    place = place_of("redis+sentinel://a:1/other", "")
    replies[A] = [b"c", b"3"]
    await place.locate()
    with pytest.raises(RedisConnectionError, match=r"c:3 is a slave and not the master of other"):
        await place.verify(lambda *command: asyncio.sleep(0, [b"slave"]))
    await place.verify(lambda *command: asyncio.sleep(0, [b"master"]))


async def test_a_lane_of_a_cluster_is_at_the_master_of_its_slot(replies: dict[Address, Any]) -> None:
    replies[A] = SLOTS
    place = ClusterPlace(places.parse_redis_url("redis+cluster://a:1"), slot=100)
    assert await place.locate() == B
    assert await place.masters() == [A, B]
    place.doubt(MovedError("100 c:3"), B)
    assert await place.locate() == C
    place.doubt()
    assert await place.locate() == B


async def test_a_slot_that_no_node_serves_is_an_error(replies: dict[Address, Any]) -> None:
    replies[A] = SLOTS[:1]
    with pytest.raises(RedisConnectionError, match="no node serves the slot"):
        await ClusterPlace(places.parse_redis_url("redis+cluster://a:1"), slot=100).locate()


# --- lane client ------------------------------------------------------------------------------------------------------
# All commands of a client share one connection. The client replaces a broken connection.


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
