"""Cancels orphans: running requests whose gateways have died and whose clients have not resumed them in time."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from redis.exceptions import RedisError

from quire.shared.protocol.broker import Broker
from quire.shared.protocol.states import CancelReply
from quire.worker.queue.committer import Committer

log = logging.getLogger(__name__)

# Longest time between two checks.
CHECK_S = 2.0


class Orphans:
    """Checks the gateways of this worker's requests. A client that resumes a request attaches it to another gateway."""

    def __init__(self, broker: Broker, committer: Committer, grace_s: float) -> None:
        self._broker = broker
        self._committer = committer
        self._grace_s = grace_s
        # Since when each orphan has been without a live gateway.
        self._orphaned_at: dict[str, float] = {}

    async def run(self, ended: asyncio.Event) -> None:
        """Check until `ended` is set."""
        while not ended.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(min(CHECK_S, max(0.1, self._grace_s / 4))):
                    await ended.wait()
            try:
                await self._check()
            except (RedisError, OSError) as error:
                log.debug("the gateways of requests cannot be checked now: %s", error)
                # Gateways cannot renew their leases either while Redis is away.
                self._orphaned_at.clear()

    async def _check(self) -> None:
        now = asyncio.get_running_loop().time()
        running = [request_id for request_id, _ in self._committer.attempts]
        listeners = await self._broker.listeners_of(running)
        live = await self._broker.live_gateways(sorted({name for gateways in listeners.values() for name in gateways}))
        orphans = [request_id for request_id, gateways in listeners.items() if live.isdisjoint(gateways)]
        self._orphaned_at = {request_id: self._orphaned_at.get(request_id, now) for request_id in orphans}
        for request_id, since in self._orphaned_at.items():
            if now - since < self._grace_s:
                continue
            if await self._broker.cancel(request_id, unless_beside=listeners[request_id]) is CancelReply.FLAGGED:
                log.warning(
                    "request %s is cancelled: its gateway is gone, and no client has resumed it",
                    request_id,
                    extra={"request_id": request_id},
                )
