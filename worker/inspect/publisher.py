"""Publishes views of the engine to a Redis channel, only while a gateway asks for them.

Without viewers the engine's thread does nothing for this. With viewers it copies its tables about ten times per second
and notes each step in some microseconds. Views become rarer where that would take more than ENGINE_SHARE of the
thread's time. A failure here is logged and never ends the worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from redis.exceptions import RedisError

from quire.shared.protocol.broker import Broker
from quire.shared.protocol.views import MAX_WORKER_LENGTH
from quire.worker.engine.engine import Engine
from quire.worker.inspect.engine_view import make_view
from quire.worker.inspect.snapshot import Snapshot, take_snapshot
from quire.worker.inspect.step_log import RecentSteps, StepLog
from quire.worker.queue.engine_thread import EngineGone, EngineThread

log = logging.getLogger(__name__)

# Interval at which Redis is asked for viewers.
ASK_S = 0.4
# Shortest time between two views. An idle engine is shown less often, for viewers that join.
VIEW_S = 0.1
IDLE_VIEW_S = 1.0
# Largest share of the time of the engine's thread for copying, and of the interpreter for rendering.
ENGINE_SHARE = 0.005
RENDER_SHARE = 0.02
# If the engine does not respond within this time, it is asked again later.
ANSWER_S = 10.0

T = TypeVar("T")


class ViewPublisher:
    """Publishes views of one engine. `num_views` counts them."""

    def __init__(self, broker: Broker, engine: EngineThread, worker_id: str) -> None:
        self._broker = broker
        self._engine = engine
        self._worker_id = worker_id
        self.num_views = 0
        # Total time of the views: on the engine's thread, and on another one.
        self.read_s = 0.0
        self.render_s = 0.0

    async def run(self, ended: asyncio.Event) -> None:
        """Publish views while there are viewers, until `ended` is set.

        A flag ends it because redis-py can swallow a cancellation that arrives during a command.
        """
        while not ended.is_set():
            try:
                if await self._broker.is_looked_at(self._worker_id):
                    await self._publish_while_viewed(ended)
            except (RedisError, OSError, TimeoutError, EngineGone) as error:
                log.debug("no view of the engine could be published: %s", error)
            except Exception:
                log.exception("publishing a view of the engine failed")
            await _wait(ended, ASK_S)

    async def _publish_while_viewed(self, ended: asyncio.Event) -> None:
        log.info("publishing views of the engine: it has viewers")
        steps = await self._call(_observe)
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
                await self._call(lambda engine: setattr(engine, "observer", None))
            log.info(
                "the engine has no viewers any more; each of %d views took %.2f ms of its thread and %.2f ms elsewhere",
                self.num_views,
                1000 * self.read_s / max(1, self.num_views),
                1000 * self.render_s / max(1, self.num_views),
            )

    async def _publish(self, steps: StepLog) -> float:
        """Publish one view. Returns the seconds to wait before the next one."""
        snapshot, recent, read_s = await self._call(lambda engine: _read(engine, steps))
        data, render_s = await asyncio.to_thread(self._render, snapshot, recent)
        await self._broker.publish_view(self._worker_id, data)
        self.num_views += 1
        self.read_s += read_s
        self.render_s += render_s
        return max(VIEW_S, read_s / ENGINE_SHARE, render_s / RENDER_SHARE)

    def _render(self, snapshot: Snapshot, recent: RecentSteps) -> tuple[bytes, float]:
        started = time.thread_time()
        data = make_view(snapshot, recent, self._worker_id[:MAX_WORKER_LENGTH], self.num_views).encode()
        return data, time.thread_time() - started

    async def _call(self, function: Callable[[Engine], T]) -> T:
        async with asyncio.timeout(ANSWER_S):
            return await asyncio.wrap_future(self._engine.call(function))


def _read(engine: Engine, steps: StepLog) -> tuple[Snapshot, RecentSteps, float]:
    """Read the parts of a view, and return the seconds of the engine's thread that this took."""
    started = time.thread_time()
    return take_snapshot(engine), steps.take(), time.thread_time() - started


def _observe(engine: Engine) -> StepLog:
    """Start a log of the engine's steps."""
    engine.observer = log = StepLog(engine.groups)
    return log


async def _wait(ended: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await ended.wait()
