"""Every token reaches its client once and in order, whatever pub/sub loses, repeats or reorders."""

from __future__ import annotations

import asyncio
from typing import Any

from quire.gateway.stream.router import FrameRouter
from quire.shared.broker import Claim
from quire.shared.messages import Delta, Outcome, StepItem
from tests.gateway.stream.test_buffer import SCORED, Log, open_one, scored_steps, steps
from tests.support.broker_calls import recoveries_of
from tests.support.gateway.running import RunningGateway, until
from tests.support.hand_worker import IDS, TEXT, HandWorker, run


async def test_frames_that_are_lost_are_read_from_the_log(gateway: RunningGateway) -> None:
    async def act(worker: HandWorker, claim: Claim, items: list[StepItem]) -> None:
        await worker.log(claim, items)
        for index in (0, 3, 4, len(items) - 1):
            await worker.publish(items[index].encode())

    assert await run(gateway, act) == TEXT
    assert gateway.gateway.router.stats.repairs >= 1

    async def noted() -> bool:
        return await recoveries_of(gateway.gateway.broker) == {"repairs": gateway.gateway.router.stats.repairs}

    await until(noted)


async def test_frames_that_come_twice_or_in_disorder_change_nothing(gateway: RunningGateway) -> None:
    async def act(worker: HandWorker, claim: Claim, items: list[StepItem]) -> None:
        await worker.log(claim, items)
        for item in [items[2], items[0], items[0], items[1], items[2], *reversed(items), *items]:
            await worker.publish(item.encode())

    assert await run(gateway, act) == TEXT


async def test_frames_of_other_portions_than_the_log_are_cut_to_fit(gateway: RunningGateway) -> None:
    async def act(worker: HandWorker, claim: Claim, items: list[StepItem]) -> None:
        await worker.log(claim, items)
        await worker.publish(items[0].encode() + items[1].encode())
        await worker.publish(StepItem(claim.request_id, 0, (Delta(0, tuple(IDS[:5])),)).encode())
        tail = (Delta(0, tuple(IDS[3:]), "stop"),)
        await worker.publish(StepItem(claim.request_id, 3, tail, Outcome("stop")).encode())

    assert await run(gateway, act) == TEXT


async def test_frames_for_requests_that_nobody_waits_for_are_ignored(gateway: RunningGateway) -> None:
    async def act(worker: HandWorker, claim: Claim, items: list[StepItem]) -> None:
        await worker.log(claim, items)
        for item in items:
            stranger = StepItem("stranger", item.start, item.deltas, item.outcome)
            await worker.publish(stranger.encode() + item.encode())

    assert await run(gateway, act) == TEXT


async def test_frames_that_were_at_hand_together_are_given_together() -> None:
    router, buffer = open_one([])
    given = []

    def sink() -> bool:
        given.append(buffer.take())
        return True

    buffer.sink = sink
    items = steps(5, 1)
    for item in items[:3]:
        router.feed([item], 0.0)
    assert given == []
    await asyncio.sleep(0)
    assert given == [items[:3]]
    router.feed([items[3]], 0.0)
    await asyncio.sleep(0)
    assert given == [items[:3], [items[3]]]


async def test_what_came_together_for_many_prompts_is_not_read_from_the_log() -> None:
    """A client that reads has taken all earlier items, so all new items fit the buffer, however many they are."""
    ids = [f"r{index}" for index in range(64)]
    log: Any = Log([])
    router = FrameRouter(log, keepalive_s=60.0)
    buffer = router.open(ids)
    buffer.accept(None, is_logged=False)
    for together in zip(*(scored_steps(5, one) for one in ids), strict=True):
        router.feed(together, 0.0)
        given = buffer.take()
        while len(given) < len(ids):
            await buffer.ready()
            given += buffer.take()
        assert given == list(together)
    # For a client that no longer reads, the buffer keeps one item per prompt.
    for at in (5, 6):
        router.feed([StepItem(one, at, (Delta(0, (at,), logprobs=SCORED),)) for one in ids], 0.0)
    assert len(buffer._waiting) == len(ids)
    assert all(cursor.behind for cursor in buffer.cursors.values())
