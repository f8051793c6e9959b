"""Bodies that are read at the same time share a bound, and no caller takes what others need."""

from __future__ import annotations

import asyncio
import gc

import pytest
from aiohttp import web

from quire.gateway.api.body_budget import BODIES, BodyBudget
from quire.gateway.errors.api_errors import ServerBusy
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import until


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def takes(budget: BodyBudget, name: str, *sizes: int) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(budget.take(name, size, 60)) for size in sizes]


async def test_a_caller_has_half_and_the_next_room_goes_to_who_has_least() -> None:
    budget = BodyBudget(100)
    many = takes(budget, "a", *[20] * 10)
    await settled()
    assert [task.done() for task in many] == [True] * 2 + [False] * 8
    others = takes(budget, "b", 30) + takes(budget, "c", 40)
    await settled()
    # "c" waits for the room that is left over; it is not given to a smaller body of "a".
    assert [task.done() for task in others] == [True, False]
    budget.give_back("a", 20)
    await settled()
    assert others[1].done()
    budget.give_back("a", 20)
    await settled()
    assert sum(task.done() for task in many) == 3
    for task in many:
        task.cancel()


async def test_a_body_that_is_larger_than_the_bound_is_read_alone() -> None:
    budget = BodyBudget(10)
    await budget.take("a", 50, 1)
    (other,) = takes(budget, "b", 1)
    await settled()
    assert not other.done()
    budget.give_back("a", 50)
    await asyncio.wait_for(other, 5)


async def test_a_body_that_waits_too_long_is_refused_and_leaves_nothing_behind() -> None:
    freed: list[int] = []
    budget = BodyBudget(10, freed.append)
    await budget.take("a", 10, 1)
    with pytest.raises(ServerBusy) as caught:
        await budget.take("b", 10, 0.01)
    assert caught.value.headers["Retry-After"] == "1"
    gone, last = takes(budget, "c", 10) + takes(budget, "d", 10)
    await settled()
    gone.cancel()  # its client has left
    await settled()
    budget.give_back("a", 10)
    await asyncio.wait_for(last, 5)
    budget.give_back("d", 10)
    assert (budget._callers, budget._taken, budget._waiting) == ({}, 0, 0)
    assert freed == [10, 10]


async def test_the_number_of_waiting_bodies_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.gateway.api.body_budget.MAX_OWN_WAITING", 3)
    budget = BodyBudget(10)
    await budget.take("a", 10, 1)
    waiting = takes(budget, "a", *[10] * 4)
    await settled()
    with pytest.raises(ServerBusy):
        waiting[3].result()
    for task in waiting:
        task.cancel()


async def test_a_body_without_room_waits_and_is_refused_unread(start_gateway: Start) -> None:
    gateway = await start_gateway(max_bodies_bytes=1024 * 1024, body_timeout_s=0.2)
    assert gateway._runner is not None
    budget = gateway._runner.app[BODIES]
    await budget.take("another caller", 1024 * 1024, 1)
    async with gateway.worker(emit([ord("a")])):
        reply = await gateway.complete()
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "server_busy", "1")
        assert reply.headers["connection"] == "close"
        budget.give_back("another caller", 1024 * 1024)
        assert (await gateway.complete()).status == 200
    assert (budget._taken, budget._callers) == (0, {})


async def test_a_refused_body_is_not_kept_until_a_garbage_collection(start_gateway: Start) -> None:
    """An error with a reference to a frame of its own traceback kept the body of each refused call."""
    gateway = await start_gateway()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            assert (await gateway.complete(prompt="x" * 1_000_000)).status == 400

        async def all_are_gone() -> bool:
            return not any(issubclass(type(one), web.BaseRequest) for one in gc.get_objects())

        await until(all_are_gone)
    finally:
        gc.enable()
