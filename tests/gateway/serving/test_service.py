"""The wiring of a gateway: its parts live from start to close, and leave nothing behind."""

from __future__ import annotations

import asyncio

from quire.gateway.model.served_model import load_model
from quire.gateway.serving.service import Gateway
from tests.support.gateway.running import RunningGateway


async def test_a_gateway_that_is_closed_leaves_no_task_behind(gateway: RunningGateway) -> None:
    settings = gateway.settings
    before = asyncio.all_tasks()
    other = Gateway(settings, load_model(settings.model, settings.name))
    await other.start()
    await asyncio.wait_for(other.subscription.ready.wait(), 10)
    assert other.redis_problems() == []
    await other.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before


async def test_a_request_without_a_listener_is_cancelled_unless_its_client_may_return(
    gateway: RunningGateway,
) -> None:
    one, cancelled = gateway.gateway, []
    one.canceller.cancel = cancelled.extend  # type: ignore[method-assign]
    with one.listening(["a" * 32]) as buffer:
        buffer.is_responsible = True
        assert one.router.has("a" * 32)
    assert not one.router.has("a" * 32)
    assert cancelled == ["a" * 32]
    with one.listening(["b" * 32]):
        pass  # another gateway is responsible
    one.draining = True
    with one.listening(["c" * 32], can_return=True) as buffer:
        buffer.is_responsible = True
    assert cancelled == ["a" * 32]
    with one.listening(["d" * 32], can_return=False) as buffer:
        buffer.is_responsible = True
    assert cancelled == ["a" * 32, "d" * 32]


async def test_problems_are_named(gateway: RunningGateway) -> None:
    one = gateway.gateway
    one.worker_registry.redis_answers = False
    one.subscription.ready.clear()
    assert one.redis_problems() == ["Redis does not answer", "not subscribed to the workers' output"]
