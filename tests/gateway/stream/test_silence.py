"""Silence of a request reveals lost frames, and costs little while nothing is lost."""

from __future__ import annotations

import asyncio

import pytest

from quire.gateway.stream.cursor import SILENCE_S, Cursor
from quire.shared.broker import Claim
from quire.shared.messages import Delta, Outcome, StepItem
from tests.gateway.stream.test_buffer import open_one, steps
from tests.support.gateway.running import RunningGateway, until
from tests.support.hand_worker import TEXT, HandWorker, run


def the_cursor(gateway: RunningGateway) -> Cursor:
    [buffer] = gateway.gateway.router._open
    [cursor] = buffer.cursors.values()
    return cursor


async def test_when_the_last_frame_is_lost_silence_reveals_it(gateway: RunningGateway) -> None:
    async def act(worker: HandWorker, claim: Claim, items: list[StepItem]) -> None:
        await worker.log(claim, items)
        for item in items[:-1]:
            await worker.publish(item.encode())

    began = asyncio.get_running_loop().time()
    assert await run(gateway, act) == TEXT
    assert asyncio.get_running_loop().time() - began < 2


async def test_when_no_frame_comes_at_all_the_log_is_enough(gateway: RunningGateway) -> None:
    async def act(worker: HandWorker, claim: Claim, items: list[StepItem]) -> None:
        await worker.log(claim, items)

    assert await run(gateway, act) == TEXT


@pytest.mark.slow
async def test_a_silent_request_is_not_read_and_what_is_lost_after_it_is_found_soon(gateway: RunningGateway) -> None:
    loop = asyncio.get_running_loop()
    since = 0.0

    async def act(worker: HandWorker, claim: Claim, items: list[StepItem]) -> None:
        nonlocal since

        async def is_patient() -> bool:
            return the_cursor(gateway).silence_s >= 8 * SILENCE_S

        await until(is_patient)
        assert gateway.gateway.router.stats.log_reads == 0
        await worker.log(claim, items)
        await worker.publish(items[0].encode())
        since = loop.time()

    assert await run(gateway, act) == TEXT
    # The interval starts over: it is not the one that had grown before.
    assert loop.time() - since < 4 * SILENCE_S
    assert gateway.gateway.router.stats.repairs == 1


async def test_what_was_never_published_is_found_however_many_are_silent(gateway: RunningGateway) -> None:
    """More than are asked about at once."""
    streams = [asyncio.create_task(gateway.complete(max_tokens=5)) for _ in range(70)]
    worker = HandWorker(gateway)
    claims = [await worker.claim() for _ in streams]
    for claim in claims:
        await worker.log(claim, [StepItem(claim.request_id, 0, (Delta(0, (), "stop"),), Outcome("stop"))])
    replies = await asyncio.wait_for(asyncio.gather(*streams), 20)
    assert {reply.status for reply in replies} == {200}
    assert gateway.gateway.router.stats.log_reads <= 2 * len(streams)


async def test_a_call_that_is_over_is_not_fed_and_not_checked() -> None:
    router, buffer = open_one([])
    router.close(buffer)
    router.feed(steps(1, 1), 0.0)
    await asyncio.sleep(0)
    assert buffer.take() == []
    buffer.check = pytest.fail  # type: ignore[method-assign,assignment]
    router.silence._tick(asyncio.get_running_loop().time() + 3600)


async def test_a_request_that_redis_forgot_ends_with_an_error(gateway: RunningGateway) -> None:
    worker = HandWorker(gateway)
    call = asyncio.create_task(gateway.complete(max_tokens=5))
    await worker.claim()
    await worker.broker.client.flushall()
    reply = await asyncio.wait_for(call, 20)
    assert (reply.status, reply.error["code"]) == (500, "generation_failed")
    assert "lost" in reply.error["message"]
