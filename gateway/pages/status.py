"""Endpoints that describe a gateway: its model, and whether it works.

`/readyz` is for supervisors: it counts a worker until its registration expires, at least five seconds after its last
heartbeat. `/status` is for a person who waits for an answer, and wants to know earlier that a worker has stopped: it
looks at the age of the heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web
from redis.exceptions import RedisError

from quire.gateway.api.errors import InvalidRequest
from quire.gateway.service import Gateway
from quire.shared.broker import LastBeat

log = logging.getLogger("gateway")

# Heartbeats that a worker may miss before it counts as not responding.
MISSED_BEATS = 2
# Requests within this time get the same answer, so that many open pages cost Redis no more than one.
FRESH_S = 0.2
# Redis answers within milliseconds, or does not answer.
REDIS_TIMEOUT_S = 1.0


class Status:
    """Handlers of the endpoints that describe one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._lock = asyncio.Lock()
        self._looked_at = float("-inf")
        self._state: dict[str, Any] = {}

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models"""
        return web.json_response({"object": "list", "data": [self._card()]})

    async def one_model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{name}"""
        self._gateway.limits.check_model(request.match_info["name"])
        return web.json_response(self._card())

    def _card(self) -> dict[str, Any]:
        model = self._gateway.model
        return {
            "id": model.name,
            "object": "model",
            "created": self._gateway.started,
            "owned_by": "quire",
            "max_model_len": self._gateway.worker_registry.max_model_len,
            "sampling_defaults": model.sampling_defaults,
        }

    async def healthz(self, request: web.Request) -> web.Response:
        """GET /healthz: 200 while the process is alive."""
        return web.json_response({"status": "ok"})

    async def readyz(self, request: web.Request) -> web.Response:
        """GET /readyz: 200 if a worker would take a request that arrives now, else 503 with the reasons."""
        registry = self._gateway.worker_registry
        workers = len(registry.workers)
        problems = [
            *(["this gateway is shutting down"] if self._gateway.draining else []),
            *self._gateway.redis_problems(),
            *([] if workers or not registry.redis_answers else ["no worker makes progress"]),
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
                return summary(await self._gateway.broker.last_beats())
        except (RedisError, OSError, TimeoutError) as error:
            log.debug("the heartbeats of the workers cannot be read: %s", error)
            return {"redis": False, "workers": 0, "responding": 0, "silent_s": None}


def summary(beats: list[LastBeat]) -> dict[str, Any]:
    """Returns what `/status` tells about these heartbeats, one per worker.

    workers: how many are registered; responding: how many of these have a heartbeat that is not overdue; silent_s:
    seconds since the newest heartbeat of all, None without a worker.
    """
    return {
        "redis": True,
        "workers": len(beats),
        "responding": sum(beat.age_s <= MISSED_BEATS * beat.every_s for beat in beats),
        "silent_s": min((round(beat.age_s, 3) for beat in beats), default=None),
    }
