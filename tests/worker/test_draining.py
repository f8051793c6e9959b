"""A worker that is told to stop while it takes a request over."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch

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


async def test_a_worker_parks_what_still_runs_if_it_is_asked_to(redis_url: str) -> None:
    async with Gateway(redis_url) as gateway:
        model = MockModel()
        forward = model.forward

        def slow(*arguments: Any) -> torch.Tensor:
            time.sleep(0.01)
            return forward(*arguments)

        model.forward = slow  # type: ignore[method-assign]
        engine = Engine(model, LIMITS, (EOS,), None)
        service = WorkerService(engine, model_name=MODEL, worker_id="w1", redis_url=redis_url)
        task = asyncio.create_task(service.run(0.05, park_s=500))
        request_id = await gateway.submit((3, 4), max_tokens=120, ignore_eos=True)
        await gateway.listen()
        service.stop()
        await asyncio.wait_for(task, 10)
        assert await gateway.client.hget(KEYS.request(request_id), "state") == b"parked"
        [parked] = await gateway.broker.read_parked(5)
        assert 0 < parked.emitted < 120
        assert 490 < parked.left_s <= 500
        engine.check_integrity()
