"""Cancels requests in the background, once no client listens to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from redis.exceptions import RedisError

from quire.shared.process.tasks import end_tasks
from quire.shared.protocol.broker import Broker
from quire.shared.protocol.states import CancelReply, ExpireReply

log = logging.getLogger("gateway")

# The pause after a cancellation that failed because Redis does not answer.
CANCEL_PAUSE_S = 0.5
# Maximum number of waiting cancellations; further ones are dropped.
MAX_CANCELLATIONS = 100_000
# Maximum number of cancellations that are sent to Redis at the same time.
BATCH = 16

# Ends the request of an id.
End = Callable[[str], Awaitable[object]]


class Canceller:
    """Ends requests in the background, however long Redis takes to answer.

    A request that has a listener by then runs on. The listener may be at this gateway (`is_wanted`), or at another live
    gateway.
    """

    def __init__(self, broker: Broker, gateway_id: str, is_wanted: Callable[[str], bool]) -> None:
        self._broker = broker
        self._gateway_id = gateway_id
        self._is_wanted = is_wanted
        self.cancelled = 0
        # Requests to end, by id; and the batch that Redis is ending now.
        self._waiting: dict[str, End] = {}
        self._batch: dict[str, End] = {}
        # Requests that were not cancelled because another client of this gateway listens. `left` cancels such a request
        # if that client leaves too: its own call may not yet be responsible for the request.
        self._spared: set[str] = set()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task = asyncio.create_task(self._run())

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Cancel requests, unless a client listens to them."""
        self._add(request_ids, self._cancel_unwanted)

    def left(self, request_ids: Iterable[str]) -> None:
        """Cancel those of the requests that were spared. Called when their last listener at this gateway leaves."""
        spared = self._spared.intersection(request_ids)
        self._spared -= spared
        self.cancel(tuple(spared))

    def expire(self, request_ids: Sequence[str]) -> None:
        """End requests whose clients were told that the deadline has passed."""
        self._add(request_ids, self._expire)

    def _add(self, request_ids: Sequence[str], end: End) -> None:
        for request_id in request_ids:
            if len(self._waiting) < MAX_CANCELLATIONS:
                self._waiting[request_id] = end
        if self._waiting:
            self._idle.clear()
            self._wake.set()

    async def close(self, timeout_s: float) -> None:
        """Wait until all requests are cancelled, for `timeout_s` at most, and stop."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            left = len(self._waiting.keys() | self._batch.keys())
            log.warning("%d requests could not be cancelled: Redis does not answer", left)
        await end_tasks(self._task)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                # The batch leaves the queue first: an id that is added meanwhile is processed again, because the
                # listeners of its request may have changed.
                batch = {request_id: self._waiting.pop(request_id) for request_id in list(self._waiting)[:BATCH]}
                self._batch = batch
                results = await asyncio.gather(*(end(id_) for id_, end in batch.items()), return_exceptions=True)
                self._batch = {}
                failed = False
                for (request_id, end), result in zip(batch.items(), results, strict=True):
                    if isinstance(result, (RedisError, OSError)):
                        self._waiting.setdefault(request_id, end)
                        failed = True
                    elif isinstance(result, BaseException):
                        log.error(
                            "request %s cannot be cancelled",
                            request_id,
                            exc_info=result,
                            extra={"request_id": request_id},
                        )
                if failed:
                    await asyncio.sleep(CANCEL_PAUSE_S)
            self._idle.set()

    async def _cancel_unwanted(self, request_id: str) -> None:
        if self._spares(request_id):
            return
        others = await self._broker.detach(request_id, self._gateway_id)
        if await self._broker.live_gateways(others) or self._spares(request_id):
            return
        # A gateway that has attached by now keeps the request alive. Redis calls a refused request unknown, and a
        # request that has ended meanwhile done.
        if await self._broker.cancel(request_id, unless_beside=others) in (CancelReply.CANCELLED, CancelReply.FLAGGED):
            self.cancelled += 1

    def _spares(self, request_id: str) -> bool:
        wanted = self._is_wanted(request_id)
        if wanted:
            self._spared.add(request_id)
        return wanted

    async def _expire(self, request_id: str) -> None:
        if await self._broker.expire(request_id) == ExpireReply.EARLY:
            await self._cancel_unwanted(request_id)
