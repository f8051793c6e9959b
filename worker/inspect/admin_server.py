"""The worker's admin endpoints: `/health`, `/metrics` and `/debug/blocks`, for operators.

The engine is read on its thread, between two steps. If it does not respond in time, the endpoint returns 503.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from aiohttp import web

from quire.shared.protocol.keys import WORKER_TTL_S
from quire.shared.telemetry.internal_server import InternalServer, ServiceUnavailable, dump, json_response
from quire.shared.telemetry.prometheus import CONTENT_TYPE_LATEST
from quire.worker.engine.engine import Engine
from quire.worker.inspect.block_report import read_blocks
from quire.worker.inspect.metrics import WorkerMetrics
from quire.worker.inspect.snapshot import take_snapshot
from quire.worker.queue.engine_thread import EngineGone, EngineThread
from quire.worker.queue.metrics import QueueMetrics

# Longest time for which a request waits for the step in progress.
ANSWER_S = 2.0

T = TypeVar("T")


def admin_server(
    engine: EngineThread,
    listener: socket.socket,
    queue: QueueMetrics,
    info: Mapping[str, str],
    num_replaced_kernels: int,
) -> InternalServer:
    """Make the admin server of a worker on a bound socket. Arguments of `WorkerMetrics`."""
    return WorkerAdminServer(engine, listener, WorkerMetrics(engine, queue, info, num_replaced_kernels)).server


class WorkerAdminServer:
    """Serves the admin endpoints of one worker on a bound socket."""

    def __init__(self, engine: EngineThread, listener: socket.socket, metrics: WorkerMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self.server = InternalServer(
            listener, {"/metrics": self.metrics, "/health": self.health, "/debug/blocks": self.blocks}
        )

    async def health(self, request: web.Request) -> web.Response:
        """Answer GET /health: 200 while the engine's thread makes progress, idle or not."""
        reason = self._stuck()
        if reason:
            return json_response(503, {"status": "unavailable", "reason": reason})
        return json_response(200, {"status": "ok", "steps": self._engine.status.steps})

    async def metrics(self, request: web.Request) -> web.Response:
        """Answer GET /metrics."""
        snapshot, times = await self._ask(lambda engine: (take_snapshot(engine), engine.times.read()))
        text = self._metrics.render(await asyncio.to_thread(snapshot.usage), times)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def blocks(self, request: web.Request) -> web.Response:
        """Answer GET /debug/blocks."""
        report = await self._ask(read_blocks)
        body = await asyncio.to_thread(lambda: dump(report.render()))
        return web.Response(body=body, content_type="application/json")

    async def _ask(self, function: Callable[[Engine], T]) -> T:
        """Call a function of the engine on its thread. Raises ServiceUnavailable."""
        future = self._engine.call(function)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise ServiceUnavailable(self._stuck() or f"the engine is busy: no answer within {ANSWER_S:g} s") from None
        except EngineGone as error:
            raise ServiceUnavailable(str(error)) from None

    def _stuck(self) -> str:
        """Return why the engine makes no progress; empty if it does."""
        if self._engine.failure is not None:
            return f"the engine's thread failed: {self._engine.failure!r}"
        if not self._engine.is_alive():
            return "the engine's thread has ended"
        still_s = time.monotonic() - self._engine.ticked_at
        # A step may take three times as long as the slowest one so far; the heartbeat allows the same.
        is_stuck = still_s > max(WORKER_TTL_S, 3 * self._engine.status.slowest_step_s)
        return f"the engine has not moved for {still_s:.0f} s" if is_stuck else ""
