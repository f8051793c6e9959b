"""Pulls requests off the queue: as many as fit the engine now, never more. What waits, waits in Redis.

A blocking read is never cancelled, since the entry that it was about to return would be delivered and not seen; it
ends by itself within BLOCK_S. After a failed read the worker looks at its own pending entries once, for the same
reason.
"""

from __future__ import annotations

import asyncio
import logging

from redis.exceptions import RedisError, ResponseError

from shared.broker import Broker, Delivery, QueueReader, StepCommit, new_id
from shared.keys import PRIORITY_CLASSES
from shared.messages import GenerationRequest, MessageError, Outcome, StepItem
from shared.redis_clients import BLOCK_S
from worker.committer import Committer
from worker.engine_loop import EngineLoop

log = logging.getLogger(__name__)

# How soon a full engine is asked again for room.
FULL_S = 0.01
RETRY_S = 0.2
RETRY_LIMIT_S = 2.0


class Consumer:
    """Claims deliveries and hands them to the engine."""

    def __init__(self, broker: Broker, reader: QueueReader, committer: Committer, engine: EngineLoop) -> None:
        self._broker = broker
        self._reader = reader
        self._committer = committer
        self._engine = engine
        self._stopping = False
        self._look_back = True

    def look_back(self) -> None:
        """Look at what is pending for this worker with the next read: something of it may be there to take again."""
        self._look_back = True

    def stop(self) -> None:
        """Read no more. A read in progress ends within BLOCK_S; what it brings stays pending for our return."""
        self._stopping = True

    async def run(self) -> None:
        """Read until `stop`."""
        delay = RETRY_S
        while not self._stopping:
            try:
                if self._look_back:
                    self._look_back = False
                    await self._broker.create_groups()
                    await self._take(await self._reader.pending())
                room = self._engine.room
                if room <= 0:
                    await asyncio.sleep(FULL_S)
                    continue
                await self._take(await self._reader.read(room, int(1000 * BLOCK_S)))
                delay = RETRY_S
            except (RedisError, OSError) as error:
                if isinstance(error, ResponseError) and "NOGROUP" not in str(error):
                    log.error("Redis refuses to serve the queue: %s", error)
                else:
                    log.warning("reading the queue failed (%s); again in %.1f s", error, delay)
                self._look_back = True
                await asyncio.sleep(delay)
                delay = min(2 * delay, RETRY_LIMIT_S)

    async def _take(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            if self._stopping:
                return
            if self._committer.runs(delivery.request_id):
                continue
            claim = await self._broker.claim(delivery, self._reader.worker_id, new_id())
            if claim is None:
                continue
            try:
                request, logged = GenerationRequest.decode(claim.body), claim.items()
                if request.id != claim.request_id:
                    raise MessageError(f"its body is that of request {request.id}")
            except MessageError as error:
                log.error("request %s cannot be read: %s", claim.request_id, error)
                item = StepItem(claim.request_id, claim.emitted, (), Outcome("error", "the request cannot be read"))
                self._committer.register(claim, ())
                self._committer.put([StepCommit(claim.attempt, item)])
                continue
            wanted = self._committer.register(claim, logged)
            self._engine.add(request, claim.attempt, logged, PRIORITY_CLASSES.index(delivery.priority_class))
            if not wanted:
                self._engine.finish(request.id, "cancelled")
