"""The command about parked requests: list, park and unpark over several lanes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from redis import Redis

from quire.gateway.admin.parked_requests import run
from quire.gateway.admin.parking_settings import ParkingSettings
from quire.shared.broker import Broker, QueueBounds, QueueReader, new_id
from quire.shared.command_line import CommandError
from quire.shared.keys import LaneKeys
from quire.shared.messages import GenerationRequest, SamplingParams
from quire.shared.redis.clients import command_client

BOUNDS = QueueBounds(100, 10_000)


def body(pooling: str = "") -> bytes:
    return GenerationRequest("r", "one", (1, 2), SamplingParams(max_tokens=3), pooling=pooling).encode()


def at(redis_url: str, lane: str, work: Callable[[Broker], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine with a broker of a lane."""

    async def with_broker() -> Any:
        client = command_client(redis_url, lane)
        try:
            return await work(Broker(client, lane))
        finally:
            await client.aclose()

    return asyncio.run(with_broker())


async def submit(broker: Broker, name: str, pooling: str = "") -> None:
    await broker.submit(name, body(pooling), gateway="g", cost=3, bounds=BOUNDS)


@pytest.fixture
def lanes(redis_url: str) -> str:
    """Lane `one` with a running and a waiting request and an embedding; `two/b` with a waiting request."""

    async def one(broker: Broker) -> None:
        await broker.create_groups()
        await submit(broker, "running")
        [delivery] = await QueueReader(broker.client, "one", "w").read(1, 0)
        assert await broker.claim(delivery, "w", new_id()) is not None
        await submit(broker, "waiting")
        await submit(broker, "vector", "mean")

    at(redis_url, "one", one)
    at(redis_url, "two/b", lambda broker: submit(broker, "other"))
    return redis_url


def parked(redis_url: str, lane: str) -> set[str]:
    with Redis.from_url(redis_url) as client:
        return {name.decode() for name in client.zrange(LaneKeys(lane).parked, 0, -1)}


def test_all_requests_are_parked_but_embeddings(lanes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ParkingSettings(action="park", redis_url=lanes), {}) == 0
    assert capsys.readouterr().out == "3 requests are parked\n"
    assert (parked(lanes, "one"), parked(lanes, "two/b")) == ({"running", "waiting"}, {"other"})
    assert run(ParkingSettings(redis_url=lanes), {}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1:4] for line in lines] == [["one", "standard", "0"]] * 2 + [["two/b", "standard", "0"]]
    assert run(ParkingSettings(action="unpark", redis_url=lanes), {}) == 0
    assert capsys.readouterr().out == "3 requests are queued again\n"
    assert parked(lanes, "one") == parked(lanes, "two/b") == set()


def test_the_requests_of_one_worker_or_one_model_are_parked(lanes: str) -> None:
    assert run(ParkingSettings(action="park", worker="w", redis_url=lanes), {}) == 0
    assert (parked(lanes, "one"), parked(lanes, "two/b")) == ({"running"}, set())
    assert run(ParkingSettings(action="park", served_model_name="two/b", redis_url=lanes), {}) == 0
    assert (parked(lanes, "one"), parked(lanes, "two/b")) == ({"running"}, {"other"})


def test_one_request_is_parked_for_the_time_that_is_asked_for(lanes: str) -> None:
    assert run(ParkingSettings(action="park", id="waiting", retention_s=60, redis_url=lanes), {}) == 0
    assert parked(lanes, "one") == {"waiting"}
    [one] = at(lanes, "one", lambda broker: broker.read_parked(5))
    assert 50 < one.left_s <= 60
    assert run(ParkingSettings(action="unpark", id="waiting", redis_url=lanes), {}) == 0
    for action, what in (("park", "parked"), ("unpark", "queued again")):
        with pytest.raises(CommandError, match=f"'unknown' cannot be {what}"):
            run(ParkingSettings(action=action, id="unknown", redis_url=lanes), {})


def test_all_requests_of_a_call_are_parked(redis_url: str) -> None:
    for name in ("call", "call-1", "call-2", "calls"):
        at(redis_url, "one", lambda broker, name=name: submit(broker, name))  # type: ignore[misc]
    assert run(ParkingSettings(action="park", id="call", redis_url=redis_url), {}) == 0
    assert parked(redis_url, "one") == {"call", "call-1", "call-2"}


def test_none_is_said_to_be_parked(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ParkingSettings(redis_url=redis_url), {}) == 0
    assert capsys.readouterr().err == "no request is parked\n"


def test_a_worker_is_named_only_to_park(redis_url: str) -> None:
    with pytest.raises(CommandError, match="--worker belongs to the action `park`"):
        run(ParkingSettings(action="unpark", worker="w", redis_url=redis_url), {})


def test_a_redis_that_does_not_answer_is_named() -> None:
    with pytest.raises(CommandError, match=r"no Redis at redis://127\.0\.0\.1:1/0.*--redis-url"):
        run(ParkingSettings(redis_url="redis://127.0.0.1:1/0"), {})
