"""The worker publishes views of its engine while a viewer is connected, and makes no view otherwise."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis
from redis.asyncio.client import PubSub

from quire.shared.protocol.broker import Broker
from quire.shared.protocol.broker import gateway as gateway_verbs
from quire.shared.protocol.keys import LaneKeys
from quire.shared.protocol.messages import GenerationRequest, SamplingParams
from quire.shared.protocol.views import View
from quire.shared.redis.clients import command_client, pubsub_client
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.inspect.block_report import read_blocks
from quire.worker.inspect.publisher import ASK_S, ENGINE_SHARE, ViewPublisher
from quire.worker.queue.engine_thread import EngineThread
from tests.support.mock_model import EOS, MockModel

LIMITS = EngineLimits(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=128)
CHANNEL = LaneKeys("mock").view("w1")


class Shown:
    """An engine on its thread, its publisher, and a subscription to the published views."""

    def __init__(self, client: Redis, pubsub: PubSub) -> None:
        self.broker = Broker(client, "mock")
        self._is_looked_at, self.asks = self.broker.is_looked_at, 0
        self.broker.is_looked_at = self._asked  # type: ignore[method-assign]
        self._pubsub = pubsub
        self.engine = Engine(MockModel(), LIMITS, (EOS,), None)
        self.loop = EngineThread(self.engine, lambda commits, computed: None, lambda: None)
        self.viewer = ViewPublisher(self.broker, self.loop, "w1")
        self.ended = asyncio.Event()

    def add(self, name: str, count: int = 40, n: int = 4) -> None:
        params = SamplingParams(count, n=n, temperature=1.0, ignore_eos=True)
        self.loop.add(GenerationRequest(name, "mock", tuple(range(1, 12)), params), "attempt", ())

    async def view(self, timeout_s: float = 10.0) -> View | None:
        """Return the next view, or None if no view arrives within the timeout."""
        until = time.monotonic() + timeout_s
        while (left := until - time.monotonic()) > 0:
            message = await self._pubsub.get_message(timeout=left)
            if message is not None and message["type"] == "message":
                return View.decode(message["data"])
        return None

    async def _asked(self, worker_id: str) -> bool:
        self.asks += 1
        return await self._is_looked_at(worker_id)

    async def until_asked_again(self) -> None:
        """Wait until the publisher has asked for viewers twice more."""
        asks = self.asks
        async with asyncio.timeout(60):
            while self.asks < asks + 3:  # noqa: ASYNC110 - the publisher tells nobody
                await asyncio.sleep(0.005)

    async def until_idle(self) -> None:
        async with asyncio.timeout(60):
            while self.engine.requests or self.loop._commands:  # noqa: ASYNC110 - the thread tells nobody
                await asyncio.sleep(0.005)


@asynccontextmanager
async def showing(redis_url: str) -> AsyncIterator[Shown]:
    client, subscriber = command_client(redis_url), pubsub_client(redis_url)
    pubsub = subscriber.pubsub()
    await pubsub.subscribe(CHANNEL)
    shown = Shown(client, pubsub)
    shown.loop.start()
    task = asyncio.create_task(shown.viewer.run(shown.ended))
    try:
        yield shown
    finally:
        shown.ended.set()
        await task
        shown.loop.stop()
        await asyncio.to_thread(shown.loop.join)
        await pubsub.aclose()
        await subscriber.aclose()
        await client.aclose()


async def test_while_nobody_looks_nothing_is_read_noted_or_published(redis_url: str) -> None:
    async with showing(redis_url) as shown:
        shown.add("r1")
        await shown.until_asked_again()
        await shown.until_idle()
        assert shown.engine.num_steps >= 40
        assert shown.engine.observer is None
        assert shown.viewer.num_views == 0
        assert await shown.view(0) is None


@pytest.mark.alone
@pytest.mark.slow
async def test_views_begin_within_a_second_and_end_when_nobody_asks_any_more(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_verbs, "VIEW_TTL_S", 0.7)
    async with showing(redis_url) as shown:
        looked_at = time.monotonic()
        await shown.broker.look("w1")
        first = await shown.view()
        assert first is not None
        assert time.monotonic() - looked_at < 1
        assert first.worker == "w1"
        assert shown.engine.observer is not None
        while shown.engine.observer is not None:
            shown.add(f"r{time.monotonic_ns()}", count=2)  # the engine always has a request to show
            await shown.view(ASK_S / 4)
        assert time.monotonic() - looked_at < 0.7 + 5 * ASK_S
        assert await shown.view(ASK_S) is None
        await shown.broker.look("w1")
        assert await shown.view(1.0) is not None, "and again for the next one"


async def test_what_is_published_is_what_the_operators_page_says(redis_url: str) -> None:
    async with showing(redis_url) as shown:
        await shown.broker.look("w1")
        assert await shown.view() is not None
        shown.add("r1")
        await shown.until_idle()
        told = await asyncio.wrap_future(shown.loop.call(lambda engine: read_blocks(engine).render()))
        async with asyncio.timeout(60):
            while (view := await shown.view()) is None or view.figures["steps"] < told["usage"]["steps"]:
                await shown.broker.look("w1")
        assert view.figures == {name: told["usage"][name] for name in view.figures}
        assert view.figures["copies"] == 3
        assert view.sequences == ()
        assert len(view.cells) == len(told["blocks"]) > 0


@pytest.mark.alone
@pytest.mark.slow
async def test_a_look_costs_the_engine_less_than_a_hundredth(redis_url: str) -> None:
    async with showing(redis_url) as shown:
        await shown.broker.look("w1")
        assert await shown.view() is not None
        began, read_s = time.monotonic(), shown.viewer.read_s
        for _ in range(4):
            await shown.broker.look("w1")
            shown.add(f"r{time.monotonic_ns()}", count=100)
            assert await shown.view() is not None
        elapsed = time.monotonic() - began
        assert shown.viewer.num_views <= 10 * elapsed + 2, "ten a second at the most"
        assert shown.viewer.read_s - read_s < 2 * ENGINE_SHARE * elapsed


async def test_an_engine_that_is_gone_is_no_failure_of_the_viewer(redis_url: str) -> None:
    async with showing(redis_url) as shown:
        await shown.broker.look("w1")
        assert await shown.view() is not None
        shown.loop.stop()
        await asyncio.to_thread(shown.loop.join)
        views = shown.viewer.num_views
        await shown.until_asked_again()
        assert shown.viewer.num_views <= views + 1, "one may have been under way"
