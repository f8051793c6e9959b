"""`/status`: whether a request that waits can make progress now.

`/readyz` is for supervisors: it counts a worker until its registration expires, at least five seconds after its last
heartbeat. A person in front of a silent answer wants to know earlier, so this looks at the age of the heartbeats.
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
# All clients within this time get the same answer, so that many open pages cost Redis no more than one.
FRESH_S = 0.2
# Redis answers within milliseconds, or does not answer.
REDIS_TIMEOUT_S = 1.0


class Status:
    """The state of the workers, looked up when a client asks."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._lock = asyncio.Lock()
        self._looked_at = float("-inf")
        self._state: dict[str, Any] = {}

    async def show(self, request: web.Request) -> web.Response:
        """GET /status"""
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
    """What `/status` tells of the last heartbeats.

    workers: how many are registered; responding: how many of these have a heartbeat that is not overdue; silent_s:
    seconds since the newest heartbeat of all, None without a worker.
    """
    return {
        "redis": True,
        "workers": len(beats),
        "responding": sum(beat.age_s <= MISSED_BEATS * beat.every_s for beat in beats),
        "silent_s": min((round(beat.age_s, 3) for beat in beats), default=None),
    }
