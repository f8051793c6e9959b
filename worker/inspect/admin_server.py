"""The inside of a worker, for operators: `/health`, `/metrics` and `/debug/blocks`.

What is the engine's is read on its thread, between two steps; an engine that does not answer in time is a 503.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from quire.shared.broker import WORKER_TTL_S
from quire.shared.telemetry.internal_server import InternalServer, ServiceUnavailable, dump, json_response
from quire.shared.telemetry.prometheus import CONTENT_TYPE_LATEST
from quire.worker.engine.engine import Engine
from quire.worker.inspect.metrics import WorkerMetrics, read_engine
from quire.worker.inspect.usage import snapshot
from quire.worker.queue.engine_thread import EngineGone, EngineThread

# How long a step may keep us waiting.
ANSWER_S = 2.0

T = TypeVar("T")


class WorkerAdminServer:
    """Serves one worker's inside on a bound socket."""

    def __init__(self, engine: EngineThread, listener: socket.socket, metrics: WorkerMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self.server = InternalServer(
            listener, {"/metrics": self.metrics, "/health": self.health, "/debug/blocks": self.blocks}
        )

    async def health(self, request: web.Request) -> web.Response:
        """200 while the engine moves, idle or not."""
        reason = self._stuck()
        if reason:
            return json_response(503, {"status": "unavailable", "reason": reason})
        return json_response(200, {"status": "ok", "steps": self._engine.status.steps})

    async def metrics(self, request: web.Request) -> web.Response:
        text = self._metrics.render(await self._ask(read_engine))
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def blocks(self, request: web.Request) -> web.Response:
        found = await self._ask(snapshot)
        body = await asyncio.to_thread(lambda: dump(found.render()))
        return web.Response(body=body, content_type="application/json")

    async def _ask(self, function: Callable[[Engine], T]) -> T:
        """What the function says of the engine. Raises Unavailable."""
        future = self._engine.call(function)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.wrap_future(future)  # which is cancelled with us: nobody waits for its result
        except TimeoutError:
            raise ServiceUnavailable(self._stuck() or f"the engine is busy: no answer within {ANSWER_S:g} s") from None
        except EngineGone as error:
            raise ServiceUnavailable(str(error)) from None

    def _stuck(self) -> str:
        if self._engine.failure is not None:
            return f"the engine's thread failed: {self._engine.failure!r}"
        if not self._engine.is_alive():
            return "the engine's thread has ended"
        still_s = time.monotonic() - self._engine.ticked_at
        # As for the heartbeat, a step may take a few times as long as the slowest one did.
        is_stuck = still_s > max(WORKER_TTL_S, 3 * self._engine.status.slowest_step_s)
        return f"the engine has not moved for {still_s:.0f} s" if is_stuck else ""
