"""Requests that nobody listens to, because their gateways have died: cancelled if nobody comes back for them."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from redis.exceptions import RedisError

from quire.shared.broker import Broker
from quire.shared.states import CancelReply
from quire.worker.queue.committer import Committer

log = logging.getLogger(__name__)

LOOK_S = 2.0


class Orphans:
    """Looks after the gateways of what runs here. A client that comes back attaches its request to another gateway."""

    def __init__(self, broker: Broker, committer: Committer, grace_s: float) -> None:
        self._broker = broker
        self._committer = committer
        self._grace_s = grace_s
        # Since when each request is known to have no gateway that lives.
        self._alone: dict[str, float] = {}

    async def run(self, ended: asyncio.Event) -> None:
        """Look until `ended` is set."""
        while not ended.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(min(LOOK_S, max(0.1, self._grace_s / 4))):
                    await ended.wait()
            try:
                await self._look()
            except (RedisError, OSError) as error:
                log.debug("the gateways cannot be looked up now: %s", error)
                # A gateway cannot renew its lease either while Redis is away.
                self._alone.clear()

    async def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        running = [request_id for request_id, _ in self._committer.attempts]
        listeners = await self._broker.listeners_of(running)
        live = await self._broker.live_gateways(sorted({name for gateways in listeners.values() for name in gateways}))
        alone = {request_id for request_id, gateways in listeners.items() if live.isdisjoint(gateways)}
        self._alone = {request_id: self._alone.get(request_id, now) for request_id in alone}
        for request_id, since in self._alone.items():
            if now - since < self._grace_s:
                continue
            if await self._broker.cancel(request_id, unless_beside=listeners[request_id]) is CancelReply.FLAGGED:
                log.warning(
                    "request %s is cancelled: its gateway is gone, and nobody came back for it",
                    request_id,
                    extra={"request_id": request_id},
                )
