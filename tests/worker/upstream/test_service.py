"""The worker service with upstreams: between a real Redis and real HTTP servers; the test plays the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from tokenizers import Tokenizer

from quire.shared.protocol.states import ParkReply
from quire.worker.service import LeaseTimes, WorkerService
from quire.worker.upstream.client import UpstreamClient
from quire.worker.upstream.pool import UpstreamPool
from quire.worker.upstream.runtime import ModelFacts, UpstreamRuntime
from tests.support.upstreams import FakeUpstream, Fault, answer
from tests.worker.test_service import MODEL, Gateway, assert_drained

pytestmark = pytest.mark.usefixtures("short_waits", "short_reads")


@pytest.fixture
def short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.worker.queue.consumer.BLOCK_S", 0.05)
    monkeypatch.setattr("quire.worker.upstream.executor.STRANDED_S", 0.2)


@asynccontextmanager
async def serving(
    redis_url: str, name: str, *upstreams: FakeUpstream, drain_s: float = 0.0, park_s: int = 0
) -> AsyncIterator[WorkerService]:
    tokenizer = upstreams[0].tokenizer
    pool = UpstreamPool([UpstreamClient(one.url, "", 10, 60) for one in upstreams], tokenizer, MODEL, "")
    runtime = UpstreamRuntime(pool, ModelFacts(tokenizer, 269, frozenset({268}), 500), 8)
    leases = LeaseTimes(lease_s=2.0, beat_s=0.1)
    service = WorkerService(runtime, model_name=MODEL, worker_id=name, redis_url=redis_url, leases=leases)
    task = asyncio.create_task(service.run(drain_s, park_s))
    try:
        yield service
    finally:
        service.stop()
        await task


async def emitted(gateway: Gateway, request_id: str, count: int) -> None:
    """Wait until a request has emitted some tokens."""
    while request_id not in gateway.items or gateway.items[request_id][-1].end < count:
        await gateway.listen()


async def test_requests_are_answered_and_the_card_tells_what_is_free(redis_url: str, tokenizer: Tokenizer) -> None:
    upstream = FakeUpstream(tokenizer)
    async with upstream.running(), Gateway(redis_url) as gateway, serving(redis_url, "w1", upstream):
        ids = [await gateway.submit((number + 1, 5), max_tokens=20) for number in range(10)]
        for number, request_id in enumerate(ids):
            assert (await gateway.result(request_id))[0] == answer((number + 1, 5), 20, tokenizer)
        await assert_drained(gateway, 10)
        async with asyncio.timeout(60):
            while (card := (await gateway.broker.live_workers())[0]).free_blocks < 8:  # noqa: ASYNC110 - of the next beat
                await asyncio.sleep(0.02)
        assert (card.max_model_len, card.total_blocks, card.running) == (200, 8, 0)


async def test_a_worker_without_an_upstream_hands_its_requests_to_one_that_has(
    redis_url: str, tokenizer: Tokenizer
) -> None:
    slow, other = FakeUpstream(tokenizer, holds_after=20), FakeUpstream(tokenizer)
    async with AsyncExitStack() as servers, Gateway(redis_url) as gateway:
        await servers.enter_async_context(slow.running())
        async with other.running():
            pass  # its port is known
        async with serving(redis_url, "w1", slow), serving(redis_url, "w2", other):
            request_id = await gateway.submit((1, 5), max_tokens=100)
            await emitted(gateway, request_id, 5)
            assert other.bodies == []
            await servers.aclose()
            async with other.running():
                tokens, outcome = await gateway.result(request_id)
                free = {card.worker_id: card.free_blocks for card in await gateway.broker.live_workers()}
                assert free["w1"] == 0
    assert (tokens, outcome) == (answer((1, 5), 100, tokenizer), "length")
    last = gateway.items[request_id][-1].outcome
    assert last is not None
    assert not last.is_exact
    assert len(slow.bodies) == len(other.bodies) == 1


async def test_a_request_that_may_have_ended_the_upstream_is_handed_to_nobody(
    redis_url: str, tokenizer: Tokenizer
) -> None:
    deadly, other = FakeUpstream(tokenizer), FakeUpstream(tokenizer)
    deadly.faults += [Fault("cut", 0)] * 3
    async with AsyncExitStack() as servers, other.running(), Gateway(redis_url) as gateway:
        await servers.enter_async_context(deadly.running())
        async with serving(redis_url, "w1", deadly):
            request_id = await gateway.submit((1, 5))
            async with asyncio.timeout(60):
                while not deadly.bodies:  # noqa: ASYNC110 - nothing tells when it is called
                    await asyncio.sleep(0.001)
            await servers.aclose()
            async with serving(redis_url, "w2", other):
                await asyncio.sleep(1)
                assert other.bodies == []
                async with deadly.running():
                    assert (await gateway.result(request_id))[1] == "error"
    assert len(deadly.bodies) == 3


async def test_a_worker_that_stops_hands_its_requests_back(redis_url: str, tokenizer: Tokenizer) -> None:
    upstream = FakeUpstream(tokenizer, holds_after=20)
    async with upstream.running(), Gateway(redis_url) as gateway:
        async with serving(redis_url, "w1", upstream):
            request_id = await gateway.submit((1, 5), max_tokens=60)
            await emitted(gateway, request_id, 5)
        async with asyncio.timeout(60):
            while upstream.open:  # noqa: ASYNC110 - nothing tells when it is closed
                await asyncio.sleep(0.01)
        upstream.go_on.set()
        async with serving(redis_url, "w2", upstream):
            assert (await gateway.result(request_id))[0] == answer((1, 5), 60, tokenizer)


async def test_a_worker_that_drains_ends_its_requests(redis_url: str, tokenizer: Tokenizer) -> None:
    upstream = FakeUpstream(tokenizer, holds_after=20)
    async with upstream.running(), Gateway(redis_url) as gateway:
        async with serving(redis_url, "w1", upstream, drain_s=60):
            request_id = await gateway.submit((1, 5), max_tokens=60)
            await emitted(gateway, request_id, 5)
            asyncio.get_running_loop().call_later(0.1, upstream.go_on.set)  # while the worker drains
        assert (await gateway.result(request_id))[0] == answer((1, 5), 60, tokenizer)
    assert len(upstream.bodies) == 1


async def test_a_request_is_parked_and_continued(redis_url: str, tokenizer: Tokenizer) -> None:
    upstream = FakeUpstream(tokenizer, holds_after=20)
    async with upstream.running(), Gateway(redis_url) as gateway, serving(redis_url, "w1", upstream):
        request_id = await gateway.submit((1, 5), max_tokens=60)
        await emitted(gateway, request_id, 5)
        assert await gateway.broker.park(request_id, retention_s=60) is ParkReply.PARKED
        async with asyncio.timeout(60):
            while upstream.open:  # noqa: ASYNC110 - nothing tells when it is closed
                await asyncio.sleep(0.01)
        upstream.go_on.set()
        await gateway.broker.unpark(request_id)
        assert (await gateway.result(request_id))[0] == answer((1, 5), 60, tokenizer)


async def test_a_cancelled_request_leaves_its_upstream(redis_url: str, tokenizer: Tokenizer) -> None:
    upstream = FakeUpstream(tokenizer, holds_after=20)
    async with upstream.running(), Gateway(redis_url) as gateway, serving(redis_url, "w1", upstream):
        request_id = await gateway.submit((1, 5), max_tokens=100)
        await emitted(gateway, request_id, 5)
        await gateway.broker.cancel(request_id)
        assert (await gateway.result(request_id))[1] == "cancelled"
        async with asyncio.timeout(60):
            while upstream.open:  # noqa: ASYNC110 - nothing tells when it is closed
                await asyncio.sleep(0.01)
        await assert_drained(gateway, 1)
