"""Puts requests into the queue, and takes them out again when nobody wants them any more."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Sequence

from redis.exceptions import RedisError

from gateway.errors import BrokerDown, QueueIsFull
from shared.broker import Broker, QueueBounds, QueueFull
from shared.messages import GenerationRequest

log = logging.getLogger("gateway")

# A submission whose reply was lost may have been carried out; making it again is harmless.
ATTEMPTS = 3
MAX_RETRY_AFTER_S = 60
RATE_WINDOW_S = 30.0
# How long cancellations are tried while Redis is away, and how many may wait.
CANCEL_PAUSE_S = 0.5
MAX_CANCELLATIONS = 100_000


class CompletionRate:
    """Requests that this gateway saw end, per second, over the last RATE_WINDOW_S."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=10_000)

    def count(self) -> None:
        self._ends.append(asyncio.get_running_loop().time())

    def retry_after_s(self, waiting: int) -> int:
        """When to try again, in seconds, with `waiting` requests in the queue."""
        now = asyncio.get_running_loop().time()
        while self._ends and now - self._ends[0] > RATE_WINDOW_S:
            self._ends.popleft()
        if not self._ends:
            return 5
        rate = len(self._ends) / max(1.0, now - self._ends[0])
        # A tenth of the queue gone is room enough for the next attempt.
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(0.1 * waiting / rate)))


class Canceller:
    """Cancels in the background, for as long as Redis takes to answer."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._waiting: dict[str, None] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task = asyncio.create_task(self._run())

    def cancel(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if len(self._waiting) < MAX_CANCELLATIONS:
                self._waiting[request_id] = None
        if self._waiting:
            self._idle.clear()
            self._wake.set()

    async def close(self, timeout_s: float) -> None:
        """End when everything is cancelled, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%d requests could not be cancelled: Redis does not answer", len(self._waiting))
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                batch = list(self._waiting)[:16]
                results = await asyncio.gather(*map(self._broker.cancel, batch), return_exceptions=True)
                for request_id, result in zip(batch, results, strict=True):
                    if isinstance(result, (RedisError, OSError)):
                        continue
                    if isinstance(result, BaseException):
                        log.error("request %s cannot be cancelled", request_id, exc_info=result)
                    self._waiting.pop(request_id, None)
                if any(isinstance(result, (RedisError, OSError)) for result in results):
                    await asyncio.sleep(CANCEL_PAUSE_S)
            self._idle.set()


class Submission:
    """Submits all requests of a call, or none of them."""

    def __init__(self, broker: Broker, gateway_id: str, bounds: QueueBounds, subscribed: asyncio.Event) -> None:
        self._broker = broker
        self._gateway_id = gateway_id
        self._bounds = bounds
        self._subscribed = subscribed
        self.rate = CompletionRate()
        self.canceller = Canceller(broker)

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Accept the requests into the queue. Raises BrokerDown or QueueIsFull; then nothing of them runs."""
        if not self._subscribed.is_set():
            raise _down("not connected")
        ids = [request.id for request in requests]
        # A submission that has begun is finished even if the client leaves, so that it is known what to cancel.
        work = asyncio.ensure_future(self._submit_all(requests))
        try:
            await asyncio.shield(work)
        except BaseException:
            work.add_done_callback(lambda done: self._abandon(done, ids))
            raise

    def _abandon(self, work: asyncio.Future[None], ids: Sequence[str]) -> None:
        if not work.cancelled():
            work.exception()  # has been seen
        self.canceller.cancel(ids)

    async def _submit_all(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            try:
                await self._submit(request)
            except QueueFull as error:
                raise QueueIsFull(
                    f"The queue is full: {error.requests} requests with {error.tokens} tokens wait. Try again later.",
                    headers={"Retry-After": str(self.rate.retry_after_s(error.requests))},
                ) from error

    async def _submit(self, request: GenerationRequest) -> None:
        body, cost = request.encode(), request.cost
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._broker.submit(
                    request.id, body, gateway=self._gateway_id, cost=cost, bounds=self._bounds
                )
            except (RedisError, OSError) as error:
                if attempt == ATTEMPTS:
                    raise _down(str(error)) from error
        return None


def _down(why: str) -> BrokerDown:
    log.warning("a request cannot be queued: %s", why)
    return BrokerDown("The queue cannot be reached now. Try again in a moment.", headers={"Retry-After": "2"})
