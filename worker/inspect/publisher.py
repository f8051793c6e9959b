"""Shows the engine to those who look at it: views to a Redis channel, and only while a gateway asks for them.

While nobody looks the engine's thread does nothing for it. While somebody does, it copies its tables some ten times per
second and notes each step in a microsecond; views become rarer where that would take more than ENGINE_SHARE of its
time. What fails here is logged and never ends the worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from redis.exceptions import RedisError

from quire.shared.broker import Broker
from quire.shared.views import MAX_WORKER_LENGTH
from quire.worker.engine.engine import Engine
from quire.worker.inspect.view import EngineCopy, StepLog, read
from quire.worker.queue.engine_thread import EngineGone, EngineThread

log = logging.getLogger(__name__)

# How often we ask whether somebody looks.
ASK_S = 0.4
# Views at the most so often; of an engine that does nothing so often, for those who come to look.
VIEW_S = 0.1
IDLE_VIEW_S = 1.0
# At most this part of the time of the engine's thread, and of the interpreter, which it needs too.
ENGINE_SHARE = 0.005
RENDER_SHARE = 0.02
# An engine that does not answer for so long is asked again later.
ANSWER_S = 10.0

T = TypeVar("T")


class ViewPublisher:
    """Publishes views of one engine. `num_views` counts them."""

    def __init__(self, broker: Broker, engine: EngineThread, worker_id: str) -> None:
        self._broker = broker
        self._engine = engine
        self._worker_id = worker_id
        self.num_views = 0
        # Seconds of the engine's thread, and of another one, that the views took in all.
        self.read_s = 0.0
        self.render_s = 0.0

    async def run(self, ended: asyncio.Event) -> None:
        """Until `ended`: a flag, since redis-py can swallow a cancellation that arrives inside a command."""
        while not ended.is_set():
            try:
                if await self._broker.is_looked_at(self._worker_id):
                    await self._show(ended)
            except (RedisError, OSError, TimeoutError, EngineGone) as error:
                log.debug("no view of the engine: %s", error)
            except Exception:
                log.exception("showing the engine failed")
            await _wait(ended, ASK_S)

    async def _show(self, ended: asyncio.Event) -> None:
        """Publish views for as long as somebody looks."""
        log.info("somebody looks at the engine")
        steps = StepLog()
        await self._call(lambda engine: _observe(engine, steps))
        loop = asyncio.get_running_loop()
        asks_at, shown_at, shown = loop.time() + ASK_S, float("-inf"), None
        pause_s = 0.0
        try:
            while not ended.is_set():
                now = loop.time()
                if now >= asks_at:
                    if not await self._broker.is_looked_at(self._worker_id):
                        return
                    asks_at = now + ASK_S
                if (status := self._engine.status) != shown or now - shown_at >= IDLE_VIEW_S:
                    pause_s = await self._publish(steps)
                    shown, shown_at = status, now
                else:
                    pause_s = VIEW_S
                await _wait(ended, pause_s)
        finally:
            with suppress(EngineGone, TimeoutError):
                await self._call(lambda engine: _observe(engine, None))
            log.info(
                "nobody looks any more; %d views took %.2f ms of the engine's thread and %.2f ms of another's each",
                self.num_views,
                1000 * self.read_s / max(1, self.num_views),
                1000 * self.render_s / max(1, self.num_views),
            )

    async def _publish(self, steps: StepLog) -> float:
        """One view. Returns the time until the next may come."""
        reading = await self._call(lambda engine: read(engine, steps))
        data, render_s = await asyncio.to_thread(self._render, reading)
        await self._broker.publish_view(self._worker_id, data)
        self.num_views += 1
        self.read_s += reading.cost_s
        self.render_s += render_s
        return max(VIEW_S, reading.cost_s / ENGINE_SHARE, render_s / RENDER_SHARE)

    def _render(self, reading: EngineCopy) -> tuple[bytes, float]:
        started = time.thread_time()
        data = reading.view(self._worker_id[:MAX_WORKER_LENGTH], self.num_views).encode()
        return data, time.thread_time() - started

    async def _call(self, function: Callable[[Engine], T]) -> T:
        async with asyncio.timeout(ANSWER_S):
            return await asyncio.wrap_future(self._engine.call(function))


def _observe(engine: Engine, log: StepLog | None) -> None:
    engine.observer = log


async def _wait(ended: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await ended.wait()
