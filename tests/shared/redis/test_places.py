"""Places without servers; tests/faults has failovers of real clusters and Sentinels."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError

from quire.shared.redis import places
from quire.shared.redis.places import ClusterPlace, SentinelPlace, place_of
from quire.shared.redis.url import Address

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
