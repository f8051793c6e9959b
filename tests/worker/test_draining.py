"""A worker that is told to stop while it takes a request over."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.shared.broker import Broker, Claim, QueueReader, new_id
from quire.worker.engine.engine import Engine
from quire.worker.queue.consumer import Consumer
from quire.worker.service import LeaseTimes, WorkerService
from tests.support.mock_model import EOS, MockModel
from tests.worker.test_service import KEYS, LIMITS, MODEL, Gateway

ANSWER_S = 0.1


@pytest.mark.parametrize(("deaths", "state"), [(0, b"done"), (2, b"queued")])
async def test_what_was_being_taken_over_ends_or_is_handed_back(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, deaths: int, state: bytes
) -> None:
    """Redis answers the claim only after the worker has read for the last time."""
    asked, answer = asyncio.Event(), asyncio.Event()
    claim: Any = Broker.claim
    run: Any = Consumer.run

    async def late(*args: Any) -> Claim | None:
        found: Claim | None = await claim(*args)
        asked.set()
        await answer.wait()
        return found

    async def run_to_the_end(consumer: Consumer) -> None:
        await run(consumer)
        asyncio.get_running_loop().call_later(ANSWER_S, answer.set)

    async with Gateway(redis_url) as gateway:
        await gateway.broker.create_groups()
        request_id = await gateway.submit((3, 4))
        [delivery] = await QueueReader(gateway.client, MODEL, "dead").read(1, 0)
        for index in range(deaths):
            await gateway.broker.claim(delivery, "dead", new_id(), f"process {index}")
        monkeypatch.setattr(Broker, "claim", late)
        monkeypatch.setattr(Consumer, "run", run_to_the_end)
        engine = Engine(MockModel(), LIMITS, (EOS,), None)
        leases = LeaseTimes(lease_s=0.2)
        service = WorkerService(engine, model_name=MODEL, worker_id="w1", redis_url=redis_url, leases=leases)
        task = asyncio.create_task(service.run(5.0))
        await asyncio.wait_for(asked.wait(), 10)
        service.stop()
        await asyncio.wait_for(task, 10)
        assert await gateway.client.hget(KEYS.request(request_id), "state") == state
