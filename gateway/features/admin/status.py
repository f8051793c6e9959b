"""Endpoints that describe a gateway: its version, and whether it works.

`/healthz`, `/health` and `/ping` are for liveness: they succeed while the process answers, so that no supervisor
restarts a gateway because Redis or the workers are away. `/readyz` is for readiness: it counts a worker until its
registration expires, at least five seconds after its last heartbeat. `/status` is for a person who waits for an answer,
and wants to know earlier that a worker has stopped: it looks at the age of the heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web
from redis.exceptions import RedisError

from quire.gateway.errors.api_errors import InvalidRequest
from quire.gateway.serving.model_directory import ModelDirectory
from quire.shared.process.version import installed_version
from quire.shared.protocol.broker import LastBeat

log = logging.getLogger("gateway")

# Heartbeats that a worker may miss before it counts as not responding.
MISSED_BEATS = 2
# Requests within this time get the same answer, so that many open pages cost Redis no more than one.
FRESH_S = 0.2
# Redis answers within milliseconds, or does not answer.
REDIS_TIMEOUT_S = 1.0


class Status:
    """Handlers of the endpoints that describe one gateway."""

    def __init__(self, directory: ModelDirectory) -> None:
        self._directory = directory
        self._lock = asyncio.Lock()
        self._looked_at = float("-inf")
        self._state: dict[str, Any] = {}

    async def healthz(self, request: web.Request) -> web.Response:
        """GET /healthz, /health and /ping: 200 while the process is alive."""
        return web.json_response({"status": "ok"})

    async def version(self, request: web.Request) -> web.Response:
        """GET /version: the version of Quire."""
        return web.json_response({"version": installed_version("0 (not installed)")})

    async def readyz(self, request: web.Request) -> web.Response:
        """GET /readyz: 200 if a worker would take a request that arrives now, perhaps once its model is loaded.

        Else 503 with the reasons.
        """
        directory = self._directory
        registries = [gateway.worker_registry for gateway in directory.gateways]
        workers = sum(len(registry.workers) for registry in registries)
        answers = directory.redis_answers and all(registry.redis_answers for registry in registries)
        problems = [
            *(["this gateway is shutting down"] if directory.process.is_leaving or directory.process.draining else []),
            *directory.redis_problems(),
            *([] if workers or directory.has_host or not answers else ["no worker makes progress"]),
        ]
        state = {"ready": not problems, "workers": workers, "problems": problems}
        return web.json_response(state, status=503 if problems else 200)

    async def show(self, request: web.Request) -> web.Response:
        """GET /status: how many workers are registered, and how many of them respond."""
        if request.query:
            raise InvalidRequest(f"{min(request.query)[:80]!r} is no parameter of {request.path}; it has none.")
        async with self._lock:
            loop = asyncio.get_running_loop()
            if loop.time() - self._looked_at > FRESH_S:
                self._state = await self._look()
                self._looked_at = loop.time()
        return web.json_response(self._state)

    async def _look(self) -> dict[str, Any]:
        try:
            async with asyncio.timeout(REDIS_TIMEOUT_S):
                lanes = await asyncio.gather(*(gateway.broker.last_beats() for gateway in self._directory.gateways))
                return summary([beat for beats in lanes for beat in beats])
        except (RedisError, OSError, TimeoutError) as error:
            log.debug("the heartbeats of the workers cannot be read: %s", error)
            return {"redis": False, "workers": 0, "responding": 0, "silent_s": None}


def summary(beats: list[LastBeat]) -> dict[str, Any]:
    """Return what `/status` tells about these heartbeats, one per worker.

    workers: how many are registered; responding: how many of these have a heartbeat that is not overdue; silent_s:
    seconds since the newest heartbeat of all, None without a worker.
    """
    return {
        "redis": True,
        "workers": len(beats),
        "responding": sum(beat.age_s <= MISSED_BEATS * beat.every_s for beat in beats),
        "silent_s": min((round(beat.age_s, 3) for beat in beats), default=None),
    }
