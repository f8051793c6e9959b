"""Requests whose gateway has died: cancelled if nobody comes back for them."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from redis.exceptions import RedisError

from shared.broker import Broker
from worker.committer import Committer

log = logging.getLogger(__name__)

LOOK_S = 2.0


class Orphans:
    """Looks after the gateways of what runs here. A client that comes back attaches its request to another gateway."""

    def __init__(self, broker: Broker, committer: Committer, grace_s: float) -> None:
        self._broker = broker
        self._committer = committer
        self._grace_s = grace_s
        # Since when each gateway is known to be gone.
        self._gone: dict[str, float] = {}

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
                self._gone.clear()

    async def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        running = [request_id for request_id, _ in self._committer.attempts]
        owners = {request: gateway for request, gateway in (await self._broker.gateways_of(running)).items() if gateway}
        gateways = sorted(set(owners.values()))
        live = await self._broker.live_gateways(gateways)
        self._gone = {gateway: self._gone.get(gateway, now) for gateway in gateways if gateway not in live}
        for request_id, gateway in owners.items():
            if gateway in self._gone and now - self._gone[gateway] >= self._grace_s:
                log.warning("request %s is cancelled: its gateway is gone, and nobody came back for it", request_id)
                await self._broker.cancel(request_id)
