"""Requests of dead gateways are cancelled after the grace time. The tests use neither real time nor Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from quire.worker.queue import orphans as module
from quire.worker.queue.orphans import Orphans

GRACE_S = 4.0


class Lane:
    """A fake broker and committer: the running attempts, each request's listening gateways, and the live gateways."""

    def __init__(self) -> None:
        self.attempts = [("r", "attempt"), ("background", "attempt"), ("other", "attempt")]
        self.listeners = {"r": ["a", "b"], "other": ["c"]}
        self.live = {"a", "c", "d"}
        self.is_away = False
        self.told: list[tuple[str, list[str]]] = []

    async def listeners_of(self, request_ids: list[str]) -> dict[str, list[str]]:
        assert request_ids == [request_id for request_id, _ in self.attempts]
        if self.is_away:
            raise RedisConnectionError
        return dict(self.listeners)

    async def live_gateways(self, names: list[str]) -> set[str]:
        assert names == sorted({name for listeners in self.listeners.values() for name in listeners})
        return self.live.intersection(names)

    async def cancel(self, request_id: str, unless_beside: list[str]) -> str:
        self.told.append((request_id, unless_beside))
        return "flagged"


class Looks:
    """A fake stop event and clock: each wait advances the clock by a second, and takes no real time."""

    def __init__(self) -> None:
        self.now, self.end = 0.0, 0.0
        self.waits: list[float] = []

    def time(self) -> float:
        return self.now

    def is_set(self) -> bool:
        return self.now >= self.end

    def timeout(self, seconds: float) -> asyncio.Timeout:
        self.waits.append(seconds)
        return asyncio.timeout(None)

    async def wait(self) -> None:
        self.now += 1
        raise TimeoutError


@pytest.fixture
def lane() -> Lane:
    return Lane()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    looks = Looks()
    fake = SimpleNamespace(get_running_loop=lambda: looks, timeout=looks.timeout)
    monkeypatch.setattr(module, "asyncio", fake)
    return looks


@pytest.fixture
def look(lane: Lane, looks: Looks) -> Callable[[int], Awaitable[None]]:
    """Return a function that looks for orphans a number of times, once a second."""
    made: Any = Orphans(lane, lane, GRACE_S)  # type: ignore[arg-type]

    async def look(times: int) -> None:
        looks.end += times
        await made.run(looks)

    return look


async def test_who_has_a_gateway_that_lives_is_left_alone(lane: Lane, look: Callable[[int], Awaitable[None]]) -> None:
    await look(20)
    assert lane.told == []


async def test_who_has_none_is_cancelled_after_the_grace(lane: Lane, look: Callable[[int], Awaitable[None]]) -> None:
    lane.live.remove("a")
    await look(4)
    assert lane.told == []
    await look(1)
    assert lane.told == [("r", ["a", "b"])], "unless somebody has come to another gateway meanwhile"


async def test_who_comes_back_in_time_has_the_whole_grace_again(
    lane: Lane, look: Callable[[int], Awaitable[None]]
) -> None:
    lane.live.remove("a")
    await look(4)
    lane.listeners["r"].append("d")
    await look(1)
    lane.live.remove("d")
    await look(4)
    assert lane.told == []
    await look(1)
    assert lane.told == [("r", ["a", "b", "d"])]


async def test_while_redis_is_away_no_grace_runs_out(lane: Lane, look: Callable[[int], Awaitable[None]]) -> None:
    """While Redis is away, no gateway can renew its lease."""
    lane.live.remove("a")
    await look(4)
    lane.is_away = True
    await look(20)
    lane.is_away = False
    await look(4)
    assert lane.told == []
    await look(1)
    assert [request_id for request_id, _ in lane.told] == ["r"]


async def test_each_has_a_grace_of_its_own_after_which_it_is_cancelled_until_it_has_ended(
    lane: Lane, look: Callable[[int], Awaitable[None]]
) -> None:
    lane.listeners = {"late": ["a"], "early": ["c"]}
    lane.live.remove("c")
    await look(2)
    lane.live.remove("a")
    await look(3)
    assert [request_id for request_id, _ in lane.told] == ["early"]
    del lane.listeners["early"]
    await look(2)
    assert [request_id for request_id, _ in lane.told] == ["early", "late"]


@pytest.mark.parametrize(("grace_s", "every_s"), [(0.1, 0.1), (4.0, 1.0), (60.0, 2.0)])
async def test_it_looks_several_times_in_a_grace(lane: Lane, looks: Looks, grace_s: float, every_s: float) -> None:
    looks.end = 2
    await Orphans(lane, lane, grace_s).run(looks)  # type: ignore[arg-type]
    assert looks.waits == [every_s] * 2
